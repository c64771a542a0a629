"""Names of a package that are imported on their first use, as its stub file lists them.

A stub (``__init__.pyi``) lists the public names for readers, editors and type checkers; the package reads the same lines
when it runs. So `import specbeam` and ``specbeam --help`` do not wait for torch.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from specbeam.core.garbage import rarely_collected


def homes_in(stub: Path) -> dict[str, tuple[str, str]]:
    """Return where a stub file imports each name from: name -> (module, name there), in the order of the file."""
    homes = {}
    for line in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(line, ast.ImportFrom) and line.module:
            for alias in line.names:
                homes[alias.asname or alias.name] = (line.module, alias.name)
    return homes


def attached(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the functions `__getattr__` and `__dir__` and the list `__all__` of a package, made from its stub file.

    Args:
        package: the package's `__name__`.
        file: its `__file__`; the stub has the same name with the suffix ".pyi".
    """
    homes = homes_in(Path(file).with_suffix(".pyi"))

    def get(name: str) -> Any:
        """Import a public name on its first use."""
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        module, there = homes[name]
        with rarely_collected():
            home = import_module(module)
            is_module = module == package or not hasattr(home, there)
            value = import_module(f"{module}.{there}") if is_module else getattr(home, there)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        """Return the public names in alphabetical order."""
        return sorted(homes)

    return get, names, list(homes)

"""The kernels in a package of their own, without the rest of specbeam: what a program needs to compile and keep steps."""

import shutil
from pathlib import Path

import specbeam

SOURCE = Path(specbeam.__file__).parent


def write_kernels(folder: Path) -> Path:
    """Write the package to a folder, and return its own."""
    package = folder / "specbeam"
    for room in ("kernels", "caches"):
        shutil.copytree(SOURCE / room, package / room, ignore=shutil.ignore_patterns("__pycache__"))
    for module in ("errors.py", "garbage.py", "whole_files.py"):
        shutil.copy(SOURCE / module, package)
    (package / "__init__.py").touch()
    return package

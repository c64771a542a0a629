"""The kernels in a package of their own, without the rest of specbeam: what a program needs to compile and keep steps."""

import shutil
from pathlib import Path

import specbeam

SOURCE = Path(specbeam.__file__).parent


def write_kernels(folder: Path) -> Path:
    """Write the package to a folder, and return its own."""
    package = folder / "specbeam"
    core = package / "core"
    for folder_of_core in ("compiling", "caches"):
        source = SOURCE / "core" / folder_of_core
        shutil.copytree(source, core / folder_of_core, ignore=shutil.ignore_patterns("__pycache__"))
    for module in ("errors.py", "garbage.py", "machine.py", "whole_files.py"):
        shutil.copy(SOURCE / "core" / module, core)
    (core / "__init__.py").touch()
    (package / "__init__.py").touch()
    return package

"""A check that plots can be written, made before anything is measured."""

from importlib.util import find_spec
from pathlib import Path

from specbeam.errors import MissingFile, MissingPackage


def check_picture(path: Path) -> None:
    """Raise `MissingFile` if a plot cannot be written to `path`, `MissingPackage` if matplotlib is missing."""
    if path.is_dir() or not path.parent.is_dir():
        raise MissingFile(f"a plot cannot be written to {path}; name a file in a folder that exists")
    if find_spec("matplotlib") is None:
        raise MissingPackage("plots are drawn by matplotlib: pip install matplotlib")

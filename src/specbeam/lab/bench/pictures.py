"""A check that plots can be written, made before anything is measured."""

from importlib.util import find_spec
from pathlib import Path

from specbeam.doors import require_place
from specbeam.errors import CannotWrite, MissingFile, MissingPackage

KINDS = (".png", ".svg", ".pdf", ".jpg", ".webp")


def check_picture(path: Path) -> None:
    """Raise `MissingFile` if a plot cannot be written to `path`, `MissingPackage` if matplotlib is missing."""
    try:
        require_place(path)
    except CannotWrite as error:
        raise MissingFile(f"a plot cannot be written to {path}: {error}") from error
    if path.suffix.lower() not in KINDS:
        raise MissingFile(f"a plot cannot be written to {path}; its name must end in {', '.join(KINDS)}")
    if find_spec("matplotlib") is None:
        raise MissingPackage("plots are drawn by matplotlib: pip install 'specbeam[bench]'")

"""Files that users ask for: their places are looked at before the work, and an error of writing names the file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specbeam.errors import CannotWrite, SpecbeamError
from specbeam.whole_files import write_whole


def require_place(path: Path) -> None:
    """Raise `CannotWrite` unless a file can be written to `path`, as far as its name and permissions say."""
    with writing(path):
        if path.is_dir():
            raise CannotWrite(f"{path} is a folder; give the name of a file")
        _require_folder(path.parent, path)
        if path.exists() and not os.access(path, os.W_OK):
            raise CannotWrite(f"{path} may not be written by this user; change its permissions, or give another name")


def require_folder_place(path: Path) -> None:
    """Raise `CannotWrite` unless there is a folder at `path` to write to, or one can be made with those above it."""
    with writing(path):
        there = path
        while not there.exists() and there != there.parent:
            there = there.parent
        _require_folder(there, path)


def _require_folder(folder: Path, path: Path) -> None:
    """Raise `CannotWrite` unless files can be made in a folder; `path` is what is to be written there."""
    if not folder.exists():
        raise CannotWrite(f"there is no folder {folder} to write {path.name} into; make it, or give another name")
    if not folder.is_dir():
        raise CannotWrite(f"{folder} is no folder, so {path} cannot be written; give another name")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CannotWrite(
            f"this user may not write into the folder {folder}, so {path} cannot be written; change its permissions, or "
            "give another name"
        )


@contextmanager
def writing(path: Path, advice: str = "give another name, or make room") -> Iterator[None]:
    """Raise `CannotWrite`, which names the file, in place of an error of the system inside."""
    try:
        yield
    except SpecbeamError:
        raise
    except OSError as error:
        raise CannotWrite(f"{path} cannot be written: {error.strerror or error}; {advice}") from error


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file that is whole or not there; into what is no file, such as a pipe or a device, directly.

    Raises `CannotWrite` if it cannot be written.
    """
    raw = content.encode("utf-8") if isinstance(content, str) else content
    with writing(path):
        if path.exists() and not path.is_file():
            with path.open("wb", buffering=0) as file:
                file.write(raw)
        else:
            write_whole(Path(os.path.realpath(path)), raw)

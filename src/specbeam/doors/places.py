"""Files that users name: looked at before the work, and named by the errors of reading and writing."""

import gzip
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbeam.core.whole_files import write_whole
from specbeam.errors import BadPrompt, CannotWrite, MissingFile, SpecbeamError

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
# What is raised for a packed file that is cut off, spoilt, or not packed at all.
DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)


def require_file(path: Path, wanted: str = "give the name of a file") -> None:
    """Raise `MissingFile` unless there is a file at `path` that this user can open.

    Args:
        wanted: what to do if there is none.
    """
    with reading(path, wanted):
        if path.is_dir():
            raise MissingFile(f"{path} is a folder; {wanted}")
        if not path.exists():
            raise MissingFile(f"there is no file {path}; {wanted}")
        if not os.access(path, os.R_OK):
            raise MissingFile(f"{path} may not be read by this user; change its permissions, or {wanted}")


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


def text_of(path: Path, wanted: str = "give the name of a file") -> str:
    """Return the text of a UTF-8 file, which may be packed (.gz, .xz).

    Raises `MissingFile` if it cannot be read, and `BadPrompt`, which names the line, if it is not UTF-8, or damaged.
    """
    require_file(path, wanted)
    try:
        with reading(path, wanted), OPENERS.get(path.suffix, open)(path, "rb") as file:
            raw: bytes = file.read()
        return raw.decode("utf-8-sig")
    except DAMAGE as error:
        raise BadPrompt(f"{path} is damaged, or not packed as its name says: {error}; pack it anew") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise BadPrompt(
            f"{path}, line {line}: byte {error.object[error.start]:#x} is no UTF-8; save it as UTF-8"
        ) from error


@contextmanager
def reading(path: Path, wanted: str = "give the name of a file") -> Iterator[None]:
    """Raise `MissingFile`, which names the file, in place of an error of the system inside."""
    try:
        yield
    except (SpecbeamError, gzip.BadGzipFile):
        raise
    except OSError as error:
        raise MissingFile(f"{path} cannot be read: {error.strerror or error}; {wanted}") from error


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

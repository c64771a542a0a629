"""Files named by users: checks before any work, and errors that name the file."""

import errno
import gzip
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbeam.core.whole_files import write_whole
from specbeam.errors import BadPrompt, BadSetting, CannotWrite, MissingFile, SpecbeamError

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
# Errors of compressed files that are truncated, damaged, or not compressed.
DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)


def suffix_of(path: Path) -> str:
    """Return the suffix of a file's name that tells its content: without that of a compression."""
    return path.with_suffix("").suffix if path.suffix in OPENERS else path.suffix


def require_suffix(path: Path, *suffixes: str) -> None:
    """Raise `BadSetting` unless the name of an output file ends in one of the suffixes of its content."""
    if path.suffix.lower() not in suffixes:
        raise BadSetting(
            f"{path} would hold {suffixes[0][1:].upper()}; give a name that ends in {' or '.join(suffixes)}"
        )


def require_file(path: Path, wanted: str = "give the name of a file") -> None:
    """Raise `MissingFile` unless `path` is a readable file.

    Args:
        wanted: advice for the message.
    """
    with reading(path, wanted):
        if path.is_dir():
            raise MissingFile(f"{path} is a folder; {wanted}")
        if not path.exists():
            raise MissingFile(f"there is no file {path}; {wanted}")
        if not os.access(path, os.R_OK):
            raise MissingFile(f"{path} is not readable by this user; change its permissions, or {wanted}")


def require_place(path: Path) -> None:
    """Raise `CannotWrite` unless the name and permissions of `path` allow writing a file."""
    with writing(path):
        if path.is_dir():
            raise CannotWrite(f"{path} is a folder; give the name of a file")
        _require_folder(path.parent, path)
        if path.exists() and not os.access(path, os.W_OK):
            raise CannotWrite(f"{path} is not writable by this user; change its permissions, or give another name")


def require_folder_place(path: Path) -> None:
    """Raise `CannotWrite` unless `path` is a writable folder or can be created with its parents."""
    with writing(path):
        there = path
        while not there.exists() and there != there.parent:
            there = there.parent
        _require_folder(there, path)


def _require_folder(folder: Path, path: Path) -> None:
    """Raise `CannotWrite` unless `path` can be created in a folder."""
    if not folder.exists():
        raise CannotWrite(f"there is no folder {folder} for {path.name}; create it, or give another name")
    if not folder.is_dir():
        raise CannotWrite(f"{folder} is not a folder, so {path} cannot be written; give another name")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CannotWrite(
            f"the folder {folder} is not writable by this user, so {path} cannot be written; change its permissions, or "
            "give another name"
        )


def text_of(path: Path, wanted: str = "give the name of a file") -> str:
    """Return the text of a UTF-8 file, plain or compressed (.gz, .xz).

    Raises `MissingFile` if it cannot be read, and `BadPrompt` if it is damaged or, with the line, not UTF-8.
    """
    require_file(path, wanted)
    try:
        with reading(path, wanted), OPENERS.get(path.suffix, open)(path, "rb") as file:
            raw: bytes = file.read()
        return raw.decode("utf-8-sig")
    except DAMAGE as error:
        raise BadPrompt(f"{path} is damaged, or its suffix is wrong: {error}; compress it again") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise BadPrompt(
            f"{path}, line {line}: byte {error.object[error.start]:#x} is not UTF-8; save the file as UTF-8"
        ) from error


@contextmanager
def reading(path: Path, wanted: str = "give the name of a file") -> Iterator[None]:
    """Turn system errors inside the block into a `MissingFile` that names the file."""
    try:
        yield
    except (SpecbeamError, gzip.BadGzipFile):
        raise
    except OSError as error:
        raise MissingFile(f"{path} cannot be read: {error.strerror or error}; {wanted}") from error


@contextmanager
def writing(path: Path, advice: str = "") -> Iterator[None]:
    """Turn system errors inside the block into a `CannotWrite` that names the file.

    Args:
        advice: for the message; "": by the kind of the error.
    """
    try:
        yield
    except SpecbeamError:
        raise
    except OSError as error:
        found = advice or _advice(path, error)
        raise CannotWrite(f"{path} cannot be written: {error.strerror or error}; {found}") from error


def _advice(path: Path, error: OSError) -> str:
    """Return what to do about an error in writing a file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room, or give another name"
    if isinstance(error, FileNotFoundError):
        return f"create the folder {path.parent}, or give another name"
    if isinstance(error, PermissionError):
        return "change its permissions, or give another name"
    return "give another name"


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file atomically; write directly to pipes and devices. Raises `CannotWrite` if that fails."""
    raw = content.encode("utf-8") if isinstance(content, str) else content
    with writing(path):
        if path.exists() and not path.is_file():
            with path.open("wb", buffering=0) as file:
                file.write(raw)
        else:
            write_whole(Path(os.path.realpath(path)), raw)

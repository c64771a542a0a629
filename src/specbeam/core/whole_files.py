"""Atomic writes of files: a file is complete or absent, even if the writing process is killed."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from uuid import uuid4

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP}  # file systems without fsync


@contextmanager
def whole(path: Path, outlasts_power: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write to; its file replaces `path` if no error occurs.

    The temporary file is in the same folder and has a unique name, so that several processes may write the same file;
    it is deleted after an error. A symbolic link stays, and its target is replaced; devices and pipes are written to
    directly.

    Args:
        outlasts_power: whether to wait until the content and name of the new file are on the disk; otherwise a power
            loss may leave a damaged file.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    goal = Path(os.path.realpath(path))
    if goal.exists() and not goal.is_file():
        yield goal
        return
    part = goal.with_name(f".{goal.name[:60]}.{os.getpid()}.{uuid4().hex[:12]}.part")
    try:
        yield part
        if outlasts_power:
            _sync(part)
        part.replace(goal)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    if outlasts_power:
        with suppress(OSError):  # some folders cannot be opened; the file is complete nevertheless
            _sync(goal.parent)


def write_whole(path: Path, content: bytes, mode: int = 0o666, outlasts_power: bool = True) -> None:
    """Write a file atomically; see `whole`.

    Args:
        mode: permissions of a new file, before the process's umask.
        outlasts_power: see `whole`.
    """
    with whole(path, outlasts_power) as part, open(part, "wb", opener=partial(os.open, mode=mode)) as file:
        file.write(content)


@contextmanager
def whole_files_in(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to write files to, which then replace those in `folder` atomically, one by one.

    For functions that write several files, such as `save_pretrained`. Configurations, which refer to the others, come last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = Path(mkdtemp(prefix=".", suffix=".part", dir=folder))
    try:
        yield parts
        files = [path for path in parts.rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: (path.suffix == ".json", path)):
            goal = folder / path.relative_to(parts)
            goal.parent.mkdir(parents=True, exist_ok=True)
            _sync(path)
            path.replace(goal)
    finally:
        _delete_folder(parts)


def delete_leftovers(folder: Path, pattern: str = ".*.part") -> None:
    """Delete the temporary files of killed processes in a folder. No other process may write to it meanwhile."""
    for path in folder.glob(pattern):
        if path.is_dir():
            _delete_folder(path)
        else:
            path.unlink(missing_ok=True)


def _delete_folder(folder: Path) -> None:
    """Delete a folder and its contents, ignoring errors."""
    for path in sorted(folder.rglob("*"), reverse=True):
        with suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()
    with suppress(OSError):
        folder.rmdir()


def _sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    number = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(number)

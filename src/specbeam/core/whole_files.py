"""Files that are whole or not there, whenever the process that writes them ends."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from uuid import uuid4

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP}  # some file systems have nothing to wait for


@contextmanager
def whole(path: Path, outlasts_power: bool = True) -> Iterator[Path]:
    """Yield another path to write to; that file takes the place of `path` when nothing has gone wrong.

    The other path is this call's own, so that several processes may write the same file, and lies in the same folder. It
    is gone when something goes wrong. A symbolic link stays, and the file that it leads to is replaced; a device or a pipe
    is written to as it is.

    Args:
        outlasts_power: whether to wait until the disk has the content and the name of the new file; without it, a loss of
            power may leave a damaged file.

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
        with suppress(OSError):  # some folders cannot be opened; the file is whole all the same
            _sync(goal.parent)


def write_whole(path: Path, content: bytes, mode: int = 0o666, outlasts_power: bool = True) -> None:
    """Write a file that is either whole or not there.

    Args:
        mode: who may read and write a new file, as far as the process's mask allows.
        outlasts_power: see `whole`.
    """
    with whole(path, outlasts_power) as part, open(part, "wb", opener=partial(os.open, mode=mode)) as file:
        file.write(content)


@contextmanager
def whole_files_in(folder: Path) -> Iterator[Path]:
    """Yield another folder to write files to; each of them then takes its place in `folder`, whole.

    For libraries that write several files by themselves, as `save_pretrained` does. Configurations, which are small and
    name the others, come last.
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
    """Delete the files that killed processes were writing to a folder. No other process may write there now."""
    for path in folder.glob(pattern):
        if path.is_dir():
            _delete_folder(path)
        else:
            path.unlink(missing_ok=True)


def _delete_folder(folder: Path) -> None:
    """Delete a folder and all that is in it, as far as possible."""
    for path in sorted(folder.rglob("*"), reverse=True):
        with suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()
    with suppress(OSError):
        folder.rmdir()


def _sync(path: Path) -> None:
    """Wait until the disk has a file or a folder."""
    number = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(number)

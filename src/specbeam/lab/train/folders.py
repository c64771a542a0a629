"""Folders of training runs that can be resumed: each stores its options, and a folder of other options is refused."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specbeam.core import delete_leftovers, write_whole
from specbeam.errors import BadSetting, SpecbeamError
from specbeam.lab.train.trees import read_or_refuse

OPTIONS = "options.json"
LOCK = ".lock"


@contextmanager
def work_folder(folder: Path, options: dict[str, Any], leftovers: str) -> Iterator[None]:
    """Work in a folder, which no other process does meanwhile. It is made if it is missing.

    Args:
        options: settings that the work depends on; see `keep_options`.
        leftovers: a pattern of files that only a folder with options may hold.

    Raises:
        BadSetting: the folder cannot be written, another process works in it, or it holds work with other options.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            delete_leftovers(folder, "*.part")
            _check_options(folder, json.loads(json.dumps(options)), leftovers)  # as they are read again
            yield
    except (SpecbeamError, ConnectionError):  # a report may be printed to a program that has ended
        raise
    except OSError as error:
        raise BadSetting(
            f"{folder} cannot be written: {error}; make room, or choose another folder. Finished work stays, and the "
            "same call goes on from it"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder until this one leaves it, or ends in whatever way."""
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise BadSetting(
            f"another process works in {folder}; wait until it has ended, or choose another folder"
        ) from error
    except (PermissionError, NotADirectoryError):
        raise
    except (OSError, NotImplementedError) as error:  # some disks that machines share have no locks
        warnings.warn(f"{folder} cannot be locked ({error}); let no other process work in it", stacklevel=4)
    try:
        yield
    finally:
        lock.release()


def _check_options(folder: Path, options: dict[str, Any], leftovers: str) -> None:
    """Raise `BadSetting` if a folder holds work with other options."""
    path = folder / OPTIONS
    if not path.exists():
        if any(folder.glob(leftovers)):
            raise BadSetting(f"{folder} holds {leftovers}, but no {OPTIONS}; delete it, or choose another folder")
        return
    before = read_or_refuse(path, lambda: dict(json.loads(path.read_text())))
    different = []
    for name in sorted({**before, **options}):
        old = before.get(name)
        new = options.get(name)
        if old != new:
            different.append(f"{name} {old!r} (now {new!r})")
    if different:
        raise BadSetting(f"{folder} holds work with {', '.join(different)}; choose another folder, or delete this one")


def keep_options(folder: Path, options: dict[str, Any]) -> None:
    """Write the options of a folder, once all that can be wrong with them has been tried."""
    write_whole(folder / OPTIONS, (json.dumps(options, indent=2) + "\n").encode())

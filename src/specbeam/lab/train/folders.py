"""Folders of resumable work: a folder stores the options of its work, and work with other options is refused."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specbeam.core import delete_leftovers, write_whole
from specbeam.errors import BadSetting, SpecbeamError, warn
from specbeam.lab.train.trees import read_or_refuse

OPTIONS = "options.json"
LOCK = ".lock"


@contextmanager
def work_folder(folder: Path, options: dict[str, Any], leftovers: str) -> Iterator[None]:
    """Lock a folder for this process while it works in it. The folder is made if it is missing.

    Args:
        options: settings that the work depends on; see `keep_options`.
        leftovers: pattern of files that only a folder with options may hold.

    Raises:
        BadSetting: the folder cannot be written, another process works in it, or it holds work with other options.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            delete_leftovers(folder, "*.part")
            _check_options(folder, json.loads(json.dumps(options)), leftovers)  # as JSON would read them back
            yield
    except (SpecbeamError, ConnectionError):  # ConnectionError: a report was printed to a closed pipe
        raise
    except OSError as error:
        raise BadSetting(
            f"{folder} cannot be written: {error}; make room, or choose another folder. Finished work stays: repeat the "
            "call to continue"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder until the context or the process ends."""
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise BadSetting(f"another process works in {folder}; wait for its end, or choose another folder") from error
    except (PermissionError, NotADirectoryError):
        raise
    except (OSError, NotImplementedError) as error:  # some network disks have no locks
        warn(f"{folder} cannot be locked ({error}); make sure that no other process works in it")
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
            option = name.rpartition(".")[2]  # without the record that holds it
            different.append(f"{option} {old!r} (now {new!r})")
    if different:
        raise BadSetting(f"{folder} holds work with {', '.join(different)}; choose another folder, or delete this one")


def digest(values: Any) -> str:
    """Return a hash of JSON values, for an option of a folder."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=8).hexdigest()


def prefixed(prefix: str, record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as options of a folder, with a prefix: {"prefix.field": value}."""
    return {f"{prefix}.{name}": value for name, value in asdict(record).items()}


def keep_options(folder: Path, options: dict[str, Any]) -> None:
    """Write the options of a folder. Call it after everything that can refuse them."""
    write_whole(folder / OPTIONS, (json.dumps(options, indent=2) + "\n").encode())

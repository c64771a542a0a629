"""Kept files: written whole, read only if they are the user's own, and deleted when they have not been used for long."""

import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from specbeam.core.caches.folders import VARIABLE, distrust, warn_once
from specbeam.core.whole_files import write_whole

LOG = logging.getLogger("specbeam.caches")
ENDINGS = (".nbc", ".json", ".claim", ".part")
DAY_S = 86_400.0
UNUSED_S = 30 * DAY_S  # after which a kept file is deleted
LEFT_S = DAY_S  # after which what a killed process has left is deleted: claims, and files that were being written
MOST_BYTES = 4 << 30  # of all kept files in a folder; of more, those go that were used least recently
_CLEANED = "cleaned"  # the file whose time is that of the last cleaning
# A link leads elsewhere; a pipe would be waited for.
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def digest_of(key: str, content: bytes) -> bytes:
    """Return a digest of what is kept under a key, 64 hexadecimal digits."""
    return blake2b(content, digest_size=32, key=blake2b(key.encode(), digest_size=32).digest()).hexdigest().encode()


def read_sealed(path: Path, key: str) -> bytes | None:
    """Return the content that `keep_sealed` has kept under this key; None if there is none.

    A file that is damaged, or was kept under another key, is deleted.
    """
    found = read_own(path)
    if found is None:
        return None
    (seal, _, content) = found.partition(b"\n")
    if seal != digest_of(key, content):
        discard(path, "it is damaged")
        return None
    return content


def keep_sealed(path: Path, key: str, content: bytes) -> None:
    """Keep content under a key, with its digest. Warns once if it cannot be kept."""
    keep(path, digest_of(key, content) + b"\n" + content)


def read_own(path: Path) -> bytes | None:
    """Return what is in a kept file; None if there is none, or none that can be trusted."""
    try:
        number = os.open(path, _READ)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_of_reading(path, f"cannot be read ({error.strerror})")
        return None
    try:
        status = os.fstat(number)
        reason = distrust(status) if stat.S_ISREG(status.st_mode) else "is not a file"
        if reason:
            _warn_of_reading(path, reason)
            return None
        with os.fdopen(number, "rb", closefd=False) as file:
            content = file.read()
    except OSError as error:
        _warn_of_reading(path, f"cannot be read ({error.strerror})")
        return None
    finally:
        os.close(number)
    if time.time() - status.st_mtime > DAY_S:
        with suppress(OSError):
            os.utime(path)  # so that it counts as used
    return content


def keep(path: Path, content: bytes) -> None:
    """Keep a file, for this user alone. Warns once if that is impossible, as on a full disk."""
    try:
        if path.is_symlink() or path.is_fifo():  # a link leads to the file of somebody else, a pipe to a reader
            path.unlink()
        elif path.is_dir():
            path.rmdir()
        # A file that a loss of power damages does not fit its digest, and is made anew. Waiting for the disk would cost
        # 4 ms for each measurement.
        write_whole(path, content, mode=0o600, outlasts_power=False)
    except OSError as error:
        warn_once(
            "keeping",
            f"{path} cannot be written ({error.strerror or error}); so machine code and measurements are not kept, and "
            f"other processes compile and measure anew. Make room there, or set {VARIABLE} to another folder",
        )


def discard(path: Path, reason: str) -> None:
    """Delete a kept file that is of no use, so that it is made anew."""
    LOG.info("%s is deleted and made anew: %s", path, reason)
    with suppress(OSError):  # it is replaced when it is made anew
        path.unlink()


def _warn_of_reading(path: Path, reason: str) -> None:
    warn_once(
        "reading",
        f"{path} {reason}; so it is not read, but made anew. If other users can write there, delete the folder, or set "
        f"{VARIABLE} to another one",
    )


class _KeptFile(NamedTuple):
    """A kept file, for cleaning."""

    used: float  # seconds since the epoch
    size: int  # bytes
    path: str


def clean(folder: Path) -> None:
    """Delete the files of a folder that nothing has used for long, and more while they are too large together.

    Looks at them once a day. Files that another checkout or version keeps stay as long as it uses them.
    """
    stamp = folder / _CLEANED
    now = time.time()
    with suppress(OSError):
        if now - stamp.stat().st_mtime < DAY_S:
            return
    with suppress(OSError):
        stamp.touch(mode=0o600)
        files = sorted(_kept_files(folder))
        size = sum(file.size for file in files)
        for file in files:
            limit_s = LEFT_S if file.path.endswith((".claim", ".part")) else UNUSED_S
            if now - file.used < limit_s and size <= MOST_BYTES:
                continue
            with suppress(OSError):
                os.unlink(file.path)
                size -= file.size


def _kept_files(folder: Path) -> Iterator[_KeptFile]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.endswith(ENDINGS):
                continue
            with suppress(OSError):  # another process has deleted it
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield _KeptFile(status.st_mtime, status.st_size, entry.path)

"""Cache files: written atomically, read only if the user owns them, and deleted after a month without use."""

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
UNUSED_S = 30 * DAY_S  # time without use after which a file is deleted
LEFT_S = DAY_S  # time after which files of killed processes are deleted: claims and partly written files
MOST_BYTES = 4 << 30  # maximum size of a folder; beyond it the least recently used files are deleted
_CLEANED = "cleaned"  # file whose modification time is the time of the last cleaning
# Do not follow links, and do not wait for pipes.
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def digest_of(key: str, content: bytes) -> bytes:
    """Return a digest of a key and its content, 64 hexadecimal digits."""
    return blake2b(content, digest_size=32, key=blake2b(key.encode(), digest_size=32).digest()).hexdigest().encode()


def read_sealed(path: Path, key: str) -> bytes | None:
    """Return the content that `save_sealed` stored under this key; None if there is none.

    A damaged file, or one with another key, is deleted.
    """
    found = read_own(path)
    if found is None:
        return None
    (seal, _, content) = found.partition(b"\n")
    if seal != digest_of(key, content):
        discard(path, "it is damaged")
        return None
    return content


def save_sealed(path: Path, key: str, content: bytes) -> None:
    """Save content under a key, with its digest. Warns once if this is impossible."""
    keep(path, digest_of(key, content) + b"\n" + content)


def read_own(path: Path) -> bytes | None:
    """Return the content of a cache file; None if it is missing or cannot be trusted."""
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
            os.utime(path)  # marks it as used
    return content


def keep(path: Path, content: bytes) -> None:
    """Save a file, readable only by this user. Warns once if this is impossible, for example on a full disk."""
    try:
        if path.is_symlink() or path.is_fifo():  # a link may lead to another user's file, a pipe to a reader
            path.unlink()
        elif path.is_dir():
            path.rmdir()
        # No fsync, which would take 4 ms per measurement: files damaged by a power loss fail their digest and are replaced.
        write_whole(path, content, mode=0o600, outlasts_power=False)
    except OSError as error:
        warn_once(
            "keeping",
            f"{path} cannot be written ({error.strerror or error}), so machine code and measurements are not saved, and "
            f"other processes compile and measure again. Free disk space, or set {VARIABLE} to another folder",
        )


def discard(path: Path, reason: str) -> None:
    """Delete an unusable cache file, so that it is replaced."""
    LOG.info("deleting %s, which will be replaced: %s", path, reason)
    with suppress(OSError):  # it will be overwritten
        path.unlink()


def _warn_of_reading(path: Path, reason: str) -> None:
    warn_once(
        "reading",
        f"{path} {reason}, so it is ignored and replaced. If other users can write there, delete the folder, or set "
        f"{VARIABLE} to another one",
    )


class _CacheFile(NamedTuple):
    """A cache file, for cleaning."""

    used: float  # seconds since the epoch
    size: int  # bytes
    path: str


def clean(folder: Path) -> None:
    """Delete files of a folder that have not been used for a month, and the least recently used ones beyond `MOST_BYTES`.

    Runs at most once a day. Files of other checkouts and versions remain as long as they are used.
    """
    stamp = folder / _CLEANED
    now = time.time()
    with suppress(OSError):
        if now - stamp.stat().st_mtime < DAY_S:
            return
    with suppress(OSError):
        stamp.touch(mode=0o600)
        files = sorted(_cache_files(folder))
        size = sum(file.size for file in files)
        for file in files:
            limit_s = LEFT_S if file.path.endswith((".claim", ".part")) else UNUSED_S
            if now - file.used < limit_s and size <= MOST_BYTES:
                continue
            with suppress(OSError):
                os.unlink(file.path)
                size -= file.size


def _cache_files(folder: Path) -> Iterator[_CacheFile]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.endswith(ENDINGS):
                continue
            with suppress(OSError):  # another process has deleted it
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield _CacheFile(status.st_mtime, status.st_size, entry.path)

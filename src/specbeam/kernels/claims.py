"""Claims on files: of several processes that want the same file one makes it, and the others wait for it."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # where processes cannot lock files, each makes its own
    LOCKS = False
else:
    LOCKS = True

PATIENCE = 30.0  # seconds that a process waits for another one; longer than any function takes to compile
_PAUSE = 0.01  # seconds between two looks


class Claim:
    """A claim of this process on what it makes, until it is `ended`; or until the process ends, however it ends."""

    def __init__(self, path: Path, number: int) -> None:
        self._path = path
        self._number = number  # of the open file whose lock is the claim

    def end(self) -> None:
        """Give the claim up, so that others go on. Does nothing the second time."""
        if self._number >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._number)
            self._number = -1


def claimed(path: Path) -> Claim | None:
    """Return a claim by a lock on the file at `path`, which is made for it; None if another process has one.

    Raises:
        OSError: nothing can be written or locked there.
    """
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(number)
            return None
        except OSError:
            os.close(number)
            raise
        if _is_at(path, number):
            return Claim(path, number)
        os.close(number)  # its last owner has deleted it between our two calls


def _is_at(path: Path, number: int) -> bool:
    """Return whether an open file is the one at this path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(number), path.stat())
    return False


def wait_for(path: Path) -> Claim | None:
    """Return a claim as `claimed` does, after any other process has ended its own; None if it has not in `PATIENCE`."""
    latest = time.monotonic() + PATIENCE
    while (claim := claimed(path)) is None and time.monotonic() < latest:
        time.sleep(_PAUSE)
    return claim


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let no other process do what is done inside, as far as locks on files are to be had."""
    claim = None
    if LOCKS:
        with suppress(OSError):
            claim = wait_for(path)
    try:
        yield
    finally:
        if claim is not None:
            claim.end()

"""Claims on files: of several processes that want the same file one makes it, and the others wait for it."""

import os
import time
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # where processes cannot lock files, each makes its own
    LOCKS = False
else:
    LOCKS = True

# Seconds that a process waits for what another one makes. A claim is held while all that its form calls is compiled, too;
# where that takes longer, both make it. A process that was stopped keeps its claims: so whoever has waited in vain once does
# not wait any more.
PATIENCE = 30.0
_PAUSE = 0.01  # seconds between two looks
_HELD: set["Claim"] = set()  # the claims of this process
_is_patient = True


class Claim:
    """A claim of this process on what it makes, until it is `ended`; or until the process ends, however it ends."""

    def __init__(self, path: Path, number: int) -> None:
        self._path = path
        self._number = number  # of the open file whose lock is the claim
        _HELD.add(self)

    def end(self) -> None:
        """Give the claim up, so that others go on. Does nothing the second time."""
        number = self._number
        if number < 0:
            return
        self._number = -1
        _HELD.discard(self)
        with suppress(OSError):  # the folder may have become read-only since
            self._path.unlink()
        os.close(number)


def end_all() -> None:
    """Give up all claims of this process, which is about to end: so it leaves no files."""
    for claim in list(_HELD):
        claim.end()


def claimed(path: Path) -> Claim | None:
    """Return a claim by a lock on the file at `path`, which is made for it; None if another process has one.

    Raises:
        OSError: nothing can be written or locked there.
    """
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(number)
            return None
        except OSError:
            os.close(number)
            with suppress(OSError):
                path.unlink()
            raise
        if _is_at(path, number):
            return Claim(path, number)
        os.close(number)  # its last owner has deleted it between our two calls


def _is_at(path: Path, number: int) -> bool:
    """Return whether an open file is the one at this path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(number), path.stat())
    return False


def wait_for(path: Path, seconds: float, pause: float = _PAUSE) -> Claim | None:
    """Return a claim as `claimed` does, after any other process has ended its own; None if it has not in so many seconds."""
    latest = time.monotonic() + seconds
    while (claim := claimed(path)) is None and time.monotonic() < latest:
        time.sleep(pause)
    return claim


def wait_patiently(path: Path) -> Claim | None:
    """Return a claim as `wait_for` does in `PATIENCE`; at once, when this process has waited so long in vain before."""
    global _is_patient
    claim = wait_for(path, PATIENCE if _is_patient else 0)
    if claim is None:
        _is_patient = False
    return claim

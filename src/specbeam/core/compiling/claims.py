"""Claims on files, by file locks: if several processes need a file, one makes it and the others wait.

Not by `filelock`, which locks the folders of trainings: it leaves its lock files in place, and with one lock per form of a
step there would be more than a thousand of them.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # without file locks, each process makes its own file
    LOCKS = False
else:
    LOCKS = True

# Seconds to wait for another process. A claim is held while all callees of its form are compiled, too; if this takes longer,
# both processes compile the form. A stopped process keeps its claims, so after one timeout a process no longer waits.
PATIENCE = 30.0
_PAUSE = 0.01  # seconds between two attempts
_HELD: set["Claim"] = set()  # the claims of this process
_is_patient = True


class Claim:
    """A claim of this process on a file, until `end` is called or the process ends."""

    def __init__(self, path: Path, number: int) -> None:
        self._path = path
        self._number = number  # descriptor of the open file whose lock is the claim
        _HELD.add(self)

    def end(self) -> None:
        """Release the claim. Further calls do nothing."""
        number = self._number
        if number < 0:
            return
        self._number = -1
        _HELD.discard(self)
        with suppress(OSError):  # the folder may have become read-only
            self._path.unlink()
        os.close(number)


def end_all() -> None:
    """Release all claims of this process and delete their files, before the process ends."""
    for claim in list(_HELD):
        claim.end()


def claimed(path: Path) -> Claim | None:
    """Return a claim, by a lock on a new file at `path`; None if another process has a claim.

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
        os.close(number)  # its last owner deleted it between the two calls


def _is_at(path: Path, number: int) -> bool:
    """Return whether an open file is the one at this path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(number), path.stat())
    return False


def wait_for(path: Path, seconds: float, pause: float = _PAUSE) -> Claim | None:
    """Return a claim like `claimed`, waiting up to `seconds` for another process to release it; None after that."""
    latest = time.monotonic() + seconds
    while (claim := claimed(path)) is None and time.monotonic() < latest:
        time.sleep(pause)
    return claim


def wait_patiently(path: Path) -> Claim | None:
    """Return the result of `wait_for` within `PATIENCE`; do not wait if this process has timed out before."""
    global _is_patient
    claim = wait_for(path, PATIENCE if _is_patient else 0)
    if claim is None:
        _is_patient = False
    return claim

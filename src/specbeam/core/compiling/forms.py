"""How many forms of steps this process has compiled, or loaded from disk: a time in which one was made measures that."""

from threading import Lock

_LOCK = Lock()
_MADE = 0


def count_form() -> None:
    """Count one more form."""
    global _MADE
    with _LOCK:
        _MADE += 1


def forms_made() -> int:
    """Return the number of forms so far."""
    return _MADE

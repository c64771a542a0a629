"""A counter of the forms of steps that this process has compiled or loaded: timings that include one do not count."""

from threading import Lock

_LOCK = Lock()
_MADE = 0


def count_form() -> None:
    """Count one more form."""
    global _MADE
    with _LOCK:
        _MADE += 1


def forms_made() -> int:
    """Return the number of forms compiled or loaded so far."""
    return _MADE

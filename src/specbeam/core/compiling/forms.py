"""A counter of the forms of steps that this process has compiled or loaded, and listeners to compilations."""

import logging
from collections.abc import Callable
from contextlib import suppress
from threading import Lock

Listener = Callable[[bool], None]  # is called with True when a compilation begins, and with False when it ends
_LOG = logging.getLogger(__name__)
_LOCK = Lock()
_MADE = 0
_COMPILED = 0
_LISTENERS: list[Listener] = []


def count_form() -> None:
    """Count one more form."""
    global _MADE
    with _LOCK:
        _MADE += 1


def forms_made() -> int:
    """Return the number of forms compiled or loaded so far; timings that include one do not count."""
    return _MADE


def forms_compiled() -> int:
    """Return the number of forms that this process has begun to compile."""
    return _COMPILED


def listen(listener: Listener) -> None:
    """Tell a listener of each compilation. Compiling a form compiles the forms that it calls."""
    _LISTENERS.append(listener)


def tell(begins: bool) -> None:
    """Tell all listeners that the compilation of a form begins or ends. A listener that fails is dropped, with a warning."""
    global _COMPILED
    if begins:
        with _LOCK:
            _COMPILED += 1
    for listener in [*_LISTENERS]:
        try:
            listener(begins)
        except Exception as error:
            with suppress(ValueError):  # another thread has removed it
                _LISTENERS.remove(listener)
            _LOG.warning("progress of compilations is not shown any more: %s: %s", type(error).__name__, error)

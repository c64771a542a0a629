"""Rarer garbage collections while millions of long-lived objects are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

_YOUNG = 20_000  # new objects per collection of the youngest
_RARELY = 200  # collections of younger objects per full collection
_LOCK = RLock()  # reentrant, because a signal handler may run while it is held
_inside = 0  # number of contexts, in all threads
_before = gc.get_threshold()  # before the first context
_ours = _before  # set by the first context


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Make garbage collections rarer, during imports and compilation (measured in measurements/first_text.md).

    The last of several contexts restores the thresholds, unless they have been set by another caller meanwhile.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    """Count a context; the first one makes collections rarer."""
    global _inside, _before, _ours
    with _LOCK:
        _inside += 1
        if _inside == 1:
            _before = gc.get_threshold()
            (young, middle, old) = _before
            gc.set_threshold(young and max(young, _YOUNG), middle, max(old, _RARELY))
            _ours = gc.get_threshold()  # some versions of Python ignore the third threshold


def _leave() -> None:
    """Count down a context; the last one restores the thresholds if they are still those of the first one."""
    global _inside
    with _LOCK:
        _inside -= 1
        if _inside == 0 and gc.get_threshold() == _ours:
            gc.set_threshold(*_before)

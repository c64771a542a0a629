"""Python's search for garbage, made rarer while objects are made by the million that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

_RARELY = 200  # collections of younger objects for one of all
_LOCK = RLock()  # a handler of signals may come here inside
_inside = 0  # how many are inside, in all threads
_before = gc.get_threshold()  # as the first of them found it
_ours = _before  # as the first of them set it


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Let Python look through all objects for garbage more rarely: in imports, and while steps are compiled.

    measurements/first_text.md has what that saves. The last of several threads to leave sets the threshold back, unless
    another caller has set it meanwhile.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    """Count one more inside; the first one makes the search rarer."""
    global _inside, _before, _ours
    with _LOCK:
        _inside += 1
        if _inside == 1:
            _before = gc.get_threshold()
            (young, middle, old) = _before
            gc.set_threshold(young, middle, max(old, _RARELY))
            _ours = gc.get_threshold()  # some versions of Python keep no third number


def _leave() -> None:
    """Count one fewer inside; the last one sets back what is still as the first one set it."""
    global _inside
    with _LOCK:
        _inside -= 1
        if _inside == 0 and gc.get_threshold() == _ours:
            gc.set_threshold(*_before)

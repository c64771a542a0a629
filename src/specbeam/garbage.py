"""Python's search for garbage, made rarer while objects are made by the million that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_RARELY = 200  # collections of younger objects for one of all


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Let Python look through all objects for garbage more rarely: in imports, and while steps are compiled.

    In a first text that took a ninth of the time, and a sixth where all code was kept.
    """
    (young, middle, old) = gc.get_threshold()
    gc.set_threshold(young, middle, max(old, _RARELY))
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)

"""How loops are compiled, and on how many threads they run."""

import inspect
import os
from collections.abc import Callable
from typing import Any

try:
    import numba
except ImportError:  # pip install 'specbeam[fast]'
    numba = None

AVAILABLE = numba is not None and os.environ.get("SPECBEAM_KERNELS") != "off"
Array = Any  # numba finds the types by itself
BLOCK = 64  # values that are looked at together


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiled at the first call and kept on disk. `unwrap`: tests wrap functions into type checks."""
    if not AVAILABLE:
        return function
    return numba.njit(cache=True, error_model="numpy", boundscheck=False, **options)(inspect.unwrap(function))


def compiled_in_any_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """Sums may be reordered, so that they become vector instructions; NaN stays NaN."""
    return compiled(function, fastmath={"reassoc", "nsz", "contract"})


def compiled_loosely(function: Callable[..., Any]) -> Callable[..., Any]:
    """Sums may be reordered, so that they become vector instructions; NaN must not come in."""
    return compiled(function, fastmath={"reassoc", "nsz", "contract", "nnan"})


def start_threads() -> int:
    """Most threads that compiled loops may use. To be called before any loop that may be spread: what spreads it is looked
    up when the loop is read from disk.
    """
    numba.get_num_threads()
    return int(numba.config.NUMBA_NUM_THREADS)


def use_threads(count: int) -> None:
    """At most `start_threads()`, for loops that are compiled for several."""
    numba.set_num_threads(count)

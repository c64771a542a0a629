"""Calls from compiled steps back into Python, for rows of logits that only Python can make."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int64

from specbeam.core.steps import AVAILABLE, compiled_as

if AVAILABLE:
    from specbeam.core.compiling.compiler import call_c

NUMBERS = 8  # that a callback takes: sizes, and addresses of arrays
_SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * NUMBERS)


class Callback:
    """A function of Python that compiled steps can call by its `address`, for as long as this object lives.

    Args:
        function: takes `NUMBERS` integers and returns nothing. What it raises is kept in `failure`, interrupts too, for
            compiled code cannot raise it; then the step that called gets 1 instead of 0.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.failure: BaseException | None = None
        self._function = function
        self._entry = _SIGNATURE(self._run)  # which would be freed with its last reference
        self.address = ctypes.cast(self._entry, ctypes.c_void_p).value or 0

    def _run(self, *numbers: int) -> int:
        try:
            self._function(*numbers)
        except BaseException as error:  # ctypes would print anything else and return what is in memory
            self.failure = error
            return 1
        return 0


def call_back(address: int, numbers: tuple[int, int, int, int, int, int, int, int]) -> int:
    """Call the function of a `Callback`. Returns 0, or 1 if it raised."""
    return int(_SIGNATURE(address)(*map(int, numbers)))


@compiled_as(call_back)
def _compiled_call_back(address: Any, numbers: Any) -> Any:
    return lambda address, numbers: call_c(address, numbers)


def array_at(address: int, size: int, kind: Any) -> np.ndarray:
    """Return the array of `size` numbers of a ctypes type that stands at an address, which it shares."""
    return np.ctypeslib.as_array((kind * size).from_address(address))


def integers_at(address: int, size: int) -> Int64[np.ndarray, " n"]:
    """Return the int64 array that stands at an address, which it shares."""
    return array_at(address, size, ctypes.c_int64)

"""Calls from compiled steps back into Python, for rows of logits that only Python can process."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int64

from specbeam.core.steps import AVAILABLE, compiled_as

if AVAILABLE:
    from specbeam.core.compiling.compiler import call_c

NUMBERS = 8  # integer arguments of a callback: sizes, and addresses of arrays
_SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * NUMBERS)


class Callback:
    """A Python function that compiled steps can call by its `address` while this object lives.

    Args:
        function: takes `NUMBERS` integers and returns nothing. Exceptions, including interrupts, are stored in
            `failure`, because compiled code cannot raise them; the calling step then gets 1 instead of 0.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.failure: BaseException | None = None
        self._function = function
        self._entry = _SIGNATURE(self._run)  # the address is valid only while this reference exists
        self.address = ctypes.cast(self._entry, ctypes.c_void_p).value or 0

    def _run(self, *numbers: int) -> int:
        try:
            self._function(*numbers)
        except BaseException as error:  # ctypes would print it and return an undefined number
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
    """Return a view of the array of `size` numbers of a ctypes type at an address."""
    return np.ctypeslib.as_array((kind * size).from_address(address))


def integers_at(address: int, size: int) -> Int64[np.ndarray, " n"]:
    """Return a view of the int64 array at an address."""
    return array_at(address, size, ctypes.c_int64)

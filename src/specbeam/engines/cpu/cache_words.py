"""The numbers that keys and values are kept as: float32, or rounded to bfloat16, which takes half the memory.

Rounded, every row reads every key and value as it is stored, its own included. So the output of a row does not depend on
the pass that stored them, and the law is that of the model with rounded keys and values.
"""

import inspect
from typing import Any, Literal

import numpy as np

from specbeam.core import compiling
from specbeam.core.compiling.compiler import Array, compiled, compiled_only

if compiling.AVAILABLE:
    from numba import types

    from specbeam.core.compiling.compiler import chosen_for

KVType = Literal["float32", "bfloat16"]
# The dtype of their arrays: of bits, if numpy lacks the type.
WORDS: dict[KVType, Any] = {"float32": np.float32, "bfloat16": np.uint16}


@compiled_only
def as_kept(rows: Array, cache: Array) -> Array:
    """Return float32 rows as numbers of the type of a cache: the rows themselves, or the bits of the nearest bfloat16."""


def _unchanged(rows: Array, cache: Array) -> Array:
    return rows


@compiled
def _in_bfloat16(rows: Array) -> Array:
    """Return the bits of the nearest bfloat16 numbers, uint16, of contiguous float32 rows; a half goes to the even one."""
    bits = rows.reshape(-1).view(np.uint32)
    found = np.empty(len(bits), dtype=np.uint16)
    for place in range(len(bits)):
        odd = (bits[place] >> np.uint32(16)) & np.uint32(1)
        found[place] = np.uint16((bits[place] + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    return found.reshape(rows.shape)


if compiling.AVAILABLE:

    @chosen_for(as_kept)
    def _compiled_as_kept(rows: Any, cache: Any) -> Any:
        if cache.dtype == types.uint16:
            return inspect.unwrap(lambda rows, cache: _in_bfloat16(rows))
        return inspect.unwrap(_unchanged)

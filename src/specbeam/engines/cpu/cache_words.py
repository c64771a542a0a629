"""Types of stored keys and values: float32, or bfloat16 for half the memory.

With bfloat16, every row reads rounded keys and values, including its own. So the output of a row does not depend on the
pass that stored them, and the law is that of the model with rounded keys and values.
"""

import inspect
from typing import Any, Literal

import numpy as np

from specbeam.core import compiling
from specbeam.core.compiling.compiler import Array, compiled, compiled_only
from specbeam.core.compiling.uncounted import compiled_without_counts

if compiling.AVAILABLE:
    from numba import types

    from specbeam.core.compiling.compiler import chosen_for

KVType = Literal["float32", "bfloat16"]
# The dtype of the arrays; numpy lacks bfloat16, so uint16 arrays hold the bits.
WORDS: dict[KVType, Any] = {"float32": np.float32, "bfloat16": np.uint16}

# The bits of float32 numbers.
_INFINITY = np.uint32(0x7F800000)
_NAN = np.uint32(0x7FC00000)


@compiled_only
def as_kept(rows: Array, cache: Array) -> Array:
    """Return float32 rows in the dtype of a cache: unchanged, or the bits of the nearest bfloat16 numbers."""


def _unchanged(rows: Array, cache: Array) -> Array:
    return rows


@compiled
def _in_bfloat16(rows: Array) -> Array:
    """Return the bits, uint16, of the bfloat16 numbers nearest to contiguous float32 rows; ties go to the even number."""
    numbers = rows.reshape(-1)
    found = np.empty(len(numbers), dtype=np.uint16)
    round_to_bfloat16(numbers, found)
    return found.reshape(rows.shape)


@compiled_without_counts
def round_to_bfloat16(numbers: Array, found: Array) -> None:
    """Write the bits of the bfloat16 numbers nearest to float32[n] to uint16[n]; ties go to the even number."""
    bits = numbers.view(np.uint32)
    for place in range(len(bits)):
        one = bits[place]
        odd = (one >> np.uint32(16)) & np.uint32(1)
        near = one + np.uint32(0x7FFF) + odd
        is_nan = (one & np.uint32(0x7FFFFFFF)) > _INFINITY
        found[place] = np.uint16((_NAN if is_nan else near) >> np.uint32(16))


if compiling.AVAILABLE:

    @chosen_for(as_kept)
    def _compiled_as_kept(rows: Any, cache: Any) -> Any:
        if cache.dtype == types.uint16:
            return inspect.unwrap(lambda rows, cache: _in_bfloat16(rows))
        return inspect.unwrap(_unchanged)

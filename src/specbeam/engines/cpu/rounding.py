"""Numbers rounded to 8 or 4 bits: the columns of a matrix once, the rows that it is multiplied with in each product."""

from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int8

from specbeam.kernels.compiling import Array, compiled

BYTES_PER_WORD = 4
# The byte that stands for 0 in a row: instructions multiply unsigned bytes of rows with signed ones of columns.
ZERO = 128
LARGEST = 127
LEAST = 1e-30  # the least scale times `LARGEST`, so that rows and columns of zeros stay zeros
GROUP = 32  # steps of depth that share a scale where numbers have 4 bits
LOWEST = -8  # of the whole numbers of 4 bits; the largest is 7
# The bits of a float32 that are enough for a scale of float16 or bfloat16, and those that then hold a zero point.
OF_SCALE = 0xFFFFE000
OF_ZERO = 0x1FFF

# What is added to it is rounded to a whole number, which is in the lowest bits of the sum.
_LAST_BIT_IS_1 = np.float32(1.5 * 2**23)
_WITHOUT_SIGN = np.int32(0x7FFFFFFF)
_LEAST_BITS = np.float32(LEAST).view(np.int32)

Scales = Float32[np.ndarray, " columns"]


def rounded(matrix: Float[np.ndarray, "columns depth"]) -> tuple[Int8[np.ndarray, "columns depth"], Scales]:
    """Return a matrix rounded to int8, and a scale for each column: a 127th of the largest absolute number in it.

    A number of the matrix is rounded to the nearest multiple of its column's scale.
    """
    scales = np.maximum(np.abs(matrix).max(1), LEAST).astype(np.float32) / np.float32(LARGEST)
    return np.rint(matrix / scales[:, None]).astype(np.int8), scales


def rounded_groups(
    matrix: Float[np.ndarray, "columns depth"],
) -> tuple[Int8[np.ndarray, "columns depth"], Float32[np.ndarray, "columns groups"]]:
    """Return a matrix rounded to whole numbers of 4 bits, -8 to 7, and a scale for each `GROUP` numbers of a column.

    The number of a group that is farthest from 0 becomes -8, so that its scale has the other sign; scales are bfloat16
    numbers. The depth must be a multiple of `GROUP`.
    """
    groups = matrix.reshape(len(matrix), -1, GROUP)
    farthest = np.take_along_axis(groups, np.abs(groups).argmax(2)[..., None], 2)[..., 0]
    scales = in_bfloat16(farthest / np.float32(LOWEST))
    divisors = np.where(np.abs(scales) < LEAST, np.float32(1), scales)  # a group of zeros is zeros times anything
    numbers = np.clip(np.rint(groups / divisors[..., None]), LOWEST, -LOWEST - 1)
    return numbers.astype(np.int8).reshape(matrix.shape), scales


def in_bfloat16(numbers: Float[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """Return the nearest bfloat16 numbers, as float32."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) & np.uint32(0xFFFF0000)).view(np.float32)


@compiled
def rounded_row(source: Array, numbers: Array) -> float:
    """Write a row, float32[depth], to `numbers`, uint8[depth], and return its scale: a 127th of its largest number.

    Each number is rounded to the nearest multiple of the scale, a half to the even one, and `ZERO` is added. The scale of a
    row that holds NaN is NaN.
    """
    bits = source.view(np.int32)
    top = np.int32(_LEAST_BITS)
    # Without signs, bits have the order of the numbers, and integers are compared by vector instructions.
    for step in range(len(bits)):
        size = np.int32(bits[step] & _WITHOUT_SIGN)
        top = size if size > top else top
    largest: Any = np.int32(top).view(np.float32)
    factor = np.float32(LARGEST) / largest
    for step in range(len(source)):
        shifted = np.float32(source[step] * factor + _LAST_BIT_IS_1)
        numbers[step] = np.uint8((shifted.view(np.int32) + ZERO) & 0xFF)
    return largest / np.float32(LARGEST)

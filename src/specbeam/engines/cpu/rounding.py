"""Rounding to 8 or 4 bits: of a matrix's columns once, of rows in each product."""

from typing import Any

import numpy as np
from jaxtyping import Float32, Int8

from specbeam.core.compiling.compiler import Array, compiled
from specbeam.core.compiling.uncounted import compiled_without_counts
from specbeam.engines.arrays import Dense

BYTES_PER_WORD = 4
# The byte that represents 0 in a row, because instructions multiply unsigned bytes of rows with signed bytes of
# columns.
ZERO = 128
LARGEST = 127
LEAST = 1e-30  # smallest scale times `LARGEST`, so that rows and columns of zeros stay zeros
GROUP = 32  # steps of depth that share a scale in 4-bit matrices
LOWEST = -8  # 4-bit integer; the largest is 7
# The bits of a float32 that hold a scale of float16 or bfloat16, and the remaining bits, for a zero point.
OF_SCALE = 0xFFFFE000
OF_ZERO = 0x1FFF

# Adding this number rounds to an integer, which ends up in the lowest bits of the sum.
_LAST_BIT_IS_1 = np.float32(1.5 * 2**23)
_BITS_OF_ZERO = _LAST_BIT_IS_1.view(np.int32)  # of this number plus 0
_SIGN = np.int32(-(2**31))
_WITHOUT_SIGN = np.int32(0x7FFFFFFF)
_LEAST_BITS = np.float32(LEAST).view(np.int32)


def rounded_groups(
    matrix: Dense,
) -> tuple[Int8[np.ndarray, "columns depth"], Float32[np.ndarray, "columns groups"]]:
    """Return a matrix rounded to 4-bit integers, -8 to 7, and a scale for each `GROUP` numbers of a column.

    The number of a group farthest from 0 becomes -8, so the scale has the opposite sign; scales are bfloat16 numbers. The
    depth must be a multiple of `GROUP`.
    """
    columns, depth = matrix.shape
    numbers = np.empty((columns, depth), dtype=np.int8)
    scales = np.empty((columns, depth // GROUP), dtype=np.float32)
    _round_columns_in_groups(np.ascontiguousarray(matrix, dtype=np.float32), numbers, scales)
    return numbers, scales


@compiled
def _round_columns_in_groups(matrix: Array, numbers: Array, scales: Array) -> None:
    for column in range(len(matrix)):
        round_column_in_groups(matrix[column], numbers[column], scales[column])


@compiled_without_counts
def _largest_bits(bits: Array) -> np.int32:
    """Return the bits of the maximum of |x| and `LEAST`, given the bits of x, int32[n].

    Without their signs, bits are ordered like the numbers, and vector instructions compare integers.
    """
    top = np.int32(_LEAST_BITS)
    for step in range(len(bits)):
        size = np.int32(bits[step] & _WITHOUT_SIGN)
        top = size if size > top else top
    return top


@compiled
def round_column(source: Array, numbers: Array) -> float:
    """Write a column, float32[depth], rounded to int8, to `numbers`, and return its scale.

    The scale is a 127th of the largest absolute number; numbers are rounded to the nearest multiple of it.
    """
    found = np.empty(1, dtype=np.int32)
    found[0] = _largest_bits(source.view(np.int32))
    scale = found.view(np.float32)[0] / np.float32(LARGEST)
    shifted = np.empty(len(source), dtype=np.float32)
    for step in range(len(source)):
        shifted[step] = source[step] / scale + _LAST_BIT_IS_1
    whole = shifted.view(np.int32)
    for step in range(len(source)):
        numbers[step] = np.int8(whole[step])
    return scale


@compiled
def round_column_in_groups(source: Array, numbers: Array, scales: Array) -> None:
    """Write a column, float32[depth], rounded to 4 bits in groups; see `rounded_groups`.

    Args:
        numbers: int8[depth], written.
        scales: float32[groups], written.
    """
    bits = source.view(np.int32)
    scale_bits = scales.view(np.uint32)
    farthest = np.empty(1, dtype=np.int32)
    farthest_number = farthest.view(np.float32)
    shifted = np.empty(GROUP, dtype=np.float32)
    whole = shifted.view(np.int32)
    lowest = np.int32(LOWEST)
    for group in range(len(scales)):
        first = group * GROUP
        # As integers, the bits of nonnegative numbers are ordered like the numbers; the bits of negative numbers are
        # negative.
        above = np.int32(_SIGN)
        below = np.int32(_SIGN)
        for step in range(GROUP):
            number_bits = bits[first + step]
            turned = np.int32(number_bits ^ _SIGN)
            above = number_bits if number_bits > above else above
            below = turned if turned > below else below
        farthest[0] = above if above > below else below ^ _SIGN
        if above == below:  # tie between both signs: the first one wins
            place = first
            while (bits[place] & _WITHOUT_SIGN) != above:
                place += 1
            farthest[0] = bits[place]
        scales[group] = farthest_number[0] / np.float32(LOWEST)
        half = np.uint32(0x7FFF) + ((scale_bits[group] >> np.uint32(16)) & np.uint32(1))
        scale_bits[group] = (scale_bits[group] + half) & np.uint32(0xFFFF0000)
        divisor = scales[group]
        if abs(divisor) < np.float32(LEAST):  # a group of zeros: any scale will do
            divisor = np.float32(1)
        for step in range(GROUP):
            shifted[step] = source[first + step] / divisor + _LAST_BIT_IS_1
        for step in range(GROUP):
            number = np.int32(whole[step] - _BITS_OF_ZERO)
            number = lowest if number < lowest else number
            numbers[first + step] = np.int8(-lowest - 1 if number > -lowest - 1 else number)


@compiled
def rounded_row(source: Array, numbers: Array) -> float:
    """Write a row, float32[depth], rounded to `numbers`, uint8[depth], and return its scale: a 127th of its maximum |x|.

    Each number is rounded to the nearest multiple of the scale, ties to even, and `ZERO` is added. The scale of a row with
    NaN is NaN.
    """
    largest: Any = np.int32(_largest_bits(source.view(np.int32))).view(np.float32)
    factor = np.float32(LARGEST) / largest
    for step in range(len(source)):
        shifted = np.float32(source[step] * factor + _LAST_BIT_IS_1)
        numbers[step] = np.uint8((shifted.view(np.int32) + ZERO) & 0xFF)
    return largest / np.float32(LARGEST)

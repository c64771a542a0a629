"""Numbers rounded to 8 bits: the columns of a matrix once, the rows that it is multiplied with in each product."""

import numpy as np
from jaxtyping import Float, Float32, Int8

from specbeam.kernels.compiling import Array, compiled

BYTES_PER_WORD = 4
# The byte that stands for 0 in a row: instructions multiply unsigned bytes of rows with signed ones of columns.
ZERO = 128
LARGEST = 127
LEAST = 1e-30  # the least scale times `LARGEST`, so that rows and columns of zeros stay zeros

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
    found = np.empty(1, dtype=np.int32)
    found[0] = top
    largest = found.view(np.float32)[0]
    factor = np.float32(LARGEST) / largest
    shifted = np.empty(len(source), dtype=np.float32)
    for step in range(len(source)):
        shifted[step] = source[step] * factor + _LAST_BIT_IS_1
    whole = shifted.view(np.int32)
    for step in range(len(source)):
        numbers[step] = np.uint8((whole[step] + ZERO) & 0xFF)
    return largest / np.float32(LARGEST)

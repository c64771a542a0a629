"""Matrices and numbers rounded as the panels of 8 bits and of bfloat16 hold them."""

import numpy as np

from specbeam.engines.cpu.rounding import round_column


def rounded(matrix):
    """Return a matrix rounded to int8, and a scale for each column: a 127th of the largest absolute number in it."""
    numbers = np.empty(matrix.shape, dtype=np.int8)
    columns = np.ascontiguousarray(matrix, dtype=np.float32)
    scales = [round_column(column, goal) for column, goal in zip(columns, numbers, strict=True)]
    return numbers, np.array(scales, dtype=np.float32)


def in_bfloat16(numbers):
    """Return the nearest bfloat16 numbers, as float32."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) & np.uint32(0xFFFF0000)).view(np.float32)

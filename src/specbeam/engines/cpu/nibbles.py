"""Panels of 4-bit integers with a scale and a zero point for each group, which represent exact float32 weights.

Rows are not rounded: while a panel is read, each number becomes (number - zero point) * scale in a register. float32
represents it exactly, so products are bit-identical to those of float32 panels. A weight takes 5 bits.

A panel is a sequence of groups of `GROUP` steps of depth. A group has four words for each column, see `Grouped.words`, and a
fifth one: the upper 19 bits of the float32 scale, enough for a float16 or bfloat16 number, and then the zero point.
"""

import numpy as np
from jaxtyping import Float32

from specbeam.core.compiling.compiler import Array, compiled
from specbeam.engines.arrays import Dense, Panels
from specbeam.engines.blocks import BlockNumbers
from specbeam.engines.cpu.rounding import GROUP, LOWEST, OF_SCALE, OF_ZERO, rounded_groups
from specbeam.engines.cpu.sums import WIDTH
from specbeam.engines.packed import PER_WORD, Grouped, packed_in_words

WORDS = GROUP // PER_WORD  # of a group in a column


def fits_scales(scales: Float32[np.ndarray, "groups columns"]) -> bool:
    """Return whether panels represent these scales exactly, as they do float16 and bfloat16 numbers."""
    return not bool((np.ascontiguousarray(scales).view(np.uint32) & np.uint32(OF_ZERO)).any())


def rounded_nibbles(matrix: Dense) -> Grouped:
    """Return a matrix rounded in groups of `GROUP` steps, see `rounded_groups`; all zero points are 8."""
    numbers, scales = rounded_groups(matrix)
    whole = (numbers - np.int8(LOWEST)).astype(np.uint8)
    zeros = np.full(scales.T.shape, -LOWEST, dtype=np.uint8)
    return Grouped(packed_in_words(np.ascontiguousarray(whole.T)), np.ascontiguousarray(scales.T), zeros)


def as_grouped(matrix: BlockNumbers) -> Grouped:
    """Return a matrix whose blocks have a scale and a zero point of 8, as Q4_0's; see `BlockMatrix.is_symmetric`."""
    scales = np.ascontiguousarray(matrix.scales.T).astype(np.uint16).view(np.float16).astype(np.float32)
    zeros = np.full(scales.shape, -LOWEST, dtype=np.uint8)
    return Grouped(packed_in_words(np.ascontiguousarray(matrix.numbers.T).view(np.uint8)), scales, zeros)


def write_nibbles(panels: Panels, matrix: Grouped) -> None:
    """Write the panels of a matrix, int32, padded with columns of zeros to a multiple of `WIDTH`."""
    count = len(panels)
    missing = count * WIDTH - matrix.words.shape[1]
    fine = Grouped(*(np.pad(part, ((0, 0), (0, missing))) for part in matrix.in_groups_of(GROUP)))
    groups = len(fine.scales)
    last = fine.scales.view(np.int32) | fine.zeros
    goal = panels.reshape(count, groups, WORDS + 1, WIDTH)
    goal[:, :, :WORDS] = fine.words.reshape(groups, WORDS, count, WIDTH).transpose(2, 0, 1, 3)
    goal[:, :, WORDS] = last.reshape(groups, count, WIDTH).transpose(1, 0, 2)


@compiled
def nibbles_as_float32(panel: Array, depth: int) -> Array:
    """Return the weights of one panel as float32, step after step."""
    words = panel.view(np.uint32).reshape(depth // GROUP, WORDS + 1, WIDTH)
    found = np.empty((depth, WIDTH), dtype=np.float32)
    scales = np.empty(WIDTH, dtype=np.uint32)
    in_floats = scales.view(np.float32)
    zeros = np.empty(WIDTH, dtype=np.float32)
    for group in range(depth // GROUP):
        last = words[group, WORDS]
        for column in range(WIDTH):
            scales[column] = last[column] & np.uint32(OF_SCALE)
            zeros[column] = np.float32(np.int32(last[column] & np.uint32(OF_ZERO)))
        for step in range(GROUP):
            row = found[group * GROUP + step]
            source = words[group, step // PER_WORD]
            shift = np.uint32(4 * (step % PER_WORD))
            for column in range(WIDTH):
                number = np.float32(np.int32((source[column] >> shift) & np.uint32(15)))
                row[column] = (number - zeros[column]) * in_floats[column]
    return found.reshape(-1)

"""Panels of two binary matrices with scales, see `DualBinary`: 2.5 bits per weight.

Rows are rounded to 8 bits, as for 4-bit panels. A product is then exact in integers: for each group, the sums of the row's
numbers where b1 is 1, and where b2 is 1. Both sums are multiplied by their scales and added to those of earlier groups, the
first one first, each by an operation that rounds once.

A panel is a sequence of groups of `BINARY_GROUP` steps of depth. A group has five words for each column: two of b1, two of
b2, and one with both scales, bfloat16 numbers, that of b1 in the lower half. In a word, bit 8 * k + i is the entry of step
4 * i + k, so that each shift by i shows the entries of four steps, one in each byte.
"""

import numpy as np

from specbeam.core.compiling.compiler import Array
from specbeam.core.compiling.uncounted import compiled_without_counts
from specbeam.engines.arrays import Panels
from specbeam.engines.cpu.rounding import rounded_row
from specbeam.engines.cpu.sums import WIDTH
from specbeam.engines.dual_binary import BINARY_GROUP, BITS_OF_WORD, DualBinary

_WORDS = BINARY_GROUP // BITS_OF_WORD  # of a group in a column of a binary matrix
WORDS_OF_GROUP = 2 * _WORDS + 1  # in a column of a panel
_BITS = 8  # of a number of a row
_LOWEST = np.uint32(0x01010101)  # the lowest bit of each byte


def write_binaries(panels: Panels, matrix: DualBinary) -> None:
    """Write the panels of a matrix, int32, padded with columns of zeros to a multiple of `WIDTH`."""
    count = len(panels)
    missing = count * WIDTH - matrix.planes.shape[2]
    planes, scales = (np.pad(part, ((0, 0), (0, 0), (0, missing))) for part in matrix)
    groups = scales.shape[1]
    goal = panels.view(np.uint32).reshape(count, groups, WORDS_OF_GROUP, WIDTH)
    by_panel = _interleaved(planes).reshape(2, groups, _WORDS, count, WIDTH)
    for which in range(2):
        goal[:, :, which * _WORDS : (which + 1) * _WORDS] = by_panel[which].transpose(2, 0, 1, 3)
    first, second = scales.view(np.uint32)
    both = first >> np.uint32(16) | second & np.uint32(0xFFFF0000)
    goal[:, :, -1] = both.reshape(groups, count, WIDTH).transpose(1, 0, 2)


def _interleaved(words: np.ndarray) -> np.ndarray:
    """Return words whose bit 8 * k + i is bit 4 * i + k of the given ones."""
    found = np.zeros_like(words)
    for step in range(BITS_OF_WORD):
        turn, byte = divmod(step, 4)
        bit = words >> np.uint32(step) & np.uint32(1)
        found |= bit << np.uint32(8 * byte + turn)
    return found


@compiled_without_counts
def transpose_bits(x: Array, start: int, rows: int, transposed: Array, numbers: Array) -> None:
    """Write rows of x, float32[all rows, depth], rounded to 8 bits and split into their bits, followed by their scales.

    Args:
        start: the first row.
        transposed: uint32[words], written: for each 32 steps of depth eight words of each row, the bits of equal value in
            two's complement from the lowest one on, in the order of the bits of a panel.
        numbers: uint8[depth], overwritten.
    """
    depth = x.shape[1]
    words = depth // 4
    scales = transposed[rows * words : rows * (words + 1)].view(np.float32)
    in_words = numbers.view(np.uint32)
    for row in range(rows):
        scales[row] = rounded_row(x[start + row], numbers)
        for first in range(0, words, _BITS):
            for bit in range(_BITS):
                found = np.uint32(0)
                for turn in range(_BITS):
                    signed = in_words[first + turn] ^ np.uint32(0x80808080)
                    found |= (signed >> np.uint32(bit) & _LOWEST) << np.uint32(turn)
                transposed[(first + bit) * rows + row] = found

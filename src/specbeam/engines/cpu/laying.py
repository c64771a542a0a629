"""The layout of matrices in panels: compiled loops that read each weight once, panel by panel, in cache-sized pieces.

numpy would round a matrix in several passes over memory, and transpose it slowly, by reading one word of each column in
turn; these loops read the columns one after the other.
"""

import numpy as np

from specbeam.core.compiling.compiler import Array, compiled
from specbeam.core.compiling.copies import copy_numbers
from specbeam.engines.cpu.embedding import look_up
from specbeam.engines.cpu.rounding import BYTES_PER_WORD, GROUP, ZERO, round_column, round_column_in_groups
from specbeam.engines.cpu.sums import WIDTH

_BLOCK = 16  # words of a column that are moved together: a cache line of 4-byte words
_EARLIER = np.uint64(0xFFFFFFFF)
_LATER = np.uint64(0xFFFFFFFF00000000)
_APART = 16  # words between columns, so that columns moved together do not share a cache set
_STEPS = 8  # steps of depth in a word of numbers of 4 bits
_LOWER = np.int32(0x0F0F0F0F)  # the lower half of each byte
_WITHOUT_SIGN = np.int32(0x08080808)  # adds 8 to signed numbers of 4 bits, so that they become unsigned


@compiled
def _transpose_words(source: Array, goal: Array) -> None:
    """Write the first words of each column, words[WIDTH, n or more], to words[n, WIDTH]; all words have four bytes.

    Each step moves two words of two columns by two loads and two stores. Columns must have an even number of words.
    """
    words = len(goal)
    pairs = source.view(np.uint64)
    goal_pairs = goal.view(np.uint64)
    for start in range(0, words // 2, _BLOCK // 2):
        stop = min(start + _BLOCK // 2, words // 2)
        for column in range(WIDTH // 2):
            for pair in range(start, stop):
                first = pairs[2 * column, pair]
                second = pairs[2 * column + 1, pair]
                goal_pairs[2 * pair, column] = (first & _EARLIER) | (second << np.uint64(32))
                goal_pairs[2 * pair + 1, column] = (first >> np.uint64(32)) | (second & _LATER)
    if words % 2:
        for column in range(WIDTH):
            goal[words - 1, column] = source[column, words - 1]


@compiled
def _room_for(words: int) -> Array:
    """Return room for the columns of a panel, int32[WIDTH, words or more]; see `_APART`."""
    return np.zeros((WIDTH, words + words % 2 + _APART), dtype=np.int32)


@compiled
def lay_out_words(matrix: Array, panels: Array) -> None:
    """Write the panels of a matrix of words without rounding.

    Args:
        matrix: int32[columns, words]. Missing columns of the last panel become zeros.
        panels: int32[panels, words], written: the first word of each column, then the second one, ...
    """
    columns, words = matrix.shape
    room = _room_for(words)
    for panel in range(len(panels)):
        first = panel * WIDTH
        for column in range(WIDTH):
            if first + column < columns:
                copy_numbers(room[column, :words], matrix[first + column])
            else:
                room[column] = 0
        _transpose_words(room, panels[panel].reshape(words, WIDTH))


@compiled
def _read_column(matrix: Array, place: int, row: Array) -> None:
    """Write a column of a matrix to a row, float32[depth]; zeros if the matrix lacks it."""
    if place < len(matrix):
        look_up(matrix, place, row)
    else:
        row[:] = 0


@compiled
def lay_out_bytes(matrix: Array, panels: Array) -> None:
    """Round a matrix to 8 bits and write its panels, int32[panels, words].

    A panel has four steps of depth in each word, then the scales of its columns, then 128 times their sums.

    Args:
        matrix: float32[columns, depth], or uint16, the bits of bfloat16 numbers. Missing columns of the last panel become
            zeros.
    """
    depth = matrix.shape[1]
    words = depth // BYTES_PER_WORD
    row = np.empty(depth, dtype=np.float32)
    room = _room_for(words)
    bytes_of_room = room.view(np.int8)
    for panel in range(len(panels)):
        goal = panels[panel].reshape(words + 2, WIDTH)
        scales = goal[words].view(np.float32)
        sums = goal[words + 1]
        for column in range(WIDTH):
            _read_column(matrix, panel * WIDTH + column, row)
            numbers = bytes_of_room[column, :depth]
            scales[column] = round_column(row, numbers)
            total = np.int32(0)
            for step in range(depth):
                total += np.int32(numbers[step])
            sums[column] = ZERO * total
        _transpose_words(room, goal[:words])


@compiled
def lay_out_groups(matrix: Array, panels: Array) -> None:
    """Round a matrix to 4 bits in groups and write its panels, int32[panels, words].

    A group in a panel has its words, of eight steps of depth each, and then the scales, two in a word. Numbers are
    stored unsigned, with an offset of 8; the first four of the eight steps are in the lower halves of the bytes. Only
    the upper 16 bits of a scale are stored, because the others are 0: in the lower halves of the words for the first
    half of a panel's columns, in the upper halves for the second half.

    Args:
        matrix: as in `lay_out_bytes`.
    """
    depth = matrix.shape[1]
    groups = depth // GROUP
    words = GROUP // _STEPS
    each = words * WIDTH + WIDTH // 2
    row = np.empty(depth, dtype=np.float32)
    numbers = np.empty((WIDTH, depth), dtype=np.int8)
    in_words = numbers.view(np.int32)
    scales = np.empty((WIDTH, groups), dtype=np.float32)
    bits = scales.view(np.uint32)
    for panel in range(len(panels)):
        for column in range(WIDTH):
            _read_column(matrix, panel * WIDTH + column, row)
            round_column_in_groups(row, numbers[column], scales[column])
        goal = panels[panel].reshape(groups, each)
        pairs = goal.view(np.uint32)
        for group in range(groups):
            for word in range(words):
                first = group * 2 * words + 2 * word
                for column in range(WIDTH):
                    lower = (in_words[column, first] & _LOWER) ^ _WITHOUT_SIGN
                    upper = (in_words[column, first + 1] & _LOWER) ^ _WITHOUT_SIGN
                    goal[group, word * WIDTH + column] = lower | (upper << np.int32(4))
            for column in range(WIDTH // 2):
                later = bits[column + WIDTH // 2, group] & np.uint32(0xFFFF0000)
                pairs[group, words * WIDTH + column] = (bits[column, group] >> np.uint32(16)) | later

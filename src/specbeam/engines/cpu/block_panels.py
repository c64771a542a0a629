"""Panels of small integers in blocks, which represent the exact float32 weights of GGUF files; see `BlockNumbers`.

Rows are not rounded: while a panel is read, each number becomes number * scale + offset in a register, with one rounding,
as in `BlockNumbers.weights`. So products have the same bits as with float32 panels. A weight takes 6 bits,
or 10 bits for numbers of 8 bits.

A panel is a sequence of groups of `GROUP` steps of depth. A group has 4 or 8 words of numbers for each column, the earliest
step in the lowest bits; then a word of `BlockNumbers.scales` and a word of `BlockNumbers.offsets`.
"""

from typing import Any

import numpy as np

from specbeam.core.compiling.compiler import Array, compiled
from specbeam.engines.arrays import Dense, Panels
from specbeam.engines.blocks import GROUP, HALF_GROUP, BlockNumbers
from specbeam.engines.cpu.embedding import widen_halves
from specbeam.engines.cpu.sums import WIDTH

_FACTORS = 2  # words of a group and column after its numbers
_BITS_PER_WORD = 32


def write_blocks(panels: Panels, matrix: BlockNumbers, bits: int) -> None:
    """Write the panels of a matrix, int32, padded with columns of zeros to a multiple of `WIDTH`.

    Args:
        bits: of the numbers in panels: 4 or 8, at least `matrix.bits`.
    """
    words = bits * GROUP // _BITS_PER_WORD
    groups = matrix.numbers.shape[1] // GROUP
    goal = panels.reshape(len(panels), groups, words + _FACTORS, WIDTH)
    for panel in range(len(panels)):
        part = matrix.columns(panel * WIDTH, (panel + 1) * WIDTH)
        here = len(part.numbers)
        if here < WIDTH:
            goal[panel] = 0
        numbers = _in_words(part.numbers, bits).reshape(here, groups, words)
        goal[panel, :, :words, :here] = numbers.transpose(1, 2, 0)
        goal[panel, :, words, :here] = part.scales.T.view(np.int32)
        goal[panel, :, words + 1, :here] = part.offsets.T.view(np.int32)


def rounded_blocks(matrix: Dense, bits: int) -> BlockNumbers:
    """Return a matrix rounded to numbers of 8 bits with a scale for each group, or of 4 bits with a scale and an offset.

    The depth must be a multiple of `GROUP`.
    """
    columns, depth = matrix.shape
    groups = np.ascontiguousarray(matrix, dtype=np.float32).reshape(columns, -1, GROUP)
    offsets = np.zeros(groups.shape[:2], dtype=np.float16)
    if bits == 8:
        scales = (np.abs(groups).max(2) / 127).astype(np.float16)
        lowest = -127
        highest = 127
    else:
        offsets = groups.min(2).astype(np.float16)
        scales = ((groups.max(2) - offsets) / 15).astype(np.float16)
        lowest = 0
        highest = 15
    divisors = np.where(scales == 0, np.float32(1), scales)
    steps = (groups - offsets[..., None].astype(np.float32)) / divisors[..., None]
    numbers = np.clip(np.rint(steps), lowest, highest).astype(np.int8).reshape(columns, depth)
    ones = np.uint32(1 << 16)
    both = scales.view(np.uint16).astype(np.uint32) | ones | ones << np.uint32(8)
    return BlockNumbers(numbers, both, offsets.view(np.uint16).astype(np.uint32) | ones, bits)


def _in_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Return numbers, int8[columns, depth], packed in words of this many bits each, int32[columns, words]."""
    if bits == 4:
        even = numbers[:, 0::2].view(np.uint8)
        odd = numbers[:, 1::2].view(np.uint8)
        numbers = even | odd << np.uint8(4)
    return np.ascontiguousarray(numbers).view(np.int32)


@compiled
def blocks_as_float32(panel: Array, depth: int) -> Array:
    """Return the weights of one panel as float32, step after step."""
    groups = depth // GROUP
    words = panel.view(np.uint32).reshape(groups, -1, WIDTH)
    of_numbers = words.shape[1] - _FACTORS
    bits = np.uint32(_BITS_PER_WORD * of_numbers // GROUP)
    per_word = GROUP // of_numbers
    found = np.empty((depth, WIDTH), dtype=np.float32)
    halves = np.empty(WIDTH, dtype=np.uint16)
    bases = np.empty(WIDTH, dtype=np.float32)
    offsets = np.empty(WIDTH, dtype=np.float32)
    scales = np.empty((2, WIDTH), dtype=np.float32)
    for group in range(groups):
        _write_factors(words[group, of_numbers + 1], halves, bases)
        for column in range(WIDTH):
            offsets[column] = bases[column] * _byte(words[group, of_numbers + 1, column], 2)
        _write_factors(words[group, of_numbers], halves, bases)
        for column in range(WIDTH):
            scales[0, column] = bases[column] * _byte(words[group, of_numbers, column], 2)
            scales[1, column] = bases[column] * _byte(words[group, of_numbers, column], 3)
        for step in range(GROUP):
            row = found[group * GROUP + step]
            source = words[group, step // per_word]
            shift = np.uint32(step % per_word) * bits
            half = step // HALF_GROUP
            for column in range(WIDTH):
                part = source[column] >> shift
                number = np.int32(part & np.uint32(15)) if bits == 4 else np.int32(np.int8(part & np.uint32(255)))
                # The product is exact in float32, so the order of roundings does not matter.
                row[column] = np.float32(number) * scales[half, column] + offsets[column]
    return found.reshape(-1)


@compiled
def _write_factors(words: Array, halves: Array, out: Array) -> None:
    """Write the float16 numbers in the lower halves of words, uint32[n], to out, float32[n]; `halves` is overwritten."""
    for place in range(len(words)):
        halves[place] = np.uint16(words[place] & np.uint32(0xFFFF))
    widen_halves(halves, out)


@compiled
def _byte(word: int, place: int) -> Any:
    """Return a signed byte of a word; byte 0 is the lowest."""
    return np.float32(np.int8((word >> np.uint32(8 * place)) & np.uint32(255)))

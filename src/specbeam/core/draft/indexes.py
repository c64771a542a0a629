"""DRAFT without a model, as steps: indexes of a growing text that find earlier occurrences of its last tokens.

Each kind of index is a record of arrays that has registered `add_token` and `find_after`.
"""

from typing import Any, NamedTuple

import numpy as np

from specbeam.core.beams import LENGTH, SETTLED, Texts
from specbeam.core.steps import Array, borrowed, step, verb

READ = 0  # index into the `numbers` of an index: number of tokens of the text that it has read
HASHES = 2**31 - 1  # hashes are below this prime, so that 64 bits hold their products
FACTOR = 1_000_003


@verb(0, has_body=False)
def add_token(index: Any, token: int) -> None:
    """Append a token to the text of an index, which must have capacity for it."""


@verb(0, has_body=False)
def find_after(index: Any, offset: int, texts: Texts, beam: int, depth: int) -> tuple[int, int]:  # type: ignore[empty-body]
    """Return the part of the text that followed an earlier occurrence of the last tokens of a beam: its start and stop.

    Args:
        offset: number of tokens before the first new one.
        texts: the new tokens of the live beams; the index has read their common prefix.
        depth: maximum number of tokens to return.
    """


@step
def hashed(before: int, number: int) -> int:
    """Return the hash of a sequence, extended by a number, given its hash `before`."""
    return (before * FACTOR + number + 1) % HASHES


@step
def read_text(index: Any, offset: int, texts: Texts) -> None:
    """Add the missing tokens to an index, up to the last new token that all live beams share."""
    stop = min(offset + texts.sizes[SETTLED], len(index.text))
    for place in range(index.numbers[READ], stop):
        token = index.text[place] if place < offset else texts.tokens[0, place - offset]
        add_token(index, token)


@step
def token_of_beam(index: Any, offset: int, texts: Texts, beam: int, place: int) -> int:
    """Return token `place` of the whole text of a beam."""
    return index.text[place] if place < offset else texts.tokens[beam, place - offset]


@borrowed
class GramIndex(NamedTuple):
    """A hash table of where each run of up to `longest` tokens occurred last (or first)."""

    text: Array  # int64[capacity]
    places: Array  # int64[slots]: the index after a run; 0: the slot is free
    sizes: Array  # int64[slots]: the length of the run
    numbers: Array  # int64[1]: number of tokens that were read (READ)
    longest: int
    keeps_first: bool


def gram_index(longest: int, keeps_first: bool, room: int) -> GramIndex:
    """Return an empty index with capacity for `room` tokens."""
    slots = _power_of_two(2 * longest * room)
    text = np.zeros(room, dtype=np.int64)
    places = np.zeros(slots, dtype=np.int64)
    return GramIndex(text, places, np.zeros(slots, dtype=np.int64), np.zeros(1, dtype=np.int64), longest, keeps_first)


def _power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


@step
def _slot_of_run(index: GramIndex, run: Array, size: int, code: int) -> int:
    """Return the slot of a run, or the free slot where it would be.

    Args:
        run: int64[size] or more, its tokens, the last one first.
        code: its hash.
    """
    last = len(index.places) - 1
    slot = code & last
    while index.places[slot] > 0:
        if index.sizes[slot] == size:
            same = 0
            while same < size and index.text[index.places[slot] - 1 - same] == run[same]:
                same += 1
            if same == size:
                return slot
        slot = (slot + 1) & last
    return slot


@add_token.of(GramIndex)
@step
def add_to_grams(index: GramIndex, token: int) -> None:
    """Append a token, and store its index for each run that ends before it; see `add_token`."""
    place = index.numbers[READ]
    longest = min(index.longest, place)
    run = np.empty(longest, dtype=np.int64)
    code = 0
    for size in range(1, longest + 1):
        run[size - 1] = index.text[place - size]
        code = hashed(code, run[size - 1])
        slot = _slot_of_run(index, run, size, code)
        if index.places[slot] == 0 or not index.keeps_first:
            index.places[slot] = place
            index.sizes[slot] = size
    index.text[place] = token
    index.numbers[READ] = place + 1


@find_after.of(GramIndex)
@step
def find_after_grams(index: GramIndex, offset: int, texts: Texts, beam: int, depth: int) -> tuple[int, int]:
    """Return the tokens after an earlier occurrence of the longest run at the end of a beam's text; see `find_after`."""
    length = offset + texts.sizes[LENGTH]
    longest = min(index.longest, length)
    run = np.empty(longest, dtype=np.int64)
    code = 0
    start = 0
    for size in range(1, longest + 1):
        run[size - 1] = token_of_beam(index, offset, texts, beam, length - size)
        code = hashed(code, run[size - 1])
        slot = _slot_of_run(index, run, size, code)
        if index.places[slot] == 0:
            break
        start = index.places[slot]
    if start == 0:
        return 0, 0
    return start, min(start + depth, index.numbers[READ])

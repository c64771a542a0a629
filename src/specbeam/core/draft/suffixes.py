"""DRAFT without a model, as steps: a suffix automaton finds the longest suffix of a growing text that occurred before.

States and edges are numbered in the order of their creation; state 0 is the empty string.

Source: SAM-Decoding (arXiv 2411.10666).
"""

from typing import NamedTuple

import numpy as np

from specbeam.core.beams import LENGTH, SETTLED, Texts
from specbeam.core.draft.indexes import READ, add_token, find_after, hashed, token_of_beam
from specbeam.core.steps import Array, borrowed, step

STATES, EDGES, WHOLE, STATE, MATCHED = range(1, 6)  # further indices into the `numbers` of a suffix index, after READ


@borrowed
class SuffixIndex(NamedTuple):
    """A suffix automaton of a text, and its match: the longest suffix of the text that occurred before."""

    text: Array  # int64[capacity]
    links: Array  # int64[states]: the suffix link of each state; -1 for state 0
    lengths: Array  # int64[states]: length of its longest string
    stops: Array  # int64[states]: the index after the first occurrence of that string
    edges: Array  # int64[states]: the newest edge from each state; -1: none
    sources: Array  # int64[edges]: the state that each edge leaves
    tokens: Array  # int64[edges]: its token
    goals: Array  # int64[edges]: the state that it leads to
    before: Array  # int64[edges]: the next older edge from the same state; -1: none
    slots: Array  # int64[slots]: a hash table of edges by source and token; -1: the slot is free
    # int64[6]: number of tokens that were read (READ), of STATES and of EDGES, the state of the WHOLE text, the STATE of the
    # match and its length (MATCHED)
    numbers: Array
    per_match: float  # number of draft tokens per matched token, added to 1


def suffix_index(per_match: float, room: int) -> SuffixIndex:
    """Return an index of an empty text, with capacity for `room` tokens."""
    states = 2 * room + 1
    edges = 3 * room + 1
    index = SuffixIndex(
        text=np.zeros(room, dtype=np.int64),
        links=np.full(states, -1),
        lengths=np.zeros(states, dtype=np.int64),
        stops=np.zeros(states, dtype=np.int64),
        edges=np.full(states, -1),
        sources=np.zeros(edges, dtype=np.int64),
        tokens=np.zeros(edges, dtype=np.int64),
        goals=np.zeros(edges, dtype=np.int64),
        before=np.full(edges, -1),
        slots=np.full(1 << (2 * edges).bit_length(), -1),
        numbers=np.zeros(6, dtype=np.int64),
        per_match=float(per_match),
    )
    index.numbers[STATES] = 1
    return index


@step
def _slot_of_edge(index: SuffixIndex, state: int, token: int) -> int:
    """Return the slot of the edge from a state by a token, or the free slot where it would be."""
    last = len(index.slots) - 1
    slot = hashed(hashed(0, state), token) & last
    while True:
        edge = index.slots[slot]
        if edge < 0 or (index.sources[edge] == state and index.tokens[edge] == token):
            return slot
        slot = (slot + 1) & last


@step
def _edge_from(index: SuffixIndex, state: int, token: int) -> int:
    """Return the edge from a state by a token; -1 if there is none."""
    return index.slots[_slot_of_edge(index, state, token)]


@step
def _add_edge(index: SuffixIndex, state: int, token: int, goal: int) -> None:
    """Add an edge from a state by a token, which must not exist yet."""
    edge = index.numbers[EDGES]
    index.slots[_slot_of_edge(index, state, token)] = edge
    index.sources[edge] = state
    index.tokens[edge] = token
    index.goals[edge] = goal
    index.before[edge] = index.edges[state]
    index.edges[state] = edge
    index.numbers[EDGES] = edge + 1


@step
def _add_state(index: SuffixIndex, length: int, stop: int, link: int) -> int:
    """Add a state without edges, and return it."""
    state = index.numbers[STATES]
    index.links[state] = link
    index.lengths[state] = length
    index.stops[state] = stop
    index.numbers[STATES] = state + 1
    return state


@step
def _next_match(index: SuffixIndex, state: int, matched: int, token: int) -> tuple[int, int]:
    """Return state and length of a match after one more token."""
    edge = _edge_from(index, state, token)
    while state > 0 and edge < 0:
        state = index.links[state]
        matched = index.lengths[state]
        edge = _edge_from(index, state, token)
    if edge < 0:
        return 0, 0
    return index.goals[edge], matched + 1


@step
def _split(index: SuffixIndex, above: int, below: int, token: int) -> int:
    """Split the shorter strings off state `below`, reached by an edge from `above`; return their new state.

    If the match is in the split state and is one of the shorter strings, it moves with them.
    """
    clone = _add_state(index, index.lengths[above] + 1, index.stops[below], index.links[below])
    edge = index.edges[below]
    while edge >= 0:
        _add_edge(index, clone, index.tokens[edge], index.goals[edge])
        edge = index.before[edge]
    index.links[below] = clone
    while above >= 0:
        edge = _edge_from(index, above, token)
        if edge < 0 or index.goals[edge] != below:
            break
        index.goals[edge] = clone
        above = index.links[above]
    if index.numbers[STATE] == below and index.numbers[MATCHED] <= index.lengths[clone]:
        index.numbers[STATE] = clone
    return clone


@add_token.of(SuffixIndex)
@step
def add_to_suffixes(index: SuffixIndex, token: int) -> None:
    """Extend the match by a token, and only then insert the token, so that the match is always earlier; see `add_token`."""
    numbers = index.numbers
    state, matched = _next_match(index, numbers[STATE], numbers[MATCHED], token)
    numbers[STATE] = state
    numbers[MATCHED] = matched
    place = numbers[READ]
    index.text[place] = token
    numbers[READ] = place + 1
    above = numbers[WHOLE]
    new = _add_state(index, index.lengths[above] + 1, place + 1, 0)
    numbers[WHOLE] = new
    edge = -1
    while above >= 0:
        edge = _edge_from(index, above, token)
        if edge >= 0:
            break
        _add_edge(index, above, token, new)
        above = index.links[above]
    if above >= 0:
        below = index.goals[edge]
        if index.lengths[above] + 1 != index.lengths[below]:
            below = _split(index, above, below, token)
        index.links[new] = below


@find_after.of(SuffixIndex)
@step
def find_after_suffix(index: SuffixIndex, offset: int, texts: Texts, beam: int, depth: int) -> tuple[int, int]:
    """Return the tokens after the earlier occurrence of a beam's longest suffix; see `find_after`.

    The longer the match, the longer the draft.
    """
    state = index.numbers[STATE]
    matched = index.numbers[MATCHED]
    for place in range(offset + texts.sizes[SETTLED], offset + texts.sizes[LENGTH]):
        state, matched = _next_match(index, state, matched, token_of_beam(index, offset, texts, beam, place))
    if matched == 0:
        return 0, 0
    more = index.per_match * matched
    most = depth if more >= depth else min(depth, 1 + int(more))
    start = index.stops[state]
    return start, min(start + most, index.numbers[READ])

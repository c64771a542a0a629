"""Compiled steps that update the arrays of a KV trie (see engines/kv/trie.py)."""

from typing import NamedTuple

import numpy as np

from specbeam.core.compiling.compiler import Array, borrowed, compiled
from specbeam.core.compiling.copies import copy_numbers

WASTE = 0  # the slot for padding, to which no token attends
BLOCK = 64  # the number of slots is always a multiple of this
SIZE, STORED, KNOWN, HELD, EXTENT, PEAK = range(6)  # indices of `Trie.counts`


@borrowed
class Trie(NamedTuple):
    """The arrays of a KV trie for steps; each has spare room after its used part."""

    nodes: Array  # int64[3, room]: token, parent and position of each local node, a parent before its children
    local: Array  # int64[room]: local node of each forest node known in this turn
    seen: Array  # bool[room, slots]: slots on the path to each stored local node, its own included
    used: Array  # bool[slots]: slots that some stored node sees
    slot_position: Array  # int64[slots]: position in the text of the token in each slot
    # int64[6]: the number of local nodes (SIZE), of stored local nodes (STORED), of forest nodes known in this turn (KNOWN),
    # of tokens stored now (HELD) and its maximum so far (PEAK); and one past the last slot in use (EXTENT)
    counts: Array


@compiled
def enter(trie: Trie, tokens: Array, parents: Array) -> None:
    """Append the new forest nodes of this turn to the local nodes. There must be room for them."""
    size = trie.counts[SIZE]
    known = trie.counts[KNOWN]
    for node in range(known, len(tokens)):
        at = size + node - known
        above = trie.local[parents[node]]
        trie.nodes[0, at] = tokens[node]
        trie.nodes[1, at] = above
        trie.nodes[2, at] = trie.nodes[2, above] + 1
        trie.local[node] = at
    trie.counts[SIZE] = size + max(len(tokens) - known, 0)
    trie.counts[KNOWN] = max(len(tokens), known)


@compiled
def feed_slots(trie: Trie, slots: Array) -> None:
    """Assign a free slot to each of the next `len(slots)` local nodes, write it into `slots`, and count them as stored.

    There must be enough free slots.
    """
    slot = WASTE
    start = trie.counts[STORED]
    counts = trie.counts
    for place in range(len(slots)):
        slot += 1
        while trie.used[slot]:
            slot += 1
        node = start + place
        slots[place] = slot
        trie.used[slot] = True
        trie.slot_position[slot] = trie.nodes[2, node]
        copy_numbers(trie.seen[node], trie.seen[trie.nodes[1, node]])
        trie.seen[node, slot] = True
    counts[STORED] = start + len(slots)
    counts[HELD] = counts[HELD] + len(slots)
    counts[EXTENT] = max(counts[EXTENT], slot + 1)
    counts[PEAK] = max(counts[PEAK], counts[HELD])


@compiled
def copy_for_scratch(source: Trie, goal: Trie, again: Array) -> None:
    """Initialise `goal` with the state of `source` at the start of a turn; it assigns slots that are free in `source`.

    `goal` must have capacity for all nodes of `source`, and for two more per node of `again`.

    Args:
        again: int64[count], stored forest nodes for `goal` to store again, under their parents.
    """
    size = source.counts[SIZE]
    stored = source.counts[STORED]
    known = source.counts[KNOWN]
    count = len(again)
    slots = len(source.used)
    goal.nodes[:, :stored] = source.nodes[:, :stored]
    goal.seen[:stored, :slots] = source.seen[:stored]
    goal.seen[:stored, slots:] = False
    for node in range(stored, size):  # pending nodes come after the parents of nodes to store again
        above = source.nodes[1, node]
        goal.nodes[0, node + count] = source.nodes[0, node]
        goal.nodes[1, node + count] = above if above < stored else above + count
        goal.nodes[2, node + count] = source.nodes[2, node]
    for node in range(known):
        local = source.local[node]
        goal.local[node] = local if local < stored else local + count
    for number in range(count):
        local = source.local[again[number]]
        position = source.nodes[2, local]
        anchor = stored + number
        twin = size + count + number
        goal.nodes[0, anchor] = -1
        goal.nodes[1, anchor] = -1
        goal.nodes[2, anchor] = position - 1
        goal.seen[anchor] = False
        for slot in range(slots):
            goal.seen[anchor, slot] = source.seen[local, slot] and source.slot_position[slot] != position
        goal.nodes[0, twin] = source.nodes[0, local]
        goal.nodes[1, twin] = anchor
        goal.nodes[2, twin] = position
        goal.local[again[number]] = twin
    goal.used[:slots] = source.used
    goal.used[slots:] = False
    goal.slot_position[:slots] = source.slot_position
    goal.counts[SIZE] = size + 2 * count
    goal.counts[STORED] = stored + count
    goal.counts[KNOWN] = known
    goal.counts[HELD] = source.counts[HELD]
    goal.counts[EXTENT] = source.counts[EXTENT]
    goal.counts[PEAK] = source.counts[HELD]


@compiled
def add_survivors(trie: Trie, survivors: Array, tokens: Array, parents: Array) -> Array:
    """Return the local node of each surviving beam, after adding tokens that were not drafted.

    Args:
        survivors: int64[beams], the forest node of each beam; -1 if its last token was not drafted.
        tokens, parents: int64[beams], the last token of each beam, and the forest node above it.
    """
    leaves = np.empty(len(survivors), dtype=np.int64)
    size = trie.counts[SIZE]
    nodes = trie.nodes
    for beam in range(len(survivors)):
        if survivors[beam] >= 0:
            leaves[beam] = trie.local[survivors[beam]]
            continue
        above = trie.local[parents[beam]]
        nodes[0, size] = tokens[beam]
        nodes[1, size] = above
        nodes[2, size] = nodes[2, above] + 1
        leaves[beam] = size
        size += 1
    trie.counts[SIZE] = size
    return leaves


@compiled
def prune(trie: Trie, leaves: Array) -> Array:
    """Drop all nodes that these leaves do not need, free their slots, and renumber the remaining nodes.

    The leaves are the roots of the next turn. Stored leaves and the stored parents of pending nodes come first, then the
    pending nodes; a stored node does not need the nodes above it, because it holds the slots on its path.

    Returns the former number of each remaining local node.
    """
    nodes = trie.nodes
    seen = trie.seen
    used = trie.used
    counts = trie.counts
    size = counts[SIZE]
    stored = counts[STORED]
    lives = np.zeros(size, dtype=np.bool_)
    for leaf in leaves:
        node = leaf
        while not lives[node]:
            lives[node] = True
            if node < stored:
                break
            node = nodes[1, node]
    node_map = np.empty(size, dtype=np.int64)
    former = np.empty(size, dtype=np.int64)
    count = 0
    first = 0
    used[:] = False
    for node in range(size):
        if not lives[node]:
            continue
        node_map[node] = count
        former[count] = node
        above = -1
        if node < stored:
            if count < node:
                copy_numbers(seen[count], seen[node])
            for slot in range(len(used)):
                used[slot] = used[slot] or seen[count, slot]
            first += 1
        else:
            above = node_map[nodes[1, node]]
        nodes[0, count] = nodes[0, node]
        nodes[1, count] = above
        nodes[2, count] = nodes[2, node]
        count += 1
    extent = len(used)
    while extent > 1 and not used[extent - 1]:
        extent -= 1
    for beam in range(len(leaves)):
        trie.local[beam] = node_map[leaves[beam]]
    counts[SIZE] = count
    counts[STORED] = first
    counts[KNOWN] = len(leaves)
    counts[HELD] = used.sum()
    counts[EXTENT] = extent
    return former[:count]


@compiled
def stored_among(trie: Trie, nodes: Array) -> Array:
    """Return the local nodes of the forest nodes that are stored already, whose rows have to be computed again."""
    again = np.empty(len(nodes), dtype=np.int64)
    count = 0
    for node in nodes:
        if trie.local[node] < trie.counts[STORED]:
            again[count] = trie.local[node]
            count += 1
    return again[:count]


@compiled
def has_room(trie: Trie, fresh: int, beams: int) -> bool:
    """Return whether a trie has capacity for a turn; see `core.passes.has_room_for`."""
    counts = trie.counts
    size = counts[SIZE] + fresh + beams
    slots = counts[HELD] + counts[SIZE] - counts[STORED] + fresh + 1
    rows = min(trie.nodes.shape[1], len(trie.seen))
    return size <= rows and counts[KNOWN] + fresh + beams <= len(trie.local) and slots <= len(trie.used)


@compiled
def are_feedable(trie: Trie, tokens: int, positions: int) -> bool:
    """Return whether a model of `tokens` tokens and `positions` positions has those of all pending nodes."""
    is_fine = True
    for node in range(trie.counts[STORED], trie.counts[SIZE]):
        token = trie.nodes[0, node]
        is_fine &= 0 <= token < tokens and trie.nodes[2, node] < positions
    return is_fine


@compiled
def settle(trie: Trie, tree: tuple[Array, Array], nodes: Array, tokens: Array, parents: Array, kept: Array) -> None:
    """Keep the paths to the surviving beams and to kept nodes, and free the rest; see `core.passes.settle_target`."""
    enter(trie, tree[0], tree[1])
    leaves = add_survivors(trie, nodes, tokens, parents)
    prune(trie, np.concatenate((leaves, trie.local[kept])))

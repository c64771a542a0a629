"""The steps of a KV trie's counts as loops (see engines/kv/trie.py), compiled where numba is installed."""

from typing import NamedTuple

import numpy as np

from specbeam.kernels.compiling import Array, compiled

WASTE = 0  # a slot that nobody sees: padding is written there
BLOCK = 64  # numbers of slots are multiples of it
SIZE, STORED, KNOWN, HELD, EXTENT, PEAK = range(6)


class Trie(NamedTuple):
    """A trie as loops see it: arrays with room behind what is used."""

    nodes: Array  # int64[3, room]: token, parent and position of each local node, a parent before its children
    local: Array  # int64[room]: local node of each forest node known in this turn
    seen: Array  # bool[room, slots]: slots on the path to each stored local node, its own included
    used: Array  # bool[slots]: slots that somebody sees
    slot_position: Array  # int64[slots]
    counts: Array  # int64[6]: local nodes (SIZE), how many of them are STORED; forest nodes that are KNOWN;
    #               tokens HELD now and at most (PEAK); one past the last slot in use (EXTENT)


@compiled
def enter(trie: Trie, tokens: Array, parents: Array) -> None:
    """Hang the forest nodes that are new behind the local nodes. There must be room."""
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
    """Find free slots, which there must be, for the next local nodes; from here on these count as stored."""
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
        trie.seen[node] = trie.seen[trie.nodes[1, node]]
        trie.seen[node, slot] = True
    counts[STORED] = start + len(slots)
    counts[HELD] = counts[HELD] + len(slots)
    counts[EXTENT] = max(counts[EXTENT], slot + 1)
    counts[PEAK] = max(counts[PEAK], counts[HELD])


@compiled
def hung(trie: Trie, survivors: Array, tokens: Array, parents: Array) -> Array:
    """Local nodes of beams, by their forest nodes `survivors`; those that have none (-1) are hung under their `parents`."""
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
def kept(trie: Trie, leaves: Array) -> Array:
    """Rename the local nodes: stored leaves and stored parents of pending nodes first, then what is pending; free all slots
    that none of these sees. The leaves are the roots of the next turn.

    Gives the former names of what is left.
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
    names = np.empty(size, dtype=np.int64)
    former = np.empty(size, dtype=np.int64)
    count = 0
    first = 0
    used[:] = False
    for node in range(size):
        if not lives[node]:
            continue
        names[node] = count
        former[count] = node
        above = -1
        if node < stored:
            if count < node:
                seen[count] = seen[node]
            np.logical_or(used, seen[count], used)
            first += 1
        else:
            above = names[nodes[1, node]]
        nodes[0, count] = nodes[0, node]
        nodes[1, count] = above
        nodes[2, count] = nodes[2, node]
        count += 1
    extent = len(used)
    while extent > 1 and not used[extent - 1]:
        extent -= 1
    for beam in range(len(leaves)):
        trie.local[beam] = names[leaves[beam]]
    counts[SIZE] = count
    counts[STORED] = first
    counts[KNOWN] = len(leaves)
    counts[HELD] = used.sum()
    counts[EXTENT] = extent
    return former[:count]

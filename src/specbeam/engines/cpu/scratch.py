"""Scratch caches: caches on the free slots of a text's cache, which start anew in each turn.

Drafts by the target with skipped sublayers read the keys and values of the whole target, and store keys and values that are
wrong for it. No node of the text attends to these slots, and the target's own pass overwrites them.
"""

from typing import NamedTuple

import numpy as np

from specbeam.core.compiling.compiler import Array, borrowed, compiled
from specbeam.core.passes import SettledTurn, extend, has_room_for, rewind, settle_draft
from specbeam.engines.cpu.cache_steps import CacheArrays, extend_cache
from specbeam.engines.kv.steps import HELD, KNOWN, PEAK, SIZE, STORED, Trie, copy_for_scratch

BEGUN, ROWS = range(2)  # indices into `ScratchArrays.numbers`


@borrowed
class ScratchArrays(NamedTuple):
    """A scratch cache of a session as arrays for steps."""

    own: CacheArrays  # of the passes on free slots
    trie: Trie  # of the text; the first pass of a turn copies its arrays
    numbers: Array  # int64[2]: 1 after a turn has begun; the number of computed rows


@compiled
def stored_among(trie: Trie, wanted: Array) -> Array:
    """Return the wanted forest nodes that are already stored and therefore have to run again."""
    again = np.empty(len(wanted), dtype=np.int64)
    count = 0
    for node in wanted:
        if node < trie.counts[KNOWN] and trie.local[node] < trie.counts[STORED]:
            again[count] = node
            count += 1
    return again[:count]


@extend.of(ScratchArrays)
@compiled
def extend_scratch(cache: ScratchArrays, tokens: Array, parents: Array, wanted: Array) -> Array:
    """Run `extend_cache`; the first pass of a turn starts from the cache of the text."""
    own = cache.own.trie
    numbers = cache.numbers
    if numbers[BEGUN] == 0:
        copy_for_scratch(cache.trie, own, stored_among(cache.trie, wanted))
        numbers[BEGUN] = 1
    before = own.counts[STORED]
    logits = extend_cache(cache.own, tokens, parents, wanted)
    numbers[ROWS] += own.counts[STORED] - before
    cache.trie.counts[PEAK] = max(cache.trie.counts[PEAK], own.counts[PEAK])
    return logits


@has_room_for.of(ScratchArrays)
@compiled
def scratch_has_room(cache: ScratchArrays, fresh: int, beams: int) -> bool:
    """Return whether there is capacity for `fresh` new nodes of a turn and a second copy of all roots."""
    counts = cache.trie.counts
    own = cache.own.trie
    again = counts[KNOWN]
    nodes = counts[SIZE] + 2 * again + fresh
    slots = counts[HELD] + counts[SIZE] - counts[STORED] + again + fresh + 1
    has_nodes = nodes <= min(own.nodes.shape[1], len(own.seen), len(cache.own.outputs))
    return has_nodes and counts[KNOWN] + fresh <= len(own.local) and slots <= len(own.used)


@rewind.of(ScratchArrays)
@compiled
def forget_scratch(cache: ScratchArrays, nodes: int) -> None:
    """Forget all nodes of this turn; `nodes` is ignored."""
    cache.numbers[BEGUN] = 0


@settle_draft.of(ScratchArrays)
@compiled
def settle_scratch(draft: ScratchArrays, target: CacheArrays, turn: SettledTurn) -> None:
    """Forget all nodes of this turn: the target's pass has stored the survivors."""
    forget_scratch(draft, 0)

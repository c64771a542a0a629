"""The books of a cache: they have room for whatever a turn leaves behind."""

import numpy as np

from specbeam.core.forest import Forest
from specbeam.engines.kv.trie import KVTrie
from specbeam.recipes.tuning.stored_prompt import _turn


def test_there_is_room_for_as_many_new_beams_as_come():
    """Beams that were no drafts are new nodes: many more of them than the trie has room for at first."""
    trie = KVTrie([3, 1, 4])
    first_room = trie.arrays.nodes.shape[1]
    beams = 3 * first_room
    root = Forest.rooted(np.array([4]))
    turn = _turn(root, np.full(beams, -1), np.zeros(beams, dtype=np.int64))
    trie.enter(root)
    trie.settle(turn)
    assert trie.arrays.nodes.shape[1] >= trie.size >= beams
    assert trie.positions[trie.local].tolist() == [3] * beams

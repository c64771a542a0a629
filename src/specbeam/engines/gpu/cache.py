"""One session in a model on a GPU: its trie, and the logits of a turn's forest nodes, which passes write to the host."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int64

from specbeam.core.forest import Forest
from specbeam.engines.gpu.staging import Inputs, ModelLimits, check, laid_out
from specbeam.engines.kv.cache import Logits, Nodes
from specbeam.engines.kv.member import RowMember
from specbeam.engines.kv.steps import KNOWN, SIZE, STORED, Trie, enter
from specbeam.engines.kv.trie import KVTrie
from specbeam.kernels.compiling import AVAILABLE, Array, compiled
from specbeam.records import Turn

if AVAILABLE:
    from specbeam.kernels.compiling import call_c

FIRST_ROWS = 32


class GpuCache(RowMember):
    """Rows that were handed out stay as they are until the turn after the next one begins."""

    def __init__(self, row: int, prompt: list[int], vocab: int, pinned: bool) -> None:
        super().__init__(row, prompt)
        self.answered = 0
        self.trie = KVTrie(prompt)
        self._pinned = pinned
        # logits by forest node
        self.outputs = self._room(FIRST_ROWS, vocab)
        self._next = self._room(0, vocab)

    def make_room(self, fresh: int) -> None:
        """For so many new nodes, all of which are to be stored."""
        self.trie.make_room(fresh)
        self.trie.make_slots(self.trie.waiting + fresh)
        self.make_rows(self.trie.known + fresh)

    def make_rows(self, nodes: int) -> None:
        if nodes > len(self.outputs):
            larger = self._room(2 * nodes, self.outputs.shape[1])
            larger[: len(self.outputs)] = self.outputs
            self.outputs = larger

    def _room(self, rows: int, vocab: int) -> torch.Tensor:
        return torch.empty(rows, vocab, pin_memory=self._pinned)

    def enter(self, forest: Forest) -> Nodes:
        """Take in new nodes; give the forest nodes whose logits a pass has to bring."""
        self.trie.enter(forest)
        self.make_rows(self.trie.known)
        return self.answered + np.flatnonzero(self.trie.local[self.answered :] >= self.trie.stored)

    def answer(self) -> Logits:
        """Logits of the forest nodes not handed out yet."""
        first = self.answered
        self.answered = self.trie.known
        return self.outputs[first : self.answered]

    def settle(self, turn: Turn) -> None:
        before = turn.verdict.beams.nodes
        self.trie.settle(turn)
        known = np.flatnonzero((self.trie.root_at < self.trie.stored) & (before >= 0))
        if len(self._next) < len(before):
            self._next = self._room(max(FIRST_ROWS, 2 * len(before)), self.outputs.shape[1])
        self._next.numpy()[known] = self.outputs.numpy()[before[known]]
        self.outputs, self._next, self.answered = self._next, self.outputs, 0


def runs(nodes: Int64[np.ndarray, " n"]) -> list[slice]:
    """Places of neighbours: [4, 5, 9] has them at 0 .. 2 and 2 .. 3."""
    edges = [0, *(np.flatnonzero(np.diff(nodes) != 1) + 1).tolist(), len(nodes)]
    return [slice(first, last) for first, last in pairwise(edges) if last > first]


class GpuCacheArrays(NamedTuple):
    """A session in a model on a GPU, as loops see it; with room for all that is going to be stored."""

    trie: Trie
    outputs: Array  # float32[nodes, vocab] by forest node, in memory that the GPU writes
    model: ModelLimits
    into: Inputs
    cache: int
    graphs: Array  # see `gpu_graphs.CapturedGraphs`
    staging: tuple[int, int, int]  # addresses there and here, bytes before the mask
    stream: int
    calls: tuple[int, int, int, int]


@compiled
def _pass(one: GpuCacheArrays, answered: int) -> None:
    """Store all pending nodes, and bring the logits of the forest nodes among them."""
    trie = one.trie
    into = one.into
    start = trie.counts[STORED]
    count = trie.counts[SIZE] - trie.counts[STORED]
    known = trie.counts[KNOWN]
    size = one.graphs[0, count]
    graph = one.graphs[1, count]
    logits = one.graphs[2, count]
    check(trie, count, one.model)
    byte = laid_out(trie, count, one.cache, one.model, into, 0, 0, 0)
    for numbers in (into.tokens, into.positions, into.caches, into.slots, into.wanted):
        numbers[count:size] = 0
    asked = 0
    for node in range(answered, known):
        if trie.local[node] >= start:
            into.wanted[asked] = trie.local[node] - start
            asked += 1
    into.wanted[asked:size] = 0
    copy_there, launch, copy_here, wait = one.calls
    there, here, before = one.staging
    failed = call_c(copy_there, (there, here, before + byte, one.stream))
    failed |= call_c(launch, (graph, one.stream))
    row_bytes = 4 * one.outputs.shape[1]
    goal = one.outputs.ctypes.data
    done = 0
    node = answered
    while node < known:
        first = node
        while node < known and trie.local[node] >= start:
            node += 1
        if node > first:
            source = logits + done * row_bytes
            failed |= call_c(copy_here, (goal + first * row_bytes, source, (node - first) * row_bytes, one.stream))
            done += node - first
        node += 1
    failed |= call_c(wait, (one.stream,))
    if failed != 0:
        raise RuntimeError("the GPU refused a pass")


@compiled
def gpu_extended(one: GpuCacheArrays, tokens: Array, parents: Array, answered: int) -> Array:
    """`LM.extend` of one session: enter the forest, store what is pending, give the logits of all nodes from `answered` on.

    Raises `IndexError` for tokens and positions that the model does not have, `RuntimeError` if a call fails.
    """
    enter(one.trie, tokens, parents)
    if one.trie.counts[SIZE] > one.trie.counts[STORED]:
        _pass(one, answered)
    return one.outputs[answered : one.trie.counts[KNOWN]]

"""A session's cache in a model on a GPU: its trie, and the turn's logits, which passes copy to the host."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from specbeam.core.compiling.compiler import AVAILABLE, Array, borrowed, compiled
from specbeam.core.forest import Forest, unknown_nodes
from specbeam.core.passes import extend
from specbeam.core.records import Scored, Turn
from specbeam.engines.arrays import Integers
from specbeam.engines.gpu.parts import HiddenRows
from specbeam.engines.gpu.staging import Inputs, ModelLimits, check_nodes, write_inputs
from specbeam.engines.kv.cache import Logits, Nodes, hand_out
from specbeam.engines.kv.member import RowMember
from specbeam.engines.kv.steps import SIZE, STORED, Trie, enter
from specbeam.engines.kv.trie import KVTrie

if AVAILABLE:
    from specbeam.core.compiling.compiler import call_c

FIRST_ROWS = 32  # initial capacity for rows of logits, within `FIRST_BYTES`
FIRST_BYTES = 2**22


class GpuCache(RowMember):
    """A session's cache in a model on a GPU. Returned logits are valid until the turn after the next begins.

    Args:
        vocab: number of logits.
        like: a tensor with the dtype and device of hidden states.
        width_of: returns the width of the hidden states of a column; see `Needs.columns`.
        trie: None: a new one for the prompt.

    Attributes:
        answered: number of forest nodes whose logits were returned in this turn.
        outputs: float32[room, vocab], logits on the host by forest node, in memory that the GPU writes directly.
        hidden: hidden states on the device by forest node, if a part of the session needs them.
    """

    def __init__(
        self,
        row: int,
        prompt: list[int],
        vocab: int,
        like: torch.Tensor,
        width_of: Callable[[int], int],
        trie: KVTrie | None = None,
    ) -> None:
        super().__init__(row, prompt)
        self.answered = 0
        self.trie = KVTrie(prompt) if trie is None else trie
        self.has_stale_rows = False  # whether runs have moved the roots without their logits
        self.hidden = HiddenRows(like)
        self._like = like
        self._width_of = width_of
        self._pinned = like.device.type == "cuda"
        self._first_rows = max(1, min(FIRST_ROWS, FIRST_BYTES // (4 * vocab)))
        self.outputs = self._room(self._first_rows, vocab)
        self._next = self._room(0, vocab)
        self._scratches: list[GpuCache] = []

    def scratch(self, trie: KVTrie) -> "GpuCache":
        """Return a cache with its own trie in the same row of the store, for passes that leave this cache unchanged.

        Its logits are valid until the next scratch cache but one is made: two take turns, because allocating pinned memory
        is slow.

        Args:
            trie: uses slots that are free in this cache; see `KVTrie.scratch` and `KVTrie.before`.
        """
        if len(self._scratches) < 2:
            vocab = self.outputs.shape[1]
            self._scratches.append(GpuCache(self.row, self.prompt, vocab, self._like, self._width_of, trie))
        else:
            self._scratches.reverse()
        found = self._scratches[-1]
        found.row = self.row
        found.trie = trie
        found.answered = 0
        return found

    @property
    def takes_embeddings(self) -> bool:
        """Whether some rows of the session may have embeddings instead of tokens."""
        return self.extra_inputs is not None or self.vectors is not None

    @property
    def is_for_steps(self) -> bool:
        """Whether a compiled step can run the next pass: all inputs are tokens."""
        return self.extra_inputs is None and not self.has_vectors

    def finish_run(self, roots: int) -> None:
        """Read the `roots` roots from the arrays, in which steps have settled the last turn of a run."""
        self.trie.root_at = self.trie.local[:roots].copy()
        self.answered = 0
        self.has_stale_rows = True

    def make_room(self, fresh: int) -> None:
        """Make room for `fresh` new forest nodes, and for storing them and all pending nodes."""
        self.trie.make_room(fresh)
        self.trie.make_slots(self.trie.pending + fresh)
        self.make_rows(self.trie.known + fresh)

    def make_rows(self, nodes: int) -> None:
        """Make room for the logits and hidden states of `nodes` forest nodes."""
        self._make_hidden(nodes)
        if nodes > len(self.outputs):
            larger = self._room(2 * nodes, self.outputs.shape[1])
            larger[: len(self.outputs)] = self.outputs
            self.outputs = larger

    def _make_hidden(self, nodes: int) -> None:
        if self.needs.states:
            self.hidden.make_room(nodes, sum(map(self._width_of, self.needs.columns)))

    def _room(self, rows: int, vocab: int) -> torch.Tensor:
        return torch.empty(rows, vocab, pin_memory=self._pinned)

    def enter(self, forest: Forest) -> Nodes:
        """Add the new nodes of a forest; return the forest nodes whose logits the next pass must compute."""
        self.trie.enter(forest)
        self.make_rows(self.trie.known)
        wanted = unknown_nodes(self.answered, self.trie.known, forest.known.nodes)
        return wanted[self.trie.local[wanted] >= self.trie.stored]

    def answer(self, forest: Forest) -> Scored:
        """Return the rows of the forest nodes that were not returned before and are not known; mark all as returned."""
        wanted = unknown_nodes(self.answered, self.trie.known, forest.known.nodes)
        self.answered = self.trie.known
        return self.handed_out(wanted, torch.from_numpy(outputs_of_nodes(self.outputs.numpy(), wanted)))

    def handed_out(self, nodes: Nodes, logits: Logits) -> Scored:
        """Return the rows of some forest nodes in the form that the parts of the session need; see `hand_out`."""
        return hand_out(self, logits, *([self.hidden.of(nodes)] if self.needs.states else []))

    def settle(self, turn: Turn) -> None:
        before = turn.verdict.beams.nodes
        self.trie.settle(turn)
        known = np.flatnonzero((self.trie.root_at < self.trie.stored) & (before >= 0))
        if len(self._next) < len(before):
            self._next = self._room(max(self._first_rows, 2 * len(before)), self.outputs.shape[1])
        self._next.numpy()[known] = self.outputs.numpy()[before[known]]
        if self.needs.states:
            self._make_hidden(len(before))
            self.hidden.follow(known, before[known])
        self.outputs, self._next = self._next, self.outputs
        self.answered = 0


def neighbour_slices(nodes: Integers) -> list[slice]:
    """Return slices of runs of consecutive numbers: for [4, 5, 9] the slices 0:2 and 2:3."""
    edges = [0, *(np.flatnonzero(np.diff(nodes) != 1) + 1).tolist(), len(nodes)]
    return [slice(first, last) for first, last in pairwise(edges) if last > first]


@borrowed
class GpuCacheArrays(NamedTuple):
    """The arrays of a session's cache in a model on a GPU, with capacity for all nodes that steps store."""

    trie: Trie
    outputs: Array  # float32[nodes, vocab]: logits by forest node, in memory that the GPU writes
    model: ModelLimits
    inputs: Inputs  # on the host
    store_row: int  # the session's row of the store
    source: tuple[int, int]  # first frame and number of frames of the session's source; no frames: no source
    graphs: Array  # int64[3, sizes], see `graphs.CapturedGraphs`
    staging: tuple[int, int, int]  # addresses of the inputs on the device and on the host, bytes before the mask
    stream: int  # handle of the CUDA stream
    calls: tuple[int, int, int, int]  # see `graphs.Calls`


@compiled
def outputs_of_nodes(outputs: Array, nodes: Array) -> Array:
    """Return the rows of these ascending forest nodes: a view if the nodes are consecutive, otherwise a copy."""
    count = len(nodes)
    if count > 0 and nodes[count - 1] - nodes[0] == count - 1:
        return outputs[nodes[0] : nodes[0] + count]
    found = np.empty((count, outputs.shape[1]), dtype=outputs.dtype)
    for place in range(count):
        found[place] = outputs[nodes[place]]
    return found


@compiled
def _run_pass(cache: GpuCacheArrays, wanted: Array) -> None:
    """Store all pending nodes, and copy the logits of the `wanted` forest nodes among them to the host."""
    trie = cache.trie
    inputs = cache.inputs
    start = trie.counts[STORED]
    count = trie.counts[SIZE] - trie.counts[STORED]
    size = cache.graphs[0, count]
    graph = cache.graphs[1, count]
    logits = cache.graphs[2, count]
    check_nodes(trie, count, cache.model)
    byte = write_inputs(trie, count, cache.store_row, cache.source, cache.model, inputs, (0, 0, 0))
    for numbers in (inputs.tokens, inputs.positions, inputs.caches, inputs.slots, inputs.wanted):
        numbers[count:size] = 0
    count_wanted = 0
    for node in wanted:
        if trie.local[node] >= start:
            inputs.wanted[count_wanted] = trie.local[node] - start
            count_wanted += 1
    inputs.wanted[count_wanted:size] = 0
    copy_to_device, launch, copy_to_host, wait = cache.calls
    on_device, on_host, before_mask = cache.staging
    failed = call_c(copy_to_device, (on_device, on_host, before_mask + byte, cache.stream))
    failed |= call_c(launch, (graph, cache.stream))
    row_bytes = 4 * cache.outputs.shape[1]
    goal = cache.outputs.ctypes.data
    done = 0
    place = 0
    while place < len(wanted):
        first = wanted[place]
        count = 0  # consecutive nodes are copied together
        while place < len(wanted) and wanted[place] == first + count and trie.local[wanted[place]] >= start:
            count += 1
            place += 1
        if count > 0:
            source = logits + done * row_bytes
            failed |= call_c(copy_to_host, (goal + first * row_bytes, source, count * row_bytes, cache.stream))
            done += count
        else:
            place += 1
    failed |= call_c(wait, (cache.stream,))
    if failed != 0:
        raise RuntimeError("a CUDA driver call failed in a pass on the GPU")


@extend.of(GpuCacheArrays)
@compiled
def extend_gpu_cache(cache: GpuCacheArrays, tokens: Array, parents: Array, wanted: Array) -> Array:
    """Implement `LM.extend` for one session: store its nodes, pending and new, return the logits of `wanted` nodes.

    Raises `IndexError` for tokens and positions that the model does not have, and `RuntimeError` if a call of the CUDA
    driver fails.

    Args:
        tokens, parents: int64[nodes], the forest.
        wanted: int64[n], nodes of the forest, ascending.
    """
    enter(cache.trie, tokens, parents)
    if cache.trie.counts[SIZE] > cache.trie.counts[STORED]:
        _run_pass(cache, wanted)
    return outputs_of_nodes(cache.outputs, wanted)

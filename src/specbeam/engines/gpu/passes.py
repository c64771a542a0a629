"""Passes on a GPU: one copy there, one captured graph, one copy back."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from specbeam import kernels
from specbeam.core.forest import Forest
from specbeam.engines.answers import answered
from specbeam.engines.gpu.cache import GpuCache, GpuCacheArrays, gpu_extended, runs
from specbeam.engines.gpu.decoder import GpuDecoder, PassShape
from specbeam.engines.gpu.graphs import FEW, Graphs, shape_for
from specbeam.engines.gpu.staging import ModelLimits, Staging, check, laid_out
from specbeam.engines.kv.cache import Logits, Nodes
from specbeam.engines.kv.masks import Masks
from specbeam.measure.profiler import span
from specbeam.records import Needs, Scored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# of passes that are captured
ROWS = 1024
SESSIONS = 128
MASK_BYTES = 2**22
SLOTS = 1024  # of a cache, at first
MOST_MASK_BYTES = 2**28  # of the prompts that are stored by one pass


class GpuPasses:
    """Rows of all sessions one after the other, filled up to a size for which a graph was captured; a session that is alone
    is served by one loop.

    Args:
        caches: all sessions of the model.
        capture: on a GPU; otherwise the same steps run one by one.
    """

    most = FEW  # rows of a pass inside a loop

    def __init__(self, model: "PreTrainedModel", decoder: GpuDecoder, caches: list[GpuCache], capture: bool) -> None:
        self.decoder = decoder
        self.caches = caches
        self.device = decoder.embedding.device
        self.vocab = len(decoder.head)
        windows = Masks(model.config, "sdpa", model.dtype).looked_back(decoder.kinds)
        self.model = ModelLimits(windows, decoder.angles.shape[1], len(decoder.embedding))
        self.store = decoder.store(SLOTS)
        self.staging = Staging(self.device, ROWS, SESSIONS, MASK_BYTES * len(decoder.kinds))
        self.graphs = Graphs(decoder, self.store, self.staging, capture)

    def try_out(self) -> None:
        """A pass that keeps nothing."""
        with self._on_device(), torch.inference_mode():
            self.staging.blank()
            self.decoder.forward(self.staging.inputs, PassShape(1, 1, 1, 1), self.store)

    def _on_device(self) -> AbstractContextManager[object]:
        """Kernels are started on the current device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def cache(self, row: int, prompt: list[int]) -> GpuCache:
        return GpuCache(row, prompt, self.vocab, pinned=self.device.type == "cuda")

    takes_vectors = False

    def refuses(self, context: object) -> str:
        """Say why these passes cannot take a context; they take none."""
        return "the forward for GPUs takes no context besides tokens: HuggingFaceLM(model, engine='plain') does"

    def lacks(self, needs: Needs) -> str:
        """Say why these passes cannot give what is asked for; "" if they can."""
        if needs.states:
            return "the forward for GPUs keeps no hidden states: HuggingFaceLM(model, engine='plain') does"
        return ""

    def extend(self, caches: list[GpuCache], forests: Sequence[Forest]) -> list[Scored]:
        """Store what is pending, with the new nodes of these forests; return what was not handed out yet."""
        if len(caches) == 1 and (rows := self._by_loop(caches[0], forests[0])) is not None:
            return [answered(caches[0].needs, rows)]
        wanted = [cache.enter(forest) for cache, forest in zip(caches, forests, strict=True)]
        if busy := [(cache, nodes) for cache, nodes in zip(caches, wanted, strict=True) if cache.trie.waiting]:
            self._pass([(cache, cache.trie.waiting, nodes) for cache, nodes in busy])
        return [answered(cache.needs, cache.answer()) for cache in caches]

    def prefill(self, caches: list[GpuCache], counts: list[int]) -> None:
        """Store so many pending tokens of each cache, whose logits nobody asks for."""
        none = np.zeros(0, dtype=np.int64)
        some = list[tuple[GpuCache, int, Nodes]]()
        mask_bytes = 0
        for cache, count in zip(caches, counts, strict=True):
            cache.trie.make_slots(count)
            mine = count * cache.trie.capacity * len(self.model.windows)
            if some and mask_bytes + mine > MOST_MASK_BYTES:
                self._pass(some)
                some = []
                mask_bytes = 0
            some.append((cache, count, none))
            mask_bytes += mine
        self._pass(some)

    @contextmanager
    def alone(self, cache: GpuCache, fresh: int) -> Iterator[GpuCacheArrays | None]:
        """A session for loops of its own, which may bring so many new nodes; None where these cannot run passes."""
        rows = cache.trie.waiting + fresh
        cache.make_room(fresh)
        self._reserve(cache.trie.capacity)
        room = self.staging.holds(rows, 1, rows * cache.trie.capacity * len(self.model.windows))
        with self._on_device():
            way = self.graphs.captured_for_steps(rows) if kernels.AVAILABLE and room else None
            yield way and GpuCacheArrays(
                cache.trie.arrays, cache.outputs.numpy(), self.model, self.staging.filled, cache.row, way.by_rows,
                self.staging.addresses, way.stream, way.calls,
            )  # fmt: skip

    def _by_loop(self, cache: GpuCache, forest: Forest) -> Logits | None:
        with self.alone(cache, forest.size - cache.trie.known) as one:
            if one is None:
                return None
            with span("model"):
                rows = gpu_extended(one, forest.tokens, forest.parents, cache.answered)
        cache.answered = cache.trie.known
        return torch.from_numpy(rows)

    @torch.inference_mode()
    def _pass(self, parts: list[tuple[GpuCache, int, Nodes]]) -> None:
        """Store so many pending nodes of each cache, and bring the logits of these forest nodes, which are among them."""
        counts = [count for _, count, _ in parts]
        starts = [*accumulate(counts, initial=0)]
        asked = [*accumulate((len(nodes) for *_, nodes in parts), initial=0)]
        shape = shape_for(counts, asked[-1])
        stored = [cache.trie.stored for cache, *_ in parts]
        staging, mask_bytes = self._staged(parts, shape)
        into = staging.filled
        for (cache, _, nodes), before, start, (first, last) in zip(
            parts, stored, starts, pairwise(asked), strict=False
        ):
            into.wanted[first:last] = cache.trie.local[nodes] - before + start
        into.wanted[asked[-1] : shape.wanted] = 0
        with span("model"), self._on_device():
            try:
                staging.bring(mask_bytes)
                logits = self.graphs.run(staging, shape)
                for (cache, _, nodes), first in zip(parts, asked, strict=False):
                    for run in runs(nodes):
                        rows = logits[first + run.start : first + run.stop]
                        cache.outputs[nodes[run.start] : nodes[run.stop - 1] + 1].copy_(rows, non_blocking=True)
            finally:
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()  # what it read may be filled anew from here on

    def _staged(self, parts: list[tuple[GpuCache, int, Nodes]], shape: PassShape) -> tuple[Staging, int]:
        """The rows of a pass, and how many bytes their mask has."""
        beside = Counter[int]()
        for cache, count, _ in parts:
            beside[cache.row] += count
        for cache, count, _ in parts:
            check(cache.trie.arrays, count, self.model)
            cache.trie.make_slots(beside[cache.row])
        self._reserve(max(cache.trie.capacity for cache, *_ in parts))
        most = sum(cache.trie.capacity * count for cache, count, _ in parts) * len(self.model.windows)
        staging = self.staging
        row = 0
        byte = 0
        if not staging.holds(shape.rows, shape.sessions, most):
            staging = Staging(self.device, shape.rows, shape.sessions, most)
        into = staging.filled
        for session, (cache, count, _) in enumerate(parts):
            cache.trie.make_slots(count)  # others of the row may have taken some
            byte = laid_out(cache.trie.arrays, count, cache.row, self.model, into, session, row, byte)
            row += count
        for numbers in (into.tokens, into.positions, into.caches, into.slots):
            numbers[row : shape.rows] = 0  # the slot where nothing is kept
        into.sessions[:, len(parts) : shape.sessions] = 0
        return staging, byte

    def _reserve(self, slots: int) -> None:
        before = self.store.keys
        self.store.reserve(len(self.caches), slots)
        if self.store.keys is not before:
            self.graphs.clear()

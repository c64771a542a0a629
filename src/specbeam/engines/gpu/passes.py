"""Passes on a GPU: one copy to the device, one captured graph, one copy back."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from specbeam.core import compiling
from specbeam.core.answers import scored_rows
from specbeam.core.forest import Forest, unknown_nodes
from specbeam.core.measure.profiler import span
from specbeam.core.records import ExtraInputs, Needs, Scored
from specbeam.engines.gpu.cache import GpuCache, GpuCacheArrays, extend_gpu_cache, neighbour_slices
from specbeam.engines.gpu.decoder import GpuDecoder, PassShape
from specbeam.engines.gpu.graphs import FEW, Graphs, shape_for
from specbeam.engines.gpu.runs import RunPasses
from specbeam.engines.gpu.staging import ModelLimits, Staging, check_nodes, mask_bytes, write_inputs
from specbeam.engines.kv.cache import Logits, Nodes
from specbeam.engines.kv.masks import Masks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Maximum sizes of captured passes; larger ones get their own staging.
ROWS = 1024
SESSIONS = 128
MASK_BYTES = 2**22  # for each kind of layer
MOST_MASK_BYTES = 2**28  # maximum size of the masks of all prompts in one pass


class GpuPasses:
    """The passes of a model on a GPU, with the concatenated rows of all sessions.

    A pass is padded to a size for which there may be a captured graph. A single session is served by one compiled step
    (`extend_gpu_cache`) if steps can launch the graphs.

    Args:
        caches: the caches of the sessions in each row of the store.
        capture: whether to capture graphs, which needs a GPU; otherwise the same kernels are launched one by one.
    """

    most_rows_in_steps = FEW  # maximum number of rows of a pass in steps

    def __init__(self, model: "PreTrainedModel", decoder: GpuDecoder, caches: list[GpuCache], capture: bool) -> None:
        self.decoder = decoder
        self.caches = caches
        self.device = decoder.embedding.device
        self.vocab = decoder.vocab
        windows = Masks(model.config, "sdpa", model.dtype).window_sizes(decoder.kinds)
        by_place = decoder.architecture.by_place
        self.limits = ModelLimits(windows, decoder.angles.shape[1], decoder.known, decoder.ranges, by_place)
        self.store = decoder.store()
        self.staging = Staging(self.device, ROWS, SESSIONS, MASK_BYTES * len(decoder.kinds))
        self.graphs = Graphs(decoder, self.store, self.staging, capture)
        self.runs = RunPasses(self)

    def try_out(self) -> None:
        """Run an empty pass, which raises an exception if Triton does not work here."""
        with self.on_device(), torch.inference_mode():
            self.staging.blank()
            self.decoder.forward(self.staging.inputs, PassShape(1, 1, 1, 1), self.store)

    def on_device(self) -> AbstractContextManager[object]:
        """Return a context in which the model's device is the current device, on which kernels are launched."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def cache(self, row: int, prompt: list[int]) -> GpuCache:
        """Return the cache of a new session in a row of the store."""
        return GpuCache(row, prompt, self.vocab, pinned=self.device.type == "cuda")

    takes_vectors = False

    def source_of(self, cache: GpuCache) -> tuple[int, int]:
        """Return the first frame and the number of frames of a session's source."""
        return 0, 0

    def refuses_extra_rows(self, inputs: ExtraInputs) -> str:
        """Return the reason why these passes cannot take extra rows: they take only tokens."""
        return "the forward for GPUs takes neither learned rows nor a prefix; use HuggingFaceLM(model, engine='plain')"

    def refuses(self, context: object) -> str:
        """Return the reason why these passes cannot take a context: they take none."""
        return "the forward for GPUs takes no context besides tokens; use HuggingFaceLM(model, engine='plain')"

    def lacks(self, needs: Needs) -> str:
        """Return the reason why these passes cannot provide `needs`; "" if they can."""
        if needs.states:
            return "the forward for GPUs returns no hidden states; use HuggingFaceLM(model, engine='plain')"
        return ""

    def extend(self, caches: list[GpuCache], forests: Sequence[Forest]) -> list[Scored]:
        """Store all pending nodes and the new nodes of these forests; return the rows that were not returned before."""
        for cache, forest in zip(caches, forests, strict=True):
            self._refresh_roots(cache, forest)
        if len(caches) == 1 and (rows := self._extend_by_step(caches[0], forests[0])) is not None:
            return [scored_rows(caches[0].needs, rows)]
        wanted = [cache.enter(forest) for cache, forest in zip(caches, forests, strict=True)]
        if busy := [(cache, nodes) for cache, nodes in zip(caches, wanted, strict=True) if cache.trie.pending]:
            self._run_pass([(cache, cache.trie.pending, nodes) for cache, nodes in busy])
        return [scored_rows(cache.needs, cache.answer(forest)) for cache, forest in zip(caches, forests, strict=True)]

    def _refresh_roots(self, cache: GpuCache, forest: Forest) -> None:
        """Compute the logits of stored roots again if runs have moved the roots, unless their rows are known."""
        if not cache.has_stale_rows:
            return
        cache.has_stale_rows = False
        roots = unknown_nodes(0, len(cache.trie.root_at), forest.known.nodes)
        stored = roots[cache.trie.local[roots] < cache.trie.stored]
        if len(stored):
            rows = self.runs.score_again(cache, stored)
            cache.make_rows(len(cache.trie.root_at))
            cache.outputs[stored] = torch.from_numpy(rows)

    def prefill(self, caches: list[GpuCache], counts: list[int]) -> None:
        """Store this number of pending tokens of each cache, without computing their logits.

        Runs several passes if the masks would exceed `MOST_MASK_BYTES`.
        """
        none = np.zeros(0, dtype=np.int64)
        batch = list[tuple[GpuCache, int, Nodes]]()
        batch_bytes = 0
        for cache, count in zip(caches, counts, strict=True):
            cache.trie.make_slots(count)
            own_bytes = mask_bytes(self.limits, count, cache.trie.capacity)
            if batch and batch_bytes + own_bytes > MOST_MASK_BYTES:
                self._run_pass(batch)
                batch = []
                batch_bytes = 0
            batch.append((cache, count, none))
            batch_bytes += own_bytes
        self._run_pass(batch)

    @contextmanager
    def arrays_for_steps(self, cache: GpuCache, fresh: int) -> Iterator[GpuCacheArrays | None]:
        """Yield the cache as arrays for steps, which may add up to `fresh` new nodes; None if steps cannot run passes."""
        rows = cache.trie.pending + fresh
        cache.make_room(fresh)
        self.reserve([cache])
        room = self.staging.holds(rows, 1, mask_bytes(self.limits, rows, cache.trie.capacity))
        with self.on_device():
            captured = self.graphs.captured_for_steps(rows) if compiling.AVAILABLE and room else None
            yield captured and GpuCacheArrays(
                cache.trie.arrays, cache.outputs.numpy(), self.limits, self.staging.filled, cache.row,
                self.source_of(cache), captured.by_rows, self.staging.addresses, captured.stream, captured.calls,
            )  # fmt: skip

    def _extend_by_step(self, cache: GpuCache, forest: Forest) -> Logits | None:
        """Implement `extend` for a single session in one compiled step; return None if steps cannot run passes here."""
        with self.arrays_for_steps(cache, forest.size - cache.trie.known) as arrays:
            if arrays is None:
                return None
            with span("model"):
                wanted = unknown_nodes(cache.answered, forest.size, forest.known.nodes)
                rows = extend_gpu_cache(arrays, forest.tokens, forest.parents, wanted)
        cache.answered = cache.trie.known
        return torch.from_numpy(rows)

    @torch.inference_mode()
    def _run_pass(self, parts: list[tuple[GpuCache, int, Nodes]]) -> None:
        """Run a pass, and copy the logits of wanted nodes to the host.

        Args:
            parts: caches, each with the number of pending nodes to store, and the forest nodes among them whose logits are
                needed.
        """
        counts = [count for _, count, _ in parts]
        starts = [*accumulate(counts, initial=0)]
        ends = [*accumulate((len(nodes) for *_, nodes in parts), initial=0)]  # ends of the parts in the wanted rows
        shape = shape_for(counts, ends[-1])
        stored = [cache.trie.stored for cache, *_ in parts]
        staging, filled_bytes = self._fill_staging(parts, shape, ends[-1])
        inputs = staging.filled
        for (cache, _, nodes), before, start, (first, last) in zip(parts, stored, starts, pairwise(ends), strict=False):
            inputs.wanted[first:last] = cache.trie.local[nodes] - before + start
        with span("model"), self.on_device():
            try:
                staging.copy_to_device(filled_bytes)
                logits = self.graphs.run(staging, shape)
                for (cache, _, nodes), first in zip(parts, ends, strict=False):
                    for part in neighbour_slices(nodes):
                        rows = logits[first + part.start : first + part.stop]
                        cache.outputs[nodes[part.start] : nodes[part.stop - 1] + 1].copy_(rows, non_blocking=True)
            finally:
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()  # before the staging is filled again

    def _fill_staging(
        self, parts: list[tuple[GpuCache, int, Nodes]], shape: PassShape, wanted: int
    ) -> tuple[Staging, int]:
        """Assign slots to the rows of a pass, and write its inputs to a staging; return it and the bytes of the mask.

        Raises `IndexError`, before any slot is assigned, for tokens and positions that the model does not have.
        """
        count_by_row = Counter[int]()
        for cache, count, _ in parts:
            count_by_row[cache.row] += count
        for cache, count, _ in parts:
            check_nodes(cache.trie.arrays, count, self.limits)
            cache.trie.make_slots(count_by_row[cache.row])
        self.reserve([cache for cache, *_ in parts])
        most = sum(mask_bytes(self.limits, count, cache.trie.capacity) for cache, count, _ in parts)
        staging = self.staging
        row = 0
        byte = 0
        if not staging.holds(shape.rows, shape.sessions, most):
            staging = Staging(self.device, shape.rows, shape.sessions, most)
        inputs = staging.filled
        for session, (cache, count, _) in enumerate(parts):
            cache.trie.make_slots(count)  # other sessions in the same row of the store may have just taken slots
            source = self.source_of(cache)
            place = (session, row, byte)
            byte = write_inputs(cache.trie.arrays, count, cache.row, source, self.limits, inputs, place)
            row += count
        staging.pad(row, len(parts), wanted, shape)
        return staging, byte

    def reserve(self, caches: list[GpuCache]) -> None:
        """Free the pages of rows without sessions, and assign pages to the rows of these caches."""
        self.store.release_from(len(self.caches))
        for cache in caches:
            self.store.reserve_row(cache.row, cache.trie.capacity)

"""Passes on a GPU: one copy to the device, one captured graph, one copy back."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from specbeam.core import compiling
from specbeam.core.forest import Forest, unknown_nodes
from specbeam.core.measure.profiler import span
from specbeam.core.records import LEARNT, ExtraInputs, Needs, Scored
from specbeam.engines.arrays import States, Vector
from specbeam.engines.cpu.cache import CpuCache
from specbeam.engines.cpu.early import ExitLayer
from specbeam.engines.eligibility import lacks_taps
from specbeam.engines.gpu.cache import GpuCache, GpuCacheArrays, extend_gpu_cache, neighbour_slices
from specbeam.engines.gpu.decoder import GpuDecoder, PassShape
from specbeam.engines.gpu.graphs import FEW, Graphs, shape_for
from specbeam.engines.gpu.parts import KnownParts, PassPart
from specbeam.engines.gpu.ranges import RangedPasses
from specbeam.engines.gpu.runs import RunPasses
from specbeam.engines.gpu.staging import Inputs, ModelLimits, Staging, check_nodes, mask_bytes, write_inputs
from specbeam.engines.kv.cache import Nodes
from specbeam.engines.kv.late import late_rows
from specbeam.engines.kv.masks import Masks
from specbeam.engines.kv.trie import Feed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Maximum sizes of captured passes; larger ones get their own staging.
ROWS = 1024
SESSIONS = 128
# Passes without a set of sublayers before the graphs of all sizes are captured for steps, because a search tries many sets.
BEFORE_STEPS = 64
MASK_BYTES = 2**22  # for each kind of layer
MOST_MASK_BYTES = 2**28  # maximum size of the masks of all prompts in one pass


class GpuPasses:
    """The passes of a model on a GPU, with the concatenated rows of all sessions.

    A pass is padded to a size for which there may be a captured graph. A single session is served by one compiled step
    (`extend_gpu_cache`) if steps can launch the graphs.

    Args:
        caches: the caches of all sessions, by row of the store.
        capture: whether to capture graphs, which needs a GPU; otherwise the same kernels are launched one by one.
    """

    most_rows_in_steps = FEW  # maximum number of rows of a pass in steps

    def __init__(self, model: "PreTrainedModel", decoder: GpuDecoder, caches: list[Any], capture: bool) -> None:
        self.model = model
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
        self.parts = KnownParts(decoder.states_like, decoder.width_of)
        self.before_steps = 0  # number of passes before steps run any; see `BEFORE_STEPS`

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
        return GpuCache(row, prompt, self.vocab, self.decoder.states_like, self.decoder.width_of)

    takes_vectors = True
    runs_ranges = True  # see `PackedPasses.runs_ranges`
    takes_steps = True  # see `PackedPasses.takes_steps`

    def source_of(self, cache: GpuCache) -> tuple[int, int]:
        """Return the first frame and the number of frames of a session's source."""
        return 0, 0

    def refuses_extra_rows(self, inputs: ExtraInputs) -> str:
        """Return the reason why these passes cannot take these inputs of extra rows; "" if they can."""
        return lacks_taps(self.model, (inputs.layer,))

    def refuses(self, context: object) -> str:
        """Return the reason why these passes cannot take a context: they take none."""
        return "the forward for GPUs takes no context besides tokens; load the model with engine='plain'"

    def lacks(self, needs: Needs) -> str:
        """Return the reason why these passes cannot provide `needs`; "" if they can."""
        return self.ranges.lacks(needs) if needs.exit_layer is not None else lacks_taps(self.model, needs.taps)

    @cached_property
    def ranges(self) -> RangedPasses:
        """The passes of sessions in which the first layers or an exit layer draft, on the same store."""
        return RangedPasses(self)

    def ranged(self, cache: "GpuCache | CpuCache") -> CpuCache:
        """Return a session's cache in the form that ranges of layers use, which replaces the given one.

        Call it at the start of a turn. Roots that were stored by passes of all layers are stored again.
        """
        if isinstance(cache, CpuCache):
            return cache
        return self.ranges.cache_like(cache)

    def exit_layer(self, layer: nn.Module, norm: nn.Module, after: int) -> ExitLayer:
        """See `PackedPasses.exit_layer`."""
        return self.ranges.exit_layer(layer, norm, after)

    def extend_early(self, caches: list[CpuCache], forests: Sequence[Forest]) -> list[Scored]:
        """See `PackedPasses.extend_early`."""
        return self.ranges.extend_early(caches, forests)

    def input_of(self, token: int, position: int) -> Vector:
        """See `PackedPasses.input_of`."""
        return self.ranges.input_of(token, position)

    def run_layer(self, cache: GpuCache, feed: Feed, layer: int, states: States) -> States:
        """See `PackedPasses.run_layer`."""
        return self.ranges.run_layer(cache, feed, layer, states)

    def skipping(self, attention: Sequence[int], inner: Sequence[int]) -> "GpuPasses":
        """See `PackedPasses.skipping`. Use the passes with scratch caches (`GpuCache.scratch`)."""
        fewer = copy.copy(self)
        fewer.parts = self.parts.skipping(frozenset(attention), frozenset(inner))
        fewer.before_steps = BEFORE_STEPS
        return fewer

    def extend(self, caches: "Sequence[GpuCache | CpuCache]", forests: Sequence[Forest]) -> list[Scored]:
        """Store all pending nodes and the new nodes of these forests; return the rows that were not returned before."""
        ranged = [isinstance(cache, CpuCache) for cache in caches]
        found: dict[int, Scored] = {}
        for is_ranged in sorted({*ranged}):
            places = [place for place, other in enumerate(ranged) if other is is_ranged]
            extend = self.ranges.extend if is_ranged else self._extend
            own: list[Any] = [caches[place] for place in places]
            found.update(zip(places, extend(own, [forests[place] for place in places]), strict=True))
        return [found[place] for place in range(len(caches))]

    def _extend(self, caches: list[GpuCache], forests: list[Forest]) -> list[Scored]:
        """Implement `extend` for sessions whose passes run all layers."""
        for cache, forest in zip(caches, forests, strict=True):
            self._refresh_roots(cache, forest)
        if len(caches) == 1 and (scored := self._extend_by_step(caches[0], forests[0])) is not None:
            return [scored]
        wanted = [cache.enter(forest) for cache, forest in zip(caches, forests, strict=True)]
        if busy := [(cache, nodes) for cache, nodes in zip(caches, wanted, strict=True) if cache.trie.pending]:
            self._run([(cache, cache.trie.pending, nodes) for cache, nodes in busy])
        return [cache.answer(forest) for cache, forest in zip(caches, forests, strict=True)]

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

    def prefill(self, caches: "Sequence[GpuCache | CpuCache]", counts: list[int]) -> None:
        """Store this number of pending tokens of each cache, without computing their logits.

        Runs several passes if the masks would exceed `MOST_MASK_BYTES`.
        """
        none = np.zeros(0, dtype=np.int64)
        batch = list[tuple[GpuCache, int, Nodes]]()
        batch_bytes = 0
        ranged = dict[CpuCache, int]()
        for cache, count in zip(caches, counts, strict=True):
            if isinstance(cache, CpuCache):
                ranged[cache] = count
                continue
            cache.trie.make_slots(count)
            own_bytes = mask_bytes(self.limits, count, cache.trie.capacity)
            if batch and batch_bytes + own_bytes > MOST_MASK_BYTES:
                self._run(batch)
                batch = []
                batch_bytes = 0
            batch.append((cache, count, none))
            batch_bytes += own_bytes
        self._run(batch)
        if ranged:
            self.ranges.prefill([*ranged], [*ranged.values()])

    @contextmanager
    def arrays_for_steps(
        self, cache: "GpuCache | CpuCache", fresh: int, drafts: bool = False
    ) -> Iterator[GpuCacheArrays | None]:
        """Yield the cache as arrays for steps, which may add up to `fresh` new nodes; None if steps cannot run passes.

        Args:
            drafts: whether the passes draft, by the layers that are run ahead, which steps cannot run here.
        """
        if isinstance(cache, CpuCache):
            yield None
            return
        rows = cache.trie.pending + fresh
        cache.make_room(fresh)
        self.reserve([cache])
        room = self.staging.holds(rows, 1, mask_bytes(self.limits, rows, cache.trie.capacity))
        self.before_steps = max(self.before_steps - 1, 0)
        can_launch = compiling.AVAILABLE and room and cache.is_for_steps and self.before_steps == 0
        with self.on_device():
            captured = self.graphs.captured_for_steps(rows, self._part_of(cache, FEW)) if can_launch else None
            yield captured and GpuCacheArrays(
                cache.trie.arrays, cache.outputs.numpy(), self.limits, self.staging.filled, cache.row,
                self.source_of(cache), captured.by_rows, self.staging.addresses, captured.stream, captured.calls,
            )  # fmt: skip

    def _part_of(self, cache: GpuCache, rows: int) -> PassPart:
        """Return the part of the model that a session's passes of up to `rows` rows run."""
        columns = cache.needs.columns if cache.needs.states else ()
        return self.parts.of(columns, cache.extra_inputs, rows)

    def _extend_by_step(self, cache: GpuCache, forest: Forest) -> Scored | None:
        """Implement `extend` for a single session in one compiled step; return None if steps cannot run passes here."""
        trie = cache.trie
        stored = trie.stored
        before_roots = trie.pending_before_roots
        with self.arrays_for_steps(cache, forest.size - trie.known) as arrays:
            if arrays is None:
                return None
            with span("model"):
                wanted = unknown_nodes(cache.answered, forest.size, forest.known.nodes)
                rows = extend_gpu_cache(arrays, forest.tokens, forest.parents, wanted)
        cache.answered = trie.known
        part = self._part_of(cache, FEW)
        self._keep_states(part, cache, wanted[trie.local[wanted] >= stored], (stored, 0), before_roots)
        return cache.handed_out(wanted, torch.from_numpy(rows))

    @torch.inference_mode()
    def _keep_states(
        self, part: PassPart, cache: GpuCache, nodes: Nodes, starts: tuple[int, int], before_roots: int
    ) -> None:
        """Copy the hidden states that a pass has written to its buffer, if the session needs any.

        Args:
            nodes: forest nodes.
            starts: the number of stored nodes before the pass, and the session's first row.
            before_roots: number of the session's rows before its first root.
        """
        if part.states is None:
            return
        stored, first = starts
        cache.hidden.write(nodes, part.states, cache.trie.local[nodes] - stored + first)
        if cache.needs.prompt and before_roots:
            cache.prompt_rows.append(part.states[first : first + before_roots].to(torch.float32, copy=True))

    def _run(self, sessions: list[tuple[GpuCache, int, Nodes]]) -> None:
        """Run passes, one for each part of the model that sessions need; see `_run_pass`."""
        groups: dict[PassPart, list[tuple[GpuCache, int, Nodes]]] = {}
        for one in sessions:
            groups.setdefault(self._part_of(one[0], 1), []).append(one)
        for group in groups.values():
            self._run_pass(group)

    @torch.inference_mode()
    def _run_pass(self, sessions: list[tuple[GpuCache, int, Nodes]]) -> None:
        """Run a pass, copy the logits of wanted nodes to the host, and keep hidden states that are needed.

        Args:
            sessions: caches of sessions that need the same part of the model, each with the number of pending nodes to
                store, and the forest nodes among them whose logits are needed.
        """
        counts = [count for _, count, _ in sessions]
        starts = [*accumulate(counts, initial=0)]
        ends = [*accumulate((len(nodes) for *_, nodes in sessions), initial=0)]  # ends of sessions in the wanted rows
        shape = shape_for(counts, ends[-1])
        stored = [cache.trie.stored for cache, *_ in sessions]
        before_roots = [min(cache.trie.pending_before_roots, count) for cache, count, _ in sessions]
        staging, filled_bytes = self._fill_staging(sessions, shape, ends[-1])
        part = self._part_of(sessions[0][0], shape.rows)
        part = self._with_learnt_rows(sessions, stored, shape.rows, part)
        inputs = staging.filled
        for (cache, _, nodes), before, start, (first, last) in zip(
            sessions, stored, starts, pairwise(ends), strict=False
        ):
            inputs.wanted[first:last] = cache.trie.local[nodes] - before + start
        with span("model"), self.on_device():
            try:
                staging.copy_to_device(filled_bytes)
                logits = self.graphs.run(staging, shape, part)
                for (cache, _, nodes), first in zip(sessions, ends, strict=False):
                    for piece in neighbour_slices(nodes):
                        rows = logits[first + piece.start : first + piece.stop]
                        cache.outputs[nodes[piece.start] : nodes[piece.stop - 1] + 1].copy_(rows, non_blocking=True)
                places = zip(stored, starts, strict=False)
                for (cache, _, nodes), place, count in zip(sessions, places, before_roots, strict=True):
                    self._keep_states(part, cache, nodes, place, count)
            finally:
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()  # before the staging is filled again

    def _with_learnt_rows(
        self, sessions: list[tuple[GpuCache, int, Nodes]], stored: list[int], rows: int, part: PassPart
    ) -> PassPart:
        """Return the part of the model for a pass with its extra rows, and with the embeddings that sessions give.

        Args:
            stored: number of stored nodes of each session before the pass.
            rows: number of rows of the pass.
        """
        places: list[int] = []
        vectors: list[torch.Tensor] = []
        kinds = np.zeros(rows, dtype=np.int64)
        anchors = np.zeros(rows, dtype=np.int64)
        start = 0
        for (cache, count, _), first in zip(sessions, stored, strict=True):
            if cache.takes_embeddings:
                tokens, parents, positions = cache.trie.arrays.nodes[[0, 1, 2], first : first + count]
                seen = cache.trie.seen[first : first + count]
                feed = Feed(tokens, positions, np.zeros_like(tokens), seen, parents - first)  # no slots are read
                kinds[start + feed.learnt] = 1 + LEARNT - tokens[feed.learnt]
                late = late_rows(cache.extra_inputs, feed, start)
                if late is not None:
                    anchors[late.places.numpy()] = late.anchors.numpy()
                for place in np.flatnonzero((tokens < 0) & (tokens > LEARNT)).tolist():
                    places.append(start + place)
                    vectors.append(cache.vector_of(int(tokens[place])))
            start += count
        if part.learnt is not None:
            part.learnt.put(kinds, anchors)
        return part.with_given(places, vectors, self.decoder.embedding)

    def _fill_staging(
        self, parts: list[tuple[GpuCache, int, Nodes]], shape: PassShape, wanted: int
    ) -> tuple[Staging, int]:
        """Assign slots to the rows of a pass, and write its inputs to a staging; return it and the bytes of the mask.

        Raises `IndexError`, before any slot is assigned, for tokens and positions that the model does not have.
        """
        for cache, count, _ in parts:
            self._check_nodes(cache, count)
            cache.trie.make_slots(count)
        self.reserve([cache for cache, *_ in parts])
        most = sum(mask_bytes(self.limits, count, cache.trie.capacity) for cache, count, _ in parts)
        staging = self.staging
        row = 0
        byte = 0
        if not staging.holds(shape.rows, shape.sessions, most):
            staging = Staging(self.device, shape.rows, shape.sessions, most)
        inputs = staging.filled
        for session, (cache, count, _) in enumerate(parts):
            source = self.source_of(cache)
            place = (session, row, byte)
            byte = write_inputs(cache.trie.arrays, count, cache.row, source, self.limits, inputs, place)
            if cache.takes_embeddings:
                self._write_learnt_rows(cache, inputs, place, count)
            row += count
        staging.pad(row, len(parts), wanted, shape)
        return staging, byte

    def _check_nodes(self, cache: GpuCache, count: int) -> None:
        """Raise `IndexError` for unknown tokens and positions among the next nodes of a session; see `check_nodes`."""
        trie = cache.trie
        if not cache.takes_embeddings:
            check_nodes(trie.arrays, count, self.limits)
            return
        tokens, _, positions = trie.arrays.nodes[:, trie.stored : trie.stored + count]
        if positions.max(initial=0) >= self.limits.positions:
            raise IndexError("a position is beyond the model's last position")
        if tokens.max(initial=0) >= self.limits.vocab:
            raise IndexError("a token is outside the model's vocabulary")
        enters_late = cache.extra_inputs is not None and cache.extra_inputs.layer > 0
        for token in tokens[tokens < 0].tolist():
            if token > LEARNT or not enters_late:
                cache.vector_of(token)  # raises if there is none

    def _write_learnt_rows(self, cache: GpuCache, inputs: Inputs, place: tuple[int, int, int], count: int) -> None:
        """Complete the inputs of a session whose rows may have embeddings instead of tokens.

        Rows with learned inputs see the prefix of these inputs.

        Args:
            place: see `write_inputs`, which has written the other inputs.
            count: number of the session's rows.
        """
        session, row, byte = place
        trie = cache.trie
        tokens = trie.tokens[trie.stored - count : trie.stored]
        inputs.tokens[row : row + count][tokens < 0] = self.decoder.blank
        if trie.prefix == 0:
            return
        learnt = np.flatnonzero(tokens <= LEARNT)
        prefix = slice(1, 1 + trie.prefix)
        trie.seen[trie.stored - count + learnt, prefix] = True
        extent = int(inputs.sessions[3, session])
        kinds = len(self.limits.windows)
        seen = inputs.seen[byte : byte + kinds * count * extent].reshape(kinds, count, extent)
        seen[:, learnt, prefix] = 1  # the prefix is inside every window

    def reserve(self, caches: list[GpuCache]) -> None:
        """Free the pages of rows without sessions, assign pages to the rows of these caches, and store prefixes."""
        self.store.release_from(len(self.caches))
        for cache in caches:
            self.store.reserve_row(cache.row, cache.trie.capacity)
            cache.keep_prefix(self.store)

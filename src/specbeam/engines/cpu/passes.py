"""Passes of the compiled forward over the rows of all sessions, one after the other, without padding."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import torch
from jaxtyping import Float32
from torch import nn

from specbeam.core.forest import Forest, unknown_nodes
from specbeam.core.measure.profiler import span
from specbeam.core.records import FINAL, ExtraInputs, Needs, Scored
from specbeam.engines.arrays import Integers, States, Tapped, Vector
from specbeam.engines.cpu.cache import CpuCache
from specbeam.engines.cpu.cache_steps import ALL, FIRST, LAST, CacheArrays, extend_cache
from specbeam.engines.cpu.cache_words import KVType
from specbeam.engines.cpu.decoder import Rows
from specbeam.engines.cpu.early import MOST_WAITING, ExitLayer, keep_exits
from specbeam.engines.cpu.scratch import ScratchArrays
from specbeam.engines.cpu.shared_passes import extend_caches  # noqa: F401  # a step of `passes.extend_all`
from specbeam.engines.eligibility import lacks_taps
from specbeam.engines.kv.cache import Logits, Nodes, hand_out
from specbeam.engines.kv.late import LateRows, late_rows
from specbeam.engines.kv.masks import Masks, places_of_slots
from specbeam.engines.kv.member import RowMember
from specbeam.engines.kv.steps import BLOCK
from specbeam.engines.kv.trie import Feed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedPasses:
    """The passes of a model whose layers can run in ranges: by the compiled forward, or by `engines/by_layer.py`.

    With the compiled forward, a single session is served by one compiled step, `extend_cache`.

    Args:
        decoder: a `CompiledDecoder` or a `LayerDecoder`.
        caches: the caches of all sessions, by row of the store.
    """

    most_rows_in_steps = 1 << 30  # rows of a pass in compiled steps: no limit

    def __init__(self, model: "PreTrainedModel", decoder: Any, caches: list[Any]) -> None:
        self.model = model
        self.decoder = decoder
        self.caches = caches
        self.store = decoder.store()
        self.masks = Masks(model.config, "sdpa", model.dtype)
        self.exit_layers: dict[int, ref[ExitLayer]] = {}  # by their layer in the store
        self.windows = self.masks.window_sizes(decoder.names)

    def cache(self, row: int, prompt: list[int]) -> CpuCache:
        """Return the cache of a new session in a row of the store."""
        return CpuCache(row, prompt, self.decoder.embedding.shape[1])

    def store_kv_as(self, kv: KVType) -> None:
        """Set the type of stored keys and values. Call it before anything is stored."""
        self.decoder.kv = kv
        self.store = self.decoder.store()

    def skipping(self, attention: Sequence[int], inner: Sequence[int]) -> "PackedPasses":
        """Return passes that skip some sublayers, on the same store; see `CompiledDecoder.skipping`.

        Use them with scratch caches (`CpuCache.scratch`), because their keys and values are wrong for the whole model.
        """
        fewer = copy.copy(self)
        fewer.decoder = self.decoder.skipping(attention, inner)
        return fewer

    takes_vectors = True
    runs_ranges = True  # whether ranges of layers, exit layers and passes without some sublayers can run

    def ranged(self, cache: CpuCache) -> CpuCache:
        """Return a session's cache in the form that ranges of layers use: the same one."""
        return cache

    @property
    def takes_steps(self) -> bool:
        """Whether compiled steps can run the passes of a session."""
        return bool(self.decoder.takes_steps)

    def refuses_extra_rows(self, inputs: ExtraInputs) -> str:
        """Return the reason why these passes cannot run these extra rows; "" if they can."""
        return lacks_taps(self.model, (inputs.layer,))

    def refuses(self, context: object) -> str:
        """Return the reason why these passes refuse a context: they take tokens only."""
        return "the compiled forward takes no context besides tokens; load the model with engine='plain'"

    def lacks(self, needs: Needs) -> str:
        """Return the reason why these passes cannot provide `needs`; "" if they can."""
        if needs.exit_layer is not None:
            made = self.exit_layers.get(needs.exit_layer.place)
            if made is None or made() is not needs.exit_layer:
                return "the exit layer was made for another model; load both together: load(target, draft=...)"
            if needs.taps:
                return "with an exit layer on its cache the target returns no states between its layers (taps)"
        return lacks_taps(self.model, needs.taps)

    def extend(self, caches: list[CpuCache], forests: Sequence[Forest]) -> list[Scored]:
        """Store all pending nodes and the new nodes of these forests; return the rows of new nodes."""
        for cache, forest in zip(caches, forests, strict=True):
            cache.fit(forest)
        if self.takes_steps and len(caches) == 1 and caches[0].is_for_steps:
            return [self._extend_by_step(caches[0], forests[0])]
        for cache, forest in zip(caches, forests, strict=True):
            cache.trie.enter(forest)
        if busy := [cache for cache in caches if cache.trie.pending]:
            self.prefill(busy, [cache.trie.pending for cache in busy])
        self.finish(caches)
        self.exit([cache for cache in caches if cache.waiting > MOST_WAITING])
        nodes = [cache.answer(forest) for cache, forest in zip(caches, forests, strict=True)]
        rows = [cache.outputs[wanted] for cache, wanted in zip(caches, nodes, strict=True)]
        with span("model"):
            logits = torch.from_numpy(self.decoder.logits(np.concatenate(rows)))
        each = logits.split([len(wanted) for wanted in nodes])
        return [self._hand_out(*results) for results in zip(caches, each, nodes, strict=True)]

    def _hand_out(self, cache: CpuCache, logits: Logits, nodes: Nodes) -> Scored:
        """Return the rows in the form that the parts of a session need, including hidden states; see `hand_out`.

        Args:
            nodes: the stored local node of each row.
        """
        return hand_out(cache, logits, *([self._states(cache, nodes)] if cache.needs.states else []))

    def _states(self, cache: CpuCache, nodes: Nodes | slice) -> torch.Tensor:
        """Return the needed hidden states of stored local nodes, see `Needs.columns`."""
        columns = [cache.taps[nodes]]
        if FINAL in cache.needs.columns:
            columns.insert(0, self.decoder.normed(cache.outputs[nodes]))
        return torch.from_numpy(np.concatenate(columns, axis=1))

    def _keep_prompt(self, cache: CpuCache, start: int, before_roots: int) -> None:
        if cache.needs.prompt and before_roots:
            cache.prompt_rows.append(self._states(cache, slice(start, start + before_roots)))

    def prefill(self, caches: list[CpuCache], counts: list[int]) -> None:
        """Store the given number of pending tokens of each cache, in all layers."""
        whole = {cache: count for cache, count in zip(caches, counts, strict=True) if not cache.runs_ahead}
        if whole:
            prompts = [
                (cache.trie.stored, min(cache.trie.pending_before_roots, count)) for cache, count in whole.items()
            ]
            feeds = [cache.trie.feed(count) for cache, count in whole.items()]
            last = len(self.decoder.kinds)
            taps = sorted({tap for cache in whole for tap in cache.needs.taps})
            each = self._forward([*whole], feeds, slice(0, last), taps=taps)
            hidden = self.decoder.embedding.shape[1]
            for cache, (rows, tapped), (start, before_roots) in zip(whole, each, prompts, strict=True):
                by_tap = tapped.reshape(len(rows), len(taps), hidden)
                own = by_tap[:, [taps.index(tap) for tap in cache.needs.taps]]
                cache.learn(rows, own.reshape(len(rows), -1))
                self._keep_prompt(cache, start, before_roots)
        self.begin({cache: count for cache, count in zip(caches, counts, strict=True) if cache not in whole})
        self.finish([cache for cache in caches if cache not in whole])

    def begin(self, counts: dict[CpuCache, int]) -> None:
        """Store the given number of pending tokens of each cache in the layers that are run ahead of the others."""
        for layers, caches in _by_layers(counts).items():
            prompts = [(cache.trie.stored, min(cache.trie.pending_before_roots, counts[cache])) for cache in caches]
            feeds = [cache.trie.feed(counts[cache]) for cache in caches]
            each = self._forward(caches, feeds, slice(0, layers))
            for cache, feed, (rows, _), prompt in zip(caches, feeds, each, prompts, strict=True):
                cache.learn_early(feed, rows, prompt)
            self.exit([cache for cache, (_, before_roots) in zip(caches, prompts, strict=True) if before_roots])

    def exit(self, caches: list[CpuCache]) -> None:
        """Run the exit layer on the nodes of these caches that wait for it."""
        for layer, batch in _by_exit_layer(caches).items():
            feeds = [cache.waiting_feed for cache in batch]
            states = np.concatenate([cache.early.waiting.states[: cache.waiting] for cache in batch])
            each = self._forward(batch, feeds, layer, states)
            for cache, (rows, _) in zip(batch, each, strict=True):
                keep_exits(cache.early, rows)

    def finish(self, caches: list[CpuCache]) -> None:
        """Run the other layers on the nodes that only the first layers have processed."""
        for layers, batch in _by_layers([cache for cache in caches if cache.unfinished]).items():
            feeds = [cache.unfinished_feed for cache in batch]
            early = [cache.early.outputs[cache.trie.stored - cache.unfinished : cache.trie.stored] for cache in batch]
            last = len(self.decoder.kinds)
            each = self._forward(batch, feeds, slice(layers, last), np.concatenate(early))
            for cache, (rows, _) in zip(batch, each, strict=True):
                cache.learn(rows, np.zeros((len(rows), 0), dtype=np.float32))
                for start, before_roots in cache.unfinished_prompt:
                    self._keep_prompt(cache, start, before_roots)
                cache.unfinished_prompt = []

    def extend_early(self, caches: list[CpuCache], forests: Sequence[Forest]) -> list[Scored]:
        """Run only the first layers on new nodes; return their logits, made from the output of these layers.

        If there is an exit layer, it runs after the first layers, and logits are made from its output. All sessions must
        have the same exit layer, or none. `finish` later runs the other layers on the same slots.
        """
        if self.takes_steps and len(caches) == 1 and caches[0].is_for_steps:
            return [self._extend_early_by_step(caches[0], forests[0])]
        for cache, forest in zip(caches, forests, strict=True):
            cache.trie.enter(forest)
        self.begin({cache: cache.trie.pending for cache in caches if cache.trie.pending})
        self.exit(caches)
        rows = [cache.answer_early(forest) for cache, forest in zip(caches, forests, strict=True)]
        layer = caches[0].needs.exit_layer
        with span("model"):
            logits = self.decoder.logits(np.concatenate(rows), None if layer is None else layer.norm)
        return [Scored(part) for part in torch.from_numpy(logits).split([len(outputs) for outputs in rows])]

    def exit_layer(self, layer: nn.Module, norm: nn.Module, after: int) -> ExitLayer:
        """Return a layer after the first `after` layers as an exit layer of the model, with room in the store.

        The layer of the store is new, or reused from an exit layer that no longer exists.
        """
        free = [place for place, known in self.exit_layers.items() if known() is None]
        made = self.decoder.exit_layer(layer, norm, after, free[0] if free else self.store.add_layer())
        self.exit_layers[made.place] = ref(made)
        return made

    def input_of(self, token: int, position: int) -> Vector:
        """Return the input of the first layer for a token."""
        found: Vector = self.decoder.input_of(token, position)
        return found

    def run_layer(self, cache: RowMember, feed: Feed, layer: int, states: States) -> States:
        """Return the output of one layer for the rows of a feed, given its input; its keys and values are stored."""
        ((after, _),) = self._forward([cache], [feed], slice(layer, layer + 1), states)
        return after

    def _forward(
        self,
        caches: Sequence[RowMember],
        feeds: list[Feed],
        layers: "slice | ExitLayer",
        states: States | None = None,
        taps: Sequence[int] = (),
    ) -> list[tuple[Float32[np.ndarray, "rows hidden"], Float32[np.ndarray, "rows tapped"]]]:
        """Run layers on the feeds of these caches; return the output of the last layer for each feed.

        With it come the inputs of the layers `taps`, concatenated, for each feed.

        Args:
            layers: the layers to run, or an exit layer.
            states: the input of the first of them, for all feeds; None: the embeddings of the tokens.
            taps: see `CompiledDecoder.forward`.
        """
        tries = [cache.trie for cache in caches]
        extent = -(-max(trie.extent for trie in tries) // BLOCK) * BLOCK
        self._reserve(caches, extent)
        starts = [*accumulate((len(feed) for feed in feeds), initial=0)]
        sessions = np.array([(cache.row, *ends) for cache, ends in zip(caches, pairwise(starts), strict=True)])
        tokens, positions, slots = (
            np.concatenate([getattr(feed, name) for feed in feeds]) for name in ("tokens", "positions", "slots")
        )
        seen = self.masks.flat(feeds, tries, extent)
        places = places_of_slots(tries, extent)
        rows = self._with_context(Rows(tokens, positions, slots, sessions, seen, places), caches)
        for cache in caches:
            cache.keep_prefix(self.store)
        late = [
            late_rows(cache.extra_inputs, feed, start)
            for cache, feed, start in zip(caches, feeds, starts, strict=False)
        ]
        entering = [one for one in late if one is not None]
        entries = np.zeros(len(tokens), dtype=np.int64)  # the first layer of each row
        for one in entering:
            entries[one.places.numpy()] = one.layer
        vectors = {
            start + place: cache.vector_of(int(feed.tokens[place])).float().cpu().numpy()
            for cache, feed, start in zip(caches, feeds, starts, strict=False)
            for place in np.flatnonzero(feed.tokens < 0).tolist()
            if entries[start + place] == 0
        }
        with span("model"):
            if isinstance(layers, ExitLayer):
                assert states is not None
                found = self.decoder.forward_exit(rows, self.store, layers, states)
                tapped = found[:, :0]
            elif entering:
                found, tapped = self._run_layers(rows, entering, entries, vectors, layers, states, taps)
            else:
                found, tapped = self.decoder.forward(rows, self.store, vectors, layers, states, taps)
        return [(found[start:end], tapped[start:end]) for start, end in pairwise(starts)]

    def _reserve(self, caches: Sequence[RowMember], extent: int) -> None:
        """Make room in the store for `extent` slots of each of these caches."""
        self.store.reserve(len(self.caches), extent)

    def _with_context(self, rows: Rows, caches: Sequence[RowMember]) -> Rows:
        """Return the rows of a pass with the sources that they attend to."""
        return rows

    def _run_layers(
        self,
        rows: Rows,
        entering: Sequence[LateRows],
        entries: Integers,
        vectors: dict[int, Vector],
        layers: slice,
        states: States | None,
        taps: Sequence[int],
    ) -> tuple[States, Tapped]:
        """Run `CompiledDecoder.forward` with rows that enter at an inner layer; their states before it are zeros.

        Args:
            entering: the rows that enter at an inner layer.
            entries: the first layer of each row.
            vectors: embeddings by row, for the rows that enter at the first layer and whose token is negative.
            states: the input of the first of these layers; None: the embeddings of the tokens.
        """
        hidden = self.decoder.embedding.shape[1]
        tapped = np.zeros((len(entries), len(taps), hidden), dtype=np.float32)
        later = entries[(entries > layers.start) & (entries < layers.stop)]
        for start, stop in pairwise(sorted({layers.start, layers.stop, *later.tolist()})):
            for one in entering:
                if one.layer == start and states is not None:
                    one.write(torch.from_numpy(states))
            is_in = entries <= start
            number = np.cumsum(is_in) - 1
            end = stop + (stop == layers.stop)  # the output of the last layer is a tap, too
            here = [place for place, tap in enumerate(taps) if start <= tap < end]
            own_states = None if states is None else states[is_in]
            own_vectors = {int(number[place]): vector for place, vector in vectors.items()}
            own_taps = [taps[place] - start for place in here]
            own = rows.only(is_in)
            after, found = self.decoder.forward(own, self.store, own_vectors, slice(start, stop), own_states, own_taps)
            states = np.zeros((len(entries), hidden), dtype=np.float32)
            states[is_in] = after
            tapped[np.ix_(is_in, here)] = found.reshape(len(after), len(here), hidden)
        assert states is not None
        return states, tapped.reshape(len(entries), -1)

    def _extend_by_step(self, cache: CpuCache, forest: Forest) -> Scored:
        """Implement `extend` for a single session in one compiled step."""
        wanted = unknown_nodes(cache.answered, forest.size, forest.known.nodes)
        start = cache.trie.stored
        before_roots = cache.trie.pending_before_roots
        with self.arrays_for_steps(cache, forest.size - cache.trie.known) as arrays, span("model"):
            logits = extend_cache(arrays, forest.tokens, forest.parents, wanted)
        cache.answered = cache.trie.known
        self._keep_prompt(cache, start, before_roots)
        return self._hand_out(cache, torch.from_numpy(logits), cache.trie.local[wanted])

    def _extend_early_by_step(self, cache: CpuCache, forest: Forest) -> Scored:
        """Implement `extend_early` for a single session in one compiled step."""
        wanted = unknown_nodes(cache.answered_early, forest.size, forest.known.nodes)
        with self.arrays_for_steps(cache, forest.size - cache.trie.known, drafts=True) as arrays, span("model"):
            logits = extend_cache(arrays, forest.tokens, forest.parents, wanted)
        cache.answered_early = cache.trie.known
        return Scored(torch.from_numpy(logits))

    def arrays_for_steps(
        self, cache: CpuCache, fresh: int, drafts: bool = False
    ) -> AbstractContextManager[CacheArrays]:
        """Return a context with the cache as arrays for steps, which may add up to `fresh` new nodes.

        Args:
            drafts: whether the passes draft, by the layers that are run ahead.
        """
        cache.make_room(fresh)
        self.store.reserve(len(self.caches), cache.trie.capacity)
        part = ALL
        if cache.runs_ahead:
            part = FIRST if drafts else LAST
        return self.decoder.arrays_for_steps(cache, self.store, self.windows, part, *self._context_for_steps(cache))

    def _context_for_steps(self, cache: CpuCache) -> tuple[Any, ...]:
        """Return the sources of a session as further arguments of `CompiledDecoder.arrays_for_steps`."""
        return ()

    @contextmanager
    def scratch_for_steps(self, cache: CpuCache, more: int) -> Iterator[ScratchArrays]:
        """Yield a scratch cache of a session as arrays for steps, for passes that leave `cache` unchanged.

        Valid until the session's arrays grow.

        Args:
            cache: in the same row of the store, with capacity for everything that the steps add to it.
            more: capacity for further nodes in the scratch cache.
        """
        scratch = cache.scratch(cache.trie.room_for_scratch(more))
        scratch.make_rows()
        with self.decoder.arrays_for_steps(scratch, self.store, self.windows, ALL) as own:
            yield ScratchArrays(own, cache.trie.arrays, np.zeros(2, dtype=np.int64))


def _by_exit_layer(caches: list[CpuCache]) -> dict[ExitLayer, list[CpuCache]]:
    """Return the caches with nodes that wait for an exit layer, grouped by exit layer."""
    groups: dict[ExitLayer, list[CpuCache]] = {}
    for cache in caches:
        if cache.waiting:
            groups.setdefault(cache.needs.exit_layer, []).append(cache)
    return groups


def _by_layers(caches: Iterable[CpuCache]) -> dict[int, list[CpuCache]]:
    """Return the caches grouped by the number of layers that run ahead."""
    groups: dict[int, list[CpuCache]] = {}
    for cache in caches:
        assert cache.early_layers is not None
        groups.setdefault(cache.early_layers, []).append(cache)
    return groups

"""Passes of transformers' forward in batches of sessions, padded to the longest."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int64
from torch.utils.hooks import RemovableHandle

from specbeam.core.forest import Forest, unknown_nodes
from specbeam.core.measure.profiler import span
from specbeam.core.records import FINAL, LEARNT, ExtraInputs, Needs, Scored
from specbeam.engines.arrays import PassInputs
from specbeam.engines.cache_names import NAMES, cache_argument
from specbeam.engines.eligibility import lacks_taps, layers_of
from specbeam.engines.families import head_of, positions_of
from specbeam.engines.kv.cache import Columns, Nodes, PaddedCache
from specbeam.engines.kv.late import LateRows, late_rows
from specbeam.engines.kv.masks import Mask, Masks, SlotPositions
from specbeam.engines.kv.rows import rows_at
from specbeam.engines.kv.steps import BLOCK, WASTE
from specbeam.engines.kv.store import Place
from specbeam.engines.kv.trie import Feed
from specbeam.engines.shared_tokens import SharedTokens, readable
from specbeam.engines.torch.captured import WIDEST, CapturedForward, Forward
from specbeam.engines.torch.runs import PaddedRuns
from specbeam.engines.torch.sizes import rounded_up
from specbeam.engines.torch.torch_compiled import torch_compiled

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NO_EXTRAS: Mapping[str, torch.Tensor] = {}
_NONE = torch.zeros(0)
FEW = 16  # number of rows of the store that a captured pass always reads, even if it needs only one of them


@dataclass(frozen=True, eq=False)
class Part:
    """One session's part of a pass."""

    cache: PaddedCache
    feed: Feed
    before_roots: int  # number of rows before the first root
    nodes: Nodes  # local nodes whose logits are needed
    wanted: Nodes  # the rows of these nodes in the feed

    @property
    def first(self) -> int:
        """The first row whose logits are needed; the last row if there is none."""
        return int(self.wanted.min(initial=len(self.feed) - 1))


class PaddedPasses:
    """The passes of a model run by transformers, with or without torch.compile.

    Args:
        caches: the caches of all sessions, by row of the store.
        compile: whether to call the model through torch.compile (`torch_compiled`).
        shared: the target's tokens, which a draft model reads and drafts; None: the model's own tokens.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        caches: list[Any],
        compile: bool = False,
        shared: SharedTokens | None = None,
    ) -> None:
        from specbeam.engines.kv.torch_store import KVStore  # imports transformers

        self.model = model
        self.shared = shared
        self.caches = caches
        self.call = torch_compiled(model) if compile else model
        config = model.config.get_text_config()
        self.device = model.get_input_embeddings().weight.device
        self.masks = Masks(config, config._attn_implementation or "eager", model.dtype)
        self.store = KVStore(config.num_hidden_layers)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.runs: PaddedRuns | None = None
        if type(self) is PaddedPasses:
            self.runs = PaddedRuns(self, *self._sizes())
        self.captured: CapturedForward | None = None  # on a GPU
        if self.device.type == "cuda":
            weights = [weight.detach() for weight in (*model.parameters(), *model.buffers())]
            self.captured = CapturedForward(self._call_model, self.store, weights)

    def _sizes(self) -> tuple[int, int | None, int]:
        """Return the numbers of tokens that the model reads, of its positions and of its logits."""
        logits = len(head_of(self.model))
        tokens = self.model.get_input_embeddings().weight.shape[0]
        if self.shared is not None:
            logits = tokens = self.shared.vocab
        return tokens, positions_of(self.model.config.get_text_config()), logits

    def cache(self, row: int, prompt: list[int]) -> PaddedCache:
        """Return the cache of a new session in a row of the store."""
        return PaddedCache(row, prompt)

    def lacks(self, needs: Needs) -> str:
        """Return the reason why these passes cannot provide `needs`; "" if they can."""
        if needs.states and self.call is not self.model:
            return "a model compiled by torch returns no hidden states; leave compile out"
        return lacks_taps(self.model, needs.taps)

    takes_vectors = True
    runs_ranges = False  # see `PackedPasses.runs_ranges`
    takes_steps = False  # see `PackedPasses.takes_steps`
    most_rows_in_steps = 1 << 30  # rows of a session in a pass of compiled runs: no limit

    def refuses_extra_rows(self, inputs: ExtraInputs) -> str:
        """Return the reason why these passes cannot take these inputs of extra rows; "" if they can."""
        if inputs.layer and self.call is not self.model:
            return "a model compiled by torch takes no extra rows between its layers; leave compile out"
        return lacks_taps(self.model, (inputs.layer,))

    def refuses(self, context: object) -> str:
        """Return the reason why these passes cannot take a context; "" if they can."""
        name = type(self.model).__name__
        if not isinstance(context, Mapping):
            return f"context is {type(context).__name__}; {name} takes keyword arguments of its forward, as a dict"
        known = inspect.signature(self.model.forward).parameters
        if strange := [key for key in context if key not in known or key in _OWN_ARGUMENTS]:
            return f"context holds {', '.join(strange)}, which {name} does not take"
        shapes = {key: [*value.shape] for key, value in context.items()}
        if wrong := [f"{key} is {shape}" for key, shape in shapes.items() if shape[:1] != [1]]:
            return (
                f"context holds tensors in which {', '.join(wrong)}; their first dimension must be 1, for one session"
            )
        return ""

    def extend(self, caches: list[PaddedCache], forests: Sequence[Forest]) -> list[Scored]:
        """Store all pending nodes and the new nodes of these forests; return the rows that were not returned before."""
        for cache, forest in zip(caches, forests, strict=True):
            self._refresh_roots(cache, forest)
        wanted = [(cache, cache.enter(forest)) for cache, forest in zip(caches, forests, strict=True)]
        if busy := [(cache, nodes) for cache, nodes in wanted if cache.trie.pending]:
            self._run([self._part(cache, cache.trie.pending, nodes) for cache, nodes in busy], learns=True)
        return [cache.answer(forest) for cache, forest in zip(caches, forests, strict=True)]

    def _refresh_roots(self, cache: PaddedCache, forest: Forest) -> None:
        """Compute the logits of stored roots again if runs have moved the roots, unless their rows are known."""
        if not cache.has_stale_rows:
            return
        cache.has_stale_rows = False
        trie = cache.trie
        roots = unknown_nodes(0, len(trie.root_at), forest.known.nodes)
        nodes = np.unique(trie.local[roots])
        nodes = nodes[nodes < trie.stored]
        if len(nodes):
            cache.put_rows(nodes, self.rows_of([(cache, nodes)]))

    def rows_of(self, asked: Sequence[tuple[PaddedCache, Nodes]]) -> torch.Tensor:
        """Store all pending nodes of these sessions, and return the logits of local nodes, float[nodes, vocab].

        They are on the model's device. Nodes that are stored already take part in the pass, which stores nothing for them.
        """
        parts = [self._part_with(cache, nodes) for cache, nodes in asked]
        return torch.cat([columns[0] for columns, _ in self._forward(parts, stays_on_device=True)])

    def _part_with(self, cache: PaddedCache, nodes: Nodes) -> Part:
        """Return the part of a pass with all pending nodes of a cache, and with the stored ones of these local nodes."""
        trie = cache.trie
        stored = trie.stored
        again = nodes[nodes < stored]
        pending = trie.pending
        feed = trie.feed(pending)
        rows = nodes - stored
        rows[nodes < stored] = pending + np.arange(len(again))
        if len(again):
            feed = feed.followed_by(trie.stored_feed(again))
        return Part(cache, feed, 0, nodes, rows)

    def prefill(self, caches: list[PaddedCache], counts: list[int]) -> None:
        """Store this number of pending tokens of each cache, without computing their logits."""
        none = np.zeros(0, dtype=np.int64)
        self._run([self._part(cache, count, none) for cache, count in zip(caches, counts, strict=True)], learns=False)

    def _part(self, cache: PaddedCache, count: int, nodes: Nodes) -> Part:
        """Assign slots to the next `count` pending nodes of a cache, and return them as its part of a pass.

        Args:
            nodes: the local nodes among them whose logits are needed.
        """
        trie = cache.trie
        wanted = nodes - trie.stored
        before_roots = min(trie.pending_before_roots, count)
        return Part(cache, trie.feed(count), before_roots, nodes, wanted)

    def _run(self, parts: list[Part], learns: bool) -> None:
        """Run the parts of all sessions, and store the rows of their wanted nodes in the caches if `learns`.

        Sessions with different batch keys need different passes.
        """
        groups: dict[Any, list[Part]] = {}
        for part in parts:
            groups.setdefault(self._batch_key(part.cache), []).append(part)
        for group in groups.values():
            for part, (columns, prompt) in zip(group, self._forward(group), strict=True):
                if part.cache.needs.prompt and len(prompt):
                    part.cache.prompt_rows.append(prompt)
                if learns:
                    part.cache.learn(part.nodes, columns)

    def _batch_key(self, cache: PaddedCache) -> Any:
        """Return a key that is equal for sessions that can share a batch: the shapes of their contexts."""
        return _shapes(cache.context)

    @torch.inference_mode()
    def _forward(self, parts: list[Part], stays_on_device: bool = False) -> list[tuple[Columns, torch.Tensor]]:
        """Run one pass over the rows of the store that have a part, and over the rows between them if these are few.

        Contiguous rows of the store are read in place.

        Args:
            stays_on_device: whether the logits stay on the model's device; otherwise they are returned on the host.

        Returns for each part the logits of its wanted nodes, with hidden states if the session needs them, and the hidden
        states of its rows before the first root.
        """
        by_row = {part.cache.row: part for part in parts}
        has_extras = any(
            part.cache.context is not None or part.cache.vectors is not None or part.cache.extra_inputs is not None
            for part in parts
        )
        needs_states = any(part.cache.needs.states for part in parts)
        recorded = {column: _NONE for part in parts if part.cache.needs.states for column in part.cache.needs.columns}
        filler = next(iter(by_row.values()))  # stands in for rows of the store without a part
        rows: Sequence[int] = range(min(by_row), max(by_row) + 1)
        width = max(len(part.feed) for part in parts)
        extent = -(-max(part.cache.trie.extent for part in parts) // BLOCK)
        last = max(len(part.feed) - part.first for part in parts)
        if any(part.cache.needs.prompt and part.before_roots for part in parts):
            last = width  # the model's head must read all rows
        every = range(rounded_up(rows[-1] + 1))
        sparse = len(rows) > 2 * len(by_row)
        run: Forward = self._call_model
        captured = self.captured is not None and not needs_states and not has_extras
        if self.captured is not None and captured and width <= WIDEST and len(every) <= max(FEW, 2 * len(by_row)):
            run = self.captured
            rows = every
            sparse = False
            width = rounded_up(width)
            extent = rounded_up(extent)
            last = min(rounded_up(last), width)
        elif sparse:
            rows = sorted(by_row)
        inputs, masks = self._inputs_and_masks(rows, by_row, width, extent * BLOCK)
        inputs[0] = readable(self.shared, inputs[0])
        slots = torch.from_numpy(inputs[2]).to(self.device)
        which = torch.tensor(rows, device=self.device) if sparse else slice(rows[0], rows[-1] + 1)
        self.store.reserve(max(len(self.caches), rows[-1] + 1), extent * BLOCK)
        self.store.place = Place(which, slots, extent * BLOCK)
        entering: list[LateRows] = []
        if has_extras:
            for part in parts:
                part.cache.keep_prefix(self.store)
            caches = [by_row.get(row, filler).cache for row in rows]
            extras = self._extra_arguments(caches, inputs[0])
            run = partial(self._call_model, extras=extras)
            for place, row in enumerate(rows):
                if row in by_row:
                    feed = by_row[row].feed
                    late = late_rows(by_row[row].cache.extra_inputs, feed, (place + 1) * width - len(feed))
                    entering += [] if late is None else [late]
            inputs[0][inputs[0] <= LEARNT] = 0  # learned rows need a valid token id
        with span("model"), self._hooked(recorded, entering):
            ids, places, _ = torch.from_numpy(inputs).to(self.device)
            logits = run(ids, places, masks, last)
            if self.shared is not None:
                logits = self.shared.fitted_logits(logits)
            if self.device.type == "cuda" and not stays_on_device:  # laws are computed on the host
                wanted = [rows.index(row) for row in by_row]
                logits = logits[wanted].float().cpu()
                recorded = {column: states[wanted].float() for column, states in recorded.items()}  # heads run here
                rows = [*by_row]
        results = []
        for part in parts:
            row = rows.index(part.cache.row)
            start = last - len(part.feed)
            columns: Columns = (rows_at(logits[row], part.wanted + start),)
            prompt = logits.new_zeros(0, 0)
            if part.cache.needs.states:
                columns_wanted = [recorded[column][row, -last:] for column in part.cache.needs.columns]
                states = torch.cat(columns_wanted, dim=-1)
                columns += (rows_at(states, part.wanted + start),)
                if part.cache.needs.prompt and part.before_roots:
                    prompt = states[start : start + part.before_roots]
            results.append((columns, prompt))
        return results

    def _inputs_and_masks(
        self, rows: Sequence[int], by_row: dict[int, Part], width: int, extent: int
    ) -> tuple[PassInputs, Mask]:
        """Return the tokens, positions and slots of a pass, aligned to the right, and its masks."""
        feeds, tries = self._feeds_and_tables(rows, by_row)
        inputs = np.zeros((3, len(rows), width), dtype=np.int64)
        inputs[2] = WASTE
        for place, feed in enumerate(feeds):
            if len(feed):
                inputs[:, place, -len(feed) :] = feed.tokens, feed.positions, feed.slots
        return inputs, self.masks.build(feeds, tries, width, extent, self.device)

    def _feeds_and_tables(
        self, rows: Sequence[int], by_row: dict[int, Part]
    ) -> tuple[list[Feed], Sequence[SlotPositions]]:
        """Return the feed of each row of the store, and the positions of the tokens in its slots."""
        filler = next(iter(by_row.values()))
        feeds = [by_row[row].feed if row in by_row else _EMPTY_FEED for row in rows]
        tables = [by_row.get(row, filler).cache.trie for row in rows]  # the tables of empty feeds are not read
        return feeds, tables

    @contextmanager
    def _hooked(self, states: dict[int, torch.Tensor], entering: list[LateRows]) -> Iterator[None]:
        """A context in which passes record hidden states, and extra rows enter at their layers.

        transformers' forward runs all rows through each layer, so extra rows pass through earlier layers as rows of
        token 0, to which other rows do not attend.

        Args:
            states: filled in by column of `Needs.columns`, float[batch, rows, size], for all rows.
        """
        handles = [self._record(states, column) for column in states]
        for rows in entering:
            layer = layers_of(self.model)[rows.layer]
            handles.append(layer.register_forward_pre_hook(partial(_enter, rows), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, states: dict[int, torch.Tensor], column: int) -> RemovableHandle:
        """Register a hook that records the hidden states of one column; see `_hooked`."""
        module = self.model.get_output_embeddings()
        if column != FINAL:
            layers = layers_of(self.model)
            if column == len(layers):
                return layers[-1].register_forward_hook(partial(_record_output, states, column))
            module = layers[column]
        return module.register_forward_pre_hook(partial(_record_input, states, column), with_kwargs=True)

    def _extra_arguments(self, caches: list[Any], tokens: Int64[np.ndarray, "batch width"]) -> dict[str, torch.Tensor]:
        """Return the model's arguments besides tokens: the sessions' contexts, of equal shapes, and embeddings.

        Raises `IndexError` for negative tokens without an embedding.
        """
        context = caches[0].context or {}
        extras = {name: torch.cat([cache.context[name] for cache in caches]).to(self.device) for name in context}
        late = [cache.extra_inputs is not None and cache.extra_inputs.layer > 0 for cache in caches]
        is_given = (tokens < 0) & ((tokens > LEARNT) | ~np.array(late)[:, None])
        given = np.argwhere(is_given).tolist()
        if given or any(cache.vectors is not None for cache in caches):
            known = torch.from_numpy(np.maximum(tokens, 0)).to(self.device)
            embeds = self.model.get_input_embeddings()(known).clone()
            for row, place in given:
                embeds[row, place] = caches[row].vector_of(int(tokens[row, place])).to(embeds)
            extras["inputs_embeds"] = embeds
        return extras

    def _call_model(
        self,
        ids: torch.Tensor,
        places: torch.Tensor,
        masks: Mask,
        wanted: int,
        extras: Mapping[str, torch.Tensor] = NO_EXTRAS,
    ) -> torch.Tensor:
        """Call the model, and return the logits of the last `wanted` rows of each sequence in the batch."""
        tokens = {} if "inputs_embeds" in extras else {"input_ids": ids}
        output = self.call(
            **tokens,
            **extras,
            attention_mask=masks,
            position_ids=places,
            **cache_argument(self.model, self.store),
            use_cache=True,
            **({"logits_to_keep": wanted} if self._keeps_rows else {}),
        )
        return output.logits[:, -wanted:]


def _enter(
    rows: LateRows, module: object, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    states = (given[0] if given else named["hidden_states"]).clone()
    rows.write(states.view(-1, states.shape[-1]))
    return ((states, *given[1:]), named) if given else (given, {**named, "hidden_states": states})


def _record_input(
    states: dict[int, torch.Tensor], column: int, module: object, given: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    states[column] = given[0] if given else named["hidden_states"]


def _record_output(
    states: dict[int, torch.Tensor], column: int, module: object, given: tuple[Any, ...], output: Any
) -> None:
    states[column] = output[0] if isinstance(output, tuple) else output


def _shapes(context: Mapping[str, torch.Tensor] | None) -> Any:
    """Return the names and shapes in a context, which are equal for contexts that can share a batch; None without one."""
    return None if context is None else tuple(sorted((name, tuple(value.shape)) for name, value in context.items()))


_OWN_ARGUMENTS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    *NAMES,
    "use_cache",
    "logits_to_keep",
)
_EMPTY_FEED = Feed(
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.int64),
    np.zeros((0, 0), dtype=bool),
    np.zeros(0, dtype=np.int64),
)

"""Passes of a model that takes batches: sessions side by side, padded to the longest."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.core.forest import Forest
from specbeam.engines.kv.cache import Columns, Nodes, PaddedCache
from specbeam.engines.kv.masks import Mask, Masks, SlotPositions
from specbeam.engines.kv.rows import picked
from specbeam.engines.kv.store import KVStore, Place
from specbeam.engines.kv.trie import BLOCK, WASTE, Feed
from specbeam.engines.torch.captured import WIDEST, CapturedForward, Forward
from specbeam.engines.torch.lean import LeanDecoder
from specbeam.engines.torch.sizes import up
from specbeam.engines.torch.torch_compiled import torch_compiled
from specbeam.measure.profiler import span
from specbeam.records import Needs, Scored

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_NOTHING_GIVEN: Mapping[str, torch.Tensor] = {}
FEW = 16  # caches that may go along for the sake of one


@dataclass(frozen=True, eq=False)
class Part:
    """What one session brings to a pass."""

    cache: PaddedCache
    feed: Feed
    ahead: int  # rows that stand before the first root
    nodes: Nodes  # local nodes whose logits are asked for
    wanted: Nodes  # the rows of these

    @property
    def first(self) -> int:
        """The first row whose logits are asked for; the last one, if there is none."""
        return int(self.wanted.min(initial=len(self.feed) - 1))


class SharedRow:
    """What the sessions of one row of the store bring to a pass, one after the other.

    Attributes:
        feed: all of it.
        table: a trie, or what knows the positions of slots as one does.
        starts: the first row of each part.
    """

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.starts = [0, *accumulate(len(part.feed) for part in parts)]
        self.feed: Feed
        self.table: SlotPositions
        self.feed, self.table = _together(parts) if len(parts) > 1 else (parts[0].feed, parts[0].cache.trie)

    @property
    def first(self) -> int:
        """The first row whose logits are asked for."""
        return min(start + part.first for start, part in zip(self.starts, self.parts, strict=False))


@dataclass(frozen=True, eq=False)
class SlotTable:
    """The positions of the tokens in the slots of a row, whoever they belong to."""

    slot_position: Int64[np.ndarray, " slots"]

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return len(self.slot_position)


def _together(parts: list[Part]) -> tuple[Feed, SlotPositions]:
    """Return the feeds of several sessions as one, and where what they see stands."""
    slots = max(part.cache.trie.capacity for part in parts)
    positions = np.zeros(slots, dtype=np.int64)
    seen = []
    for part in parts:
        trie = part.cache.trie
        wide = np.zeros((len(part.feed), slots), dtype=bool)
        wide[:, : part.feed.seen.shape[1]] = part.feed.seen
        looked_at = np.flatnonzero(wide.any(0))
        positions[looked_at] = trie.slot_position[looked_at]
        seen.append(wide)
    tokens, places, at = (
        np.concatenate([getattr(part.feed, name) for part in parts]) for name in ("tokens", "positions", "slots")
    )
    return Feed(tokens, places, at, np.concatenate(seen)), SlotTable(positions)


class PaddedPasses:
    """Of the model itself, or of its lean forward.

    Args:
        compile: by what torch makes of the model's forward (`torch_compiled`).
        caches: all sessions of the model; those that a pass leaves out may stand between those that it takes in.
    """

    def __init__(
        self, model: "PreTrainedModel", lean: LeanDecoder | None, caches: list[PaddedCache], compile: bool = False
    ) -> None:
        self.model = model
        self.lean = lean
        self.caches = caches
        self.call = torch_compiled(model) if compile else model
        config = model.config.get_text_config()
        self.device = model.get_input_embeddings().weight.device
        self.masks = Masks(config, config._attn_implementation or "eager", model.dtype)
        self.store = KVStore(config.num_hidden_layers)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.captured: CapturedForward | None = None  # on a GPU
        if self.device.type == "cuda":
            weights = [one.detach() for one in (*model.parameters(), *model.buffers())]
            self.captured = CapturedForward(self._called, self.store, weights)

    def cache(self, row: int, prompt: list[int]) -> PaddedCache:
        """Return the cache of a new session."""
        return PaddedCache(row, prompt)

    def lacks(self, needs: Needs) -> str:
        """Say why these passes cannot give what is asked for; "" if they can."""
        if not needs.states:
            return ""
        if self.call is not self.model:
            return "what torch.compile makes of a model hands out no hidden states: leave compile out"
        return ""

    takes_vectors = True

    def refuses(self, context: object) -> str:
        """Say why these passes cannot take a context; "" if they can."""
        name = type(self.model).__name__
        if self.lean is not None:
            return "the lean forward takes no context besides tokens: HuggingFaceLM(model, engine='plain') does"
        if not isinstance(context, Mapping):
            return f"context is {type(context).__name__}; {name} takes keyword arguments of its forward, as a dict"
        known = inspect.signature(self.model.forward).parameters
        if strange := [key for key in context if key not in known or key in _OURS]:
            return f"context holds {', '.join(strange)}, which {name} does not take"
        shapes = {key: [*one.shape] for key, one in context.items()}
        if wrong := [f"{key} is {shape}" for key, shape in shapes.items() if shape[:1] != [1]]:
            return f"of the context {', '.join(wrong)}; each has to be of one session: the first dimension is 1"
        return ""

    def extend(self, caches: list[PaddedCache], forests: Sequence[Forest]) -> list[Scored]:
        """Store what is pending, with the new nodes of these forests; return what was not handed out yet."""
        asked = [(cache, cache.enter(forest)) for cache, forest in zip(caches, forests, strict=True)]
        if busy := [(cache, nodes) for cache, nodes in asked if cache.trie.waiting]:
            self._run([self._part(cache, cache.trie.waiting, nodes) for cache, nodes in busy], learns=True)
        return [cache.answer() for cache in caches]

    def prefill(self, caches: list[PaddedCache], counts: list[int]) -> None:
        """Store so many pending tokens of each cache, whose logits nobody asks for."""
        none = np.zeros(0, dtype=np.int64)
        self._run([self._part(cache, count, none) for cache, count in zip(caches, counts, strict=True)], learns=False)

    def _part(self, cache: PaddedCache, count: int, nodes: Nodes) -> Part:
        """Store so many pending nodes of a cache, of which the logits of some local nodes are asked for."""
        trie = cache.trie
        wanted = nodes - trie.stored
        ahead = min(trie.ahead, count)
        return Part(cache, trie.feed(count), ahead, nodes, wanted)

    def _run(self, parts: list[Part], learns: bool) -> None:
        """Run a pass, and let the caches learn what it found of their nodes, if anything was asked for.

        Sessions with contexts of different shapes cannot stand in one batch, and have a pass for each shape.
        """
        groups: dict[Any, list[Part]] = {}
        for part in parts:
            groups.setdefault(_shapes(part.cache.context), []).append(part)
        for group in groups.values():
            for part, (columns, prompt) in zip(group, self._forward(group), strict=True):
                if part.cache.needs.prompt and len(prompt):
                    part.cache.prompt_rows.append(prompt)
                if learns:
                    part.cache.learn(part.nodes, columns)

    @torch.inference_mode()
    def _forward(self, parts: list[Part]) -> list[tuple[Columns, torch.Tensor]]:
        """Run one pass over the caches that bring a part, and over those between them where these are few.

        Rows of the store that stand side by side are read in place.

        Returns of each part what was wanted: logits, and hidden states where somebody needs them; and the hidden states of
        the rows that stand before its first root.
        """
        together: dict[int, list[Part]] = {}
        for part in parts:
            together.setdefault(part.cache.row, []).append(part)
        by_row = {row: SharedRow(mine) for row, mine in together.items()}
        given = any(part.cache.context is not None or part.cache.vectors is not None for part in parts)
        hears = any(part.cache.needs.states for part in parts)
        some = next(iter(by_row.values()))
        rows: Sequence[int] = range(min(by_row), max(by_row) + 1)
        width = max(len(one.feed) for one in by_row.values())
        extent = -(-max(part.cache.trie.extent for part in parts) // BLOCK)
        last = max(len(one.feed) - one.first for one in by_row.values())
        if any(part.cache.needs.prompt and part.ahead for part in parts):
            last = width  # the model's head has to read them all
        every = range(up(rows[-1] + 1))
        sparse = len(rows) > 2 * len(by_row)
        run: Forward = self._called
        captured = self.captured is not None and not hears and not given
        if self.captured is not None and captured and width <= WIDEST and len(every) <= max(FEW, 2 * len(by_row)):
            run = self.captured
            rows = every
            sparse = False
            width = up(width)
            extent = up(extent)
            last = min(up(last), width)
        elif sparse:
            rows = sorted(by_row)
        inputs, masks = self._laid_out(rows, by_row, width, extent * BLOCK)
        slots = torch.from_numpy(inputs[2]).to(self.device)
        which = torch.tensor(rows, device=self.device) if sparse else slice(rows[0], rows[-1] + 1)
        self.store.reserve(max(len(self.caches), rows[-1] + 1), extent * BLOCK)
        self.store.place = Place(which, slots, extent * BLOCK)
        if given:
            besides = self._given([by_row.get(row, some) for row in rows], inputs[0])
            run = partial(self._called, given=besides)
        with span("model"), self._hearing(hears) as heard:
            logits = self._logits(inputs, masks, last, run, heard if hears else None)
            if self.captured is not None:  # laws are made on the host
                logits = logits[[rows.index(row) for row in by_row]].float().cpu()
                rows = [*by_row]
                heard[:] = [one[[rows.index(row) for row in by_row]].float().cpu() for one in heard]
        found = []
        for part in parts:
            mine = by_row[part.cache.row]
            row = rows.index(part.cache.row)
            start = mine.starts[mine.parts.index(part)] + last - len(mine.feed)
            columns: Columns = (picked(logits[row], part.wanted + start),)
            prompt = logits.new_zeros(0, 0)
            if part.cache.needs.states:
                states = heard[0][row, -last:]
                columns += (picked(states, part.wanted + start),)
                if part.cache.needs.prompt and part.ahead:
                    prompt = states[start : start + part.ahead]
            found.append((columns, prompt))
        return found

    def _laid_out(
        self, rows: Sequence[int], by_row: dict[int, SharedRow], width: int, extent: int
    ) -> tuple[Int64[np.ndarray, "3 batch width"], Mask]:
        """Tokens, positions and slots, aligned to the right, and the masks."""
        some = next(iter(by_row.values()))
        feeds = [by_row[row].feed if row in by_row else _NOTHING for row in rows]
        tries = [by_row.get(row, some).table for row in rows]  # what has no feed is not looked at
        inputs = np.zeros((3, len(rows), width), dtype=np.int64)
        inputs[2] = WASTE
        for one, feed in enumerate(feeds):
            if len(feed):
                inputs[:, one, -len(feed) :] = feed.tokens, feed.positions, feed.slots
        return inputs, self.masks.build(feeds, tries, width, extent, self.device, additive=self.lean is not None)

    def _logits(
        self,
        inputs: Int64[np.ndarray, "3 batch width"],
        masks: Mask,
        wanted: int,
        run: Forward,
        heard: list[torch.Tensor] | None,
    ) -> Float[torch.Tensor, "batch wanted vocab"]:
        ids, places, _ = torch.from_numpy(inputs).to(self.device)
        if self.lean is not None:
            real = torch.from_numpy(np.flatnonzero(inputs[2])) if (inputs[2] == WASTE).any() else None
            embeds = run.keywords["given"]["inputs_embeds"] if isinstance(run, partial) else None
            return self.lean.forward(ids, places, masks, self.store, wanted, real, heard, embeds)
        return run(ids, places, masks, wanted)

    @contextmanager
    def _hearing(self, hears: bool) -> Iterator[list[torch.Tensor]]:
        """Give a list that what the head reads, float[batch, rows, size], is put into in a pass, if anybody asks."""
        heard: list[torch.Tensor] = []
        if not hears or self.lean is not None:
            yield heard
            return

        def hear(head: object, given: tuple[torch.Tensor]) -> None:
            heard.append(given[0])

        handle = self.model.get_output_embeddings().register_forward_pre_hook(hear)
        try:
            yield heard
        finally:
            handle.remove()

    def _given(self, rows: list[SharedRow], tokens: Int64[np.ndarray, "batch width"]) -> dict[str, torch.Tensor]:
        """Return what the model is called with besides tokens, of sessions whose contexts have the same shapes."""
        caches = [row.parts[0].cache for row in rows]
        context = caches[0].context or {}
        given = {name: torch.cat([cache.context[name] for cache in caches]).to(self.device) for name in context}
        if any(cache.vectors is not None for cache in caches):
            known = torch.from_numpy(np.maximum(tokens, 0)).to(self.device)
            embeds = self.model.get_input_embeddings()(known).clone()
            for row, place in np.argwhere(tokens < 0).tolist():
                vectors = caches[row].vectors
                if vectors is None:
                    raise IndexError("a token is beyond those of the model")
                embeds[row, place] = vectors[-1 - int(tokens[row, place])].to(embeds)
            given["inputs_embeds"] = embeds
        return given

    def _called(
        self,
        ids: torch.Tensor,
        places: torch.Tensor,
        masks: Mask,
        wanted: int,
        given: Mapping[str, torch.Tensor] = _NOTHING_GIVEN,
    ) -> torch.Tensor:
        named = {} if "inputs_embeds" in given else {"input_ids": ids}
        output = self.call(
            **named,
            **given,
            attention_mask=masks,
            position_ids=places,
            past_key_values=self.store,
            use_cache=True,
            **({"logits_to_keep": wanted} if self._keeps_rows else {}),
        )
        return output.logits[:, -wanted:]


def _shapes(context: Mapping[str, torch.Tensor] | None) -> Any:
    """Return what contexts that can stand in one batch have in common."""
    return None if context is None else tuple(sorted((name, tuple(one.shape)) for name, one in context.items()))


_OURS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
)
_NOTHING = Feed(
    np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=bool)
)

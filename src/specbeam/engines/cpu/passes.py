"""Passes of the compiled forward: rows of all sessions one after the other, without padding."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float32

from specbeam.core.forest import Forest
from specbeam.engines.cpu.cache import CpuCache
from specbeam.engines.cpu.cache_steps import CacheArrays, extended
from specbeam.engines.cpu.decoder import CompiledDecoder, Rows
from specbeam.engines.kv.cache import Logits, told
from specbeam.engines.kv.masks import Masks
from specbeam.engines.kv.trie import BLOCK, Feed
from specbeam.errors import BadForest
from specbeam.measure.profiler import span
from specbeam.records import Needs, Scored

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedPasses:
    """What `padded.PaddedPasses` does; a session that is alone is served by one loop.

    Args:
        caches: all sessions of the model.
    """

    most = 1 << 30  # rows of a pass inside a loop: no limit of its own

    def __init__(self, model: "PreTrainedModel", decoder: CompiledDecoder, caches: list[CpuCache]) -> None:
        self.decoder = decoder
        self.caches = caches
        self.store = decoder.store()
        self.masks = Masks(model.config, "sdpa", model.dtype)
        self.windows = self.masks.looked_back(decoder.names)

    def cache(self, row: int, prompt: list[int]) -> CpuCache:
        return CpuCache(row, prompt, self.decoder.embedding.shape[1])

    takes_vectors = True

    def refuses(self, context: object) -> str:
        """Say why these passes cannot take a context; they take none."""
        return "the compiled forward takes no context besides tokens: HuggingFaceLM(model, engine='plain') does"

    def lacks(self, needs: Needs) -> str:
        """Say why these passes cannot give what is asked for: they can."""
        return ""

    def extend(self, caches: list[CpuCache], forests: Sequence[Forest]) -> list[Scored]:
        """Store what is pending, with the new nodes of these forests; return what was not handed out yet."""
        if len(caches) == 1 and caches[0].vectors is None and caches[0].early_layers is None:
            return [self._alone(caches[0], forests[0])]
        for cache, forest in zip(caches, forests, strict=True):
            if cache.half:
                _check_is_whole(cache, forest)
            cache.trie.enter(forest)
        if busy := [cache for cache in caches if cache.trie.waiting]:
            self.prefill(busy, [cache.trie.waiting for cache in busy])
        self.finish(caches)
        rows = [cache.answer() for cache in caches]
        with span("model"):
            logits = torch.from_numpy(self.decoder.logits(np.concatenate(rows)))
        each = logits.split([len(one) for one in rows])
        return [self._told(*one) for one in zip(caches, each, rows, strict=True)]

    def _told(self, cache: CpuCache, logits: Logits, outputs: Float32[np.ndarray, "nodes hidden"]) -> Scored:
        """Return what the parts of a session need of its rows."""
        return told(cache, logits, *([self._normed(outputs)] if cache.needs.states else []))

    def _normed(self, outputs: Float32[np.ndarray, "n hidden"]) -> torch.Tensor:
        return torch.from_numpy(self.decoder.normed(outputs))

    def _keep_prompt(self, cache: CpuCache, start: int, ahead: int) -> None:
        """Keep the hidden states of so many rows that stand before the first root, from a stored local node on."""
        if cache.needs.prompt and ahead:
            cache.prompt_rows.append(self._normed(cache.outputs[start : start + ahead]))

    def prefill(self, caches: list[CpuCache], counts: list[int]) -> None:
        """Store so many pending tokens of each cache."""
        whole = {cache: count for cache, count in zip(caches, counts, strict=True) if cache.early_layers is None}
        if whole:
            ahead = [(cache.trie.stored, min(cache.trie.ahead, count)) for cache, count in whole.items()]
            feeds = [cache.trie.feed(count) for cache, count in whole.items()]
            each = self._forward([*whole], feeds, slice(None))
            for cache, outputs, (start, before) in zip(whole, each, ahead, strict=True):
                cache.learn(outputs)
                self._keep_prompt(cache, start, before)
        self.begin({cache: count for cache, count in zip(caches, counts, strict=True) if cache not in whole})
        self.finish([cache for cache in caches if cache not in whole])

    def begin(self, counts: dict[CpuCache, int]) -> None:
        """Store so many pending tokens of each cache in the layers that are run ahead of the others."""
        for layers, caches in _by_layers(counts).items():
            ahead = [(cache.trie.stored, min(cache.trie.ahead, counts[cache])) for cache in caches]
            feeds = [cache.trie.feed(counts[cache]) for cache in caches]
            each = self._forward(caches, feeds, slice(layers))
            for cache, feed, rows, prompt in zip(caches, feeds, each, ahead, strict=True):
                cache.learn_early(feed, rows, prompt)

    def finish(self, caches: list[CpuCache]) -> None:
        """Let the other layers see what only the first ones have seen."""
        for layers, some in _by_layers([cache for cache in caches if cache.half]).items():
            feeds = [feed for cache in some for feed in cache.half]
            of_caches = [cache for cache in some for _ in cache.half]
            early = [cache.early[cache.trie.stored - cache.waiting_half : cache.trie.stored] for cache in some]
            each = self._forward(of_caches, feeds, slice(layers, None), np.concatenate(early))
            for cache in some:
                cache.learn(np.concatenate([one for one, of in zip(each, of_caches, strict=True) if of is cache]))
                for start, before in cache.half_prompt:
                    self._keep_prompt(cache, start, before)
                cache.half = []
                cache.half_prompt = []

    def extend_early(self, caches: list[CpuCache], forests: Sequence[Forest]) -> list[Scored]:
        """Return what the first layers alone make of the nodes that were not handed out yet, in the same slots."""
        for cache, forest in zip(caches, forests, strict=True):
            cache.trie.enter(forest)
        self.begin({cache: cache.trie.waiting for cache in caches if cache.trie.waiting})
        rows = [cache.answer_early() for cache in caches]
        logits = torch.from_numpy(self.decoder.logits(np.concatenate(rows)))
        return [Scored(one) for one in logits.split([len(one) for one in rows])]

    def _forward(
        self,
        caches: list[CpuCache],
        feeds: list[Feed],
        layers: slice,
        behind: Float32[np.ndarray, "n hidden"] | None = None,
    ) -> list[Float32[np.ndarray, "rows hidden"]]:
        """Run layers on what was fed to the caches. Returns what is behind them, feed by feed."""
        tries = [cache.trie for cache in caches]
        extent = -(-max(trie.extent for trie in tries) // BLOCK) * BLOCK
        self.store.reserve(len(self.caches), extent)
        starts = [*accumulate((len(feed) for feed in feeds), initial=0)]
        sessions = np.array([(cache.row, *ends) for cache, ends in zip(caches, pairwise(starts), strict=True)])
        tokens, positions, slots = (
            np.concatenate([getattr(feed, name) for feed in feeds]) for name in ("tokens", "positions", "slots")
        )
        rows = Rows(tokens, positions, slots, sessions, self.masks.flat(feeds, tries, extent))
        vectors = {
            start + place: cache.vectors[-1 - int(feed.tokens[place])].float().numpy()
            for cache, feed, start in zip(caches, feeds, starts, strict=False)
            if cache.vectors is not None
            for place in np.flatnonzero(feed.tokens < 0).tolist()
        }
        with span("model"):
            outputs = self.decoder.forward(rows, self.store, vectors, layers, behind)
        return [outputs[start:stop] for start, stop in pairwise(starts)]

    def _alone(self, cache: CpuCache, forest: Forest) -> Scored:
        first = cache.answered
        start = cache.trie.stored
        ahead = cache.trie.ahead
        with self.alone(cache, forest.size - cache.trie.known) as one, span("model"):
            logits = extended(one, forest.tokens, forest.parents, cache.answered)
        cache.answered = cache.trie.known
        self._keep_prompt(cache, start, ahead)
        return self._told(cache, torch.from_numpy(logits), cache.outputs[cache.trie.local[first:]])

    def alone(self, cache: CpuCache, fresh: int) -> AbstractContextManager[CacheArrays]:
        """A session for loops of its own, which may bring so many new nodes."""
        cache.make_room(fresh)
        self.store.reserve(len(self.caches), cache.trie.capacity)
        return self.decoder.alone(cache, self.store, self.windows)


def _check_is_whole(cache: CpuCache, forest: Forest) -> None:
    """Raise `BadForest` if a forest lacks a node that the first layers have seen."""
    known = cache.trie.known
    if forest.size < known or (forest.tokens[:known] != cache.trie.tokens[cache.trie.local]).any():
        raise BadForest(
            f"the first layers have seen {known} nodes, and the forest of {forest.size} does not begin with them; drafts of "
            "the target's own layers cannot be pruned: use early_layers(model, layers)"
        )


def _by_layers(caches: Iterable[CpuCache]) -> dict[int, list[CpuCache]]:
    """Return the caches by how many layers are run ahead of the others."""
    found: dict[int, list[CpuCache]] = {}
    for cache in caches:
        assert cache.early_layers is not None
        found.setdefault(cache.early_layers, []).append(cache)
    return found

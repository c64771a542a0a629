"""Passes of the compiled forward: rows of all sessions one after the other, without padding."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float32

from specbeam.clock import lap
from specbeam.core.forest import Forest
from specbeam.errors import BadForest
from specbeam.lm.compiled.decoder import CompiledDecoder, Rows
from specbeam.lm.compiled.lane import CompiledLane
from specbeam.lm.compiled.one_lane import OneLane, extended
from specbeam.lm.kv.lane import Logits, told
from specbeam.lm.kv.masks import Masks
from specbeam.lm.kv.trie import BLOCK, Feed
from specbeam.records import Needs, Scored

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedPasses:
    """What `padded.PaddedPasses` does; a session that is alone is served by one loop.

    Args:
        lanes: all sessions of the model.
    """

    most = 1 << 30  # rows of a pass inside a loop: no limit of its own

    def __init__(self, model: "PreTrainedModel", decoder: CompiledDecoder, lanes: list[CompiledLane]) -> None:
        self.decoder = decoder
        self.lanes = lanes
        self.store = decoder.store()
        self.masks = Masks(model.config, "sdpa", model.dtype)
        self.windows = self.masks.looked_back(decoder.names)

    def lane(self, row: int, prompt: list[int]) -> CompiledLane:
        return CompiledLane(row, prompt, self.decoder.embedding.shape[1])

    takes_vectors = True

    def refuses(self, context: object) -> str:
        """Say why these passes cannot take a context; they take none."""
        return "the compiled forward takes no context besides tokens: HuggingFaceLM(model, engine='plain') does"

    def lacks(self, needs: Needs) -> str:
        """Say why these passes cannot give what is asked for: they can."""
        return ""

    def extend(self, lanes: list[CompiledLane], forests: Sequence[Forest]) -> list[Scored]:
        """Store what is pending, with the new nodes of these forests; return what was not handed out yet."""
        if len(lanes) == 1 and lanes[0].vectors is None and lanes[0].early_layers is None:
            return [self._alone(lanes[0], forests[0])]
        for lane, forest in zip(lanes, forests, strict=True):
            if lane.half:
                _check_is_whole(lane, forest)
            lane.trie.enter(forest)
        if busy := [lane for lane in lanes if lane.trie.waiting]:
            self.prefill(busy, [lane.trie.waiting for lane in busy])
        self.finish(lanes)
        rows = [lane.answer() for lane in lanes]
        with lap("model"):
            logits = torch.from_numpy(self.decoder.logits(np.concatenate(rows)))
        each = logits.split([len(one) for one in rows])
        return [self._told(*one) for one in zip(lanes, each, rows, strict=True)]

    def _told(self, lane: CompiledLane, logits: Logits, outputs: Float32[np.ndarray, "nodes hidden"]) -> Scored:
        """Return what the parts of a session need of its rows."""
        return told(lane, logits, *([self._normed(outputs)] if lane.needs.states else []))

    def _normed(self, outputs: Float32[np.ndarray, "n hidden"]) -> torch.Tensor:
        return torch.from_numpy(self.decoder.normed(outputs))

    def _keep_prompt(self, lane: CompiledLane, start: int, ahead: int) -> None:
        """Keep the hidden states of so many rows that stand before the first root, from a stored local node on."""
        if lane.needs.prompt and ahead:
            lane.prompt_rows.append(self._normed(lane.outputs[start : start + ahead]))

    def prefill(self, lanes: list[CompiledLane], counts: list[int]) -> None:
        """Store so many pending tokens of each lane."""
        whole = {lane: count for lane, count in zip(lanes, counts, strict=True) if lane.early_layers is None}
        if whole:
            ahead = [(lane.trie.stored, min(lane.trie.ahead, count)) for lane, count in whole.items()]
            feeds = [lane.trie.feed(count) for lane, count in whole.items()]
            each = self._forward([*whole], feeds, slice(None))
            for lane, outputs, (start, before) in zip(whole, each, ahead, strict=True):
                lane.learn(outputs)
                self._keep_prompt(lane, start, before)
        self.begin({lane: count for lane, count in zip(lanes, counts, strict=True) if lane not in whole})
        self.finish([lane for lane in lanes if lane not in whole])

    def begin(self, counts: dict[CompiledLane, int]) -> None:
        """Store so many pending tokens of each lane in the layers that are run ahead of the others."""
        for layers, lanes in _by_layers(counts).items():
            ahead = [(lane.trie.stored, min(lane.trie.ahead, counts[lane])) for lane in lanes]
            feeds = [lane.trie.feed(counts[lane]) for lane in lanes]
            each = self._forward(lanes, feeds, slice(layers))
            for lane, feed, rows, prompt in zip(lanes, feeds, each, ahead, strict=True):
                lane.learn_early(feed, rows, prompt)

    def finish(self, lanes: list[CompiledLane]) -> None:
        """Let the other layers see what only the first ones have seen."""
        for layers, some in _by_layers([lane for lane in lanes if lane.half]).items():
            feeds = [feed for lane in some for feed in lane.half]
            of_lanes = [lane for lane in some for _ in lane.half]
            early = [lane.early[lane.trie.stored - lane.waiting_half : lane.trie.stored] for lane in some]
            each = self._forward(of_lanes, feeds, slice(layers, None), np.concatenate(early))
            for lane in some:
                lane.learn(np.concatenate([one for one, of in zip(each, of_lanes, strict=True) if of is lane]))
                for start, before in lane.half_prompt:
                    self._keep_prompt(lane, start, before)
                lane.half = []
                lane.half_prompt = []

    def extend_early(self, lanes: list[CompiledLane], forests: Sequence[Forest]) -> list[Scored]:
        """Return what the first layers alone make of the nodes that were not handed out yet, in the same slots."""
        for lane, forest in zip(lanes, forests, strict=True):
            lane.trie.enter(forest)
        self.begin({lane: lane.trie.waiting for lane in lanes if lane.trie.waiting})
        rows = [lane.answer_early() for lane in lanes]
        logits = torch.from_numpy(self.decoder.logits(np.concatenate(rows)))
        return [Scored(one) for one in logits.split([len(one) for one in rows])]

    def _forward(
        self,
        lanes: list[CompiledLane],
        feeds: list[Feed],
        layers: slice,
        behind: Float32[np.ndarray, "n hidden"] | None = None,
    ) -> list[Float32[np.ndarray, "rows hidden"]]:
        """Run layers on what was fed to the lanes. Returns what is behind them, feed by feed."""
        tries = [lane.trie for lane in lanes]
        extent = -(-max(trie.extent for trie in tries) // BLOCK) * BLOCK
        self.store.reserve(len(self.lanes), extent)
        starts = [*accumulate((len(feed) for feed in feeds), initial=0)]
        sessions = np.array([(lane.row, *ends) for lane, ends in zip(lanes, pairwise(starts), strict=True)])
        tokens, positions, slots = (
            np.concatenate([getattr(feed, name) for feed in feeds]) for name in ("tokens", "positions", "slots")
        )
        rows = Rows(tokens, positions, slots, sessions, self.masks.flat(feeds, tries, extent))
        vectors = {
            start + place: lane.vectors[-1 - int(feed.tokens[place])].float().numpy()
            for lane, feed, start in zip(lanes, feeds, starts, strict=False)
            if lane.vectors is not None
            for place in np.flatnonzero(feed.tokens < 0).tolist()
        }
        with lap("model"):
            outputs = self.decoder.forward(rows, self.store, vectors, layers, behind)
        return [outputs[start:stop] for start, stop in pairwise(starts)]

    def _alone(self, lane: CompiledLane, forest: Forest) -> Scored:
        first = lane.answered
        start = lane.trie.stored
        ahead = lane.trie.ahead
        with self.alone(lane, forest.size - lane.trie.known) as one, lap("model"):
            logits = extended(one, forest.tokens, forest.parents, lane.answered)
        lane.answered = lane.trie.known
        self._keep_prompt(lane, start, ahead)
        return self._told(lane, torch.from_numpy(logits), lane.outputs[lane.trie.local[first:]])

    def alone(self, lane: CompiledLane, fresh: int) -> AbstractContextManager[OneLane]:
        """A session for loops of its own, which may bring so many new nodes."""
        lane.make_room(fresh)
        self.store.reserve(len(self.lanes), lane.trie.capacity)
        return self.decoder.alone(lane, self.store, self.windows)


def _check_is_whole(lane: CompiledLane, forest: Forest) -> None:
    """Raise `BadForest` if a forest lacks a node that the first layers have seen."""
    known = lane.trie.known
    if forest.size < known or (forest.tokens[:known] != lane.trie.tokens[lane.trie.local]).any():
        raise BadForest(
            f"the first layers have seen {known} nodes, and the forest of {forest.size} does not begin with them; drafts of "
            "the target's own layers cannot be pruned: use early_layers(model, layers)"
        )


def _by_layers(lanes: Iterable[CompiledLane]) -> dict[int, list[CompiledLane]]:
    """Return the lanes by how many layers are run ahead of the others."""
    found: dict[int, list[CompiledLane]] = {}
    for lane in lanes:
        assert lane.early_layers is not None
        found.setdefault(lane.early_layers, []).append(lane)
    return found

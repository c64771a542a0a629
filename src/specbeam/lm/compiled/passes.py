"""Passes of the compiled forward: rows of all sessions one after the other, without padding."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float32

from specbeam.clock import lap
from specbeam.core.forest import Forest
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
        self.decoder, self.lanes, self.store = decoder, lanes, decoder.store()
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
        if len(lanes) == 1 and lanes[0].vectors is None:
            return [self._alone(lanes[0], forests[0])]
        for lane, forest in zip(lanes, forests, strict=True):
            lane.trie.enter(forest)
        if busy := [lane for lane in lanes if lane.trie.waiting]:
            self.prefill(busy, [lane.trie.waiting for lane in busy])
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
        ahead = [(lane.trie.stored, min(lane.trie.ahead, count)) for lane, count in zip(lanes, counts, strict=True)]
        feeds = [lane.trie.feed(count) for lane, count in zip(lanes, counts, strict=True)]
        for lane, outputs, (start, before) in zip(lanes, self._forward(lanes, feeds), ahead, strict=True):
            lane.learn(outputs)
            self._keep_prompt(lane, start, before)

    def _forward(self, lanes: list[CompiledLane], feeds: list[Feed]) -> list[Float32[np.ndarray, "rows hidden"]]:
        """Run the layers on what was fed to the lanes. Returns what is behind them, feed by feed."""
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
            outputs = self.decoder.forward(rows, self.store, vectors)
        return [outputs[start:stop] for start, stop in pairwise(starts)]

    def _alone(self, lane: CompiledLane, forest: Forest) -> Scored:
        first, start, ahead = lane.answered, lane.trie.stored, lane.trie.ahead
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

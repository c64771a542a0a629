"""Passes of a model that takes batches: sessions side by side, padded to the longest."""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.clock import lap
from specbeam.core.forest import Forest
from specbeam.lm.kv.lane import Lane, Logits, Nodes
from specbeam.lm.kv.masks import Mask, Masks
from specbeam.lm.kv.rows import picked
from specbeam.lm.kv.store import KVStore, Place
from specbeam.lm.kv.trie import BLOCK, WASTE, Feed
from specbeam.lm.padded.captured import WIDEST, CapturedForward, Forward
from specbeam.lm.padded.lean import LeanDecoder
from specbeam.lm.padded.sizes import up
from specbeam.lm.padded.torch_compiled import torch_compiled

if TYPE_CHECKING:
    from transformers import PreTrainedModel


FEW = 16  # lanes that may go along for the sake of one


class PaddedPasses:
    """Of the model itself, or of its lean forward.

    Args:
        compile: by what torch makes of the model's forward (`torch_compiled`).
        lanes: all sessions of the model; those that a pass leaves out may stand between those that it takes in.
    """

    def __init__(
        self, model: "PreTrainedModel", lean: LeanDecoder | None, lanes: list[Lane], compile: bool = False
    ) -> None:
        self.model, self.lean, self.lanes = model, lean, lanes
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

    def lane(self, row: int, prompt: list[int]) -> Lane:
        return Lane(row, prompt)

    def extend(self, lanes: list[Lane], forests: Sequence[Forest]) -> list[Logits]:
        """Store what is pending, with the new nodes of these forests; logits of what was not handed out yet."""
        asked = [(lane, lane.enter(forest)) for lane, forest in zip(lanes, forests, strict=True)]
        if busy := [(lane, nodes) for lane, nodes in asked if lane.trie.waiting]:
            wanted = {lane.row: nodes - lane.trie.stored for lane, nodes in busy}
            feeds = {lane.row: lane.trie.feed(lane.trie.waiting) for lane, _ in busy}
            found = self._forward(feeds, wanted)
            for lane, nodes in busy:
                lane.learn(nodes, found[lane.row])
        return [lane.answer() for lane in lanes]

    def prefill(self, lanes: list[Lane], counts: list[int]) -> None:
        """Store so many pending tokens of each lane, whose logits nobody asks for."""
        by_row = {lane.row: lane.trie.feed(count) for lane, count in zip(lanes, counts, strict=True)}
        self._forward(by_row, dict.fromkeys(by_row, np.zeros(0, dtype=np.int64)))

    @torch.inference_mode()
    def _forward(self, by_row: dict[int, Feed], wanted: dict[int, Nodes]) -> dict[int, Logits]:
        """One pass over the lanes that have a feed, and those between them where these are few: lanes side by side are read
        in place. The logits of the `wanted` places of each feed.
        """
        rows: Sequence[int] = range(min(by_row), max(by_row) + 1)
        width = max(len(feed) for feed in by_row.values())
        extent = -(-max(self.lanes[row].trie.extent for row in by_row) // BLOCK)
        last = max(len(feed) - int(wanted[row].min(initial=len(feed) - 1)) for row, feed in by_row.items())
        every, sparse = range(up(rows[-1] + 1)), len(rows) > 2 * len(by_row)
        run: Forward = self._called
        if self.captured is not None and width <= WIDEST and len(every) <= max(FEW, 2 * len(by_row)):
            run, rows, width, extent, sparse = self.captured, every, up(width), up(extent), False
            last = min(up(last), width)
        elif sparse:
            rows = sorted(by_row)
        inputs, masks = self._laid_out(rows, by_row, width, extent * BLOCK)
        slots = torch.from_numpy(inputs[2]).to(self.device)
        which = torch.tensor(rows, device=self.device) if sparse else slice(rows[0], rows[-1] + 1)
        self.store.reserve(max(len(self.lanes), rows[-1] + 1), extent * BLOCK)
        self.store.place = Place(which, slots, extent * BLOCK)
        with lap("model"):
            logits = self._logits(inputs, masks, last, run)
            if self.captured is not None:  # laws are made on the host
                logits, rows = logits[[rows.index(row) for row in by_row]].float().cpu(), [*by_row]
        return {row: picked(logits[rows.index(row)], wanted[row] + last - len(feed)) for row, feed in by_row.items()}

    def _laid_out(
        self, rows: Sequence[int], by_row: dict[int, Feed], width: int, extent: int
    ) -> tuple[Int64[np.ndarray, "3 batch width"], Mask]:
        """Tokens, positions and slots, aligned to the right, and the masks."""
        feeds, some = [by_row.get(row, _NOTHING) for row in rows], next(iter(by_row))
        tries = [self.lanes[row if row in by_row else some].trie for row in rows]  # what has no feed is not looked at
        inputs = np.zeros((3, len(rows), width), dtype=np.int64)
        inputs[2] = WASTE
        for one, feed in enumerate(feeds):
            if len(feed):
                inputs[:, one, -len(feed) :] = feed.tokens, feed.positions, feed.slots
        return inputs, self.masks.build(feeds, tries, width, extent, self.device, additive=self.lean is not None)

    def _logits(
        self, inputs: Int64[np.ndarray, "3 batch width"], masks: Mask, wanted: int, run: Forward
    ) -> Float[torch.Tensor, "batch wanted vocab"]:
        ids, places, _ = torch.from_numpy(inputs).to(self.device)
        if self.lean is not None:
            real = torch.from_numpy(np.flatnonzero(inputs[2])) if (inputs[2] == WASTE).any() else None
            return self.lean.forward(ids, places, masks, self.store, wanted, real)
        return run(ids, places, masks, wanted)

    def _called(self, ids: torch.Tensor, places: torch.Tensor, masks: Mask, wanted: int) -> torch.Tensor:
        output = self.call(
            input_ids=ids,
            attention_mask=masks,
            position_ids=places,
            past_key_values=self.store,
            use_cache=True,
            **({"logits_to_keep": wanted} if self._keeps_rows else {}),
        )
        return output.logits[:, -wanted:]


_NOTHING = Feed(
    np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=bool)
)

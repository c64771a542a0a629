"""A model's own forward on a GPU as captured graphs: kernels are started one by one only once for each size of a pass."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specbeam.lm.attention import Mask
from specbeam.lm.kv_store import KVStore

Forward = Callable[[Tensor, Tensor, Mask, int], Tensor]  # tokens, positions, masks, how many rows are wanted
WIDEST = 64  # rows of a session; longer passes are bound by arithmetic


@dataclass(frozen=True, eq=False)
class Captured:
    """A graph, what it reads, and what it writes."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    masks: Mask
    logits: Tensor

    def replayed(self, tokens: Tensor, positions: Tensor, slots: Tensor, masks: Mask) -> Tensor:
        """The logits are valid until the next pass."""
        own, given = _flat(self.masks), _flat(masks)
        for goal, source in zip(
            (self.tokens, self.positions, self.slots, *own), (tokens, positions, slots, *given), strict=True
        ):
            goal.copy_(source)
        self.graph.replay()
        return self.logits


class CapturedForward:
    """Runs a forward; a size that is met for the second time is captured.

    Models whose forward cannot be captured, as it looks at numbers on the host, are run as they are.
    """

    def __init__(self, forward: Forward, store: KVStore) -> None:
        self.forward, self.store = forward, store
        self._known: dict[Any, Captured | None] = {}
        self._sizes, self._fails = (0, 0), False
        self._pool: Any = None

    def __call__(self, tokens: Tensor, positions: Tensor, masks: Mask, wanted: int) -> Tensor:
        place, sizes = self.store.place, (self.store.lanes, self.store.slots)
        if sizes != self._sizes:  # the store has moved: graphs write where nobody looks any more
            self._known.clear()
            self._sizes, self._pool = sizes, None
        key = tokens.shape, place.extent, wanted
        if self._fails or key not in self._known:
            self._known[key] = None
            return self.forward(tokens, positions, masks, wanted)
        known = self._known[key]
        if known is None:
            known = self._captured(tokens, positions, masks, wanted)
            if known is None:
                return self.forward(tokens, positions, masks, wanted)
            self._known[key] = known
        return known.replayed(tokens, positions, place.slots, masks)

    def _captured(self, tokens: Tensor, positions: Tensor, masks: Mask, wanted: int) -> Captured | None:
        place = self.store.place
        tokens, positions, slots = tokens.clone(), positions.clone(), place.slots.clone()
        masks = {kind: one.clone() for kind, one in masks.items()} if isinstance(masks, dict) else masks.clone()
        graph, self._pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        self.store.place = replace(place, slots=slots)
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = self.forward(tokens, positions, masks, wanted)
        except RuntimeError:
            self._fails = True
            return None
        finally:
            self.store.place = place
        return Captured(graph, tokens, positions, slots, masks, logits)


def _flat(masks: Mask) -> list[Tensor]:
    return list(masks.values()) if isinstance(masks, dict) else [masks]

"""A model's own forward on a GPU as captured graphs: kernels are started one by one only once for each size of a pass."""

import gc
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from specbeam.engines.kv.masks import Mask
from specbeam.engines.kv.store import KVStore

_T = TypeVar("_T")
Forward = Callable[[Tensor, Tensor, Mask, int], Tensor]  # tokens, positions, masks, how many rows are wanted
WIDEST = 64  # rows of a session; longer passes are bound by arithmetic
MOST_GRAPHS = 64


class Capture:
    """Makes graphs for one device, which share their memory: no two of them may run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._pool: Any = None

    def clear(self) -> None:
        """All graphs are gone, and their memory went with the last."""
        self._pool = None

    def __call__(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """A graph of what was done, and the result that it writes; None if it cannot be captured.

        No garbage is collected meanwhile: graphs of a model that is gone would be freed, which ends a capture.
        """
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream(self.stream.device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            with (
                _no_garbage_collected(),
                torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                return graph, work()
        except RuntimeError:  # out of memory, or it looked at a number
            return None
        finally:
            torch.cuda.set_stream(before)  # a capture that failed may leave its own behind


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class OfSecondTimes(Generic[_T]):
    """What is made when its key is met for the second time; what was not used for longest makes room."""

    def __init__(self) -> None:
        self.made: dict[Hashable, _T | None] = {}  # the one that was used last stands last

    def clear(self) -> None:
        self.made.clear()

    def get(self, key: Hashable, make: Callable[[], _T | None]) -> _T | None:
        """None at first, and where it cannot be made."""
        is_new = key not in self.made
        known = self.made.pop(key, None)
        if known is None and not is_new:
            known = make()
        self.made[key] = known
        if len(self.made) > MOST_GRAPHS:
            del self.made[next(iter(self.made))]
        return known


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
        own = self.tokens, self.positions, self.slots, *_flat(self.masks)
        for goal, source in zip(own, (tokens, positions, slots, *_flat(masks)), strict=True):
            goal.copy_(source)
        self.graph.replay()
        return self.logits


class CapturedForward:
    """Runs a forward; a size that is met for the second time is captured.

    Models whose forward cannot be captured, as it looks at numbers on the host, are run as they are; so are those on several
    devices, and all under autocast.

    Args:
        weights: all that the forward reads besides; kept, for graphs know addresses alone.
    """

    def __init__(self, forward: Forward, store: KVStore, weights: Sequence[Tensor]) -> None:
        self.forward = forward
        self.store = store
        self._weights = weights
        devices = {one.device for one in weights}
        self._capture = Capture(next(iter(devices))) if len(devices) == 1 else None
        self.graphs = OfSecondTimes[Captured]()
        self._sizes = (0, 0)
        self._fails = self._capture is None

    def __call__(self, tokens: Tensor, positions: Tensor, masks: Mask, wanted: int) -> Tensor:
        place = self.store.place
        sizes = (self.store.caches, self.store.slots)
        if self._fails or torch.is_autocast_enabled():
            return self.forward(tokens, positions, masks, wanted)
        if sizes != self._sizes:
            self._clear()
            self._sizes = sizes
        key = tokens.shape, place.extent, wanted
        known = self.graphs.get(key, lambda: self._captured(tokens, positions, masks, wanted))
        if known is None:
            return self.forward(tokens, positions, masks, wanted)
        return known.replayed(tokens, positions, place.slots, masks)

    def _clear(self) -> None:
        """The store has moved: graphs write where nobody looks any more."""
        self.graphs.clear()
        if self._capture is not None:
            self._capture.clear()

    def _captured(self, tokens: Tensor, positions: Tensor, masks: Mask, wanted: int) -> Captured | None:
        place = self.store.place
        capture = self._capture
        assert capture is not None
        tokens = tokens.clone()
        positions = positions.clone()
        slots = place.slots.clone()
        masks = {kind: one.clone() for kind, one in masks.items()} if isinstance(masks, dict) else masks.clone()
        self.store.place = replace(place, slots=slots)
        try:
            found = capture(lambda: self.forward(tokens, positions, masks, wanted))
        finally:
            self.store.place = place
        self._fails = found is None
        if self._fails:
            warnings.warn(
                "the model's forward cannot be captured as a CUDA graph (it looks at numbers on the host, or there is no "
                "memory left): its kernels are started one by one from now on, which takes longer",
                stacklevel=2,
            )
        return None if found is None else Captured(found[0], tokens, positions, slots, masks, found[1])


def _flat(masks: Mask) -> list[Tensor]:
    return list(masks.values()) if isinstance(masks, dict) else [masks]

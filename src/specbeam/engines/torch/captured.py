"""transformers' forward on a GPU as captured CUDA graphs, so that one launch starts all kernels of a pass."""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from specbeam.core.errors import warn
from specbeam.engines.kv.masks import Mask

if TYPE_CHECKING:
    from specbeam.engines.kv.torch_store import KVStore

_T = TypeVar("_T")
# Takes tokens, positions, masks, and a number of last rows; returns the logits of these rows.
Forward = Callable[[Tensor, Tensor, Mask, int], Tensor]
WIDEST = 64  # maximum number of rows of a session in a captured pass; longer passes are compute-bound
MOST_GRAPHS = 64  # maximum number of graphs of one forward; the least recently used is dropped


class Capture:
    """Captures graphs on one device. The graphs share their memory, so no two of them may run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._pool: Any = None

    def clear(self) -> None:
        """Drop the memory pool. Call it after deleting all graphs, so that its memory is freed."""
        self._pool = None

    def __call__(self, work: Callable[[], _T]) -> tuple[torch.cuda.CUDAGraph, _T] | None:
        """Capture the kernels of `work`. Return the graph and the tensors that it writes; None if capturing fails.

        The garbage collector is off meanwhile: the capture would fail if it freed the graphs of a deleted model.
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
        except RuntimeError:  # out of memory, or `work` reads a number on the host
            return None
        finally:
            torch.cuda.set_stream(before)  # a failed capture may leave its stream current


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class SecondUseCache(Generic[_T]):
    """An LRU cache of `MOST_GRAPHS` keys whose values are made at the second use of their key."""

    def __init__(self) -> None:
        self.made: dict[Hashable, _T | None] = {}  # ordered by last use

    def clear(self) -> None:
        self.made.clear()

    def get(self, key: Hashable, make: Callable[[], _T | None]) -> _T | None:
        """Return the value of a key; None at the first use of the key, or if `make` returns None."""
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
    """A captured graph, the tensors that it reads, and the logits that it writes."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    masks: Mask
    logits: Tensor

    def replay(self, tokens: Tensor, positions: Tensor, slots: Tensor, masks: Mask) -> Tensor:
        """Run the graph on these inputs, and return its logits, which are valid until the next pass."""
        inputs = (self.tokens, self.positions, self.slots, *_as_list(self.masks))
        for goal, source in zip(inputs, (tokens, positions, slots, *_as_list(masks)), strict=True):
            goal.copy_(source)
        self.graph.replay()
        return self.logits


class CapturedForward:
    """A forward that captures each size of a pass as a graph at its second use.

    Passes run without graphs under autocast, for models on several devices, and for models whose forward cannot be captured
    because it reads numbers on the host.

    Args:
        weights: all weights and buffers that the forward reads. They are referenced here because graphs hold only
            addresses.
    """

    def __init__(self, forward: Forward, store: "KVStore", weights: Sequence[Tensor]) -> None:
        self.forward = forward
        self.store = store
        self._weights = weights
        devices = {weight.device for weight in weights}
        self._capture = Capture(next(iter(devices))) if len(devices) == 1 else None
        self.graphs = SecondUseCache[Captured]()
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
        known = self.graphs.get(key, lambda: self._captured_pass(tokens, positions, masks, wanted))
        if known is None:
            return self.forward(tokens, positions, masks, wanted)
        return known.replay(tokens, positions, place.slots, masks)

    def _clear(self) -> None:
        """Delete all graphs after the store has replaced its buffers, because they would write into the old ones."""
        self.graphs.clear()
        if self._capture is not None:
            self._capture.clear()

    def _captured_pass(self, tokens: Tensor, positions: Tensor, masks: Mask, wanted: int) -> Captured | None:
        """Return a graph of a pass of this size; None, after a warning, if the forward cannot be captured."""
        place = self.store.place
        capture = self._capture
        assert capture is not None
        tokens = tokens.clone()
        positions = positions.clone()
        slots = place.slots.clone()
        masks = {kind: mask.clone() for kind, mask in masks.items()} if isinstance(masks, dict) else masks.clone()
        self.store.place = replace(place, slots=slots)
        try:
            made = capture(lambda: self.forward(tokens, positions, masks, wanted))
        finally:
            self.store.place = place
        self._fails = made is None
        if self._fails:
            warn(
                "the model's forward cannot be captured as a CUDA graph (it reads numbers on the host, or there is no "
                "memory left); from now on its kernels are launched one by one, which is slower",
            )
        return None if made is None else Captured(made[0], tokens, positions, slots, masks, made[1])


def _as_list(masks: Mask) -> list[Tensor]:
    return list(masks.values()) if isinstance(masks, dict) else [masks]

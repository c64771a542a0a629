"""The KV store: keys and values of many sessions in preallocated buffers that passes write in place.

This file holds the store of the compiled forward; that of other engines is a transformers cache (kv/torch_store.py).

The dimension `caches` of a buffer is the rows of the store. A session's cache is in one row.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from specbeam.engines.arrays import AnyArray, Integers, PrefixRows

PAGE = 4096  # minimum bytes of a memory page


@dataclass(frozen=True, eq=False)
class Place:
    """The rows and slots of the store that a pass writes, and the slots that it reads."""

    caches: slice | Int64[Tensor, " batch"]  # rows of the store: a slice is read in place, indices are copied
    slots: Int64[Tensor, "batch query"]
    extent: int  # the pass reads the first `extent` slots


class RowStore(ABC):
    """Rows and slots of a store that grows. Subclasses hold the buffers.

    Args:
        layers: number of layers of the model; further layers may be added after these.

    Attributes:
        caches: number of rows.
        slots: number of slots of each row.
    """

    def __init__(self, layers: int) -> None:
        self.caches = 1
        self.slots = 64
        self.model_layers = layers

    def reserve(self, caches: int, slots: int) -> None:
        """Make room for rows and slots; a dimension that is too small at least doubles."""
        caches = self.caches if caches <= self.caches else max(caches, 2 * self.caches)
        slots = self.slots if slots <= self.slots else max(slots, 2 * self.slots)
        if (caches, slots) == (self.caches, self.slots):
            return
        with torch.inference_mode():
            self.grow(caches, slots)  # an out-of-memory error changes nothing
        self.caches = caches
        self.slots = slots

    def reserve_row(self, row: int, slots: int) -> None:
        """Make room for slots in one row of the store."""
        self.reserve(row + 1, slots)

    @abstractmethod
    def touch(self) -> None:
        """Write to each page of the buffers, so that their memory is allocated now instead of during decoding."""

    @abstractmethod
    def grow(self, caches: int, slots: int) -> None:
        """Replace the buffers by larger ones with the same contents."""

    @abstractmethod
    def write_prefix(self, layer: int, cache: int, keys: PrefixRows, values: PrefixRows) -> None:
        """Write rows of a layer into the slots after the waste slot of one row of the store."""

    @abstractmethod
    def take(self, cache: int, slots: Integers) -> list[Any]:
        """Return a copy of the keys and values in some slots of one row, in all layers of the model, for `put`."""

    @abstractmethod
    def put(self, cache: int, slots: Integers, taken: list[Any]) -> None:
        """Write keys and values from `take` into the same number of slots of one row, which must have room."""

    @abstractmethod
    def move_cache(self, source: int, goal: int, extent: int) -> None:
        """Copy the first `extent` slots of one row of the store to another row."""

    @abstractmethod
    def clear_cache(self, cache: int) -> None:
        """Write zeros to one row: masked slots enter products, and a NaN of another text would spread."""

    @abstractmethod
    def copy_slots(self, source: int, slots: Integers, goal: int, goal_slots: Integers) -> None:
        """Copy some slots of one row of the store to slots of the same or another row, which must have room."""


def panel_buffers(
    where: tuple[int, int, int], slots: int, size: int, width: int, words: np.dtype
) -> tuple[AnyArray, AnyArray]:
    """Return zero buffers for the keys and values of compiled layers.

    Args:
        where: layers, rows and heads.
        size: size of a head.
        width: slots of a panel; the columns of values are padded to a multiple of it.

    Returns keys, words[*where, panels, size, width], and values, words[*where, slots, padded size].
    """
    panels = -(-slots // width)
    keys = np.zeros((*where, panels, size, width), dtype=words)
    values = np.zeros((*where, panels * width, -(-size // width) * width), dtype=words)
    return keys, values


def in_words(numbers: Float[Tensor, "..."], words: np.dtype) -> AnyArray:
    """Return numbers as float32, or as the bits of the nearest bfloat16 numbers if `words` is uint16."""
    if words == np.float32:
        return numbers.detach().float().numpy()
    return numbers.detach().to(torch.bfloat16).view(torch.int16).numpy().view(words)


class PanelStore(RowStore):
    """A store for the compiled forward, which writes the buffers itself.

    Each buffer holds all layers. Keys are in panels of `width` neighbouring slots, whose scores are computed together
    in vector registers.

    Args:
        size: size of a head.
        width: slots of a panel; the columns of values are padded with zeros to a multiple of it.
        words: dtype of the buffers: float32, or uint16 for the bits of bfloat16 numbers.

    Attributes:
        more_layers: number of layers after the model's; see `add_layer`.
        keys_by_panel: words[layers, caches, heads, panels, size, slots of a panel].
        values_by_slot: words[layers, caches, heads, slots, padded size].
    """

    def __init__(self, layers: int, heads: int, size: int, width: int, words: Any = np.float32) -> None:
        super().__init__(layers)
        self.words = np.dtype(words)
        self.heads = heads
        self.size = size
        self.columns = width
        self.more_layers = 0
        self._allocate(self.caches, self.slots)

    def add_layer(self) -> int:
        """Add a layer to the store, and return its index."""
        self.more_layers += 1
        self.grow(self.caches, self.slots)
        return self.model_layers + self.more_layers - 1

    def _allocate(self, caches: int, slots: int) -> None:
        where = (self.model_layers + self.more_layers, caches, self.heads)
        self.keys_by_panel, self.values_by_slot = panel_buffers(where, slots, self.size, self.columns, self.words)

    def touch(self) -> None:
        for buffer in (self.keys_by_panel, self.values_by_slot):
            buffer.reshape(-1)[:: PAGE // buffer.itemsize] += 0

    def grow(self, caches: int, slots: int) -> None:
        before = self.keys_by_panel, self.values_by_slot
        self._allocate(caches, slots)
        for old, new in zip(before, (self.keys_by_panel, self.values_by_slot), strict=True):
            new[: len(old), : old.shape[1], :, : old.shape[3]] = old

    def write_prefix(
        self,
        layer: int,
        cache: int,
        keys: PrefixRows,
        values: PrefixRows,
    ) -> None:
        slots = np.arange(1, 1 + keys.shape[1])
        by_slot = in_words(keys, self.words).transpose(1, 0, 2)
        self.keys_by_panel[layer, cache][:, slots // self.columns, :, slots % self.columns] = by_slot
        self.values_by_slot[layer, cache][:, slots, : self.size] = in_words(values, self.words)

    def take(self, cache: int, slots: Integers) -> list[Any]:
        return self._taken(cache, slots, self.model_layers)

    def put(self, cache: int, slots: Integers, taken: list[Any]) -> None:
        self._write(cache, slots, taken, self.model_layers)

    def copy_slots(self, source: int, slots: Integers, goal: int, goal_slots: Integers) -> None:
        layers = len(self.keys_by_panel)
        self._write(goal, goal_slots, self._taken(source, slots, layers), layers)

    def _taken(self, cache: int, slots: Integers, layers: int) -> list[Any]:
        """Return a copy of the keys and values in some slots of one row, in the first `layers` layers."""
        by_panel = self.keys_by_panel[:layers, cache]
        by_slot = self.values_by_slot[:layers, cache]
        if not _are_neighbours(slots):
            panels, columns = divmod(slots, self.columns)
            return [np.moveaxis(by_panel[:, :, panels, :, columns], 0, -1).copy(), by_slot[:, :, slots]]
        keys = np.empty((*by_panel.shape[:2], self.size, len(slots)), dtype=self.words)
        for panel, span, part in self._panels_of(slots):
            keys[..., part] = by_panel[:, :, panel, :, span]
        return [keys, by_slot[:, :, slots[0] : slots[-1] + 1].copy()]

    def _write(self, cache: int, slots: Integers, taken: list[Any], layers: int) -> None:
        """Write keys and values from `_taken` into slots of one row."""
        by_panel = self.keys_by_panel[:layers, cache]
        by_slot = self.values_by_slot[:layers, cache]
        keys, values = taken
        if not _are_neighbours(slots):
            panels, columns = divmod(slots, self.columns)
            by_panel[:, :, panels, :, columns] = np.moveaxis(keys, -1, 0)
            by_slot[:, :, slots] = values
            return
        for panel, span, part in self._panels_of(slots):
            by_panel[:, :, panel, :, span] = keys[..., part]
        by_slot[:, :, slots[0] : slots[-1] + 1] = values

    def _panels_of(self, slots: Integers) -> Iterator[tuple[int, slice, slice]]:
        """Yield, for neighbouring slots, the index of each panel, its columns, and their part of the slots.

        Slices are copied several times faster than index arrays.
        """
        first = int(slots[0])
        stop = int(slots[-1]) + 1
        for panel in range(first // self.columns, -(-stop // self.columns)):
            start = max(first, panel * self.columns)
            end = min(stop, (panel + 1) * self.columns)
            yield (
                panel,
                slice(start - panel * self.columns, end - panel * self.columns),
                slice(start - first, end - first),
            )

    def move_cache(self, source: int, goal: int, extent: int) -> None:
        panels = -(-extent // self.columns)
        for buffer, parts in ((self.keys_by_panel, panels), (self.values_by_slot, panels * self.columns)):
            buffer[:, goal, :, :parts] = buffer[:, source, :, :parts]

    def clear_cache(self, cache: int) -> None:
        self.keys_by_panel[:, cache] = 0
        self.values_by_slot[:, cache] = 0


def _are_neighbours(slots: Integers) -> bool:
    return len(slots) > 0 and bool((np.diff(slots) == 1).all())

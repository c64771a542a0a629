"""The KV store: keys and values of many sessions in preallocated buffers that passes write in place.

The dimension `caches` of a buffer is the rows of the store. A session's cache is in one row, which several sessions may
share.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specbeam.engines.arrays import AnyArray, Integers, IntegerTensor, PrefixRows

PAGE = 4096  # minimum bytes of a memory page


@dataclass(frozen=True, eq=False)
class Place:
    """The rows and slots of the store that a pass writes, and the slots that it reads."""

    caches: slice | Int64[Tensor, " batch"]  # rows of the store: a slice is read in place, indices are copied
    slots: Int64[Tensor, "batch query"]
    extent: int  # the pass reads the first `extent` slots


class StoreLayer(CacheLayerMixin):
    """The buffers of one layer, [caches, heads, slots, head size], as a transformers cache layer.

    `update` writes the keys and values of a pass, and returns views of all slots that the pass reads. The views are valid
    until the next pass or until the store grows.
    """

    is_sliding = False  # the cache holds all tokens; the mask limits attention to the window

    def __init__(self, store: "KVStore") -> None:
        super().__init__()
        self.store = store

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype = key_states.dtype
        self.device = key_states.device
        caches = self.store.caches
        slots = self.store.slots
        # Zeros instead of `empty`: masked slots enter products, and a NaN in them would spread.
        self.keys = key_states.new_zeros(caches, key_states.shape[1], slots, key_states.shape[3])
        self.values = value_states.new_zeros(caches, value_states.shape[1], slots, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self.store.place
        if isinstance(place.caches, Tensor):
            return self._update_single(key_states, value_states, place.caches, place)
        keys = self.keys[place.caches]
        values = self.values[place.caches]
        if key_states.shape[0] == 1:
            keys.index_copy_(2, place.slots[0], key_states)
            values.index_copy_(2, place.slots[0], value_states)
        else:
            batch = torch.arange(key_states.shape[0], device=key_states.device)[:, None]
            keys[batch, :, place.slots] = key_states.transpose(1, 2)
            values[batch, :, place.slots] = value_states.transpose(1, 2)
        return keys[:, :, : place.extent], values[:, :, : place.extent]

    def _update_single(
        self, key_states: Tensor, value_states: Tensor, caches: Int64[Tensor, " batch"], place: Place
    ) -> tuple[Tensor, Tensor]:
        self.keys[caches[:, None], :, place.slots] = key_states.transpose(1, 2)
        self.values[caches[:, None], :, place.slots] = value_states.transpose(1, 2)
        return self.keys[caches, :, : place.extent], self.values[caches, :, : place.extent]

    def write_prefix(self, cache: int, keys: PrefixRows, values: PrefixRows) -> None:
        """Write rows into the slots after the waste slot of one row of the store."""
        if not self.is_initialized:
            self.lazy_initialization(keys[None], values[None])
        place = slice(1, 1 + keys.shape[1])
        self.keys[cache, :, place] = keys
        self.values[cache, :, place] = values

    def grow(self, caches: int, slots: int) -> None:
        if self.is_initialized:
            self.keys, self.values = (_larger(buffer, caches, slots) for buffer in (self.keys, self.values))

    # transformers derives masks and positions from these. Passes state both, so these values do not matter.
    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.place.extent, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name before transformers 5.16


class KVStore(Cache):
    """The buffers of all layers, as a transformers cache; `place` holds the rows and slots of the current pass."""

    def __init__(self, layers: int) -> None:
        self.caches = 1
        self.slots = 64
        self.place = Place(slice(0, 1), torch.zeros(1, 0, dtype=torch.long), 0)
        self.model_layers = layers  # further layers may be added after these
        super().__init__(layers=[StoreLayer(self) for _ in range(layers)])

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

    def touch(self) -> None:
        """Write to each page of the buffers, so that their memory is allocated now instead of during decoding.

        Torch buffers are written when they are created, so this does nothing.
        """

    def grow(self, caches: int, slots: int) -> None:
        """Replace the buffers by larger ones with the same contents."""
        for layer in self.layers:
            layer.grow(caches, slots)

    @torch.inference_mode()
    def write_prefix(
        self,
        layer: int,
        cache: int,
        keys: PrefixRows,
        values: PrefixRows,
    ) -> None:
        """Write rows of a layer into the slots after the waste slot of one row of the store."""
        self.layers[layer].write_prefix(cache, keys, values)

    @torch.inference_mode()
    def take(self, cache: int, slots: Integers) -> list[Any]:
        """Return a copy of the keys and values in some slots of one row, in all layers of the model, for `put`."""
        which = torch.from_numpy(slots)
        return [buffer[cache, :, which.to(buffer.device)] for buffer in self._model_buffers()]

    @torch.inference_mode()
    def put(self, cache: int, slots: Integers, taken: list[Any]) -> None:
        """Write keys and values from `take` into the same number of slots of one row, which must have room."""
        which = torch.from_numpy(slots)
        for buffer, part in zip(self._model_buffers(), taken, strict=True):
            buffer[cache, :, which.to(buffer.device)] = part

    def _model_buffers(self) -> list[Tensor]:
        return self._buffers()[: 2 * self.model_layers]

    def _buffers(self) -> list[Tensor]:
        """Return the buffers of keys and values of each layer that has been written."""
        known = [layer for layer in self.layers if layer.is_initialized]
        return [buffer for layer in known for buffer in (layer.keys, layer.values)]

    @torch.inference_mode()
    def move_cache(self, source: int, goal: int, extent: int) -> None:
        """Copy the first `extent` slots of one row of the store to another row."""
        for buffer in self._buffers():
            buffer[goal, :, :extent] = buffer[source, :, :extent]

    @torch.inference_mode()
    def clear_cache(self, cache: int) -> None:
        """Write zeros to one row: masked slots enter products, and a NaN of another text would spread."""
        for buffer in self._buffers():
            buffer[cache].zero_()

    @torch.inference_mode()
    def move_slots(self, cache: int, source: IntegerTensor, goal: IntegerTensor) -> None:
        """Copy some slots of one row of the store to other slots of the same row."""
        for buffer in self._buffers():
            buffer[cache, :, goal] = buffer[cache, :, source]


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


class PanelStore(KVStore):
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
        return len(self.layers) + self.more_layers - 1

    def _allocate(self, caches: int, slots: int) -> None:
        where = (len(self.layers) + self.more_layers, caches, self.heads)
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
        own = slice(0, len(self.layers))
        by_panel = self.keys_by_panel[own, cache]
        by_slot = self.values_by_slot[own, cache]
        if not _are_neighbours(slots):
            panels, columns = divmod(slots, self.columns)
            return [np.moveaxis(by_panel[:, :, panels, :, columns], 0, -1).copy(), by_slot[:, :, slots]]
        keys = np.empty((*by_panel.shape[:2], self.size, len(slots)), dtype=self.words)
        for panel, span, part in self._panels_of(slots):
            keys[..., part] = by_panel[:, :, panel, :, span]
        return [keys, by_slot[:, :, slots[0] : slots[-1] + 1].copy()]

    def put(self, cache: int, slots: Integers, taken: list[Any]) -> None:
        own = slice(0, len(self.layers))
        by_panel = self.keys_by_panel[own, cache]
        by_slot = self.values_by_slot[own, cache]
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

    def move_slots(self, cache: int, source: IntegerTensor, goal: IntegerTensor) -> None:
        (panels, columns), (to_panels, to_columns) = (divmod(slots.numpy(), self.columns) for slots in (source, goal))
        keys = self.keys_by_panel[:, cache]
        values = self.values_by_slot[:, cache]
        keys[:, :, to_panels, :, to_columns] = keys[:, :, panels, :, columns]
        values[:, :, goal.numpy()] = values[:, :, source.numpy()]


def _are_neighbours(slots: Integers) -> bool:
    return len(slots) > 0 and bool((np.diff(slots) == 1).all())


def _larger(buffer: Float[Tensor, "*layers caches heads slots size"], caches: int, slots: int) -> Tensor:
    """Return a larger copy of a buffer, with zeros in the new rows and slots."""
    *layers, before, heads, known, size = buffer.shape
    grown = buffer.new_zeros(*layers, caches, heads, slots, size)
    grown[..., :before, :, :known, :] = buffer
    return grown

"""Keys and values of many sessions, one cache each, preallocated and written in place."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True, eq=False)
class Place:
    """Where a pass writes and what it reads."""

    caches: slice | Int64[Tensor, " batch"]  # a slice is read in place, single caches are copied together
    slots: Int64[Tensor, "batch query"]
    extent: int


class StoreLayer(CacheLayerMixin):
    """One layer's buffers, [caches, heads, slots, head size]. `update` writes the pass and returns views of all it may see.

    The returned views are valid until the next pass or until the store grows.
    """

    is_sliding = False  # every token stays; windows are cut by the mask

    def __init__(self, store: "KVStore") -> None:
        super().__init__()
        self.store = store

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype = key_states.dtype
        self.device = key_states.device
        caches = self.store.caches
        slots = self.store.slots
        # Zeros, not empty: a masked slot still enters the product, and a stray NaN there would spread.
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

    def grow(self, caches: int, slots: int) -> None:
        if self.is_initialized:
            self.keys, self.values = (_larger(buffer, caches, slots) for buffer in (self.keys, self.values))

    def move_cache(self, source: int, goal: int) -> None:
        if self.is_initialized:
            self.keys[goal] = self.keys[source]
            self.values[goal] = self.values[source]

    def move_slots(self, cache: int, source: Int64[Tensor, " n"], goal: Int64[Tensor, " n"]) -> None:
        if self.is_initialized:
            self.keys[cache, :, goal] = self.keys[cache, :, source]
            self.values[cache, :, goal] = self.values[cache, :, source]

    # What masks and positions would be derived from; we bring our own, so these are never consulted for them.
    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.place.extent, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name before transformers 5.16


class KVStore(Cache):
    """The buffers of all layers; `place` says where the present pass writes."""

    def __init__(self, layers: int) -> None:
        self.caches = 1
        self.slots = 64
        self.place = Place(slice(0, 1), torch.zeros(1, 0, dtype=torch.long), 0)
        super().__init__(layers=[StoreLayer(self) for _ in range(layers)])

    def reserve(self, caches: int, slots: int) -> None:
        """Make room, at least doubling what is too small."""
        caches = self.caches if caches <= self.caches else max(caches, 2 * self.caches)
        slots = self.slots if slots <= self.slots else max(slots, 2 * self.slots)
        if (caches, slots) == (self.caches, self.slots):
            return
        with torch.inference_mode():
            self.grow(caches, slots)  # where there is no memory for it, nothing has changed
        self.caches = caches
        self.slots = slots

    def grow(self, caches: int, slots: int) -> None:
        for layer in self.layers:
            layer.grow(caches, slots)

    @torch.inference_mode()
    def move_cache(self, source: int, goal: int) -> None:
        for layer in self.layers:
            layer.move_cache(source, goal)

    @torch.inference_mode()
    def move_slots(self, cache: int, source: Int64[Tensor, " n"], goal: Int64[Tensor, " n"]) -> None:
        for layer in self.layers:
            layer.move_slots(cache, source, goal)


class SlotStore(KVStore):
    """Keys and values of all layers in two buffers, [layers, caches, heads, slots, size]."""

    def __init__(self, layers: int, heads: int, size: int, like: Tensor, slots: int) -> None:
        super().__init__(layers)
        self.slots = slots
        # Zeros, not empty: a masked slot still enters the product, and a stray NaN there would spread.
        self.keys, self.values = (like.new_zeros(layers, self.caches, heads, slots, size) for _ in range(2))

    def grow(self, caches: int, slots: int) -> None:
        self.keys, self.values = (_larger(one, caches, slots) for one in (self.keys, self.values))

    @torch.inference_mode()
    def move_cache(self, source: int, goal: int) -> None:
        for one in (self.keys, self.values):
            one[:, goal] = one[:, source]

    @torch.inference_mode()
    def move_slots(self, cache: int, source: Int64[Tensor, " n"], goal: Int64[Tensor, " n"]) -> None:
        for one in (self.keys, self.values):
            one[:, cache, :, goal] = one[:, cache, :, source]


class PanelStore(KVStore):
    """Buffers for the compiled forward, which writes them itself: all layers in one, and keys by slot, so that the scores of
    neighbouring slots are made side by side.

    Args:
        size: of a head.
        width: what the columns of values are padded to a multiple of, with zeros.
    """

    def __init__(self, layers: int, heads: int, size: int, width: int) -> None:
        super().__init__(layers)
        self.heads = heads
        self.size = size
        self.width = -(-size // width) * width
        self.columns = width
        self._allocate(self.caches, self.slots)

    def _allocate(self, caches: int, slots: int) -> None:
        panels = -(-slots // self.columns)
        where = (len(self.layers), caches, self.heads)
        self.keys_by_panel = np.zeros((*where, panels, self.size, self.columns), dtype=np.float32)
        self.values_by_slot = np.zeros((*where, panels * self.columns, self.width), dtype=np.float32)

    def grow(self, caches: int, slots: int) -> None:
        before = self.keys_by_panel, self.values_by_slot
        self._allocate(caches, slots)
        for old, new in zip(before, (self.keys_by_panel, self.values_by_slot), strict=True):
            new[:, : old.shape[1], :, : old.shape[3]] = old

    def move_cache(self, source: int, goal: int) -> None:
        for buffer in (self.keys_by_panel, self.values_by_slot):
            buffer[:, goal] = buffer[:, source]

    def move_slots(self, cache: int, source: Int64[Tensor, " n"], goal: Int64[Tensor, " n"]) -> None:
        (panels, columns), (to_panels, to_columns) = (divmod(one.numpy(), self.columns) for one in (source, goal))
        keys = self.keys_by_panel[:, cache]
        values = self.values_by_slot[:, cache]
        keys[:, :, to_panels, :, to_columns] = keys[:, :, panels, :, columns]
        values[:, :, goal.numpy()] = values[:, :, source.numpy()]


def _larger(buffer: Float[Tensor, "*layers caches heads slots size"], caches: int, slots: int) -> Tensor:
    *layers, before, heads, known, size = buffer.shape
    grown = buffer.new_zeros(*layers, caches, heads, slots, size)
    grown[..., :before, :, :known, :] = buffer
    return grown

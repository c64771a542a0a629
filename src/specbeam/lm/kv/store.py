"""Keys and values of many sessions, one lane each, preallocated and written in place."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True, eq=False)
class Place:
    """Where a pass writes and what it reads."""

    lanes: slice | Int64[Tensor, " batch"]  # a slice is read in place, single lanes are copied together
    slots: Int64[Tensor, "batch query"]
    extent: int


class StoreLayer(CacheLayerMixin):
    """One layer's buffers, [lanes, heads, slots, head size]. `update` writes the pass and returns views of all it may see.

    The returned views are valid until the next pass or until the store grows.
    """

    is_sliding = False  # every token stays; windows are cut by the mask

    def __init__(self, store: "KVStore") -> None:
        super().__init__()
        self.store = store

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype = key_states.dtype
        self.device = key_states.device
        lanes = self.store.lanes
        slots = self.store.slots
        # Zeros, not empty: a masked slot still enters the product, and a stray NaN there would spread.
        self.keys = key_states.new_zeros(lanes, key_states.shape[1], slots, key_states.shape[3])
        self.values = value_states.new_zeros(lanes, value_states.shape[1], slots, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self.store.place
        if isinstance(place.lanes, Tensor):
            return self._update_single(key_states, value_states, place.lanes, place)
        keys = self.keys[place.lanes]
        values = self.values[place.lanes]
        if key_states.shape[0] == 1:
            keys.index_copy_(2, place.slots[0], key_states)
            values.index_copy_(2, place.slots[0], value_states)
        else:
            batch = torch.arange(key_states.shape[0], device=key_states.device)[:, None]
            keys[batch, :, place.slots] = key_states.transpose(1, 2)
            values[batch, :, place.slots] = value_states.transpose(1, 2)
        return keys[:, :, : place.extent], values[:, :, : place.extent]

    def _update_single(
        self, key_states: Tensor, value_states: Tensor, lanes: Int64[Tensor, " batch"], place: Place
    ) -> tuple[Tensor, Tensor]:
        self.keys[lanes[:, None], :, place.slots] = key_states.transpose(1, 2)
        self.values[lanes[:, None], :, place.slots] = value_states.transpose(1, 2)
        return self.keys[lanes, :, : place.extent], self.values[lanes, :, : place.extent]

    def grow(self, lanes: int, slots: int) -> None:
        if self.is_initialized:
            self.keys, self.values = (_larger(buffer, lanes, slots) for buffer in (self.keys, self.values))

    def move_lane(self, source: int, goal: int) -> None:
        if self.is_initialized:
            self.keys[goal] = self.keys[source]
            self.values[goal] = self.values[source]

    def move_slots(self, lane: int, source: Int64[Tensor, " n"], goal: Int64[Tensor, " n"]) -> None:
        if self.is_initialized:
            self.keys[lane, :, goal] = self.keys[lane, :, source]
            self.values[lane, :, goal] = self.values[lane, :, source]

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
        self.lanes = 1
        self.slots = 64
        self.place = Place(slice(0, 1), torch.zeros(1, 0, dtype=torch.long), 0)
        super().__init__(layers=[StoreLayer(self) for _ in range(layers)])

    def reserve(self, lanes: int, slots: int) -> None:
        """Make room, at least doubling what is too small."""
        lanes = self.lanes if lanes <= self.lanes else max(lanes, 2 * self.lanes)
        slots = self.slots if slots <= self.slots else max(slots, 2 * self.slots)
        if (lanes, slots) == (self.lanes, self.slots):
            return
        with torch.inference_mode():
            self.grow(lanes, slots)  # where there is no memory for it, nothing has changed
        self.lanes = lanes
        self.slots = slots

    def grow(self, lanes: int, slots: int) -> None:
        for layer in self.layers:
            layer.grow(lanes, slots)

    @torch.inference_mode()
    def move_lane(self, source: int, goal: int) -> None:
        for layer in self.layers:
            layer.move_lane(source, goal)

    @torch.inference_mode()
    def move_slots(self, lane: int, source: Int64[Tensor, " n"], goal: Int64[Tensor, " n"]) -> None:
        for layer in self.layers:
            layer.move_slots(lane, source, goal)


class SlotStore(KVStore):
    """Keys and values of all layers in two buffers, [layers, lanes, heads, slots, size]."""

    def __init__(self, layers: int, heads: int, size: int, like: Tensor, slots: int) -> None:
        super().__init__(layers)
        self.slots = slots
        # Zeros, not empty: a masked slot still enters the product, and a stray NaN there would spread.
        self.keys, self.values = (like.new_zeros(layers, self.lanes, heads, slots, size) for _ in range(2))

    def grow(self, lanes: int, slots: int) -> None:
        self.keys, self.values = (_larger(one, lanes, slots) for one in (self.keys, self.values))

    @torch.inference_mode()
    def move_lane(self, source: int, goal: int) -> None:
        for one in (self.keys, self.values):
            one[:, goal] = one[:, source]

    @torch.inference_mode()
    def move_slots(self, lane: int, source: Int64[Tensor, " n"], goal: Int64[Tensor, " n"]) -> None:
        for one in (self.keys, self.values):
            one[:, lane, :, goal] = one[:, lane, :, source]


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
        self._allocate(self.lanes, self.slots)

    def _allocate(self, lanes: int, slots: int) -> None:
        panels = -(-slots // self.columns)
        where = (len(self.layers), lanes, self.heads)
        self.keys_by_panel = np.zeros((*where, panels, self.size, self.columns), dtype=np.float32)
        self.values_by_slot = np.zeros((*where, panels * self.columns, self.width), dtype=np.float32)

    def grow(self, lanes: int, slots: int) -> None:
        before = self.keys_by_panel, self.values_by_slot
        self._allocate(lanes, slots)
        for old, new in zip(before, (self.keys_by_panel, self.values_by_slot), strict=True):
            new[:, : old.shape[1], :, : old.shape[3]] = old

    def move_lane(self, source: int, goal: int) -> None:
        for buffer in (self.keys_by_panel, self.values_by_slot):
            buffer[:, goal] = buffer[:, source]

    def move_slots(self, lane: int, source: Int64[Tensor, " n"], goal: Int64[Tensor, " n"]) -> None:
        (panels, columns), (to_panels, to_columns) = (divmod(one.numpy(), self.columns) for one in (source, goal))
        keys = self.keys_by_panel[:, lane]
        values = self.values_by_slot[:, lane]
        keys[:, :, to_panels, :, to_columns] = keys[:, :, panels, :, columns]
        values[:, :, goal.numpy()] = values[:, :, source.numpy()]


def _larger(buffer: Float[Tensor, "*layers lanes heads slots size"], lanes: int, slots: int) -> Tensor:
    *layers, before, heads, known, size = buffer.shape
    grown = buffer.new_zeros(*layers, lanes, heads, slots, size)
    grown[..., :before, :, :known, :] = buffer
    return grown

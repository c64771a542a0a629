"""The KV store of engines that call torch: buffers of keys and values as a transformers cache."""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specbeam.engines.arrays import Integers, PrefixRows
from specbeam.engines.kv.store import Place, RowStore


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


class KVStore(RowStore, Cache):
    """The buffers of all layers, as a transformers cache; `place` holds the rows and slots of the current pass."""

    def __init__(self, layers: int) -> None:
        RowStore.__init__(self, layers)
        self.place = Place(slice(0, 1), torch.zeros(1, 0, dtype=torch.long), 0)
        Cache.__init__(self, layers=[StoreLayer(self) for _ in range(layers)])

    def touch(self) -> None:
        """Do nothing: torch buffers are written when they are created."""

    def grow(self, caches: int, slots: int) -> None:
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
        self.layers[layer].write_prefix(cache, keys, values)

    @torch.inference_mode()
    def take(self, cache: int, slots: Integers) -> list[Any]:
        which = torch.from_numpy(slots)
        return [buffer[cache, :, which.to(buffer.device)] for buffer in self._model_buffers()]

    @torch.inference_mode()
    def put(self, cache: int, slots: Integers, taken: list[Any]) -> None:
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
        for buffer in self._buffers():
            buffer[goal, :, :extent] = buffer[source, :, :extent]

    @torch.inference_mode()
    def clear_cache(self, cache: int) -> None:
        for buffer in self._buffers():
            buffer[cache].zero_()

    @torch.inference_mode()
    def copy_slots(self, source: int, slots: Integers, goal: int, goal_slots: Integers) -> None:
        which = torch.from_numpy(slots)
        places = torch.from_numpy(goal_slots)
        for buffer in self._buffers():
            buffer[goal, :, places.to(buffer.device)] = buffer[source, :, which.to(buffer.device)]


def _larger(buffer: Float[Tensor, "*layers caches heads slots size"], caches: int, slots: int) -> Tensor:
    """Return a larger copy of a buffer, with zeros in the new rows and slots."""
    *layers, before, heads, known, size = buffer.shape
    grown = buffer.new_zeros(*layers, caches, heads, slots, size)
    grown[..., :before, :, :known, :] = buffer
    return grown

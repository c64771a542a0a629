"""The keys and values of trees that a target has scored, as a transformers cache, for extra rows."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class TreeLayer(CacheLayerMixin):
    """The keys and values of a layer: first of a prefix that only later rows see, then of trees."""

    is_sliding = False

    def __init__(self, cache: "TreeCache", number: int) -> None:
        super().__init__()
        self.cache = cache
        self.number = number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Set type and device."""
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of trees; for later rows return prefix, trees and their own."""
        if not self.cache.is_full:
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states
            self.values = value_states
            return key_states, value_states
        keys = self._with(self.cache.keys, self.keys, key_states)
        return keys, self._with(self.cache.values, self.values, value_states)

    def _with(self, prefix: tuple[Tensor, ...], trees: Tensor, own: Tensor) -> Tensor:
        parts = [trees, own]
        if prefix:
            parts.insert(0, prefix[self.number].to(own).expand(len(own), -1, -1, -1))
        return torch.cat(parts, 2)

    # transformers derives masks and positions from these. Passes here give both explicitly, so the values do not
    # matter.
    def get_seq_length(self) -> int:
        """Return 0."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys, and 0."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length


class TreeCache(Cache):
    """The keys and values of trees; see `TreeLayer`."""

    def __init__(self, layers: int, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
        self.keys = keys
        self.values = values
        self.is_full = False  # whether the trees were scored
        super().__init__(layers=[TreeLayer(self, number) for number in range(layers)])

"""The stored keys and values of a source as a transformers cache layer."""

from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class CrossLayer(CacheLayerMixin):
    """The cross-attention keys and values of one layer in the current pass, as a transformers cache layer, read-only."""

    is_sliding = False

    def __init__(self, keys: Float[Tensor, "batch heads frames size"], values: Tensor) -> None:
        super().__init__()
        self.keys = keys
        self.values = values
        self.dtype = keys.dtype
        self.device = keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the keys and values exist."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        raise AssertionError("the keys and values of a source are never updated")

    def get_seq_length(self) -> int:
        return int(self.keys.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name before transformers 5.16

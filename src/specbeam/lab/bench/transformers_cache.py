"""The cache of transformers' own beam search, for timing.

It holds a copy of the prompt per beam, and all copies are made anew whenever beams are reordered.
"""

import copy
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from specbeam.engines import cache_argument
from specbeam.recipes import TurnCost, seconds_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CopiedPrompt:
    """A prompt in transformers' cache, on which steps of beams are timed.

    Args:
        length: number of tokens of the prompt, at least 1.
    """

    @torch.inference_mode()
    def __init__(self, model: "PreTrainedModel", length: int) -> None:
        self.model = model
        self.prompt = (7 * torch.arange(length, device=model.device) + 3)[None] % model.config.vocab_size
        self.cache = DynamicCache(config=model.config)
        model.base_model(input_ids=self.prompt, **cache_argument(model.base_model, self.cache), use_cache=True)

    @torch.inference_mode()
    def turn(self, beams: int) -> TurnCost:
        """Time a pass over one row per beam, and the reordering of the cache after it.

        Every other beam ends, and the others get two successors each. Making the copies is not timed.
        """
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(beams)
        order = torch.arange(beams, device=self.model.device)
        rows = (order % self.model.config.vocab_size)[:, None]
        self.model(input_ids=rows[:1])  # making the copies has evicted the weights from the CPU's caches
        step = {"input_ids": rows, **cache_argument(self.model, cache), "use_cache": True}
        pass_s = seconds_of(self.model.device, lambda: self.model(**step))
        kv_tokens = _bytes(cache) // token_bytes(self.model)
        settle_s = seconds_of(self.model.device, lambda: cache.reorder_cache(order // 2))
        return TurnCost(pass_s, settle_s, kv_tokens)


@torch.inference_mode()
def token_bytes(model: "PreTrainedModel") -> int:
    """Return the number of bytes of the keys and values of one token in all layers."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model.base_model(input_ids=token, **cache_argument(model.base_model, cache))
    return _bytes(cache)


def _bytes(cache: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

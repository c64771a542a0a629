"""Passes of the decoder of an encoder-decoder model, by transformers' forward."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int32, Int64

from specbeam.engines.arrays import PassInputs
from specbeam.engines.cache_names import cache_argument
from specbeam.engines.kv.cache import PaddedCache
from specbeam.engines.kv.cross import CrossStore, CrossView, ReadsSources
from specbeam.engines.kv.masks import Mask, distances_back
from specbeam.engines.shared_tokens import SharedTokens
from specbeam.engines.torch.passes import NO_EXTRAS, PaddedPasses, Part
from specbeam.engines.torch.places import Places, decoder_of, self_attention_with_biases

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SourcePasses(ReadsSources, PaddedPasses):
    """The passes of an encoder-decoder model's decoder, by transformers' forward; see `ReadsSources`."""

    cross: CrossStore

    def __init__(self, model: "PreTrainedModel", caches: list[Any], shared: SharedTokens | None = None) -> None:
        from specbeam.engines.kv.torch_store import KVStore

        super().__init__(model, caches, shared=shared)
        self.captured = None  # the shapes of a pass depend on its sources
        self.store = KVStore(decoder_layers(model))
        self.places = Places(model)
        self.cross = CrossStore()
        self.readers = []
        self._is_whole = is_whole(model)
        encoder_mask = inspect.signature(decoder_of(model).forward).parameters.get("encoder_attention_mask")
        self.takes_masks = encoder_mask is not None and self._is_whole
        self._distances: Int32[np.ndarray, "batch width extent"] | None = None

    @property
    def most_positions(self) -> int | None:
        return self.places.most

    def store_source(self, states: torch.Tensor) -> int:
        layers = self._cross_layers(states)
        return self.cross.add([layer.keys for layer in layers], [layer.values for layer in layers])

    def _cross_layers(self, states: torch.Tensor) -> Sequence[Any]:
        """Return the keys and values of a source in each layer, which the decoder computes with its first token."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        first = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        arguments = plain_arguments(self.model, states, first)
        self.model(**arguments, **cache_argument(self.model, cache), use_cache=True)
        layers: Sequence[Any] = cache.cross_attention_cache.layers
        return layers

    def plain_logits(self, states: torch.Tensor, path: list[int]) -> torch.Tensor:
        return plain_logits(self.model, states, path)

    def _batch_key(self, cache: PaddedCache) -> Any:
        """Return the length of a session's source, which must be equal in a batch if the decoder takes no source mask."""
        return None if self.takes_masks else self.cross.lengths[cache.source_row]

    def _extra_arguments(self, caches: list[Any], tokens: Int64[np.ndarray, "batch width"]) -> dict[str, torch.Tensor]:
        return {"sources": torch.tensor([cache.source_row for cache in caches])}

    def _inputs_and_masks(
        self, rows: Sequence[int], by_row: dict[int, Part], width: int, extent: int
    ) -> tuple[PassInputs, Mask]:
        if self.places.needs_distances:
            self._distances = distances_back(*self._feeds_and_tables(rows, by_row), width, extent)
        return super()._inputs_and_masks(rows, by_row, width, extent)

    def _call_model(
        self,
        ids: torch.Tensor,
        places: torch.Tensor,
        masks: Mask,
        wanted: int,
        extras: Mapping[str, torch.Tensor] = NO_EXTRAS,
    ) -> torch.Tensor:
        view = self.cross.view(extras["sources"].tolist())
        with self.places.given(places, self._distances):
            output = self.model(**self._arguments(ids, masks, view), use_cache=True)
        logits: torch.Tensor = output.logits[:, -wanted:]
        return logits

    def _arguments(self, ids: torch.Tensor, masks: Mask, view: CrossView) -> dict[str, Any]:
        """Return the arguments of the model. Layers read stored keys and values, so only the states' shape matters."""
        from transformers.cache_utils import EncoderDecoderCache
        from transformers.modeling_outputs import BaseModelOutput

        cached = cache_argument(self.model, EncoderDecoderCache(self.store, view.cache))
        shape = (*view.mask.shape, 1)
        size = self.model.config.d_model
        shapeless = torch.zeros(1, 1, 1, dtype=self.model.dtype, device=self.device).expand(*shape[:2], size)
        if not self._is_whole:
            return {"input_ids": ids, "attention_mask": masks, "encoder_outputs": shapeless, **cached}
        arguments = {
            "decoder_input_ids": ids,
            "decoder_attention_mask": masks,
            "encoder_outputs": BaseModelOutput(last_hidden_state=shapeless),
            **cached,
        }
        if self.takes_masks:
            arguments["attention_mask"] = view.mask.long()
        return arguments


def is_whole(model: "PreTrainedModel") -> bool:
    """Return whether a model's forward includes its encoder."""
    return "decoder_input_ids" in inspect.signature(model.forward).parameters


def make_causal(model: "PreTrainedModel") -> None:
    """Mark the self-attention of a decoder with biases by distance as causal.

    transformers 5.15 to 5.17 forgets it for umT5: without an explicit mask, tokens attend to later ones there.
    """
    for module in self_attention_with_biases(decoder_of(model)):
        if hasattr(module, "is_causal"):
            module.is_causal = True


def plain_arguments(model: "PreTrainedModel", states: torch.Tensor, ids: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of a model for tokens and encoder states, without a cache."""
    from transformers.modeling_outputs import BaseModelOutput

    states = states.to(model.device, model.dtype)
    if is_whole(model):
        return {"decoder_input_ids": ids, "encoder_outputs": BaseModelOutput(last_hidden_state=states)}
    return {"input_ids": ids, "encoder_outputs": states}


def plain_logits(model: Any, states: torch.Tensor, path: list[int]) -> torch.Tensor:
    """Return a model's logits after a path, float[vocab], for encoder states, without a cache."""
    ids = torch.tensor([path], device=model.device)
    logits: torch.Tensor = model(**plain_arguments(model, states, ids), use_cache=False).logits[0, -1]
    return logits


def decoder_layers(model: "PreTrainedModel") -> int:
    """Return the number of decoder layers; in many configurations, `num_hidden_layers` is the number of encoder layers."""
    config = model.config
    for name in ("num_decoder_layers", "decoder_layers"):
        if (count := getattr(config, name, None)) is not None:
            return int(count)
    return int(config.num_hidden_layers)

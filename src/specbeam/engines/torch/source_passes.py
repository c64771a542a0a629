"""Passes of the decoder of an encoder-decoder model: all nodes of a session's forest look at one stored source."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int32, Int64
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from specbeam.engines.kv.cache import PaddedCache
from specbeam.engines.kv.cross import CrossStore, CrossView
from specbeam.engines.kv.masks import Mask, distances_back
from specbeam.engines.kv.store import KVStore
from specbeam.engines.source import Source
from specbeam.engines.torch.passes import NO_EXTRAS, PaddedPasses, SharedRow
from specbeam.engines.torch.places import Places, decoder_of
from specbeam.records import ExtraInputs, Needs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_HEADS = (
    "its hidden states belong to one source and are not handed out: draft heads, exit layers and other parts that read them "
    "are for decoder-only models"
)


class SourceCache(PaddedCache):
    """A session's cache in a model that reads a source.

    Attributes:
        source_row: the row of `SourcePasses.cross` with the keys and values of the source; -1 before it has one.
    """

    source_row = -1


class SourcePasses(PaddedPasses):
    """The passes of a model whose decoder looks at a source.

    Attributes:
        cross: the keys and values of all sources.
        readers: of each row of `cross`, the source and the caches of the sessions that read it.
    """

    takes_vectors = False

    def __init__(self, model: "PreTrainedModel", caches: list[Any]) -> None:
        super().__init__(model, None, caches)
        self.captured = None  # the shapes of a pass change with its sources
        self.store = KVStore(decoder_layers(model))
        self.places = Places(model)
        self.cross = CrossStore()
        self.readers: list[tuple[Source, list[SourceCache]]] = []
        known = inspect.signature(model.forward).parameters
        self._is_whole = (
            "decoder_input_ids" in known
        )  # and not a decoder that reads what the encoder of another model made
        encoder_mask = inspect.signature(decoder_of(model).forward).parameters.get("encoder_attention_mask")
        self.takes_masks = encoder_mask is not None and self._is_whole
        self._distances: Int32[np.ndarray, "batch width extent"] | None = None

    def cache(self, row: int, prompt: list[int]) -> SourceCache:
        return SourceCache(row, prompt)

    def lacks(self, needs: Needs) -> str:
        return f"{type(self.model).__name__} reads sources, and {NO_HEADS}" if needs.states else ""

    def refuses_extra_rows(self, inputs: ExtraInputs) -> str:
        return f"{type(self.model).__name__} reads sources, and {NO_HEADS}"

    def refuses(self, context: object) -> str:
        if isinstance(context, Source):
            return ""
        return (
            f"{type(self.model).__name__} reads a source for each prompt, and the context is {type(context).__name__}"
        )

    @torch.inference_mode()
    def hold(self, cache: SourceCache, source: Source, encoder: Any) -> None:
        """Store the keys and values of a session's source, unless another session of the same source has done so."""
        for row, (known, readers) in enumerate(self.readers):
            if known is source:
                readers.append(cache)
                cache.source_row = row
                return
        layers = self._cross_layers(source.states_of(encoder))
        cache.source_row = self.cross.add([layer.keys for layer in layers], [layer.values for layer in layers])
        self.readers.append((source, [cache]))

    def let_go(self, cache: SourceCache, encoder: Any) -> None:
        """Free the source of a session that is over, if no other session reads it."""
        if cache.source_row < 0:
            return
        row = cache.source_row
        source, readers = self.readers[row]
        readers.remove(cache)
        cache.source_row = -1
        if readers:
            return
        source.forget(encoder)
        self.cross.drop(row)
        last = self.readers.pop()
        if row < len(self.readers):
            self.readers[row] = last
            for other in last[1]:
                other.source_row = row

    def drop_sources(self) -> None:
        """Free all sources, when no session is left that reads them."""
        self.readers.clear()
        self.cross.clear()

    def _cross_layers(self, states: torch.Tensor) -> Sequence[Any]:
        """Return the keys and values of a source in each layer: the decoder makes them when it reads its first token."""
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        first = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self.model(**self._plain_arguments(states, first), past_key_values=cache, use_cache=True)
        layers: Sequence[Any] = cache.cross_attention_cache.layers
        return layers

    def plain_logits(self, states: torch.Tensor, path: list[int]) -> torch.Tensor:
        """Return the logits after a path, float[vocab], as the model gives them by itself."""
        ids = torch.tensor([path], device=self.device)
        logits: torch.Tensor = self.model(**self._plain_arguments(states, ids), use_cache=False).logits[0, -1]
        return logits

    def _plain_arguments(self, states: torch.Tensor, ids: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of the model for tokens and the states of an encoder, without stored keys."""
        states = states.to(self.device, self.model.dtype)
        if self._is_whole:
            return {"decoder_input_ids": ids, "encoder_outputs": BaseModelOutput(last_hidden_state=states)}
        return {"input_ids": ids, "encoder_outputs": states}

    def _batch_key(self, cache: PaddedCache) -> Any:
        """Return what sessions in one batch have in common: the length of the source, if the decoder takes no mask of it."""
        assert isinstance(cache, SourceCache)
        return None if self.takes_masks else self.cross.lengths[cache.source_row]

    def _extra_arguments(
        self, rows: list[SharedRow], tokens: Int64[np.ndarray, "batch width"]
    ) -> dict[str, torch.Tensor]:
        """Return the rows of the sources that the sequences of a pass look at."""
        caches: list[Any] = [row.parts[0].cache for row in rows]
        return {"sources": torch.tensor([cache.source_row for cache in caches])}

    def _inputs_and_masks(
        self, rows: Sequence[int], by_row: dict[int, SharedRow], width: int, extent: int
    ) -> tuple[Int64[np.ndarray, "3 batch width"], Mask]:
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
        """Call the model, and return the logits of the last `wanted` rows of each sequence of the batch."""
        view = self.cross.view(extras["sources"].tolist())
        with self.places.given(places, self._distances):
            output = self.model(**self._arguments(ids, masks, view), use_cache=True)
        logits: torch.Tensor = output.logits[:, -wanted:]
        return logits

    def _arguments(self, ids: torch.Tensor, masks: Mask, view: CrossView) -> dict[str, Any]:
        """Return the arguments of the model. Its layers read the stored keys: of the states, only the shape matters."""
        cache = EncoderDecoderCache(self.store, view.cache)
        shape = (*view.mask.shape, 1)
        size = self.model.config.d_model
        shapeless = torch.zeros(1, 1, 1, dtype=self.model.dtype, device=self.device).expand(*shape[:2], size)
        if not self._is_whole:
            return {"input_ids": ids, "attention_mask": masks, "encoder_outputs": shapeless, "past_key_values": cache}
        arguments = {
            "decoder_input_ids": ids,
            "decoder_attention_mask": masks,
            "encoder_outputs": BaseModelOutput(last_hidden_state=shapeless),
            "past_key_values": cache,
        }
        if self.takes_masks:
            arguments["attention_mask"] = view.mask.long()
        return arguments


def decoder_layers(model: "PreTrainedModel") -> int:
    """Return the number of layers of the decoder: `num_hidden_layers` is that of the encoder in many configurations."""
    config = model.config
    for name in ("num_decoder_layers", "decoder_layers"):
        if (count := getattr(config, name, None)) is not None:
            return int(count)
    return int(config.num_hidden_layers)

"""Positions of forest nodes in the decoders of encoder-decoder models, most of which take no position argument.

Such decoders derive positions from the length of their cache, but the nodes of a tree are side by side in it. During a
pass, the forward of the module that looks up positions is replaced by one that uses the positions of nodes.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int32, Int64
from torch import nn

from specbeam.core.errors import UnsupportedModel
from specbeam.engines.families import bucket_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Places:
    """Passes node positions to one decoder.

    Attributes:
        needs_distances: whether the decoder also needs the distances from slots to rows.
        most: number of positions of the decoder; None if there is no limit.

    Raises `UnsupportedModel` if the decoder looks up positions in an unknown way.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self._embedding: Any = None
        self._look_up: Callable[..., torch.Tensor] | None = None
        self._biases: list[Any] = []
        self.takes_more_positions = False
        decoder = decoder_of(model)
        if decoder is None:
            raise UnsupportedModel(f"specbeam cannot find the decoder of {type(model).__name__}")
        positions = getattr(decoder, "embed_positions", None)
        if isinstance(positions, nn.Embedding):
            self._embedding = positions
            self._look_up = _looked_up
        elif hasattr(positions, "create_position_ids_from_input_ids") and hasattr(positions, "weights"):
            self._embedding = positions
            self._look_up = _looked_up_in_grown
            self.takes_more_positions = True
        self._biases = self_attention_with_biases(decoder)
        if self._embedding is None and not self._biases:
            raise UnsupportedModel(
                f"the decoder of {type(model).__name__} looks up positions in an unsupported way; specbeam supports "
                "BART, mBART, Marian, PEGASUS, M2M100, NLLB, T5, mT5, umT5, Whisper and similar models"
            )
        self.needs_distances = bool(self._biases)
        self.most = self._most()

    def _most(self) -> int | None:
        """Return the number of positions of the decoder; None if there is no limit."""
        if self._embedding is None or self.takes_more_positions:
            return None
        return int(self._embedding.weight.shape[0]) - int(getattr(self._embedding, "offset", 0))

    @contextmanager
    def given(
        self,
        places: Int64[torch.Tensor, "batch width"],
        distances: "Int32[np.ndarray, 'batch width extent'] | None",
    ) -> Iterator[None]:
        """A context in which the decoder uses these positions; the model is restored afterwards.

        Args:
            places: the position of each row.
            distances: the distance in positions from each slot's token to each row; None unless `needs_distances`.
        """
        with ExitStack() as stack:
            if self._look_up is not None:
                look_up = self._look_up
                embedding = self._embedding

                def forward(*given: Any, **named: Any) -> torch.Tensor:
                    return look_up(embedding, places, _ids_in(given, named))

                stack.enter_context(_replaced(embedding, "forward", forward))
            if self._biases:
                assert distances is not None
                back = torch.from_numpy(distances).to(places.device)
                for module in self._biases:
                    stack.enter_context(_replaced(module, "compute_bias", _bias_from(module, back)))
            yield


def decoder_of(model: "PreTrainedModel") -> Any:
    """Return the decoder of a model, without its head; None if it is not found."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return model.model.decoder
    found = model.get_decoder()
    return None if found is model else found


def self_attention_with_biases(decoder: Any) -> list[Any]:
    """Return the self-attention modules of a decoder that hold a table of biases by distance, as in T5; [] without one."""
    return [
        module
        for module in ([] if decoder is None else decoder.modules())
        if hasattr(module, "compute_bias") and getattr(module, "has_relative_attention_bias", False)
    ]


def _looked_up(embedding: Any, places: torch.Tensor, ids: "torch.Tensor | None") -> torch.Tensor:
    return nn.functional.embedding(places + int(getattr(embedding, "offset", 0)), embedding.weight)


def _looked_up_in_grown(embedding: Any, places: torch.Tensor, ids: "torch.Tensor | None") -> torch.Tensor:
    """Return rows of a table of positions that grows with the text, in which padding tokens have a separate row."""
    pad = int(embedding.padding_idx)
    rows = places + pad + 1
    if ids is not None:
        rows = torch.where(ids == pad, pad, rows)
    most = int(rows.max()) + 1
    if most > embedding.weights.shape[0]:
        embedding.make_weights(most + embedding.offset, embedding.embedding_dim, pad)
    found: torch.Tensor = embedding.weights[rows]
    return found.detach()


def _ids_in(given: tuple[Any, ...], named: dict[str, Any]) -> "torch.Tensor | None":
    """Return the token ids in the arguments of a module that looks up positions; None if there are none."""
    first = given[0] if given else named.get("input_ids")
    return first if isinstance(first, torch.Tensor) and first.ndim == 2 else None


def _bias_from(module: Any, back: Int32[torch.Tensor, "batch width extent"]) -> Callable[..., torch.Tensor]:
    """Return a replacement of a module's `compute_bias` that uses these distances."""
    settings = bucket_settings(module)

    def compute_bias(*given: Any, **named: Any) -> torch.Tensor:
        buckets = module._relative_position_bucket(-back.long(), **settings)
        bias: torch.Tensor = module.relative_attention_bias(buckets)
        return bias.permute(0, 3, 1, 2)

    return compute_bias


@contextmanager
def _replaced(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A context in which a method of a module is replaced."""
    before = vars(module).get(name)
    setattr(module, name, function)
    try:
        yield
    finally:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)

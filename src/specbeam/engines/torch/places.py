"""Positions of the nodes of a forest in the decoders of encoder-decoder models, most of which take none from a caller.

Such decoders count positions from the length of their cache, where the nodes of a tree stand side by side. For the time of a
pass, the module that looks positions up gets a forward that takes the positions of nodes.
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
    """The way in which one decoder is given the positions of the nodes of a pass.

    Attributes:
        needs_distances: whether it also has to know how far before each row the token of each slot is.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        """Find out how the decoder of a model looks positions up. Raises `UnsupportedModel` if that is not known."""
        self._embedding: Any = None
        self._look_up: Callable[..., torch.Tensor] | None = None
        self._biases: list[Any] = []
        self.takes_more_positions = False
        decoder = decoder_of(model)
        if decoder is None:
            raise UnsupportedModel(f"{type(model).__name__} does not keep its decoder where specbeam looks for it")
        positions = getattr(decoder, "embed_positions", None)
        if isinstance(positions, nn.Embedding):
            self._embedding = positions
            self._look_up = _looked_up
        elif hasattr(positions, "create_position_ids_from_input_ids") and hasattr(positions, "weights"):
            self._embedding = positions
            self._look_up = _looked_up_in_grown
            self.takes_more_positions = True
        self._biases = [
            module
            for module in decoder.modules()
            if hasattr(module, "compute_bias") and getattr(module, "has_relative_attention_bias", False)
        ]
        if self._embedding is None and not self._biases:
            raise UnsupportedModel(
                f"{type(model).__name__} looks the positions of its decoder up in a way that specbeam does not know; it "
                "knows BART, mBART, Marian, PEGASUS, M2M100, NLLB, T5, mT5, umT5, Whisper and their like"
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
        """Let the decoder use these positions in this context; outside of it the model is as it was.

        Args:
            places: the position of each row.
            distances: how many positions before each row the token of each slot is; None unless `needs_distances`.
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
    """Return the module that is the decoder of a model, without its head; None if it is not found."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return model.model.decoder
    found = model.get_decoder()
    return None if found is model else found


def _looked_up(embedding: Any, places: torch.Tensor, ids: "torch.Tensor | None") -> torch.Tensor:
    return nn.functional.embedding(places + int(getattr(embedding, "offset", 0)), embedding.weight)


def _looked_up_in_grown(embedding: Any, places: torch.Tensor, ids: "torch.Tensor | None") -> torch.Tensor:
    """Return the rows of a table of positions that grows with the text, in which padding tokens have a row of their own."""
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
    """Return the token ids among the arguments of a module that looks positions up; None if there are none."""
    first = given[0] if given else named.get("input_ids")
    return first if isinstance(first, torch.Tensor) and first.ndim == 2 else None


def _bias_from(module: Any, back: Int32[torch.Tensor, "batch width extent"]) -> Callable[..., torch.Tensor]:
    """Return a replacement of `compute_bias` of a module, which takes distances in place of numbers of rows."""
    settings = bucket_settings(module)

    def compute_bias(*given: Any, **named: Any) -> torch.Tensor:
        buckets = module._relative_position_bucket(-back.long(), **settings)
        bias: torch.Tensor = module.relative_attention_bias(buckets)
        return bias.permute(0, 3, 1, 2)

    return compute_bias


@contextmanager
def _replaced(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let a module have another method in this context."""
    before = vars(module).get(name)
    setattr(module, name, function)
    try:
        yield
    finally:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)

"""Growth of a T5, an encoder-decoder model, into a larger one with the same function; see `widen_model`.

The encoder and the decoder grow alike. New heads have distance biases of 0, and write nothing. Norms over more width, most
of it zeros, find a smaller mean square, and the logits of some models are divided by the root of the width: the weights of
the norms compensate both, without rounding if the width grows by a power of four.
"""

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specbeam.engines import family_of
from specbeam.errors import BadSetting, NotSupported
from specbeam.lab.bench.widen_model import (
    INNER_PER_WIDTH,
    UNITS,
    check_no_less,
    deviation,
    insert,
    is_tied,
    keep_short,
    random_model,
    with_more_units,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READERS = ("t5", "mt5", "umt5")
WITHOUT_GATE = 4.0  # feed-forward units per unit of width of layers without a gate
OUTPUTS = ("o.weight", "wo.weight")  # suffixes of the names of matrices that write into the residual stream
NORM = "layer_norm.weight"


@dataclass(frozen=True)
class ReaderSize:
    """The dimensions of a T5."""

    hidden: int  # width of the residual stream
    encoder_layers: int
    decoder_layers: int
    inner: int  # feed-forward units
    heads: int

    @classmethod
    def of(cls, config: Any) -> "ReaderSize":
        """Return the size of a model with this config of transformers."""
        return cls(config.d_model, config.num_layers, config.num_decoder_layers, config.d_ff, config.num_heads)

    def parameters(self, config: Any, tied: bool) -> int:
        """Return the number of weights, without norms and biases of distances, which are negligible.

        Args:
            config: has the size of a head, the vocabulary size, and whether feed-forward layers have a gate.
            tied: whether the embedding and the output head share their weights.
        """
        attention = 4 * self.hidden * self.heads * config.d_kv
        inner = (3 if config.is_gated_act else 2) * self.hidden * self.inner
        words = (1 if tied else 2) * config.vocab_size * self.hidden
        return words + self.encoder_layers * (attention + inner) + self.decoder_layers * (2 * attention + inner)


def reader_size_for(model: "PreTrainedModel", parameters: int) -> ReaderSize:
    """Return a size of about `parameters` weights with usual proportions; no dimension is below the model's own.

    Encoder and decoder keep the ratio of their numbers of layers. If that is too few weights for usual proportions, the
    model's own size gets more feed-forward units.

    Raises `BadSetting` if the model has more weights already, or has almost as many.
    """
    config = model.config
    tied = is_tied(model)
    own = ReaderSize.of(config)
    if (has := own.parameters(config, tied)) > parameters:
        raise BadSetting(f"cannot grow to {parameters:,} parameters: the model has {has:,} already")
    units = INNER_PER_WIDTH if config.is_gated_act else WITHOUT_GATE
    sizes = []
    for factor in range(1, 65):
        hidden = own.hidden * factor
        heads = max(own.heads, hidden // config.d_kv)
        inner = max(own.inner, round(units * hidden / UNITS) * UNITS)
        no_layer = ReaderSize(hidden, 0, 0, inner, heads).parameters(config, tied)
        all_layers = ReaderSize(hidden, own.encoder_layers, own.decoder_layers, inner, heads).parameters(config, tied)
        times = (parameters - no_layer) / (all_layers - no_layer)
        if times < 1:
            continue
        encoder_layers = round(times * own.encoder_layers)
        decoder_layers = round(times * own.decoder_layers)
        sizes.append(ReaderSize(hidden, encoder_layers, decoder_layers, inner, heads))
    best = min(sizes, key=lambda size: deviation(size.hidden, size.decoder_layers), default=own)
    if best == own:
        return with_more_units(own, parameters, lambda size: size.parameters(config, tied))
    return best


@torch.no_grad()
def grown_reader(model: "PreTrainedModel", to: ReaderSize | int, seed: int = 0) -> "PreTrainedModel":
    """Return a new T5 with more weights that computes the same logits up to rounding.

    Type, device and rounding to bfloat16 are as in `grown`.

    Args:
        model: a T5, with or without a gate, mT5 or umT5. It is not changed.
        to: a size, or a number of parameters for `reader_size_for`.
        seed: seed of the new random weights.

    Raises:
        NotSupported: the model is of another family.
        BadSetting: a dimension of the size is smaller than the model's.
    """
    family = family_of(model)
    if family is None or family.kind not in READERS:
        raise NotSupported(
            f"encoder-decoder models can be grown if they are {', '.join(READERS)}; this is {type(model).__name__}"
        )
    size = reader_size_for(model, to) if isinstance(to, int) else to
    own = ReaderSize.of(model.config)
    check_no_less(own, size)
    config = copy.deepcopy(model.config)
    config.d_model = size.hidden
    config.num_layers = size.encoder_layers
    config.num_decoder_layers = size.decoder_layers
    config.d_ff = size.inner
    config.num_heads = size.heads
    config.layer_norm_epsilon = model.config.layer_norm_epsilon * own.hidden / size.hidden
    large = random_model(type(model), config, model, seed)
    if not is_tied(model):  # the configuration is not reliable: transformers sets it to "tied" for each of these
        large.lm_head.weight = nn.Parameter(large.lm_head.weight.clone())
    keep_short(large, model)
    norm_scale = math.sqrt(own.hidden / size.hidden)  # a norm over more width divides by less
    of_logits = family.numbers(config).logits_divisor / family.numbers(model.config).logits_divisor
    for name, new in large.named_parameters():
        if name.endswith(NORM):
            new.fill_(norm_scale)
        elif name.endswith(OUTPUTS) or _is_embedding(large, name):  # new layers, heads and units write nothing
            new.zero_()
    known = dict(large.named_parameters())
    for name, old in model.named_parameters():
        scale = norm_scale if name.endswith(NORM) else 1.0
        if name == f"decoder.final_{NORM}":
            scale *= of_logits
        insert(known[name], old * scale)
    large.generation_config = copy.deepcopy(model.generation_config)
    return large.eval()


def _is_embedding(model: nn.Module, name: str) -> bool:
    """Return whether a parameter is a table that is looked up: of tokens, or of biases by distance."""
    owner, _, _ = name.rpartition(".")
    return isinstance(model.get_submodule(owner), nn.Embedding)

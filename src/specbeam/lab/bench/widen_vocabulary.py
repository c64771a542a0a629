"""Growth of a vocabulary: a model with more words and the same texts.

The cost of laws, sorting and sums over 128,000 words does not depend on the words. So each new word is a copy of one of
the model's own with a far smaller logit: logits have the shape of a large vocabulary, and new words are practically
never drawn.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specbeam.errors import BadSetting
from specbeam.lab.bench.widen_model import Size, grown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SPARE = 64  # columns added to the residual stream; the first carries a constant
CONSTANT = 2.0**-10  # too small to affect a norm
LOUDNESS = 2.0**10  # weight of the constant in the last norm
SHIFT = 30.0  # minimum distance between the logits of a new word and of the word it copies
SAMPLES = (8, 32)  # rows and columns of random tokens on which the last norm is measured


@torch.no_grad()
def with_words(model: "PreTrainedModel", words: int, seed: int = 0) -> "PreTrainedModel":
    """Return a new model with more words, each at most exp(-30) times as probable as the word of the model that it
    copies.

    The probabilities of the model's own words stay as they are, up to rounding. The weights of new words are bfloat16
    numbers wherever the model's own are.

    Args:
        model: a model of a family that `grown` knows. It is not changed.
        words: number of words of the new model.
        seed: seed of the choice of copied words.

    Raises:
        BadSetting: the model has more words already.
        NotSupported: the model is of another family.
    """
    own = model.config.vocab_size
    if words < own:
        raise BadSetting(f"cannot grow to {words:,} words: the model has {own:,} already")
    size = Size.of(model.config)
    place = size.hidden  # column of the constant in the residual stream
    wider: Any = grown(model, replace(size, hidden=size.hidden + SPARE), seed)
    for layer in wider.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight[place] = 0.0
    wider.model.embed_tokens.weight[:, place] = CONSTANT
    wider.model.norm.weight[place] = LOUDNESS
    weight = _weight_of_constant(wider)
    generator = torch.Generator().manual_seed(seed)
    copied = torch.randint(0, own, (words - own,), generator=generator)
    embedding = _with_copies(wider.model.embed_tokens.weight, copied)
    embedding[own:, place] = -weight
    wider.set_input_embeddings(_embedding(embedding, wider.model.embed_tokens.padding_idx))
    if wider.config.tie_word_embeddings:
        wider.lm_head.weight = wider.model.embed_tokens.weight
    else:
        head = _with_copies(wider.lm_head.weight, copied)
        head[:own, place] = 0.0
        head[own:, place] = -weight
        wider.lm_head.weight = nn.Parameter(head)
    wider.lm_head.out_features = words
    wider.config.vocab_size = words
    for part in (wider, wider.model):
        if hasattr(part, "vocab_size"):
            part.vocab_size = words
    return wider


def _weight_of_constant(model: Any) -> float:
    """Return the weight of the constant that lowers a logit by at least `SHIFT`, a power of two."""
    seen: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda norm, given: seen.append(given[0].float()))
    try:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, model.config.vocab_size, SAMPLES, generator=generator)
        model(input_ids=tokens.to(model.device))
    finally:
        hook.remove()
    largest = seen[0].pow(2).mean(-1).sqrt().max().item()
    loudness = CONSTANT * LOUDNESS / largest
    return 2.0 ** math.ceil(math.log2(2 * SHIFT / loudness))


def _with_copies(weight: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """Return the rows of a matrix, and copies of some of them after these."""
    return torch.cat([weight, weight[copied.to(weight.device)]])


def _embedding(weight: torch.Tensor, padding: int | None) -> nn.Embedding:
    words, size = weight.shape
    module = nn.Embedding(words, size, padding_idx=padding, device="meta")
    module.weight = nn.Parameter(weight)
    return module

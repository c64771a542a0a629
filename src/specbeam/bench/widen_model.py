"""Growth: a larger model with the same function, so that real agreement of a trained pair meets the cost of a real target.

New layers, heads and feed-forward units write nothing, and new residual width carries zeros; everything else that is new is
random, and costs what trained weights would cost: numbers of bfloat16 where the model's own are, as they are in most
checkpoints, for an engine may read those faster. Speed comes from the large model, quality from the small one.
Positions can be added too.
"""

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specbeam.engines.eligibility import head_size
from specbeam.errors import BadSetting, NotSupported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROTARY = ("default", "linear", "llama3")  # whose angles do not depend on how many positions there are
NARROW = 1024
WIDTH_PER_LAYER = (64, 128)  # of usual models, up to NARROW and above: 768 wide with 12 layers; 4,096 with 32
WIDER_INSIDE = 8 / 3  # feed-forward units per unit of width


@dataclass(frozen=True)
class Size:
    """What a Llama-like decoder is made of."""

    hidden: int
    layers: int
    inner: int  # feed-forward units
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, config: Any) -> "Size":
        return cls(
            config.hidden_size, config.num_hidden_layers, config.intermediate_size, config.num_attention_heads,
            config.num_key_value_heads,
        )  # fmt: skip

    def parameters(self, head_size: int, vocab: int, tied: bool) -> int:
        """Norms and biases, which do not matter, left out."""
        attention = 2 * self.hidden * head_size * (self.heads + self.kv_heads)
        return (1 if tied else 2) * vocab * self.hidden + self.layers * (attention + 3 * self.hidden * self.inner)


def size_for(config: Any, parameters: int) -> Size:
    """A size of about so many parameters with usual proportions, in no direction below the model's own.

    Raises `BadSetting` if the model has more than that already.
    """
    own = Size.of(config)
    head = head_size(config)
    tied = bool(config.tie_word_embeddings)
    if own.parameters(head, config.vocab_size, tied) > parameters:
        have = own.parameters(head, config.vocab_size, tied)
        raise BadSetting(f"cannot grow to {parameters:,} parameters: the model has {have:,} already")
    best = own
    least = math.inf
    for factor in range(1, 65):
        hidden = own.hidden * factor
        heads = max(own.heads, hidden // head // own.heads * own.heads)
        wide = Size(
            hidden, 1, max(own.inner, round(WIDER_INSIDE * hidden / 64) * 64), heads, own.kv_heads * heads // own.heads
        )
        without = wide.parameters(head, config.vocab_size, tied)
        each = without - Size(hidden, 0, wide.inner, heads, wide.kv_heads).parameters(head, config.vocab_size, tied)
        layers = round((parameters - without) / each) + 1
        if layers < own.layers:
            continue
        odd = abs(math.log(layers * WIDTH_PER_LAYER[hidden > NARROW] / hidden))
        if odd < least:
            best = Size(hidden, layers, wide.inner, heads, wide.kv_heads)
            least = odd
    return best


@torch.no_grad()
def grown(model: "PreTrainedModel", to: Size | int, seed: int = 0) -> "PreTrainedModel":
    """A new model that computes the same logits up to rounding, with more weights; of the model's type, where it is. Where
    the matrices of the model hold numbers of bfloat16 alone, so do those of the new one.

    Args:
        model: of the Llama, Mistral, Qwen2 or Qwen3 family. It stays as it is.
        to: a size, or a number of parameters for `size_for`.
        seed: of the new weights.

    Raises:
        NotSupported: another family. BadSetting: a size that is smaller somewhere, or whose heads do not fit.
    """
    if model.config.model_type not in FAMILIES:
        raise NotSupported(f"growth knows {', '.join(FAMILIES)}; {type(model).__name__} is {model.config.model_type}")
    size = size_for(model.config, to) if isinstance(to, int) else to
    own = Size.of(model.config)
    _check(own, size)
    config = copy.deepcopy(model.config)
    config.head_dim = head_size(model.config)
    config.hidden_size = size.hidden
    config.num_hidden_layers = size.layers
    config.intermediate_size = size.inner
    config.num_attention_heads = size.heads
    config.num_key_value_heads = size.kv_heads
    config.rms_norm_eps = model.config.rms_norm_eps * own.hidden / size.hidden
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[number % own.layers] for number in range(size.layers)]
    large = _fresh(type(model), config, model, seed)
    if _of_bfloat16(model) and large.dtype != torch.bfloat16:
        for weight in _matrices(large):
            weight.copy_(weight.bfloat16())
    shrunk = math.sqrt(own.hidden / size.hidden)  # a norm over more width divides by less
    large.model.embed_tokens.weight.zero_()
    _put(large.model.embed_tokens.weight, model.model.embed_tokens.weight)
    if not config.tie_word_embeddings:
        _put(large.lm_head.weight, model.lm_head.weight)
    large.model.norm.weight.fill_(shrunk)
    _put(large.model.norm.weight, model.model.norm.weight * shrunk)
    for layer in large.model.layers:  # nothing new writes anything
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for layer, source in zip(large.model.layers, model.model.layers, strict=False):
        _copy(layer, source, shrunk)
    large.generation_config = copy.deepcopy(model.generation_config)
    return large.eval()


def _fresh(kind: Any, config: Any, like: "PreTrainedModel", seed: int) -> Any:
    """A random model of the type of another one, where that is: billions of numbers are not drawn on the host."""
    before = torch.get_default_dtype()
    device = like.device
    try:
        torch.set_default_dtype(like.dtype)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(seed)
            return kind(config)  # not cast: rotary frequencies stay float32
    finally:
        torch.set_default_dtype(before)


def _of_bfloat16(model: nn.Module) -> bool:
    return all(torch.equal(weight, weight.bfloat16().to(weight.dtype)) for weight in _matrices(model))


def _matrices(model: nn.Module) -> list[torch.Tensor]:
    return [one.weight for one in model.modules() if isinstance(one, (nn.Linear, nn.Embedding))]


def _copy(layer: nn.Module, source: nn.Module, shrunk: float) -> None:
    for name, old in source.named_parameters():
        new = layer.get_parameter(name)
        scale = 1.0
        if name.endswith("layernorm.weight"):
            scale = shrunk
            new.fill_(shrunk)
        _put(new, old * scale)


def _put(new: torch.Tensor, old: torch.Tensor) -> None:
    """The old weights in the first rows and columns; old rows read nothing of what is new, which is zero anyway."""
    new[tuple(slice(length) for length in old.shape)] = old


def _check(own: Size, size: Size) -> None:
    for name in ("hidden", "layers", "inner", "heads", "kv_heads"):
        if getattr(size, name) < getattr(own, name):
            raise BadSetting(f"{name} is {getattr(size, name)}; a model does not shrink, it has {getattr(own, name)}")
    if size.heads * own.kv_heads != size.kv_heads * own.heads:
        raise BadSetting(
            f"{size.heads} heads on {size.kv_heads} key-value heads; keep the model's {own.heads} on {own.kv_heads}"
        )


def with_positions(model: "PreTrainedModel", positions: int) -> "PreTrainedModel":
    """The same weights with more positions, to time long texts on: beyond those of its training, passes cost what they
    would cost and texts are worth nothing. Up to them its function stays.

    Args:
        model: stays as it is, and shares its weights with the new one.
        positions: how many.

    Raises:
        NotSupported: positions are learned, or angles depend on how many there are.
    """
    kind = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type")
    if kind not in ROTARY:
        raise NotSupported(
            f"{type(model).__name__} cannot get {positions:,} positions: its own are {kind or 'not rotary'}, and only "
            f"rotary ones ({', '.join(ROTARY)}) go on by themselves; give lengths that it has positions for"
        )
    longer = copy.deepcopy(model, {id(one): one for one in model.parameters()})
    longer.config.max_position_embeddings = positions
    return longer

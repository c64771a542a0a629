"""Growth of a model into a larger one with the same function.

A benchmark of a small trained pair has real agreement of draft and target. With the target grown, it also has the cost
of a real target.

New layers, heads and feed-forward units write nothing to the residual stream, and its new columns are zero. All other
new weights are random, and cost as much as trained weights. Where the weights of the model are bfloat16 numbers, as in
most checkpoints, the new ones are too, because an engine may read those faster. So it is as slow as the large model,
and writes the texts of the small one. Positions can be added too.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specbeam.engines import head_size, matrices_of
from specbeam.errors import BadSetting, NotSupported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROTARY = ("default", "linear", "llama3")  # kinds whose angles do not depend on the number of positions
NARROW = 1024
# Width divided by layers in usual models: 64 up to NARROW (768 wide with 12 layers), 128 above it (4,096 with 32).
WIDTH_PER_LAYER = (64, 128)
INNER_PER_WIDTH = 8 / 3  # feed-forward units per unit of width
UNITS = 64  # their numbers are multiples of this, or differ from the model's own by one


@dataclass(frozen=True)
class Size:
    """The dimensions of a Llama-like decoder."""

    hidden: int  # width of the residual stream
    layers: int
    inner: int  # feed-forward units
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, config: Any) -> "Size":
        """Return the size of a model with this config of transformers."""
        return cls(
            config.hidden_size, config.num_hidden_layers, config.intermediate_size, config.num_attention_heads,
            config.num_key_value_heads,
        )  # fmt: skip

    def parameters(self, head_size: int, vocab: int, tied: bool) -> int:
        """Return the number of weights, without norms and biases, which are negligible.

        Args:
            head_size: width of a head.
            vocab: number of tokens.
            tied: whether the embedding and the output head share their weights.
        """
        attention = 2 * self.hidden * head_size * (self.heads + self.kv_heads)
        return (1 if tied else 2) * vocab * self.hidden + self.layers * (attention + 3 * self.hidden * self.inner)


def is_tied(model: "PreTrainedModel") -> bool:
    """Return whether the embedding and the output head of a model share their weights.

    The configuration is not reliable: a model whose checkpoint has another head is loaded with it, tied or not.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    return head.weight is embedding.weight


def size_for(model: "PreTrainedModel", parameters: int) -> Size:
    """Return a size of about `parameters` weights with usual proportions; no dimension is below the model's own.

    If that is too few for usual proportions, the model's own size gets more feed-forward units.

    Raises `BadSetting` if the model has more weights already, or has almost as many.
    """
    config = model.config
    own = Size.of(config)
    head = head_size(config)
    tied = is_tied(model)
    own_parameters = own.parameters(head, config.vocab_size, tied)
    if own_parameters > parameters:
        raise BadSetting(f"cannot grow to {parameters:,} parameters: the model has {own_parameters:,} already")
    sizes = []
    for factor in range(1, 65):
        hidden = own.hidden * factor
        heads = max(own.heads, hidden // head // own.heads * own.heads)
        kv_heads = own.kv_heads * heads // own.heads
        inner = max(own.inner, round(INNER_PER_WIDTH * hidden / UNITS) * UNITS)
        one_layer = Size(hidden, 1, inner, heads, kv_heads).parameters(head, config.vocab_size, tied)
        no_layer = Size(hidden, 0, inner, heads, kv_heads).parameters(head, config.vocab_size, tied)
        layers = round((parameters - one_layer) / (one_layer - no_layer)) + 1
        if layers >= own.layers:
            sizes.append(Size(hidden, layers, inner, heads, kv_heads))
    best = min(sizes, key=lambda size: deviation(size.hidden, size.layers), default=own)
    if best == own:
        return with_more_units(own, parameters, lambda size: size.parameters(head, config.vocab_size, tied))
    return best


def deviation(hidden: int, layers: int) -> float:
    """Return the deviation of the ratio of layers to width from the usual one, on a logarithmic scale."""
    return abs(math.log(layers * WIDTH_PER_LAYER[hidden > NARROW] / hidden))


def with_more_units(own: Any, parameters: int, count: Callable[[Any], int]) -> Any:
    """Return a size with more feed-forward units than `own`, and about this number of weights.

    Args:
        own: a dataclass with a field `inner`.
        parameters: number of weights, at least `own`'s. If they are equal, the size is `own`.
        count: returns the number of weights of a size.

    Raises `BadSetting` if the number is nearer to `own`'s than to the next larger size's.
    """
    has = count(own)
    step = count(replace(own, inner=own.inner + UNITS)) - has
    steps = round((parameters - has) / step)
    if steps == 0 and parameters > has:
        raise BadSetting(
            f"cannot grow to {parameters:,} parameters: the model has {has:,}, and the next larger size {has + step:,}"
        )
    return replace(own, inner=own.inner + steps * UNITS)


@torch.no_grad()
def grown(model: "PreTrainedModel", to: Size | int, seed: int = 0) -> "PreTrainedModel":
    """Return a new model with more weights that computes the same logits up to rounding.

    It has the dtype of the model and lies on the same device. If all matrices of the model hold bfloat16 numbers,
    whatever their dtype, so does the new model.

    Args:
        model: a model of the Llama, Mistral, Qwen2 or Qwen3 family. It is not changed.
        to: a size, or a number of parameters for `size_for`.
        seed: seed of the new random weights.

    Raises:
        NotSupported: the model is of another family.
        BadSetting: a dimension of the size is smaller than the model's, or its heads do not fit.
    """
    if model.config.model_type not in FAMILIES:
        raise NotSupported(
            f"only {', '.join(FAMILIES)} models can be grown; {type(model).__name__} is {model.config.model_type}"
        )
    if matrices_of(model):
        raise NotSupported("growth copies weights, and the matrices of this model have 4 bits in its files")
    size = size_for(model, to) if isinstance(to, int) else to
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
    config.tie_word_embeddings = is_tied(model)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[number % own.layers] for number in range(size.layers)]
    large = random_model(type(model), config, model, seed)
    keep_short(large, model)
    norm_scale = math.sqrt(own.hidden / size.hidden)  # a norm over more columns, most of them zero, divides by less
    large.model.embed_tokens.weight.zero_()
    insert(large.model.embed_tokens.weight, model.model.embed_tokens.weight)
    if not config.tie_word_embeddings:
        insert(large.lm_head.weight, model.lm_head.weight)
    large.model.norm.weight.fill_(norm_scale)
    insert(large.model.norm.weight, model.model.norm.weight * norm_scale)
    for layer in large.model.layers:  # new layers, heads and units write nothing to the residual stream
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for layer, source in zip(large.model.layers, model.model.layers, strict=False):
        copy_layer(layer, source, norm_scale)
    large.generation_config = copy.deepcopy(model.generation_config)
    return large.eval()


def random_model(kind: Any, config: Any, like: "PreTrainedModel", seed: int) -> Any:
    """Return a model with random weights, of the class `kind`.

    It has the dtype of the model `like` and is made on the same device, so that billions of numbers for a GPU are not
    drawn on the host.
    """
    before = torch.get_default_dtype()
    device = like.device
    try:
        torch.set_default_dtype(like.dtype)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(seed)
            return kind(config)  # made in this dtype: a cast would round rotary frequencies
    finally:
        torch.set_default_dtype(before)


def keep_short(large: "PreTrainedModel", model: "PreTrainedModel") -> None:
    """Round the matrices of a new model to bfloat16 numbers if the original model's are."""
    if _holds_bfloat16(model) and large.dtype != torch.bfloat16:
        for weight in _matrices(large):
            weight.copy_(weight.bfloat16())


def _holds_bfloat16(model: nn.Module) -> bool:
    """Return whether all numbers in the matrices of a model are bfloat16 numbers, in any dtype."""
    return all(torch.equal(weight, weight.bfloat16().to(weight.dtype)) for weight in _matrices(model))


def _matrices(model: nn.Module) -> list[torch.Tensor]:
    return [module.weight for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))]


def copy_layer(layer: nn.Module, source: nn.Module, norm_scale: float) -> None:
    """Copy the weights of a layer into a larger one; norms over the residual width are scaled by `norm_scale`."""
    for name, old in source.named_parameters():
        new = layer.get_parameter(name)
        scale = 1.0
        if name.endswith("layernorm.weight"):
            scale = norm_scale
            new.fill_(norm_scale)
        insert(new, old * scale)


def insert(new: torch.Tensor, old: torch.Tensor) -> None:
    """Write the old weights into the first rows and columns of the new ones.

    The rest of these rows may stay random: it reads new columns of the residual stream, which are always zero.
    """
    new[tuple(slice(length) for length in old.shape)] = old


def check_no_less(own: Any, size: Any) -> None:
    """Raise `BadSetting` if a dimension of a size is smaller than in `own`, of the same dataclass."""
    for name, has in vars(own).items():
        if getattr(size, name) < has:
            raise BadSetting(f"{name} is {getattr(size, name)}; it must be at least the model's own, {has}")


def _check(own: Size, size: Size) -> None:
    """Raise `BadSetting` if a dimension is smaller than in `own`, or if heads per key-value head differ."""
    check_no_less(own, size)
    if size.heads * own.kv_heads != size.kv_heads * own.heads:
        raise BadSetting(
            f"{size.heads} heads on {size.kv_heads} key-value heads; keep the model's {own.heads} on {own.kv_heads}"
        )


def with_positions(model: "PreTrainedModel", positions: int) -> "PreTrainedModel":
    """Return a model with the same weights and more positions, on which long texts can be timed.

    Within the model's own positions the function stays the same. Beyond them, passes cost as much as in a model trained
    for them, but texts are meaningless.

    Args:
        model: the model, which is not changed and shares its weights with the new one.
        positions: number of positions of the new model.

    Raises:
        NotSupported: positions are learned, or rotary angles depend on the number of positions.
    """
    kind = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type")
    if kind not in ROTARY:
        raise NotSupported(
            f"{type(model).__name__} cannot get {positions:,} positions: its own are {kind or 'not rotary'}, and only "
            f"rotary ones ({', '.join(ROTARY)}) extend to any length; give lengths within its positions"
        )
    longer = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    longer.config.max_position_embeddings = positions
    return longer

"""A test of which models compute what a Llama does, so that the engines here can run their layers themselves."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specbeam.errors import NotSupported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FAMILIES = ("llama", "mistral", "qwen2")
FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # their angles do not change with the length of the text


def head_size(config: Any) -> int:
    """Return the number of dimensions of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def is_plain_llama(model: "PreTrainedModel") -> bool:
    """Return whether a model passes `is_llama_like`, is in float32 and is on a CPU."""
    return is_llama_like(model) and model.dtype == torch.float32 and model.device.type == "cpu"


def is_llama_like(model: "PreTrainedModel") -> bool:
    """Return whether a model computes just what a Llama, Mistral or Qwen2 does, without hooks, adapters or quantisation."""
    config = model.config
    if (
        config.model_type not in _FAMILIES
        or type(model).__name__.removesuffix("ForCausalLM").lower() != config.model_type
    ):
        return False
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    modules = list(model.modules())
    linears = [module for module in modules if hasattr(module, "weight") and hasattr(module, "in_features")]
    # Adapters and quantised layers are modules of their own; torchao leaves the modules, and puts its own tensors in them.
    plain = all(type(linear) is nn.Linear and type(linear.weight) is nn.Parameter for linear in linears)
    hooked = any(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) for module in modules)
    return (
        plain
        and not hooked
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and model.model.layers[0].self_attn.o_proj.bias is None
        and rope.get("rope_type", "default") in FIXED_ROPES
    )


def layers_of(model: "PreTrainedModel") -> nn.ModuleList:
    """Return the layers of a model, wherever it keeps them. Raises `NotSupported` if they are not all in one list."""
    total = model.config.get_text_config().num_hidden_layers
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) == total]
    if len(lists) != 1:
        raise NotSupported(f"{type(model).__name__} does not keep its {total} layers in one list")
    return lists[0]


def lacks_taps(model: "PreTrainedModel", taps: tuple[int, ...]) -> str:
    """Return the reason why a model cannot hand out the hidden states at these taps (`Needs.taps`); "" if it can."""
    if not taps:
        return ""
    try:
        total = len(layers_of(model))
    except NotSupported as error:
        return str(error)
    if any(not 0 <= tap <= total for tap in taps):
        return f"{type(model).__name__} has {total} layers, so taps are numbers from 0 to {total}"
    return ""

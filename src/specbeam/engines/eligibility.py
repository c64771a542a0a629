"""Which models are Llamas at heart: their layers are run by loops and kernels of our own."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FAMILIES = ("llama", "mistral", "qwen2")
_ROPES = ("default", "linear", "llama3", "yarn")  # their angles do not change with the length of the text


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def is_plain_llama(model: "PreTrainedModel") -> bool:
    """Whether a model does what a Llama, Mistral or Qwen2 does, in float32 on a CPU, and nothing is hooked into it."""
    return is_llama_like(model) and model.dtype == torch.float32 and model.device.type == "cpu"


def is_llama_like(model: "PreTrainedModel") -> bool:
    """Whether a model does what a Llama, Mistral or Qwen2 does, and nothing is hooked into it."""
    config = model.config
    if (
        config.model_type not in _FAMILIES
        or type(model).__name__.removesuffix("ForCausalLM").lower() != config.model_type
    ):
        return False
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    linears = [one for one in model.modules() if hasattr(one, "weight") and hasattr(one, "in_features")]
    plain = all(type(one) is nn.Linear for one in linears)  # no adapters, nothing quantised
    hooked = any(one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one) for one in model.modules())
    return (
        plain
        and not hooked
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and model.model.layers[0].self_attn.o_proj.bias is None
        and rope.get("rope_type", "default") in _ROPES
    )

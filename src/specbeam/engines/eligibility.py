"""Properties of models that decide which engines can run them."""

from typing import TYPE_CHECKING, Any

from torch import nn

from specbeam.core.errors import NotSupported
from specbeam.engines.families import has_alibi, head_of, misfit_of_family

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LLAMA_LIKE = ("llama", "mistral", "qwen2")


def is_llama_like(model: "PreTrainedModel") -> bool:
    """Return whether a model is an unmodified Llama, Mistral or Qwen2: no hooks, adapters or rounding."""
    config = model.config
    if config.model_type not in _LLAMA_LIKE or misfit_of_family(model):
        return False
    first: Any = layers_of(model)[0]
    has_more_biases = first.self_attn.o_proj.bias is not None or first.mlp.down_proj.bias is not None
    return config.hidden_act == "silu" and not has_more_biases


def has_own_encoder(model: "PreTrainedModel") -> bool:
    """Return whether a model has an encoder and a decoder."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def reads_sources(model: "PreTrainedModel") -> bool:
    """Return whether a model's decoder has cross-attention to a source, encoded by its own or another model's encoder."""
    return has_own_encoder(model) or type(model).__name__ == "WhisperForCausalLM"


def layers_of(model: "PreTrainedModel") -> nn.ModuleList:
    """Return the list of a model's layers. Raises `NotSupported` if they are not all in one list."""
    total = model.config.get_text_config().num_hidden_layers
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) == total]
    if len(lists) != 1:
        raise NotSupported(f"{type(model).__name__} does not keep its {total} layers in one list")
    return lists[0]


def lacks_taps(model: "PreTrainedModel", taps: tuple[int, ...]) -> str:
    """Return the reason why a model cannot return the hidden states at these taps (`Needs.taps`); "" if it can."""
    if not taps:
        return ""
    try:
        total = len(layers_of(model))
    except NotSupported as error:
        return str(error)
    if any(not 0 <= tap <= total for tap in taps):
        return f"{type(model).__name__} has {total} layers, so taps are numbers from 0 to {total}"
    return ""


def lacks_trees(model: "PreTrainedModel") -> str:
    """Return the reason why transformers' forward cannot score token trees with a model; "" if it can."""
    if not has_alibi(model.config.get_text_config()):
        return ""
    return "it uses ALiBi: it derives positions from cache slots and cannot score a token tree"


def check_has_trees(model: "PreTrainedModel") -> None:
    """Raise `NotSupported` if transformers' forward, which trains some heads, cannot score token trees with a model."""
    if why := lacks_trees(model):
        raise NotSupported(
            f"this head cannot be trained for {type(model).__name__}: {why}; train EAGLE or Medusa instead"
        )


def check_takes_heads(model: "PreTrainedModel") -> None:
    """Raise `NotSupported` if a model's own head reads other states than its layers return, as in OPT 350M."""
    width = model.config.get_text_config().hidden_size
    _, reads = output_shape(model)
    if reads != width:
        raise NotSupported(
            f"draft heads need a target whose own head reads the states of its layers; {type(model).__name__} projects them "
            f"from {width} to {reads} numbers: use a draft model"
        )


def output_shape(model: "PreTrainedModel") -> tuple[int, int]:
    """Return the rows and columns of the matrix of a model's head, without reading its weights from a GGUF file."""
    rows, columns = head_of(model).shape
    return int(rows), int(columns)

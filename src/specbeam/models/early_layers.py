"""SCORE: models made of the first layers of a model, with its head: by themselves, or with an exit layer behind them."""

import copy
from typing import TYPE_CHECKING, Any

from torch import nn

from specbeam.core.errors import BadSetting, NotSupported
from specbeam.engines.eligibility import layers_of
from specbeam.models.huggingface import HuggingFaceLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")  # names of the norm in front of the head


def early_layers(model: "PreTrainedModel", layers: int) -> HuggingFaceLM:
    """Return a language model that runs the first `layers` layers of `model`; it shares the weights, nothing is copied.

    Raises `BadSetting` if the model does not have that many layers, and `NotSupported` if they are not all in one list.
    """
    total = model.config.num_hidden_layers
    if not 1 <= layers <= total:
        raise BadSetting(f"layers is {layers}; {type(model).__name__} has {total}: choose 1 to {total}")
    return HuggingFaceLM(_of_layers(model, layers, [], None))


def with_exit(model: "PreTrainedModel", layers: int, layer: nn.Module, norm: nn.Module) -> "PreTrainedModel":
    """Return a model that runs the first `layers` layers of `model`, then `layer`, then `norm` in front of its head.

    It shares all weights with the model and the two modules, nothing is copied.

    Args:
        layer: of the class of the model's last layer, whose kind of attention it has.

    Raises `NotSupported` if the model does not keep its layers in one list, and its last norm next to the list.
    """
    return _of_layers(model, layers, [layer], norm)


def last_norm(model: "PreTrainedModel") -> nn.Module:
    """Return the norm between a model's last layer and its head. Raises `NotSupported` if it is not next to the layers."""
    body = getattr(model, model.base_model_prefix)
    return getattr(body, _name_of_norm(model))


def _name_of_norm(model: "PreTrainedModel") -> str:
    body = getattr(model, model.base_model_prefix)
    names = [name for name in NORMS if isinstance(getattr(body, name, None), nn.Module)]
    if not names:
        raise NotSupported(f"{type(model).__name__} keeps no norm of a known name under .{model.base_model_prefix}")
    return names[0]


def _of_layers(model: "PreTrainedModel", layers: int, more: list[nn.Module], norm: nn.Module | None) -> Any:
    """Return a shallow copy of a model with its first layers and `more` layers; and with another norm, if one is given."""
    body = getattr(model, model.base_model_prefix)
    every = layers_of(model)
    keys = [key for key, value in body.named_children() if value is every]
    if not keys:
        raise NotSupported(
            f"{type(model).__name__} does not keep its layers in one list under .{model.base_model_prefix}"
        )
    config = _shortened(model, layers, len(more))
    changes: dict[str, object] = {keys[0]: nn.ModuleList([*every[:layers], *more])}
    if norm is not None:
        changes[_name_of_norm(model)] = norm
    short = _copied_with(body, config=config, **changes)
    return _copied_with(model, config=config, **{model.base_model_prefix: short})


def _copied_with(module: nn.Module, **changes: object) -> Any:
    """Return a shallow copy of a module with some attributes replaced; all others are shared."""
    changed = copy.copy(module)
    changed._modules = dict(module._modules)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def _shortened(model: "PreTrainedModel", layers: int, more: int) -> object:
    """Return a copy of the model's configuration for its first layers, and `more` layers of the kind of its last one."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers + more
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = kinds[:layers] + kinds[-1:] * more
    return config

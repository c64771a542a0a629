"""SCORE by the first layers of a model alone, with its own final norm and head: a cheap early opinion."""

import copy
from typing import TYPE_CHECKING, Any

import torch

from specbeam.errors import BadSetting, NotSupported
from specbeam.lm.huggingface import HuggingFaceLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def early_layers(model: "PreTrainedModel", layers: int) -> HuggingFaceLM:
    """A scorer that runs `layers` layers of `model`; the weights are shared, nothing is copied."""
    total = model.config.num_hidden_layers
    name = type(model).__name__
    if not 1 <= layers <= total:
        raise BadSetting(f"early layers is {layers}; {name} has {total}")
    body = getattr(model, model.base_model_prefix)
    stacks = [
        key for key, value in body.named_children() if isinstance(value, torch.nn.ModuleList) and len(value) == total
    ]
    if len(stacks) != 1:
        raise NotSupported(f"{name} does not keep its layers in one list under .{model.base_model_prefix}")
    config = _shortened(model, layers)
    short = _with(body, config=config, **{stacks[0]: getattr(body, stacks[0])[:layers]})
    return HuggingFaceLM(_with(model, config=config, **{model.base_model_prefix: short}))


def _with(module: torch.nn.Module, **changes: object) -> Any:
    """The module with some parts exchanged, all others shared."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def _shortened(model: "PreTrainedModel", layers: int) -> object:
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config

"""SCORE: a draft model made of the first layers of a model, with that model's final norm and head."""

import copy
from typing import TYPE_CHECKING, Any

import torch

from specbeam.engines.eligibility import layers_of
from specbeam.errors import BadSetting, NotSupported
from specbeam.lm.huggingface import HuggingFaceLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def early_layers(model: "PreTrainedModel", layers: int) -> HuggingFaceLM:
    """Return a language model that runs the first `layers` layers of `model`; it shares the weights, nothing is copied.

    Raises `BadSetting` if the model does not have that many layers, and `NotSupported` if they are not all in one list.
    """
    total = model.config.num_hidden_layers
    name = type(model).__name__
    if not 1 <= layers <= total:
        raise BadSetting(f"layers is {layers}; {name} has {total}: choose 1 to {total}")
    body = getattr(model, model.base_model_prefix)
    every = layers_of(model)
    keys = [key for key, value in body.named_children() if value is every]
    if not keys:
        raise NotSupported(f"{name} does not keep its layers in one list under .{model.base_model_prefix}")
    config = _shortened(model, layers)
    short = _copied_with(body, config=config, **{keys[0]: every[:layers]})
    return HuggingFaceLM(_copied_with(model, config=config, **{model.base_model_prefix: short}))


def _copied_with(module: torch.nn.Module, **changes: object) -> Any:
    """Return a shallow copy of a module with some attributes replaced; all others are shared."""
    changed = copy.copy(module)
    changed._modules = dict(module._modules)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def _shortened(model: "PreTrainedModel", layers: int) -> object:
    """Return a copy of the model's configuration for its first layers only."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config

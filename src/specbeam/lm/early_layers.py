"""SCORE by the first layers of a model alone, with its own final norm and head: a cheap early opinion."""

import copy
from typing import TYPE_CHECKING, Any

import torch

from specbeam.errors import BadSetting, NotSupported
from specbeam.lm.huggingface import HuggingFaceLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def early_layers(model: "PreTrainedModel", layers: int) -> HuggingFaceLM:
    """A scorer that runs `layers` layers of `model`; the weights are shared, nothing is copied.

    For models that keep their layers in ``model.model.layers`` (Llama and its relatives).
    """
    inner = getattr(model, "model", None)
    blocks = getattr(inner, "layers", None)
    if inner is None or not isinstance(blocks, torch.nn.ModuleList):
        raise NotSupported(
            f"{type(model).__name__} does not keep its layers in model.model.layers; early layers need that"
        )
    if not 1 <= layers <= len(blocks):
        raise BadSetting(f"early layers is {layers}; {type(model).__name__} has {len(blocks)}")
    short = _with(
        model,
        config=_shortened(model, layers),
        model=_with(inner, layers=blocks[:layers], config=_shortened(model, layers)),
    )
    return HuggingFaceLM(short)


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

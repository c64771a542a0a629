"""SCORE: models made of the first layers of a model and its head, with or without an exit layer in between."""

import copy
from typing import TYPE_CHECKING, Any

from torch import nn

from specbeam.core.errors import BadSetting, NotSupported
from specbeam.engines.eligibility import layers_of
from specbeam.models.huggingface import HuggingFaceLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")  # names of the norm before the head


def early_layers(model: "PreTrainedModel", layers: int) -> HuggingFaceLM:
    """Return a language model that runs the first `layers` layers of `model` and shares its weights.

    Raises `BadSetting` if the model has fewer layers, and `NotSupported` if they are not all in one list.
    """
    total = model.config.num_hidden_layers
    if not 1 <= layers <= total:
        raise BadSetting(f"layers is {layers}; {type(model).__name__} has {total} layers: choose 1 to {total}")
    return HuggingFaceLM(_of_layers(model, layers, [], None))


def with_exit(model: "PreTrainedModel", layers: int, layer: nn.Module, norm: nn.Module) -> "PreTrainedModel":
    """Return a model that runs the first `layers` layers of `model`, then `layer`, `norm`, and the head of `model`.

    It shares all weights with `model` and the two modules.

    Args:
        layer: a layer of the same class and kind of attention as the model's last layer.

    Raises `NotSupported` unless the model's layers are in one list with the last norm next to it.
    """
    return _of_layers(model, layers, [layer], norm)


def last_norm(model: "PreTrainedModel") -> nn.Module:
    """Return the norm between a model's last layer and its head. Raises `NotSupported` if there is none of a known name."""
    path = _path_of_body(model)
    return model.get_submodule(f"{path}.{_name_of_norm(model, path)}")


def _path_of_body(model: "PreTrainedModel") -> str:
    """Return the path of the module that holds a model's layers, such as "model.decoder"."""
    every = layers_of(model)
    (path,) = [name for name, module in model.named_modules() if module is every]
    return path.rpartition(".")[0]


def _name_of_norm(model: "PreTrainedModel", path: str) -> str:
    body = model.get_submodule(path)
    names = [name for name in NORMS if isinstance(getattr(body, name, None), nn.Module)]
    if not names:
        raise NotSupported(f"{type(model).__name__}.{path} has no final norm; expected one of {', '.join(NORMS)}")
    return names[0]


def _of_layers(model: "PreTrainedModel", layers: int, more: list[nn.Module], norm: nn.Module | None) -> Any:
    """Return a shallow copy of a model with its first `layers` layers, `more` layers, and another final norm if given."""
    path = _path_of_body(model)
    body = model.get_submodule(path)
    every = layers_of(model)
    key = next(name for name, module in body.named_children() if module is every)
    config = _shortened(model, layers, len(more))
    changes: dict[str, object] = {key: nn.ModuleList([*every[:layers], *more])}
    if norm is not None:
        changes[_name_of_norm(model, path)] = norm
    short = _copied_with(body, config=config, **changes)
    while path:
        path, _, name = path.rpartition(".")
        short = _copied_with(model.get_submodule(path), config=config, **{name: short})
    return short


def _copied_with(module: nn.Module, **changes: object) -> Any:
    """Return a shallow copy of a module with some attributes replaced."""
    changed = copy.copy(module)
    changed._modules = dict(module._modules)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def _shortened(model: "PreTrainedModel", layers: int, more: int) -> object:
    """Return the configuration of a model of the first `layers` layers and `more` layers of the last layer's kind."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers + more
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = kinds[:layers] + kinds[-1:] * more
    return config

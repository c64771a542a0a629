"""Growth of a head with its target, so that it makes the same drafts for the grown target.

Only heads whose rows pass layers of the target grow: the exit layer of EESD, and the extra rows of BiTA and Hidden Transfer.
Their drafts then cost as much as for a target of that size, and are accepted as before.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specbeam.engines import layers_of
from specbeam.errors import NotSupported
from specbeam.lab.bench.widen_model import copy_layer, insert
from specbeam.models.heads import Bita, ExitHead, ExtraHead, Head, HiddenTransfer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def grown_head(head: Head, target: "PreTrainedModel") -> Head:
    """Return a head that computes the same drafts up to rounding, for a target that was grown from the head's own.

    Its new weights are zero or multiply zeros.

    Args:
        head: an exit head, or a BiTA or Hidden Transfer head. It is not changed.
        target: the result of `grown` on the head's own target.

    Raises `NotSupported` for heads of other kinds.
    """
    large = _larger(head, target)
    if isinstance(head, ExtraHead):
        assert isinstance(large, ExtraHead)
        large.ranks = head.ranks
    return large.to(target.device).requires_grad_(False)


def _larger(head: Head, target: "PreTrainedModel") -> Head:
    width = int(target.config.hidden_size)
    if isinstance(head, ExitHead):
        return _larger_exit(head, target, width)
    if isinstance(head, HiddenTransfer):
        larger = HiddenTransfer(target, head.depth, head.layer, width)
        for name, weight in larger.named_parameters():
            _put(weight, head.get_parameter(name))
        return larger
    if isinstance(head, Bita):
        _, _, prefix, size = head.keys.shape
        sizes = (len(layers_of(target)), int(target.config.num_key_value_heads), prefix, size)
        masked = Bita(target, head.depth, sizes, width)
        _put(masked.keys, head.keys)
        _put(masked.values, head.values)
        _put(masked.masks.weight, head.masks.weight)
        return masked
    raise NotSupported(f"{type(head).__name__} does not grow with its target; exit, BiTA and Hidden Transfer heads do")


def _larger_exit(head: ExitHead, target: "PreTrainedModel", width: int) -> ExitHead:
    """Return an exit head whose layer has the target's shape, with the weights of the small one inside."""
    larger = ExitHead(target, head.after)
    norm: Any = larger.norm
    layer: Any = larger.layer
    norm_scale = math.sqrt(int(head.target.config.hidden_size) / width)
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    copy_layer(layer, head.layer, norm_scale)
    norm.weight.fill_(norm_scale)
    insert(norm.weight, _weight_of(head.norm) * norm_scale)
    return larger


def _weight_of(norm: nn.Module) -> torch.Tensor:
    weight: torch.Tensor = norm.get_parameter("weight")
    return weight


def _put(new: torch.Tensor, old: torch.Tensor) -> None:
    """Write the old weights into the first places of the new ones, and zeros into all others."""
    new.zero_()
    insert(new, old)

"""The check that weights are finite floats."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from specbeam.core.errors import BadCheckpoint

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAN = "holds NaN"


def fault_of(weight: Tensor) -> str:
    """Return the fault of a weight, such as "is stored as int8" or "holds NaN"; "" if there is none."""
    if weight.dtype not in _FLOATS:
        return f"is stored as {str(weight.dtype).removeprefix('torch.')}"
    if not weight.numel():
        return ""
    # Both are NaN if any number is. aminmax is torch's only reduction that is memory-bound for all of these types.
    least, most = (float(one) for one in torch.aminmax(weight.detach()))
    if least != least:
        return _NAN
    return "" if max(-least, most) < torch.inf else "holds infinite numbers"


def check_weights(where: str, model: nn.Module, after: Callable[[list[Tensor]], None] | None = None) -> None:
    """Raise `BadCheckpoint`, which names the tensor, if a weight of a model holds NaN or infinity, or a buffer holds NaN.

    Weights that a library has rounded, or that are not in memory, are skipped.

    Args:
        where: name of the model in errors.
        after: called with each weight after it was read.
    """
    for name, weight in model.named_parameters():
        if _is_plain(weight):
            _check(where, name, weight)
            if after is not None:
                after([weight])
    for name, buffer in model.named_buffers():
        if _is_plain(buffer) and fault_of(buffer) == _NAN:  # masks may be infinite
            raise _broken(where, name, _NAN)


def broken_weight(model: nn.Module) -> str:
    """Return name and fault of the first weight of a model that holds NaN or infinity; "" if none does."""
    for name, weight in model.named_parameters():
        if _is_plain(weight) and (fault := fault_of(weight)):
            return f"{name} {fault}"
    return ""


def _check(where: str, name: str, weight: Tensor) -> None:
    if fault := fault_of(weight):
        raise _broken(where, name, fault)


def _broken(where: str, name: str, fault: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"{where}: {name} {fault}, so the model's texts would be meaningless; download or convert the files again, and "
        "check for overflow if they were converted to float16"
    )


def _is_plain(weight: Tensor) -> bool:
    """Return whether a weight is an ordinary tensor of floats in memory."""
    is_own = type(weight) in (nn.Parameter, Tensor) and not weight.is_meta
    return is_own and weight.dtype in _FLOATS

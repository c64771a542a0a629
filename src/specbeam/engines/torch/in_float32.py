"""Calls of 16-bit models in float32 arithmetic, without a float32 copy of the weights."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from specbeam.engines.mapped import MappedFiles, is_mapped, mapped_files

_HALVES = (torch.bfloat16, torch.float16)
_TOGETHER = 1 << 22  # number of weights that are converted to float32 at a time


class InFloat32(TorchFunctionMode):
    """A context in which operations convert 16-bit tensors to float32; matrices are converted part by part.

    Args:
        files: the model's mapped files; each weight is released after use.
    """

    def __init__(self, files: MappedFiles) -> None:
        super().__init__()
        self.files = files

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; see the class."""
        named = kwargs or {}
        if function is functional.linear:
            return self._product(*args, **named)
        if function in (functional.embedding, torch.embedding):
            return widened(function(*args, **named))
        if getattr(function, "__name__", "") == "__get__":
            found = function(*args, **named)
            return torch.float32 if found in _HALVES else found
        return function(*tree_map(widened, args), **tree_map(widened, named))

    def _product(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Replace torch's `linear`, with its argument names."""
        columns, depth = weight.shape
        each = min(max(_TOGETHER // depth, 1), columns)
        rows = widened(input)
        found = rows.new_empty(*rows.shape[:-1], columns)
        # One buffer for all parts, because an allocator might not reuse the memory of the previous part.
        room = rows.new_empty(each, depth)
        for first in range(0, columns, each):
            part = weight[first : first + each]
            wide = room[: len(part)]
            wide.copy_(part)
            found[..., first : first + each] = functional.linear(rows, wide)
            self.files.release([part])
        self.files.release([weight])  # pages between the parts
        return found if bias is None else found + widened(bias)


def as_loaded(model: Any) -> AbstractContextManager[Any]:
    """Return a context in which a model that `load` left in mapped files computes in float32."""
    return InFloat32(mapped_files(model)) if is_mapped(model) else nullcontext()


def widened(value: Any) -> Any:
    """Return a 16-bit tensor as float32, and anything else unchanged."""
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value

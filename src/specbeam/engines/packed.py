"""4-bit matrices of GPTQ and AWQ checkpoints: integers in groups, with a scale and a zero point for each group.

A weight is exactly (number - zero point) * scale. `PackedMatrix` locates a matrix in the files of a checkpoint and
reads it; `PackedLinear` replaces the module of such a matrix, or of a `BlockMatrix` of a GGUF file, in a transformers
model. Neither keeps the numbers, which are in the file and in the engine's panels (engines/cpu/nibbles.py).

The layouts are those of GPTQ (auto-gptq and gptqmodel; Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for
Generative Pre-trained Transformers") and of AWQ (Lin et al. 2023, "AWQ: Activation-aware Weight Quantization").
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float32, Int32, Int64, UInt8
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PER_WORD = 8  # 4-bit numbers in a word
BITS = 4
LARGEST_NUMBER = 15
# "gptq" stores zero points minus one, "gptq_v2" stores them unchanged; "awq" stores the columns of a word in another order.
Layout = Literal["gptq", "gptq_v2", "awq"]
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns each place of a word holds
_SHIFTS = np.arange(0, BITS * PER_WORD, BITS, dtype=np.uint32)


class Grouped(NamedTuple):
    """A matrix of 4-bit integers, 0 to 15, in groups along its depth.

    Attributes:
        words: int32[depth / 8, columns]: number 8 * i + k is in bits 4 * k to 4 * k + 3 of word i.
        scales: float32[groups, columns].
        zeros: uint8[groups, columns], the zero points: 0 to 16.
    """

    words: Int32[np.ndarray, "words columns"]
    scales: Float32[np.ndarray, "groups columns"]
    zeros: UInt8[np.ndarray, "groups columns"]

    @property
    def depth(self) -> int:
        """The number of inputs."""
        return len(self.words) * PER_WORD

    def columns(self, first: int, stop: int) -> "Grouped":
        """Return the columns `first` to `stop` (exclusive), as views."""
        return Grouped(self.words[:, first:stop], self.scales[:, first:stop], self.zeros[:, first:stop])

    def in_order(self, order: Int64[np.ndarray, " columns"]) -> "Grouped":
        """Return the columns in another order, as a copy."""
        return Grouped(self.words[:, order], self.scales[:, order], self.zeros[:, order])

    def in_groups_of(self, size: int) -> "Grouped":
        """Return the same matrix in smaller groups of `size` numbers, with repeated scales."""
        times = self.depth // (len(self.scales) * size)
        return Grouped(self.words, self.scales.repeat(times, 0), self.zeros.repeat(times, 0))

    def weights(self) -> Float32[np.ndarray, "columns depth"]:
        """Return (number - zero point) * scale, exact in float32 for scales of at most 19 bits."""
        numbers = _unpacked(self.words).astype(np.float32)
        size = self.depth // len(self.scales)
        by_group = numbers.reshape(len(self.scales), size, -1)
        by_group -= self.zeros[:, None]
        by_group *= self.scales[:, None]
        return np.ascontiguousarray(numbers.T)


def joined(matrices: Sequence[Grouped]) -> Grouped:
    """Return matrices of equal depth and group size, concatenated along their columns."""
    return Grouped(*(np.concatenate(parts, 1) for parts in zip(*matrices, strict=True)))


def packed_in_words(numbers: UInt8[np.ndarray, "depth columns"]) -> Int32[np.ndarray, "words columns"]:
    """Return 4-bit integers as `Grouped.words`; the depth must be a multiple of 8."""
    by_word = numbers.reshape(-1, PER_WORD, numbers.shape[1])
    words = np.zeros((len(by_word), numbers.shape[1]), dtype=np.uint32)
    for place, shift in enumerate(_SHIFTS):
        words |= by_word[:, place].astype(np.uint32) << shift
    return words.view(np.int32)


def _unpacked(words: Int32[np.ndarray, "words columns"]) -> UInt8[np.ndarray, "depth columns"]:
    """Return the numbers in `Grouped.words`."""
    numbers = np.empty((len(words), PER_WORD, words.shape[1]), dtype=np.uint8)
    bits = words.view(np.uint32)
    for place, shift in enumerate(_SHIFTS):
        numbers[:, place] = (bits >> shift) & np.uint32(LARGEST_NUMBER)
    return numbers.reshape(-1, words.shape[1])


def _unpacked_columns(words: Int32[np.ndarray, "rows words"]) -> UInt8[np.ndarray, "rows columns"]:
    bits = np.ascontiguousarray(words).view(np.uint32)
    numbers = (bits[..., None] >> _SHIFTS) & np.uint32(LARGEST_NUMBER)
    return numbers.astype(np.uint8).reshape(len(words), -1)


def _in_awq_order(numbers: UInt8[np.ndarray, "rows columns"]) -> UInt8[np.ndarray, "rows columns"]:
    by_word = numbers.reshape(len(numbers), -1, PER_WORD)
    return by_word[..., np.argsort(_AWQ_COLUMNS)].reshape(numbers.shape)


@dataclass(frozen=True)
class PackedMatrix:
    """The place of a 4-bit matrix in a file.

    Attributes:
        path: a safetensors file.
        name: the module's name, the prefix of the names of its tensors.
        layout: the packing of its tensors.
        shape: columns and depth.
        groups: number of groups along the depth.
        order: the order of the columns that `read` returns; empty: unchanged.
    """

    path: Path
    name: str
    layout: Layout
    shape: tuple[int, int]
    groups: int
    order: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.shape[0]

    def in_order(self, order: Sequence[int]) -> "PackedMatrix":
        """Return the same matrix with its columns in another order."""
        return replace(self, order=tuple(order))

    def read(self) -> Grouped:
        """Read the matrix from its file."""
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            words, zeros, scales = (file.get_tensor(f"{self.name}.{part}") for part in ("qweight", "qzeros", "scales"))
            found = Grouped(words.numpy().copy(), scales.float().numpy(), _unpacked_columns(zeros.numpy()))
        if self.layout == "gptq":
            found = found._replace(zeros=(found.zeros + 1) & LARGEST_NUMBER)
        if self.layout == "awq":
            numbers = _in_awq_order(_unpacked_columns(found.words))
            found = Grouped(packed_in_words(numbers), found.scales, _in_awq_order(found.zeros))
        return found.in_order(np.array(self.order)) if self.order else found


@runtime_checkable
class StoredMatrix(Protocol):
    """The place of a matrix of small integers in a file: a `PackedMatrix`, or a `BlockMatrix` of a GGUF file."""

    @property
    def shape(self) -> tuple[int, int]:
        """Columns and depth."""

    def __len__(self) -> int: ...

    def in_order(self, order: Sequence[int]) -> "StoredMatrix":
        """Return the same matrix with its columns in another order."""

    def read(self) -> Any:
        """Read the matrix: a record with `weights()` and `columns(first, stop)`."""


class PackedLinear(nn.Module):
    """A replacement of `nn.Linear` with a matrix of small integers, for direct calls of the model.

    Each call reads the file and multiplies in the type of its input. Engines pack `matrix` once instead.

    Args:
        tied: the weights of the matrix as a parameter of another module, such as the embedding; None: there is none.
    """

    def __init__(self, matrix: StoredMatrix, bias: nn.Parameter | None, tied: nn.Parameter | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        self.matrix = matrix
        self.tied = (tied,)  # in a tuple, as it belongs to the other module
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:
        """The weights in float32, read from the file unless they are tied."""
        (tied,) = self.tied
        return torch.from_numpy(self.matrix.read().weights()) if tied is None else tied.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of x, float[..., depth], with the matrix, plus the bias."""
        bias: Tensor | None = self.bias  # type: ignore[assignment]
        return functional.linear(x, self.weight.to(x.dtype), bias)


def matrices_of(model: nn.Module) -> list[StoredMatrix]:
    """Return the matrices of small integers in the files of a model."""
    return [module.matrix for module in model.modules() if isinstance(module, PackedLinear)]


def weights_in(model: "PreTrainedModel") -> int:
    """Return the number of weights of a model, including matrices of small integers in its files."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear) and module.tied == (None,)]
    return int(model.num_parameters()) + sum(math.prod(module.matrix.shape) for module in packed)

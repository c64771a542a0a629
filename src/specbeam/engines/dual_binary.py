"""Matrices of 2 bits as two binary matrices with scales, as DB-LLM trains them: flexible dual binarisation.

A weight is first * b1 + second * b2, where b1 and b2 are 0 or 1, and both scales belong to a column and a group of
`BINARY_GROUP` steps of depth. A grid of 2 bits, {-s, 0, s, 2s}, is the case first = 2s and second = -s, from which
training starts; trained scales are independent of each other.

`DualBinaryMatrix` locates a matrix in a file and reads it; `DualBinary` holds its numbers.

Source: arXiv 2402.11960 ("DB-LLM: Accurate Dual-Binarization for Efficient LLMs").
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64, UInt32
from torch import nn

from specbeam.engines.arrays import Dense
from specbeam.engines.packed import matrices_of

BINARY_GROUP = 64  # steps of depth that share two scales
BITS_OF_WORD = 32
DBLLM: Literal["dbllm"] = "dbllm"  # in the configuration of a checkpoint
LEAST = 1e-30  # smallest scale, so that groups of zeros stay zeros
_SHARES = np.linspace(0.3, 1.0, 15, dtype=np.float32)  # tried scales, as shares of the scale that clips nothing
_TOGETHER = 1 << 22  # number of weights that are rounded at a time

Bits = Bool[np.ndarray, "2 columns depth"]


class DualBinary(NamedTuple):
    """A matrix of two binary matrices with scales.

    Attributes:
        planes: bit t of planes[i, word, column] is the entry of binary matrix i at step 32 * word + t.
        scales: bfloat16 numbers, by binary matrix, group and column.
    """

    planes: UInt32[np.ndarray, "2 words columns"]
    scales: Float32[np.ndarray, "2 groups columns"]

    @property
    def depth(self) -> int:
        """The number of inputs."""
        return self.planes.shape[1] * BITS_OF_WORD

    def columns(self, first: int, stop: int) -> "DualBinary":
        """Return the columns `first` to `stop` (exclusive), as views."""
        return DualBinary(self.planes[..., first:stop], self.scales[..., first:stop])

    def in_order(self, order: Int64[np.ndarray, " columns"]) -> "DualBinary":
        """Return the columns in another order, as a copy."""
        return DualBinary(self.planes[..., order], self.scales[..., order])

    def weights(self) -> Float32[np.ndarray, "columns depth"]:
        """Return first * b1 + second * b2, rounded once to float32."""
        words = self.planes[:, :, None]
        bits = words >> np.arange(BITS_OF_WORD, dtype=np.uint32)[:, None] & np.uint32(1)
        by_group = bits.reshape(2, *self.scales.shape[1:2], BINARY_GROUP, -1).astype(np.float32)
        parts = by_group * self.scales[:, :, None]
        return np.ascontiguousarray((parts[0] + parts[1]).reshape(self.depth, -1).T)


def dual_binary_of(bits: Bits, scales: Float32[np.ndarray, "2 columns groups"]) -> DualBinary:
    """Return binary matrices, packed, with their scales; the depth must be a multiple of `BINARY_GROUP`."""
    packed = np.packbits(bits, axis=2, bitorder="little")
    words = packed.view("<u4").astype(np.uint32)
    return DualBinary(np.ascontiguousarray(words.swapaxes(1, 2)), np.ascontiguousarray(scales.swapaxes(1, 2)))


def joined_binaries(matrices: Sequence[DualBinary]) -> DualBinary:
    """Return matrices of equal depth, concatenated along their columns."""
    return DualBinary(*(np.concatenate(parts, 2) for parts in zip(*matrices, strict=True)))


def rounded_binaries(matrix: Dense) -> DualBinary:
    """Return a matrix rounded to the grid {-s, 0, s, 2s} in groups; the depth must be a multiple of `BINARY_GROUP`.

    The scale of a group, of either sign, is the tried one with the least squared error.
    """
    columns, depth = matrix.shape
    each = max(_TOGETHER // depth, 1)
    pieces = [_rounded(np.asarray(matrix[first : first + each], np.float32)) for first in range(0, columns, each)]
    return joined_binaries(pieces)


def _rounded(matrix: Dense) -> DualBinary:
    groups = matrix.reshape(len(matrix), -1, BINARY_GROUP)
    above = groups.max(2)
    below = -groups.min(2)
    least = np.full(above.shape, np.inf, dtype=np.float32)
    scales = np.zeros(above.shape, dtype=np.float32)
    for sign in (1, -1):
        towards, away = (above, below) if sign == 1 else (below, above)
        whole = np.maximum(np.maximum(towards / 2, away), LEAST)  # the scale that clips nothing
        for share in _SHARES:
            scale = np.float32(sign) * _in_bfloat16(whole * share)
            error = ((_steps(groups, scale) * scale[..., None] - groups) ** 2).sum(2)
            better = error < least
            least[better] = error[better]
            scales[better] = scale[better]
    steps = _steps(groups, scales).reshape(matrix.shape)
    bits = np.stack([steps >= 1, np.abs(steps) == 1])  # 2 = 2 * 1, 1 = 2 * 1 - 1, and -1 = -1
    return dual_binary_of(bits, np.stack([2 * scales, -scales]))


def _steps(groups: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the nearest of -1, 0, 1 and 2 times the scale."""
    return np.clip(np.rint(groups / scales[..., None]), -1, 2)


def _in_bfloat16(numbers: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16().float().numpy()


@dataclass(frozen=True)
class DualBinaryMatrix:
    """The place of a matrix in a file.

    The file holds NAME.planes, int32[2, depth / 32, columns], and NAME.scales, bfloat16[2, depth / 64, columns]; see
    `DualBinary`.

    Attributes:
        path: a safetensors file.
        name: the module's name, the prefix of the names of its tensors.
        shape: columns and depth.
        order: the order of the columns that `read` returns; empty: unchanged.
    """

    path: Path
    name: str
    shape: tuple[int, int]
    order: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.shape[0]

    def in_order(self, order: Sequence[int]) -> "DualBinaryMatrix":
        """Return the same matrix with its columns in another order."""
        return replace(self, order=tuple(order))

    def read(self) -> DualBinary:
        """Read the matrix from its file."""
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            planes, scales = (file.get_tensor(f"{self.name}.{part}") for part in ("planes", "scales"))
        found = DualBinary(planes.numpy().copy().view(np.uint32), scales.float().numpy())
        return found.in_order(np.array(self.order)) if self.order else found


def meets_rounded_rows(model: nn.Module) -> bool:
    """Return whether a model has matrices of this kind, whose products round rows to 8 bits."""
    return any(isinstance(one, DualBinaryMatrix) for one in matrices_of(model))

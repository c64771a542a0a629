"""Matrices in the blocks of GGUF files (llama.cpp): small integers, with scales and offsets for each block.

A weight is exactly number * scale + offset. A scale is a float16 times an integer of 8 bits, for 16 weights; an offset is a
float16 times an integer of 8 bits, for 32 weights. All block types in `BLOCKS` have this form. The layouts of blocks are
those of ggml, `ggml-common.h` and `ggml-quants.c` of llama.cpp.

`BlockMatrix` locates a matrix in a file and reads it; `BlockNumbers` holds its numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int8, Int64, UInt8, UInt32

GROUP = 32  # weights that share an offset
HALF_GROUP = 16  # weights that share a scale
_TOGETHER = 1 << 22  # number of weights that are read at a time
_OF_HALF = np.uint32(0xFFFF)
_Bytes = UInt8[np.ndarray, "blocks bytes"]


class BlockNumbers(NamedTuple):
    """The numbers of a matrix in blocks.

    Attributes:
        numbers: of 4 bits, 0 to 15, if `bits` is 4.
        scales: a float16 in the lower half of each word, and above it the integers of both halves of a group.
        offsets: a float16 in the lower half of each word, and above it an integer.
        bits: 4 or 8.
    """

    numbers: Int8[np.ndarray, "columns depth"]
    scales: UInt32[np.ndarray, "columns groups"]
    offsets: UInt32[np.ndarray, "columns groups"]
    bits: int

    def columns(self, first: int, stop: int) -> "BlockNumbers":
        """Return the columns `first` to `stop` (exclusive), as views."""
        return BlockNumbers(self.numbers[first:stop], self.scales[first:stop], self.offsets[first:stop], self.bits)

    def in_order(self, order: Int64[np.ndarray, " columns"]) -> "BlockNumbers":
        """Return the columns in another order, as a copy."""
        return BlockNumbers(self.numbers[order], self.scales[order], self.offsets[order], self.bits)

    def weights(self) -> Float32[np.ndarray, "columns depth"]:
        """Return the weights: products are exact in float32, and the sum is rounded once."""
        columns, depth = self.numbers.shape
        base = _floats(self.scales)
        scales = np.stack([base * _byte(self.scales, 2), base * _byte(self.scales, 3)], 2)
        offsets = _floats(self.offsets) * _byte(self.offsets, 2)
        found = self.numbers.astype(np.float32).reshape(columns, -1, 2, HALF_GROUP)
        found *= scales[..., None]
        found += offsets[:, :, None, None]
        return found.reshape(columns, depth)


def _floats(words: UInt32[np.ndarray, "columns groups"]) -> Float32[np.ndarray, "columns groups"]:
    """Return the float16 numbers in the lower halves of words."""
    return (words & _OF_HALF).astype(np.uint16).view(np.float16).astype(np.float32)


def _byte(words: UInt32[np.ndarray, "columns groups"], place: int) -> Float32[np.ndarray, "columns groups"]:
    """Return a signed byte of each word; byte 0 is the lowest."""
    return (words >> np.uint32(8 * place)).astype(np.uint8).view(np.int8).astype(np.float32)


def joined_blocks(matrices: Sequence[BlockNumbers]) -> BlockNumbers:
    """Return matrices of equal depth, concatenated along their columns."""
    whole = [np.concatenate(parts) for parts in zip(*(one[:3] for one in matrices), strict=True)]
    return BlockNumbers(whole[0], whole[1], whole[2], max(one.bits for one in matrices))


class BlockType(NamedTuple):
    """A type of blocks.

    Attributes:
        name: ggml's name.
        weights: number of weights in a block.
        bytes: size of a block.
        bits: of the numbers: 4 or 8.
        split: returns numbers, scales and offsets of blocks; see `BlockNumbers`.
    """

    name: str
    weights: int
    bytes: int
    bits: int
    split: Callable[[_Bytes], tuple[np.ndarray, np.ndarray, np.ndarray]]


def _words(halves: np.ndarray, first: np.ndarray | int, second: np.ndarray | int) -> np.ndarray:
    """Return words of float16 bits and, above them, two signed bytes."""
    low = np.asarray(first).astype(np.int8).view(np.uint8).astype(np.uint32)
    high = np.asarray(second).astype(np.int8).view(np.uint8).astype(np.uint32)
    return halves.astype(np.uint32) | low << np.uint32(16) | high << np.uint32(24)


def _halves(blocks: _Bytes, start: int) -> np.ndarray:
    """Return the bits of a float16 in each block, uint16[blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.uint16)


def _nibbles(packed: _Bytes) -> UInt8[np.ndarray, "blocks numbers"]:
    """Return the lower halves of bytes, then the upper ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], 1)


def _fifth_bits(blocks: _Bytes, start: int) -> UInt8[np.ndarray, "blocks numbers"]:
    """Return the bits of a 32-bit word in each block, as 16 or 0."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << np.uint8(4)


def _no_words(blocks: _Bytes, groups: int = 1) -> np.ndarray:
    return np.zeros((len(blocks), groups), dtype=np.uint32)


def _split_q4_0(blocks: _Bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scale = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:18]).view(np.int8), _words(scale, 1, 1), _words(scale, -8, 0)


def _split_q4_1(blocks: _Bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        _nibbles(blocks[:, 4:20]).view(np.int8),
        _words(_halves(blocks, 0), 1, 1),
        _words(_halves(blocks, 2), 1, 0),
    )


def _split_q5_0(blocks: _Bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = _nibbles(blocks[:, 6:22]) | _fifth_bits(blocks, 2)
    return numbers.view(np.int8) - np.int8(16), _words(_halves(blocks, 0), 1, 1), _no_words(blocks)


def _split_q5_1(blocks: _Bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = _nibbles(blocks[:, 8:24]) | _fifth_bits(blocks, 4)
    return numbers.view(np.int8), _words(_halves(blocks, 0), 1, 1), _words(_halves(blocks, 2), 1, 0)


def _split_q8_0(blocks: _Bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return blocks[:, 2:34].view(np.int8), _words(_halves(blocks, 0), 1, 1), _no_words(blocks)


def _of_six_bits(packed: _Bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the eight scales and the eight minima of 6 bits in 12 bytes."""
    low = packed[:, 0:4]
    middle = packed[:, 4:8]
    high = packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], 1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], 1)
    return scales, minima


def _words_of_k(blocks: _Bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and offsets of Q4_K and Q5_K."""
    scales, minima = _of_six_bits(blocks[:, 4:16])
    return _words(_halves(blocks, 0), scales, scales), _words(_halves(blocks, 2), -minima.view(np.int8), 0)


def _split_q4_k(blocks: _Bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    packed = blocks[:, 16:144].reshape(-1, 32)  # lower halves are one group, upper halves the next
    return _nibbles(packed).reshape(len(blocks), -1).view(np.int8), *_words_of_k(blocks)


def _split_q5_k(blocks: _Bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    low = _nibbles(blocks[:, 48:176].reshape(-1, 32)).reshape(len(blocks), 8, 32)
    group = np.arange(8, dtype=np.uint8)[None, :, None]
    high = blocks[:, None, 16:48] >> group & np.uint8(1)
    numbers = low | high << np.uint8(4)
    return numbers.reshape(len(blocks), -1).view(np.int8), *_words_of_k(blocks)


def _split_q6_k(blocks: _Bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # 128 numbers take 64 bytes of lower halves and 32 bytes of upper bits.
    low = _nibbles(blocks[:, 0:128].reshape(-1, 64)).reshape(len(blocks), 2, 4, 32)
    shift = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32) >> shift & np.uint8(3)
    numbers = (low | high << np.uint8(4)).reshape(len(blocks), -1).view(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8)
    return numbers, _words(_halves(blocks, 208), scales[:, 0::2], scales[:, 1::2]), _no_words(blocks, 8)


BLOCKS = {  # by ggml's numbers of types
    2: BlockType("Q4_0", 32, 18, 4, _split_q4_0),
    3: BlockType("Q4_1", 32, 20, 4, _split_q4_1),
    6: BlockType("Q5_0", 32, 22, 8, _split_q5_0),
    7: BlockType("Q5_1", 32, 24, 8, _split_q5_1),
    8: BlockType("Q8_0", 32, 34, 8, _split_q8_0),
    12: BlockType("Q4_K", 256, 144, 4, _split_q4_k),
    13: BlockType("Q5_K", 256, 176, 8, _split_q5_k),
    14: BlockType("Q6_K", 256, 210, 8, _split_q6_k),
}


@dataclass(frozen=True)
class BlockMatrix:
    """The place of a matrix in blocks in a file.

    Attributes:
        path: a GGUF file.
        name: name of its tensor.
        start: offset of its first byte in the file.
        type: ggml's number of its type, a key of `BLOCKS`.
        shape: columns and depth.
        order: the order of the columns that `read` returns; empty: unchanged.
    """

    path: Path
    name: str
    start: int
    type: int
    shape: tuple[int, int]
    order: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def bits(self) -> int:
        """The bits of its numbers in panels: 4 or 8."""
        return BLOCKS[self.type].bits

    @property
    def is_symmetric(self) -> bool:
        """Whether each weight is (number - 8) * scale, as in 4-bit files of GPTQ."""
        return BLOCKS[self.type].name == "Q4_0"

    def in_order(self, order: Sequence[int]) -> "BlockMatrix":
        """Return the same matrix with its columns in another order."""
        now = np.array(self.order or range(len(self)))
        return replace(self, order=tuple(now[list(order)].tolist()))

    def read(self) -> BlockNumbers:
        """Read the matrix from its file."""
        kind = BLOCKS[self.type]
        columns, depth = self.shape
        row = depth // kind.weights * kind.bytes
        stored = np.memmap(self.path, dtype=np.uint8, mode="r", offset=self.start, shape=(columns, row))
        each = max(_TOGETHER // depth, 1)
        numbers = np.empty((columns, depth), dtype=np.int8)
        scales = np.empty((columns, depth // GROUP), dtype=np.uint32)
        offsets = np.empty_like(scales)
        for first in range(0, columns, each):
            some = np.asarray(stored[first : first + each])
            parts = kind.split(some.reshape(-1, kind.bytes))
            wholes: tuple[np.ndarray, ...] = (numbers, scales, offsets)
            for whole, part in zip(wholes, parts, strict=True):
                whole[first : first + each] = part.reshape(len(some), -1)
        found = BlockNumbers(numbers, scales, offsets, kind.bits)
        return found.in_order(np.array(self.order)) if self.order else found

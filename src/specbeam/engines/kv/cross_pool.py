"""The store of cross-attention keys and values on GPUs: one pool of frames, in which each source is contiguous."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

FRAMES = 1024  # initial capacity


class CrossPool:
    """The keys and values of the sources of all sessions, frame by frame in two buffers; see `CrossStore`.

    The frames of a source are contiguous, so a captured pass finds a source by two numbers: its first frame and its length.
    When a source is dropped, nothing moves and the buffers stay in place, as graphs read them.

    Args:
        layers, heads, size: the decoder's layers, heads and head size.
        like: a tensor with the dtype and device of the buffers.
        frames: initial capacity.

    Attributes:
        keys, values: float[layers, heads, frames, size]; unused frames are not initialised.
        lengths: number of frames of each row in use.
        firsts: first frame of each row in use.
    """

    def __init__(self, layers: int, heads: int, size: int, like: Tensor, frames: int = FRAMES) -> None:
        self.keys = like.new_empty(layers, heads, frames, size)
        self.values = torch.empty_like(self.keys)
        self.lengths: list[int] = []
        self.firsts: list[int] = []

    @property
    def bytes(self) -> int:
        """The bytes of both buffers."""
        return 2 * self.keys.numel() * self.keys.element_size()

    @torch.inference_mode()
    def add(self, frames: int, by_layer: Iterable[tuple[Float[Tensor, "frames heads size"], Tensor]]) -> int:
        """Store the keys and values of one source, and return its row. The buffers are replaced if they are full.

        Args:
            frames: length of the source.
            by_layer: keys and values of each layer.
        """
        first = self._room_for(frames)
        place = slice(first, first + frames)
        for layer, (keys, values) in enumerate(by_layer):
            self.keys[layer, :, place] = keys.transpose(0, 1)
            self.values[layer, :, place] = values.transpose(0, 1)
        self.lengths.append(frames)
        self.firsts.append(first)
        return len(self.lengths) - 1

    def drop(self, row: int) -> int:
        """Free a row; the last row takes its index. Returns the former index of the last row."""
        last = len(self.lengths) - 1
        for numbers in (self.lengths, self.firsts):
            numbers[row] = numbers[last]
            numbers.pop()
        return last

    def clear(self) -> None:
        """Free all rows."""
        self.lengths = []
        self.firsts = []

    def _room_for(self, frames: int) -> int:
        """Return the start of the first gap of at least `frames` frames; grow the buffers if there is none."""
        end = 0
        for first, length in sorted(zip(self.firsts, self.lengths, strict=True)):
            if first - end >= frames:
                return end
            end = first + length
        known = self.keys.shape[2]
        if end + frames > known:
            self._grow(max(end + frames, known + known // 2))  # sources are long
        return end

    def _grow(self, frames: int) -> None:
        """Replace the buffers by larger ones with the same contents; an out-of-memory error changes nothing."""
        layers, heads, known, size = self.keys.shape
        grown = [self.keys.new_empty(layers, heads, frames, size) for _ in range(2)]
        for new, old in zip(grown, (self.keys, self.values), strict=True):
            new[:, :, :known] = old
        self.keys, self.values = grown

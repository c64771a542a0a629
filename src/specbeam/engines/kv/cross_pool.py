"""The store of the keys and values of sources for GPUs: the frames of all sources in one pool, each source in one piece."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

FRAMES = 1024  # that there is room for at first


class CrossPool:
    """The keys and values of the sources of all sessions, frame after frame in two buffers; see `CrossStore`.

    A source takes as many frames as it has, in one piece. Which ones these are is told by two numbers, so that a captured
    pass reads whatever source they name. Nothing moves when a source is dropped, and the buffers stay, as graphs read them.

    Args:
        layers, heads, size: of the decoder.
        like: a tensor of the dtype and device that the buffers should have.
        frames: that there is room for at first.

    Attributes:
        keys, values: float[layers, heads, frames, size]; unused frames are not initialised.
        lengths: number of frames of each row in use.
        firsts: the first frame of each.
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
        """Store the keys and values of one source, and return its row. The buffers move if there is no room for it.

        Args:
            frames: of the source.
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
        """Free a row, whose number the last row gets. Returns the former number of that."""
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
        """Return the first frame of the first gap that is long enough, after making one if there is none."""
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
        """Replace the buffers by larger ones with the same contents; if this runs out of memory, nothing has changed."""
        layers, heads, known, size = self.keys.shape
        grown = [self.keys.new_empty(layers, heads, frames, size) for _ in range(2)]
        for new, old in zip(grown, (self.keys, self.values), strict=True):
            new[:, :, :known] = old
        self.keys, self.values = grown

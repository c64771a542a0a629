"""What a pass on a GPU reads, laid out on the host."""

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from specbeam.engines.kv.steps import BLOCK, EXTENT, STORED, Trie, feed_slots
from specbeam.kernels.compiling import Array, compiled


class Inputs(NamedTuple):
    """What changes from pass to pass: int32 unless said otherwise; tensors on the device, arrays on the host."""

    tokens: Any  # [rows]
    positions: Any  # [rows]
    caches: Any  # [rows]
    slots: Any  # [rows] where keys and values go; 0: nowhere
    wanted: Any  # [rows] whose logits are asked for
    sessions: (
        Any  # [6, sessions]: first row, rows, cache, slots looked at; in the mask: first byte, bytes of a kind of layer
    )
    seen: Any  # uint8[bytes] by session, kind of layer, row, slot: whether the row may look there


class ModelLimits(NamedTuple):
    """What rows of a model have to keep to."""

    windows: Array  # int64[kinds]: tokens that each kind of layer looks back on, itself included; 0: all
    positions: int
    vocab: int


@compiled
def check(trie: Trie, count: int, model: ModelLimits) -> None:
    """Raise `IndexError` if the next local nodes of a session have tokens or positions that the model has not: kernels would
    read beyond its arrays.
    """
    start = trie.counts[STORED]
    stop = trie.counts[STORED] + count
    if count > 0 and trie.nodes[2, start:stop].max() >= model.positions:
        raise IndexError("a position is beyond those of the model")
    if count > 0 and (trie.nodes[0, start:stop].min() < 0 or trie.nodes[0, start:stop].max() >= model.vocab):
        raise IndexError("a token is beyond those of the model")


@compiled
def laid_out(
    trie: Trie, count: int, cache: int, model: ModelLimits, into: Inputs, session: int, row: int, byte: int
) -> int:
    """Give slots to the next local nodes of a session, for which there is room, and write down what a pass has to know of
    them, from this row and this byte of the mask on. Gives the byte behind its part of the mask. To be checked before.
    """
    start = trie.counts[STORED]
    stop = trie.counts[STORED] + count
    tokens = trie.nodes[0, start:stop]
    positions = trie.nodes[2, start:stop]
    slots = np.empty(count, dtype=np.int64)
    feed_slots(trie, slots)
    here = slice(row, row + count)
    into.tokens[here] = tokens
    into.positions[here] = positions
    into.slots[here] = slots
    into.caches[here] = cache
    extent = -(-trie.counts[EXTENT] // BLOCK) * BLOCK
    column = into.sessions[:, session]
    column[0] = row
    column[1] = count
    column[2] = cache
    column[3] = extent
    column[4] = byte
    column[5] = count * extent
    back = trie.slot_position[:extent]
    for kind in range(len(model.windows)):
        for node in range(start, stop):
            look = into.seen[byte : byte + extent]
            look[:] = trie.seen[node, :extent]
            if model.windows[kind] > 0:
                look[trie.nodes[2, node] - back >= model.windows[kind]] = 0
            byte += extent
    return byte


class Staging:
    """The same layout on the host and on the device, so that one copy brings all of it."""

    def __init__(self, device: torch.device, rows: int, sessions: int, mask_bytes: int) -> None:
        self.device = device
        self.rows = rows
        self.sessions = sessions
        self.mask_bytes = mask_bytes
        self._edges = [*accumulate([rows] * 5 + [6 * sessions], initial=0)]
        self._start = 4 * self._edges[-1]
        size = self._start + mask_bytes
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.zeros(size, dtype=torch.uint8, device=device)
        self.inputs = Inputs(*self._views(self._there))
        self.filled = Inputs(*(one.numpy() for one in self._views(self._host)))

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        numbers = buffer[: self._start].view(torch.int32)
        views = [numbers[start:stop] for start, stop in pairwise(self._edges)]
        views[5] = views[5].view(6, self.sessions)
        return [*views, buffer[self._start :]]

    def holds(self, rows: int, sessions: int, mask_bytes: int) -> bool:
        return rows <= self.rows and sessions <= self.sessions and mask_bytes <= self.mask_bytes

    def bring(self, mask_bytes: int) -> None:
        """To the device, with so many bytes of the mask."""
        end = self._start + mask_bytes
        self._there[:end].copy_(self._host[:end], non_blocking=True)

    def blank(self) -> None:
        """No session has rows, and no row is kept."""
        self._host.zero_()
        self._there.zero_()

    @property
    def addresses(self) -> tuple[int, int, int]:
        """There and here, and the bytes before the mask."""
        return self._there.data_ptr(), self._host.data_ptr(), self._start

"""The inputs of a pass on a GPU, which compiled steps write on the host."""

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from specbeam.core.compiling.compiler import Array, compiled
from specbeam.engines.kv.steps import BLOCK, EXTENT, STORED, Trie, feed_slots

SESSION_NUMBERS = 8  # numbers of each session in `Inputs.sessions`
MOST_RANGES = 255  # ranges of distances that a byte of the mask distinguishes, besides masked slots


class Inputs(NamedTuple):
    """The inputs that change from pass to pass: tensors on the device, arrays on the host, int32 except for `seen`."""

    tokens: Any  # [rows]
    positions: Any  # [rows]
    caches: Any  # [rows]: row of the store
    slots: Any  # [rows]: slot for keys and values; 0: they are not stored
    wanted: Any  # [rows]: the rows whose logits are needed
    # [8, sessions]: first row, number of rows, row of the store, number of slots for attention; in the mask: first byte,
    # bytes of each kind of layer; of the session's source: first frame, number of frames
    sessions: Any
    # uint8[bytes] by session, kind of layer, row, slot: 0 if the slot is masked, otherwise 1, or the number in
    # `ModelLimits.ranges` for the distance between row and slot. With `ModelLimits.by_place` the mask of a session is
    # followed by the position of each slot's token, four bytes each.
    seen: Any


class ModelLimits(NamedTuple):
    """The limits of a model: its windows, its numbers of positions and tokens, and its ranges of distances."""

    windows: Array  # int64[kinds]: sliding window of each kind of layer, including the row's own token; 0: all tokens
    positions: int
    vocab: int
    # uint8[distances]: for each distance, 1 plus the index of its range of equal attention biases (see `Scores`); the last
    # is for all larger distances. Empty without biases by distance.
    ranges: Array
    by_place: bool  # whether attention has biases by the position of a key; such models have one kind of layer


@compiled
def mask_bytes(model: ModelLimits, rows: int, slots: int) -> int:
    """Return the bytes of `Inputs.seen` of a session with this number of rows and slots in a pass."""
    own: int = rows * slots * len(model.windows)
    return own + 4 * slots if model.by_place else own


@compiled
def check_nodes(trie: Trie, count: int, model: ModelLimits) -> None:
    """Raise `IndexError` if any of the next `count` pending nodes has a token or a position that the model does not have.

    Otherwise kernels would read outside the model's arrays.
    """
    start = trie.counts[STORED]
    stop = trie.counts[STORED] + count
    if count > 0 and trie.nodes[2, start:stop].max() >= model.positions:
        raise IndexError("a position is beyond the model's last position")
    if count > 0 and (trie.nodes[0, start:stop].min() < 0 or trie.nodes[0, start:stop].max() >= model.vocab):
        raise IndexError("a token is outside the model's vocabulary")


@compiled
def _name_ranges(look: Array, position: int, back: Array, ranges: Array) -> None:
    """Replace ones in a row's mask by the number of the range of distances of the slot; see `ModelLimits.ranges`.

    Args:
        look: uint8[slots], the mask of the row.
        position: position of the row.
        back: int64[slots], the position of each slot's token.
    """
    most = len(ranges) - 1
    for slot in range(len(look)):
        if look[slot] != 0:
            look[slot] = ranges[min(max(position - back[slot], 0), most)]


@compiled
def write_inputs(
    trie: Trie,
    count: int,
    store_row: int,
    source: tuple[int, int],
    model: ModelLimits,
    inputs: Inputs,
    place: tuple[int, int, int],
) -> int:
    """Assign slots to the next `count` pending nodes of a session, and write their rows of a pass to `inputs`.

    There must be capacity for them, and `check_nodes` must have accepted them.

    Args:
        store_row: the session's row of the store.
        source: first frame and number of frames of the session's source.
        place: index of the session in the pass, its first row, and its first byte in the mask.

    Returns the first byte of the mask after the session.
    """
    session, row, byte = place
    start = trie.counts[STORED]
    stop = start + count
    tokens = trie.nodes[0, start:stop]
    positions = trie.nodes[2, start:stop]
    slots = np.empty(count, dtype=np.int64)
    feed_slots(trie, slots)
    here = slice(row, row + count)
    inputs.tokens[here] = tokens
    inputs.positions[here] = positions
    inputs.slots[here] = slots
    inputs.caches[here] = store_row
    extent = -(-trie.counts[EXTENT] // BLOCK) * BLOCK
    column = inputs.sessions[:, session]
    column[0] = row
    column[1] = count
    column[2] = store_row
    column[3] = extent
    column[4] = byte
    column[5] = count * extent
    column[6] = source[0]
    column[7] = source[1]
    back = trie.slot_position[:extent]
    for kind in range(len(model.windows)):
        for node in range(start, stop):
            look = inputs.seen[byte : byte + extent]
            look[:] = trie.seen[node, :extent]
            if model.windows[kind] > 0:
                look[trie.nodes[2, node] - back >= model.windows[kind]] = 0
            if len(model.ranges) > 0:
                _name_ranges(look, trie.nodes[2, node], back, model.ranges)
            byte += extent
    if model.by_place:
        end = byte + 4 * extent
        inputs.seen[byte:end].view(np.int32)[:] = back
        byte = end
    return byte


class Staging:
    """Buffers for the inputs of a pass, with the same layout on the host and the device, so that one copy transfers all.

    Attributes:
        inputs: the inputs on the device.
        filled: the inputs on the host, where steps write them.
    """

    def __init__(self, device: torch.device, rows: int, sessions: int, mask_bytes: int) -> None:
        self.device = device
        self.rows = rows
        self.sessions = sessions
        self.mask_bytes = mask_bytes
        self._edges = [*accumulate([rows] * 5 + [SESSION_NUMBERS * sessions], initial=0)]
        self._start = 4 * self._edges[-1]
        size = self._start + mask_bytes
        self._on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._on_device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.inputs = Inputs(*self._views(self._on_device))
        self.filled = Inputs(*(view.numpy() for view in self._views(self._on_host)))

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the fields of `Inputs` as views of a buffer."""
        numbers = buffer[: self._start].view(torch.int32)
        views = [numbers[start:stop] for start, stop in pairwise(self._edges)]
        views[5] = views[5].view(SESSION_NUMBERS, self.sessions)
        return [*views, buffer[self._start :]]

    def holds(self, rows: int, sessions: int, mask_bytes: int) -> bool:
        """Return whether a pass of this size fits."""
        return rows <= self.rows and sessions <= self.sessions and mask_bytes <= self.mask_bytes

    def copy_to_device(self, mask_bytes: int) -> None:
        """Copy the inputs to the device, with `mask_bytes` bytes of the mask."""
        end = self._start + mask_bytes
        self._on_device[:end].copy_(self._on_host[:end], non_blocking=True)

    def blank(self) -> None:
        """Set all inputs to zero: an empty pass that stores nothing."""
        self._on_host.zero_()
        self._on_device.zero_()

    @property
    def addresses(self) -> tuple[int, int, int]:
        """The addresses of the buffers on the device and on the host, and the number of bytes before the mask."""
        return self._on_device.data_ptr(), self._on_host.data_ptr(), self._start

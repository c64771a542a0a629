"""The records that compiled layers take: layers, the rows of a pass, and the buffers of keys and values."""

from typing import Any, NamedTuple

from specbeam.core.compiling.compiler import Array
from specbeam.engines.cpu.sources import Sources


class Stack(NamedTuple):
    """Layers of one model, and the numbers that they share."""

    weights: Any  # `Weights`
    angles: Array  # float32[tables, 2, positions, pairs]: tables for `layers.rotate`
    eps: float  # of the norms
    heads: int  # of queries
    kv_heads: int
    size: int  # of a head


class LayerRows(NamedTuple):
    """The rows of a pass, the sessions one after the other."""

    positions: Array  # int64[rows]: in the text
    slots: Array  # int64[rows]: for keys and values
    sessions: Array  # int64[sessions, 3]: row of the store, first row, last row + 1
    seen: Array  # bool[kinds, rows, slots]: which slots each row attends to, in layers of each kind
    # int64[sessions, slots]: position in the text of the token in each slot of each session; encoders of sources subtract
    # the number of the bias for distance 0
    places: Array
    sources: Sources  # of layers with cross-attention


class KeyValues(NamedTuple):
    """Buffers of keys and values of all layers, or of one layer without the first dimension."""

    # float32 or uint16[layers, caches, kv heads, panels, size, WIDTH], one panel for WIDTH slots; contiguous
    keys: Array
    values: Array  # the same dtype[layers, caches, kv heads, slots, width], contiguous


class Taps(NamedTuple):
    """Hidden states between layers that a pass writes."""

    # int64[taps]: layers whose input is written, counted from the first that runs; the number of layers stands for the
    # last output
    layers: Array
    states: Array  # float32[rows, taps * hidden], written


class Look(NamedTuple):
    """The slots that rows attend to in one layer."""

    sessions: Array  # see `LayerRows`
    seen: Array  # bool[rows, slots]
    reach: Array  # int64[rows]: one past the last slot that each row attends to
    # int64[sessions, slots]: the slots that rows of a session attend to, by their positions, and one unseen slot up to a
    # multiple of `STEP`; see `looks.looks_of`
    order: Array
    depth: Array  # int64[rows]: number of slots in `order` up to the last one that each row attends to, a multiple of `STEP`
    positions: Array  # int64[rows], see `LayerRows`
    places: Array  # see `LayerRows`

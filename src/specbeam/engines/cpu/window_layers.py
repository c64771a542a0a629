"""Layers of encoders of long windows: the parts of `layers`, with the attention of `window_attention`."""

import numpy as np

from specbeam.core.compiling.compiler import Array, compiled
from specbeam.engines.cpu.layers import add_mixed, layer_room, normalise, run_inner, write_qkv
from specbeam.engines.cpu.rows import Stack
from specbeam.engines.cpu.sums import WIDTH
from specbeam.engines.cpu.window_attention import Windows, attend_within

# Number of rows in a product. All rows are read for each panel, so they should fit the processor's cache; each panel is
# read once for all rows, so there should be many.
ROWS_TOGETHER = 96


@compiled
def all_window_layers(x: Array, stack: Stack, positions: Array, ends: Array, threads: int) -> None:
    """Run the layers one after the other on x, float32[rows, hidden], in place: each row attends to its whole window.

    Args:
        stack: layers with as many heads of keys as of queries, and no biases or caps of scores.
        positions: int64[rows], in the window.
        ends: see `Windows`.
        threads: see `panels.multiply`.
    """
    count, hidden = x.shape
    weights = stack.weights
    qkv = np.empty((count, weights.qkv.shape[1] * WIDTH), dtype=np.float32)
    mixed = np.empty((count, stack.heads * stack.size), dtype=np.float32)
    room = layer_room(min(count, ROWS_TOGETHER), hidden, stack, threads)
    last_room = layer_room(count % ROWS_TOGETHER, hidden, stack, threads)
    for layer in range(len(weights.qkv)):
        for first in range(0, count, ROWS_TOGETHER):
            stop = min(first + ROWS_TOGETHER, count)
            normed = room.normed[: stop - first]
            normalise(x[first:stop], weights.before_attention[layer], stack.eps, normed)
            write_qkv(normed, stack, layer, positions[first:stop], qkv[first:stop], threads)
        scale = weights.extras.scales[layer]
        attend_within(Windows(qkv, ends, stack.heads, stack.size, scale, mixed), threads)
        for first in range(0, count, ROWS_TOGETHER):
            stop = min(first + ROWS_TOGETHER, count)
            own = room if stop - first == len(room.normed) else last_room
            some = x[first:stop]
            add_mixed(some, mixed[first:stop], stack, layer, own)
            run_inner(some, weights, layer, stack.eps, own)

"""The layers of an encoder of long windows: those of `layers`, with the attention of `window_attention`."""

from typing import Any

import numpy as np

from specbeam.core.compiling.compiler import Array, compiled
from specbeam.engines.cpu.layers import LayerRoom, add_sublayer, layer_room, normalise, run_inner, write_qkv
from specbeam.engines.cpu.panels import multiply
from specbeam.engines.cpu.sums import WIDTH
from specbeam.engines.cpu.window_attention import attend_within

# Rows that are multiplied together. A product looks at all of them for each panel, so they should stay in the processor's
# cache; and it reads each panel once for all of them, so they should not be few.
ROWS_TOGETHER = 96


@compiled
def all_window_layers(
    x: Array,
    weights: Any,
    angles: Array,
    eps: float,
    heads: int,
    size: int,
    positions: Array,
    ends: Array,
    threads: int,
) -> None:
    """Run the layers one after the other on x, float32[rows, hidden], in place: each row looks at all of its window.

    Args:
        weights: `decoder.Weights`, of layers that have as many heads of keys as of queries, and no biases or caps of scores.
        angles: see `layers.write_qkv`.
        size: of a head.
        positions: int64[rows], in the window.
        ends: see `attend_within`.
        threads: see `panels.multiply`.
    """
    count, hidden = x.shape
    qkv = np.empty((count, weights.qkv.shape[1] * WIDTH), dtype=np.float32)
    mixed = np.empty((count, heads * size), dtype=np.float32)
    room = layer_room(min(count, ROWS_TOGETHER), hidden, weights, heads, size)
    for layer in range(len(weights.qkv)):
        for first in range(0, count, ROWS_TOGETHER):
            stop = min(first + ROWS_TOGETHER, count)
            normed = room.normed[: stop - first]
            normalise(x[first:stop], weights.before_attention[layer], eps, normed)
            write_qkv(
                normed, weights, layer, angles, eps, heads, heads, size, positions[first:stop], qkv[first:stop], threads
            )
        attend_within(qkv, ends, heads, size, weights.extras.scales[layer], mixed, threads)
        for first in range(0, count, ROWS_TOGETHER):
            stop = min(first + ROWS_TOGETHER, count)
            _finish_layer(x[first:stop], mixed[first:stop], weights, layer, eps, room, threads)


@compiled
def _finish_layer(x: Array, mixed: Array, weights: Any, layer: int, eps: float, room: LayerRoom, threads: int) -> None:
    """Add to rows what a layer makes of what their attention has mixed, and then its inner layer.

    Args:
        room: for at least as many rows.
    """
    count = len(x)
    own = LayerRoom(
        room.normed[:count],
        room.beside[:count],
        room.qkv[:count],
        room.mixed[:count],
        room.out[:count],
        room.both[:count],
        room.wide[:count],
        room.queries[:count],
    )
    extras = weights.extras
    multiply(mixed, weights.out[layer], own.out, threads)
    add_sublayer(x, own.out, extras.out_bias[layer], extras.after_attention[layer], eps, extras)
    run_inner(x, weights, layer, eps, own, threads)

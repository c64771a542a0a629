"""Elementwise functions of attention and inner layers: exp and tanh."""

import numpy as np

from specbeam.core.compiling.compiler import Array
from specbeam.core.compiling.fused import fused
from specbeam.core.compiling.sums import exp_near_0
from specbeam.core.compiling.uncounted import compiled_without_counts

_F1 = np.float32(1)
LOG2E = np.float32(1.4426950408889634)
LN2_HEAD = np.float32(0.693359375)  # has few bits, so that its multiples are exact
LN2_REST = np.float32(-2.12194440e-4)
_HALF, LEAST, _MOST = (np.float32(n) for n in (0.5, -87, 87))
_TANH_3, _TANH_5, _TANH_7, _TANH_9 = (np.float32(n) for n in (-1 / 3, 2 / 15, -17 / 315, 62 / 2835))
_TANH_NEAR = np.float32(0.0625)  # numbers with a smaller square are near 0


@compiled_without_counts
def exponential(x: Array, powers: Array) -> None:
    """Replace x, float32[n], by exp(x), with a relative error below 2e-7; x is clipped to -87 .. 87.

    Args:
        powers: int32[n], overwritten.
    """
    for place in range(len(x)):
        y = LEAST if x[place] < LEAST else x[place]
        y = _MOST if y > _MOST else y
        whole = np.floor(fused(y, LOG2E, _HALF))
        f = fused(-whole, LN2_REST, fused(-whole, LN2_HEAD, y))
        x[place] = exp_near_0(f)
        powers[place] = (np.int32(whole) + 127) << 23
    scale = powers.view(np.float32)
    for place in range(len(x)):
        x[place] *= scale[place]


@compiled_without_counts
def tanh(x: Array, powers: Array, scratch: Array) -> None:
    """Replace x, float32[n], by its hyperbolic tangent, with a relative error below 1e-6.

    Near 0, where 1 - exp(-2 |x|) loses digits, it uses the first terms of the series.

    Args:
        powers: int32[n or more], and `scratch`, float32[n or more], are overwritten.
    """
    count = len(x)
    falling = scratch[:count]
    for place in range(count):
        falling[place] = -2 * abs(x[place])
    exponential(falling, powers[:count])
    for place in range(count):
        y = x[place]
        size = (_F1 - falling[place]) / (_F1 + falling[place])
        far = -size if y < 0 else size
        square = y * y
        near = y * (_F1 + square * (_TANH_3 + square * (_TANH_5 + square * (_TANH_7 + square * _TANH_9))))
        x[place] = near if square < _TANH_NEAR else far


@compiled_without_counts
def cap_scores(x: Array, cap: np.float32, powers: Array, scratch: Array) -> None:
    """Replace x, float32[n], by cap * tanh(x / cap); for the other arguments see `tanh`."""
    for place in range(len(x)):
        x[place] = x[place] / cap
    tanh(x, powers, scratch)
    for place in range(len(x)):
        x[place] = x[place] * cap

"""The layers of a Llama-like model as compiled loops: norms, rotary positions, attention, the gated inner layer.

A row's numbers are the same, to the last bit, whatever stands beside it: sums are added up in an order that is written
down, never in one that the compiler finds, and nothing is compiled so that the compiler may change what is rounded.
"""

from typing import Any

import numpy as np

from specbeam.engines.cpu.panels import multiply, parts, stood_up
from specbeam.engines.cpu.sums import MOST, WIDTH, sums
from specbeam.kernels.compiling import Array, compiled
from specbeam.kernels.fused import fused
from specbeam.kernels.sums import exp_near_0

_F0 = np.float32(0)
_F1 = np.float32(1)
_LOG2E = np.float32(1.4426950408889634)
_LN2_HEAD = np.float32(0.693359375)  # of few bits: its multiples are exact
_LN2_REST = np.float32(-2.12194440e-4)
_SIDE_BY_SIDE = 64  # maxima
SUMMED = 32  # sums that grow side by side: every so many numbers one is added to each
_HALF, _LEAST, _MOST, _UNSEEN = (np.float32(n) for n in (0.5, -87, 87, -1e30))


@compiled
def exponential(x: Array, powers: Array) -> None:
    """x becomes exp(x), float32, to 2e-7 of it, between -87 and 87; outside, that of these.

    Args:
        powers: scratch, int32 of the same length.
    """
    for place in range(len(x)):
        y = _LEAST if x[place] < _LEAST else x[place]
        y = _MOST if y > _MOST else y
        whole = np.floor(fused(y, _LOG2E, _HALF))
        f = fused(-whole, _LN2_REST, fused(-whole, _LN2_HEAD, y))
        x[place] = exp_near_0(f)
        powers[place] = (np.int32(whole) + 127) << 23
    scale = powers.view(np.float32)
    for place in range(len(x)):
        x[place] *= scale[place]


@compiled
def total_of(parts: Array) -> Array:
    """Return the sum of float32[SUMMED], half on half: `parts` is overwritten."""
    for place in range(16):
        parts[place] += parts[place + 16]
    for place in range(8):
        parts[place] += parts[place + 8]
    for place in range(4):
        parts[place] += parts[place + 4]
    return (parts[0] + parts[2]) + (parts[1] + parts[3])


@compiled
def sum_of(x: Array, parts: Array) -> Array:
    """Return the sum of float32[n], in an order that is the same on every processor; `parts` is overwritten.

    Zeros behind the last number do not change it.
    """
    parts[:] = _F0
    whole = len(x) // SUMMED * SUMMED
    for start in range(0, whole, SUMMED):
        for place in range(SUMMED):
            parts[place] += x[start + place]
    for place in range(whole, len(x)):
        parts[place - whole] += x[place]
    return total_of(parts)


@compiled
def sum_of_squares(x: Array, parts: Array) -> Array:
    """Return the sum of the squares of float32[n], in the order of `sum_of`; `parts` is overwritten."""
    parts[:] = _F0
    whole = len(x) // SUMMED * SUMMED
    for start in range(0, whole, SUMMED):
        for place in range(SUMMED):
            parts[place] += x[start + place] * x[start + place]
    for place in range(whole, len(x)):
        parts[place - whole] += x[place] * x[place]
    return total_of(parts)


@compiled
def normalise(x: Array, weight: Array, eps: float, out: Array) -> None:
    """RMSNorm of rows."""
    parts = np.empty(SUMMED, dtype=np.float32)
    for row in range(len(x)):
        square = sum_of_squares(x[row], parts)
        factor = np.float32(1 / np.sqrt(square / x.shape[1] + eps))
        for place in range(x.shape[1]):
            out[row, place] = x[row, place] * factor * weight[place]


@compiled
def rotate(x: Array, first: int, heads: int, size: int, angles: Array, positions: Array) -> None:
    """Rotary positions, in place, of `heads` heads from column `first` on. angles: float32[2, positions, size / 2]."""
    half = size // 2
    for row in range(len(x)):
        cos = angles[0, positions[row]]
        sin = angles[1, positions[row]]
        for head in range(heads):
            start = first + head * size
            one = x[row, start : start + half]
            other = x[row, start + half : start + size]
            for place in range(half):
                a = one[place]
                b = other[place]
                one[place] = a * cos[place] - b * sin[place]
                other[place] = b * cos[place] + a * sin[place]


@compiled
def largest(x: Array) -> Array:
    """Of float32[n]. A maximum in one variable is found one by one, as NaN has to stay; many side by side are vectors."""
    tops = np.full(_SIDE_BY_SIDE, _UNSEEN, dtype=np.float32)
    whole = len(x) // _SIDE_BY_SIDE * _SIDE_BY_SIDE
    for start in range(0, whole, _SIDE_BY_SIDE):
        part = x[start : start + _SIDE_BY_SIDE]
        for place in range(_SIDE_BY_SIDE):
            tops[place] = part[place] if part[place] > tops[place] else tops[place]
    top = _UNSEEN
    for place in range(_SIDE_BY_SIDE):
        top = tops[place] if tops[place] > top else top
    for place in range(whole, len(x)):
        top = x[place] if x[place] > top else top
    return top


@compiled
def softmax(scores: Array, seen: Array, powers: Array, parts: Array) -> None:
    """In place, over what is seen; the length is a multiple of `WIDTH`. `powers`, `parts`: scratch."""
    for slot in range(len(scores)):
        scores[slot] = scores[slot] if seen[slot] else _UNSEEN
    top = largest(scores)
    for slot in range(len(scores)):
        scores[slot] = scores[slot] - top
    exponential(scores, powers[: len(scores)])
    for slot in range(len(scores)):
        scores[slot] = scores[slot] if seen[slot] else _F0
    total = sum_of(scores, parts)
    share = _F1 / total
    for slot in range(len(scores)):
        scores[slot] *= share


@compiled
def _asked(
    q: Array, first: int, start: int, count: int, kv: int, group: int, size: int, scale: float, reach: Array, tall: Array
) -> int:  # fmt: skip
    """Queries start .. start + count of one kv head, scaled and stood up; gives what slots they reach, in whole panels."""
    extent = 0
    for one in range(count):
        row = first + (start + one) // group
        head = kv * group + (start + one) % group
        extent = max(extent, reach[row])
        for place in range(size):
            tall[place * count + one] = q[row, head * size + place] * scale
    return -(-extent // WIDTH) * WIDTH


@compiled
def attend(
    q: Array, keys: Array, values: Array, rows: Array, seen: Array, reach: Array, group: int, scale: float, out: Array
) -> None:
    """Attention of all rows to their caches.

    Args:
        q: float32[rows, ...]; head h stands at columns h * size.
        keys: float32[caches, kv heads, panels, size, WIDTH], a panel per WIDTH slots; contiguous.
        values: float32[caches, kv heads, slots, width], contiguous.
        rows: int64[sessions, 3]: cache, first row, last row + 1.
        seen: bool[rows, slots]; reach: int64[rows], one past the last slot seen.
        group: query heads per kv head.
        out: float32[rows, heads * size]
    """
    kv_heads = keys.shape[1]
    panels = keys.shape[2]
    size = keys.shape[3]
    height = values.shape[2]
    width = values.shape[3]
    flat_keys = keys.reshape(-1)
    flat_values = values.reshape(-1)
    most = -(-(reach.max()) // WIDTH) * WIDTH
    scores = np.empty((MOST, most), dtype=np.float32)
    flat_scores = scores.reshape(-1)
    tall = np.empty(MOST * max(size, most), dtype=np.float32)
    mixed = np.empty((MOST, width), dtype=np.float32)
    powers = np.empty(most, dtype=np.int32)
    summed = np.empty(SUMMED, dtype=np.float32)
    for session in range(len(rows)):
        cache, first, last = rows[session]
        queries = (last - first) * group
        for kv in range(kv_heads):
            head_at = cache * kv_heads + kv
            for part in range(parts(queries)):
                start = part * queries // parts(queries)
                count = (part + 1) * queries // parts(queries) - start
                extent = _asked(q, first, start, count, kv, group, size, scale, reach, tall)
                for panel in range(extent // WIDTH):
                    sums(
                        count, flat_keys, (head_at * panels + panel) * size * WIDTH, WIDTH, tall, 0, flat_scores,
                        panel * WIDTH, most, size,
                    )  # fmt: skip
                for one in range(count):
                    softmax(scores[one, :extent], seen[first + (start + one) // group], powers, summed)
                stood_up(scores[:, :extent], 0, count, tall)
                for panel in range(width // WIDTH):
                    sums(
                        count, flat_values, head_at * height * width + panel * WIDTH, width, tall, 0, mixed.reshape(-1),
                        panel * WIDTH, width, extent,
                    )  # fmt: skip
                for one in range(count):
                    row = first + (start + one) // group
                    head = kv * group + (start + one) % group
                    out[row, head * size : (head + 1) * size] = mixed[one, :size]


@compiled
def gate(both: Array, inner: int, out: Array) -> None:
    """SiLU of the first `inner` columns times the next ones."""
    powers = np.empty(inner, dtype=np.int32)
    falling = np.empty(inner, dtype=np.float32)
    for row in range(len(both)):
        for place in range(inner):
            falling[place] = -both[row, place]
        exponential(falling, powers)
        for place in range(inner):
            out[row, place] = both[row, place] / (_F1 + falling[place]) * both[row, inner + place]


@compiled
def kept(qkv: Array, heads: int, rows: Array, slots: Array, keys: Array, values: Array) -> None:
    """Store keys and values of all rows at their slots."""
    kv_heads = keys.shape[1]
    size = keys.shape[3]
    for session in range(len(rows)):
        cache, first, last = rows[session]
        for row in range(first, last):
            for kv in range(kv_heads):
                k = (heads + kv) * size
                v = (heads + kv_heads + kv) * size
                keys[cache, kv, slots[row] // WIDTH, :, slots[row] % WIDTH] = qkv[row, k : k + size]
                values[cache, kv, slots[row], :size] = qkv[row, v : v + size]


@compiled
def all_layers(
    x: Array, weights: Any, angles: Array, eps: float, heads: int, positions: Array, rows: Array, slots: Array, seen: Array,
    kinds: Array, keys: Array, values: Array, threads: int,
) -> None:  # fmt: skip
    """The layers one after the other, on x: float32[rows, hidden], in place.

    Args:
        weights: `Weights`.
        seen: bool[kinds, rows, slots]; kinds: int64[layers], which of them a layer goes by.
        keys, values: of all layers; see `attend`.
    """
    count, hidden = x.shape
    kv_heads = keys.shape[2]
    size = keys.shape[4]
    h = np.empty((count, hidden), dtype=np.float32)
    qkv = np.empty((count, weights.qkv.shape[1] * WIDTH), dtype=np.float32)
    mixed = np.empty((count, heads * size), dtype=np.float32)
    out = np.empty((count, weights.out.shape[1] * WIDTH), dtype=np.float32)
    both = np.empty((count, weights.gate_up.shape[1] * WIDTH), dtype=np.float32)
    wide = np.empty((count, weights.inner), dtype=np.float32)
    scale = np.float32(1 / np.sqrt(size))
    reach = _reach(seen)
    for layer in range(len(kinds)):
        normalise(x, weights.before_attention[layer], eps, h)
        multiply(h, weights.qkv[layer], qkv, threads)
        for place in range(weights.bias.shape[1]):
            for row in range(count):
                qkv[row, place] += weights.bias[layer, place]
        rotate(qkv, 0, heads + kv_heads, size, angles, positions)
        kept(qkv, heads, rows, slots, keys[layer], values[layer])
        kind = kinds[layer]
        attend(qkv, keys[layer], values[layer], rows, seen[kind], reach[kind], heads // kv_heads, scale, mixed)
        multiply(mixed, weights.out[layer], out, threads)
        _add(x, out)
        normalise(x, weights.before_inner[layer], eps, h)
        multiply(h, weights.gate_up[layer], both, threads)
        gate(both, weights.inner, wide)
        multiply(wide, weights.down[layer], out, threads)
        _add(x, out)


@compiled
def _reach(seen: Array) -> Array:
    """int64[kinds, rows]: one past the last slot that a row sees."""
    kinds, rows, slots = seen.shape
    reach = np.zeros((kinds, rows), dtype=np.int64)
    for kind in range(kinds):
        for row in range(rows):
            last = slots
            while last > 0 and not seen[kind, row, last - 1]:
                last -= 1
            reach[kind, row] = last
    return reach


@compiled
def score_rows(x: Array, weight: Array, eps: float, head: Array, logits: Array, threads: int) -> None:
    """Logits of rows behind the last layer; columns up to a multiple of `WIDTH`."""
    h = np.empty_like(x)
    normalise(x, weight, eps, h)
    multiply(h, head, logits, threads)


@compiled
def _add(x: Array, more: Array) -> None:
    """x += more, of which there may be more columns."""
    for row in range(len(x)):
        here = x[row]
        there = more[row]
        for place in range(len(here)):
            here[place] += there[place]

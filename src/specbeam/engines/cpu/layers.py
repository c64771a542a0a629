"""The compiled layers of a model: norms, rotary positions, attention, the inner layer.

One implementation serves all families (engines/families.py); `Extras` holds the optional parts of a family, and branches on
them are outside of loops over numbers. Only experts have a step of their own, which other models need not compile.

A row's results are bit-identical whatever other rows are in the pass, and wherever its path is stored: the source fixes
the order of each sum, and no option lets the compiler change that order or the rounding.
"""

from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from specbeam.core.compiling.compiler import Array, compiled
from specbeam.core.compiling.copies import copy_numbers, copy_rows
from specbeam.core.compiling.ordered_sums import sum_of, sum_of_squares
from specbeam.core.compiling.uncounted import compiled_without_counts
from specbeam.core.steps import verb
from specbeam.engines.cpu.attention import Scoring, attend
from specbeam.engines.cpu.cache_words import as_kept
from specbeam.engines.cpu.curves import cap_scores, exponential
from specbeam.engines.cpu.extras import GELU, GELU_TANH, SILU, Extras
from specbeam.engines.cpu.looks import look_at, looks_of
from specbeam.engines.cpu.panels import multiply
from specbeam.engines.cpu.rows import KeyValues, LayerRows, Look, Stack, Taps
from specbeam.engines.cpu.sums import STEP, WIDTH

_F0 = np.float32(0)
_F1 = np.float32(1)
NO_ATTENTION = 1 << 20  # exceeds the number of kinds of layers
NO_INNER = 1 << 21
_HALF = np.float32(0.5)
_GELU_CUBE, _GELU_SCALE = (np.float32(n) for n in (0.044715, -2 * 0.7978845608028654))
_ROOT_HALF = np.float32(0.7071067811865476)
# exp(-z^2) times a polynomial in 1 / (1 + p z) is erfc(z) up to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
_ERF_P = np.float32(0.3275911)
_ERF_1, _ERF_2, _ERF_3, _ERF_4, _ERF_5 = (
    np.float32(n) for n in (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
)


@compiled_without_counts
def normalise(x: Array, weight: Array, eps: float, out: Array) -> None:
    """Write the norm of each row of x to `out`; see `normalise_row`."""
    for row in range(len(x)):
        normalise_row(x[row], weight, eps, out[row])


@compiled_without_counts
def normalise_row(x: Array, weight: Array, eps: float, out: Array) -> None:
    """Write the norm of x, float32[n], contiguous, to `out`, which may be x.

    Args:
        weight: float32[n] of an RMSNorm; float32[2 * n], weight and bias, of a LayerNorm; empty: x is copied.
    """
    if len(weight) == len(x):
        square = sum_of_squares(x)
        factor = np.float32(1 / np.sqrt(square / len(x) + eps))
        for place in range(len(x)):
            out[place] = x[place] * factor * weight[place]
    elif len(weight) == 0:
        for place in range(len(x)):
            out[place] = x[place]
    else:
        _centre_and_scale(x, weight, eps, out)


@compiled_without_counts
def _centre_and_scale(x: Array, weight: Array, eps: float, out: Array) -> None:
    """Write the LayerNorm of x to `out`; see `normalise_row`."""
    mean = np.float32(sum_of(x) / len(x))
    for place in range(len(x)):
        out[place] = x[place] - mean
    square = sum_of_squares(out)
    factor = np.float32(1 / np.sqrt(square / len(x) + eps))
    for place in range(len(x)):
        out[place] = out[place] * factor * weight[place] + weight[len(x) + place]


@compiled_without_counts
def rotate(x: Array, first: int, heads: int, size: int, angles: Array, positions: Array) -> None:
    """Apply rotary positions, in place, to `heads` heads of x from column `first` on.

    Args:
        angles: float32[2, positions, pairs], cosines and sines; columns after the first `pairs` pairs of a head are
            unchanged.
    """
    half = angles.shape[2]
    for row in range(len(x)):
        cos = angles[0, positions[row]]
        sin = angles[1, positions[row]]
        for head in range(heads):
            start = first + head * size
            lower = x[row, start : start + half]
            upper = x[row, start + half : start + 2 * half]
            for place in range(half):
                a = lower[place]
                b = upper[place]
                lower[place] = a * cos[place] - b * sin[place]
                upper[place] = b * cos[place] + a * sin[place]


@compiled
def activate(both: Array, inner: int, extras: Extras, out: Array) -> None:
    """Write the activation of the first `inner` columns of `both` to `out`; if gated, times the next `inner` columns."""
    powers = np.empty(inner, dtype=np.int32)
    scratch = np.empty(inner, dtype=np.float32)
    _activate_rows(both, inner, extras, out, powers, scratch)


@compiled_without_counts
def _activate_rows(both: Array, inner: int, extras: Extras, out: Array, powers: Array, scratch: Array) -> None:
    """Run `activate` with the buffers `powers`, int32[inner], and `scratch`, float32[inner]."""
    for row in range(len(both)):
        x = both[row][:inner]
        if extras.activation == SILU:
            _silu(x, powers, scratch, out[row])
        elif extras.activation == GELU_TANH:
            _gelu_tanh(x, powers, scratch, out[row])
        elif extras.activation == GELU:
            _gelu(x, powers, scratch, out[row])
        else:
            _relu(x, out[row])
        if extras.gated:
            for place in range(inner):
                out[row, place] *= both[row, inner + place]


@compiled_without_counts
def _silu(x: Array, powers: Array, falling: Array, out: Array) -> None:
    """Write x / (1 + exp(-x)) to `out`; `powers` and `falling` are overwritten."""
    for place in range(len(x)):
        falling[place] = -x[place]
    _write_gated(x, powers, falling, out)


@compiled_without_counts
def _gelu_tanh(x: Array, powers: Array, falling: Array, out: Array) -> None:
    """Write x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3) to `out`, which is x / (1 + exp(-2 u))."""
    for place in range(len(x)):
        falling[place] = _GELU_SCALE * (x[place] + _GELU_CUBE * x[place] * x[place] * x[place])
    _write_gated(x, powers, falling, out)


@compiled_without_counts
def _write_gated(x: Array, powers: Array, falling: Array, out: Array) -> None:
    """Write x / (1 + exp(falling)) to `out`; `falling` is overwritten."""
    exponential(falling, powers)
    for place in range(len(x)):
        out[place] = x[place] / (_F1 + falling[place])


@compiled_without_counts
def _gelu(x: Array, powers: Array, falling: Array, out: Array) -> None:
    """Write x times the normal distribution function of x to `out`; the error is below 2e-7 |x|."""
    for place in range(len(x)):
        falling[place] = -_HALF * x[place] * x[place]
    exponential(falling, powers)
    for place in range(len(x)):
        t = _F1 / (_F1 + _ERF_P * _ROOT_HALF * abs(x[place]))
        tail = _HALF * falling[place] * t * (_ERF_1 + t * (_ERF_2 + t * (_ERF_3 + t * (_ERF_4 + t * _ERF_5))))
        out[place] = x[place] * (tail if x[place] < 0 else _F1 - tail)


@compiled_without_counts
def _relu(x: Array, out: Array) -> None:
    for place in range(len(x)):
        out[place] = x[place] if x[place] > 0 else _F0


@compiled
def store_keys_and_values(qkv: Array, heads: int, sessions: Array, slots: Array, cache: KeyValues) -> None:
    """Store the keys and values of all rows in their slots in one layer; see `LayerRows`."""
    _store_kept(as_kept(qkv, cache.keys), heads, sessions, slots, cache.keys, cache.values)


@compiled_without_counts
def _store_kept(kept: Array, heads: int, sessions: Array, slots: Array, keys: Array, values: Array) -> None:
    """Store keys and values that are already in the store's type; see `store_keys_and_values`."""
    kv_heads = keys.shape[1]
    size = keys.shape[3]
    for session in range(len(sessions)):
        cache, first, last = sessions[session]
        for kv in range(kv_heads):
            k = (heads + kv) * size
            v = (heads + kv_heads + kv) * size
            panels = keys[cache, kv].reshape(-1)
            for row in range(first, last):
                slot = slots[row]
                at = slot // WIDTH * size * WIDTH + slot % WIDTH
                for place in range(size):
                    panels[at + place * WIDTH] = kept[row, k + place]
                copy_numbers(values[cache, kv, slot], kept[row, v : v + size])


class LayerRoom(NamedTuple):
    """Scratch arrays of layers, with a row for each row of the pass, and the number or team of threads."""

    normed: Array  # float32[rows, hidden]: input of attention or of the inner layer
    parallel: Array  # the same: input of an inner layer that runs parallel to attention; otherwise no rows
    qkv: Array
    mixed: Array  # float32[rows, heads * size]
    out: Array
    both: Array
    wide: Array  # float32[rows, inner]
    queries: Array  # float32[rows, columns]: queries of cross-attention; no columns without it
    threads: int  # see `panels.multiply`


@compiled
def layer_room(count: int, hidden: int, stack: Stack, threads: int) -> LayerRoom:
    """Return scratch arrays for passes of `count` rows."""
    weights = stack.weights
    return LayerRoom(
        np.empty((count, hidden), dtype=np.float32),
        np.empty((count if weights.extras.parallel else 0, hidden), dtype=np.float32),
        np.empty((count, weights.qkv.shape[1] * WIDTH), dtype=np.float32),
        np.empty((count, stack.heads * stack.size), dtype=np.float32),
        np.empty((count, weights.out.shape[1] * WIDTH), dtype=np.float32),
        np.empty((count, weights.gate_up.shape[1] // max(weights.extras.experts, 1) * WIDTH), dtype=np.float32),
        np.empty((count, weights.inner), dtype=np.float32),
        np.empty((count, weights.cross.query.shape[1] * WIDTH), dtype=np.float32),
        threads,
    )


@compiled
def write_qkv(h: Array, stack: Stack, layer: int, positions: Array, qkv: Array, threads: int) -> None:
    """Write the rotated queries and keys, and the values, of rows to `qkv`.

    Args:
        h: normed input of attention.
    """
    weights = stack.weights
    heads = stack.heads
    size = stack.size
    multiply(h, weights.qkv[layer], qkv, threads)
    add_bias(qkv, weights.bias[layer])
    if weights.head_norms.shape[2] > 0:
        _norm_heads(qkv, heads, stack.kv_heads, size, weights.head_norms[layer], stack.eps)
    if weights.extras.wide_norms.shape[1] > 0:
        _norm_all_heads(qkv, heads * size, weights.extras.wide_norms[layer], stack.eps)
    rope = weights.extras.ropes[layer]
    if rope >= 0:
        rotate(qkv, 0, heads + stack.kv_heads, size, stack.angles[rope], positions)


@compiled_without_counts
def add_bias(x: Array, bias: Array) -> None:
    """Add a bias, which may be empty, to the first columns of each row of x."""
    if len(bias) > 0:
        for row in range(len(x)):
            for place in range(len(bias)):
                x[row, place] += bias[place]


@compiled
def projected(x: Array, panels: Array, bias: Array, threads: int) -> Array:
    """Return the product of rows with a matrix in panels, plus a bias, which may be empty; columns are padded."""
    out = np.empty((len(x), len(panels) * WIDTH), dtype=np.float32)
    if len(x) > 0:
        multiply(x, panels, out, threads)
    add_bias(out, bias)
    return out


@compiled_without_counts
def _norm_all_heads(qkv: Array, queries: int, norms: Array, eps: float) -> None:
    """Replace all queries of a row by one RMSNorm, and all keys by another.

    Args:
        queries: number of columns of the queries.
        norms: the weights of both norms, concatenated.
    """
    for row in range(len(qkv)):
        for start, stop in ((0, queries), (queries, len(norms))):
            one = qkv[row][start:stop]
            normalise_row(one, norms[start:stop], eps, one)


@compiled_without_counts
def _norm_heads(qkv: Array, heads: int, kv_heads: int, size: int, norms: Array, eps: float) -> None:
    """Replace the queries and the keys of each head by their RMSNorms with the weights `norms`, float32[2, size]."""
    for row in range(len(qkv)):
        for head in range(heads + kv_heads):
            one = qkv[row][head * size : (head + 1) * size]
            normalise_row(one, norms[0 if head < heads else 1], eps, one)


@compiled
def run_layer(
    x: Array, h: Array, stack: Stack, layer: int, rows: LayerRows, look: Look, cache: KeyValues, room: LayerRoom
) -> None:
    """Run one layer without cross-attention on x, float32[rows, hidden], in place, and store keys and values.

    Args:
        h: normed input of attention; it may be `room.normed`.
        layer: its number in the stack.
        look: the slots that the rows attend to in this layer.
        cache: keys and values of the layer.
        room: see `layer_room`.
    """
    weights = stack.weights
    if weights.extras.parallel:
        normalise(x, weights.before_inner[layer], stack.eps, room.parallel)
    run_attention(x, h, stack, layer, rows, look, cache, room)
    run_inner(x, weights, layer, stack.eps, room)


@compiled
def run_attention(
    x: Array, h: Array, stack: Stack, layer: int, rows: LayerRows, look: Look, cache: KeyValues, room: LayerRoom
) -> None:
    """Run the attention of one layer on x, in place, and store keys and values; see `run_layer`."""
    weights = stack.weights
    extras = weights.extras
    threads = room.threads
    write_qkv(h, stack, layer, rows.positions, room.qkv, threads)
    store_keys_and_values(room.qkv, stack.heads, rows.sessions, rows.slots, cache)
    biases = extras.biases[min(layer, len(extras.biases) - 1)]
    scoring = Scoring(stack.heads // stack.kv_heads, extras.scales[layer], extras.cap, biases, extras.by_place)
    attend(room.qkv, cache, look, scoring, room.mixed, threads)
    add_mixed(x, room.mixed, stack, layer, room)


@compiled
def add_mixed(x: Array, mixed: Array, stack: Stack, layer: int, room: LayerRoom) -> None:
    """Add the output of attention to x, in place, given the mixed values."""
    weights = stack.weights
    extras = weights.extras
    multiply(mixed, weights.out[layer], room.out, room.threads)
    add_sublayer(x, room.out, extras.out_bias[layer], extras.after_attention[layer], stack.eps, extras)


@compiled
def run_cross(x: Array, stack: Stack, layer: int, cache: KeyValues, look: Look, room: LayerRoom) -> None:
    """Run the cross-attention of one layer on x, in place.

    Args:
        cache: keys and values of the sources in this layer.
        look: the frames that the rows attend to.
    """
    weights = stack.weights
    extras = weights.extras
    cross = weights.cross
    threads = room.threads
    normalise(x, cross.before[layer], stack.eps, room.normed)
    multiply(room.normed, cross.query[layer], room.queries, threads)
    add_bias(room.queries, cross.query_bias[layer])
    scoring = Scoring(1, extras.scales[layer], _F0, np.zeros((0, 0), dtype=np.float32), False)
    attend(room.queries, cache, look, scoring, room.mixed, threads)
    multiply(room.mixed, cross.out[layer], room.out, threads)
    add_sublayer(x, room.out, cross.out_bias[layer], cross.after[layer], stack.eps, extras)


@compiled
def run_inner(x: Array, weights: Any, layer: int, eps: float, room: LayerRoom) -> None:
    """Run the inner layer of one layer on x, in place; see `run_layer`. Parallel to attention it reads `room.parallel`."""
    extras = weights.extras
    reads = room.normed
    if extras.parallel:
        reads = room.parallel
    else:
        normalise(x, weights.before_inner[layer], eps, reads)
    multiply_inner(extras.router, reads, weights, layer, room)
    add_sublayer(x, room.out, extras.down_bias[layer], extras.after_inner[layer], eps, extras)


@verb(0, has_body=False)
def multiply_inner(router: Array | None, reads: Array, weights: Any, layer: int, room: LayerRoom) -> None:
    """Write the products of one inner layer to `room.out`, by the layer's experts if it has a router."""


@multiply_inner.of(NoneType)
@compiled
def multiply_dense(router: None, reads: Array, weights: Any, layer: int, room: LayerRoom) -> None:
    """Write the products of an inner layer without experts to `room.out`."""
    extras = weights.extras
    multiply(reads, weights.gate_up[layer], room.both, room.threads)
    add_bias(room.both, extras.up_bias[layer])
    activate(room.both, weights.inner, extras, room.wide)
    multiply(room.wide, weights.down[layer], room.out, room.threads)


@multiply_inner.of(np.ndarray)
@compiled
def multiply_experts(router: Array, reads: Array, weights: Any, layer: int, room: LayerRoom) -> None:
    """Write the weighted sum of the outputs of each row's experts to `room.out`.

    Each expert multiplies all rows that chose it in one product. The sum of a row runs over its own experts in
    ascending order, regardless of the choices of other rows.
    """
    extras = weights.extras
    threads = room.threads
    count = len(reads)
    shares = np.zeros((count, extras.experts), dtype=np.float32)
    choose_experts(reads, router[layer], extras.chosen, extras.divides, shares)
    up = weights.gate_up[layer]
    down = weights.down[layer]
    each_up = len(up) // extras.experts
    each_down = len(down) // extras.experts
    some = np.empty_like(reads)
    made = np.empty_like(room.out)
    rows = np.empty(count, dtype=np.int64)
    room.out[:] = _F0
    for expert in range(extras.experts):
        found = 0
        for row in range(count):
            if shares[row, expert] != 0:
                copy_numbers(some[found], reads[row])
                rows[found] = row
                found += 1
        if found == 0:
            continue
        both = room.both[:found]
        wide = room.wide[:found]
        part = made[:found]
        multiply(some[:found], up[expert * each_up : (expert + 1) * each_up], both, threads)
        activate(both, weights.inner, extras, wide)
        multiply(wide, down[expert * each_down : (expert + 1) * each_down], part, threads)
        for place in range(found):
            share = shares[rows[place], expert]
            goal = room.out[rows[place]]
            source = part[place]
            for column in range(len(goal)):
                goal[column] += source[column] * share


@compiled
def choose_experts(reads: Array, router: Array, chosen: int, divides: bool, shares: Array) -> None:
    """Write the weights of the experts that each row chooses to `shares`, float32[rows, experts] of zeros.

    A row chooses the experts with the largest probability in its softmax over all of them; ties go to the first expert.

    Args:
        router: the matrix of scores in panels.
        chosen: number of experts of a row.
        divides: whether the probabilities of the chosen experts are divided by their sum.
    """
    experts = shares.shape[1]
    scores = np.empty((len(reads), len(router) * WIDTH), dtype=np.float32)
    _score_experts(reads, router, scores)
    powers = np.empty(experts, dtype=np.int32)
    for row in range(len(reads)):
        odds = scores[row][:experts]
        top = odds[0]
        for expert in range(experts):
            top = max(top, odds[expert])
        for expert in range(experts):
            odds[expert] -= top
        exponential(odds, powers)
        total = sum_of(odds)
        kept = _F0
        for _ in range(chosen):
            best = -1
            for expert in range(experts):
                if shares[row, expert] == 0 and (best < 0 or odds[expert] > odds[best]):
                    best = expert
            shares[row, best] = odds[best]
            kept += odds[best]
        for expert in range(experts):
            shares[row, expert] /= kept if divides else np.float32(total)


@compiled
def _score_experts(reads: Array, router: Array, scores: Array) -> None:
    """Write the products of rows and the router's panels to `scores`, float32[rows, columns of the panels].

    It replaces `multiply`, which would be compiled for float32 panels in every model, because the code of all layers
    includes experts. Sums run over the depth in order, and are written every fourth step.
    """
    for row in range(len(reads)):
        for panel in range(len(router)):
            columns = router[panel]
            sums = scores[row, panel * WIDTH : (panel + 1) * WIDTH]
            for column in range(WIDTH):
                sums[column] = 0
            for place in range(0, reads.shape[1], STEP):
                some = columns[place * WIDTH : (place + STEP) * WIDTH]
                first = reads[row, place]
                second = reads[row, place + 1]
                third = reads[row, place + 2]
                fourth = reads[row, place + 3]
                for column in range(WIDTH):
                    total = sums[column] + first * some[column]
                    total += second * some[WIDTH + column]
                    total += third * some[2 * WIDTH + column]
                    sums[column] = total + fourth * some[3 * WIDTH + column]


@compiled
def all_layers(
    x: Array, stack: Stack, rows: LayerRows, kinds: Array, cache: KeyValues, taps: Taps, threads: int
) -> None:
    """Run layers one after the other on x, float32[rows, hidden], in place, and store keys and values.

    Args:
        kinds: int64[layers]: the kind of each layer, plus NO_ATTENTION or NO_INNER to skip that sublayer, which then
            changes and stores nothing.
        cache: keys and values of these layers.
    """
    count, hidden = x.shape
    weights = stack.weights
    room = layer_room(count, hidden, stack, threads)
    looks = looks_of(rows)
    of_sources = look_at_sources(rows, count)
    for layer in range(len(kinds)):
        _keep_taps(x, taps.layers, layer, taps.states)
        kind = kinds[layer] % NO_ATTENTION
        if weights.extras.parallel:
            normalise(x, weights.before_inner[layer], stack.eps, room.parallel)
        if kinds[layer] & NO_ATTENTION == 0:
            normalise(x, weights.before_attention[layer], stack.eps, room.normed)
            look = look_at(rows, looks, kind)
            own = KeyValues(cache.keys[layer], cache.values[layer])
            run_attention(x, room.normed, stack, layer, rows, look, own, room)
        if weights.cross.query.shape[1] > 0:
            source = KeyValues(rows.sources.keys[layer], rows.sources.values[layer])
            run_cross(x, stack, layer, source, of_sources, room)
        if kinds[layer] & NO_INNER == 0:
            run_inner(x, weights, layer, stack.eps, room)
    _keep_taps(x, taps.layers, len(kinds), taps.states)


@compiled
def look_at_sources(rows: LayerRows, count: int) -> Look:
    """Return the frames that the rows of a pass attend to: all frames of their session's source.

    Args:
        count: number of rows of the pass.
    """
    sources = rows.sources
    sessions = rows.sessions.copy()
    seen = np.zeros((count, sources.values.shape[3]), dtype=np.bool_)
    order = np.empty((len(sources.rows), seen.shape[1]), dtype=np.int64)
    reach = np.zeros(count, dtype=np.int64)
    for session in range(len(sources.rows)):
        first = sessions[session, 1]
        last = sessions[session, 2]
        source = sources.rows[session]
        length = sources.lengths[source]
        sessions[session, 0] = source
        seen[first:last, :length] = True
        reach[first:last] = length
        order[session] = np.arange(seen.shape[1])
    depth = -(-reach // STEP) * STEP
    return Look(sessions, seen, reach, order, depth, rows.positions, order)


@compiled_without_counts
def _keep_taps(x: Array, taps: Array, layer: int, tapped: Array) -> None:
    """Write x to the columns of `tapped` that belong to this layer, if it is among `taps`."""
    hidden = x.shape[1]
    for place in range(len(taps)):
        if taps[place] == layer:
            copy_rows(tapped[:, place * hidden : (place + 1) * hidden], x)


@compiled
def score_rows(x: Array, weight: Array, eps: float, leave: Array, head: Array, logits: Array, threads: int) -> None:
    """Write the logits of rows to `logits`, float32[rows, columns].

    Args:
        x: float32[rows, hidden], the output of the last layer.
        weight: of the final norm, see `normalise_row`.
        leave: the matrix between the norm and the head in panels; no panels: none.
        head: the head's matrix in panels; `logits` may lack the padding columns of the last panel, and columns beyond the
            last panel get -inf.
    """
    h = input_of_head(x, weight, eps, leave, threads)
    whole = min(logits.shape[1] // WIDTH, len(head))
    multiply(h, head[:whole], logits, threads)
    if whole < len(head):
        left = np.empty((len(x), WIDTH), dtype=np.float32)
        multiply(h, head[whole : whole + 1], left, threads)
        copy_rows(logits[:, whole * WIDTH :], left[:, : logits.shape[1] - whole * WIDTH])
    for row in range(len(x)):
        for column in range(len(head) * WIDTH, logits.shape[1]):
            logits[row, column] = -np.inf


@compiled
def input_of_head(x: Array, weight: Array, eps: float, leave: Array, threads: int) -> Array:
    """Return the input of the head, given the output of the last layer; x itself without a norm and a matrix."""
    h = x
    if len(weight) > 0:
        h = np.empty_like(x)
        normalise(x, weight, eps, h)
    if len(leave) == 0:
        return h
    left = np.empty((len(x), len(leave) * WIDTH), dtype=np.float32)
    multiply(h, leave, left, threads)
    return left


@compiled
def shape_logits(logits: Array, divisor: np.float32, cap: np.float32, bias: Array) -> None:
    """Divide logits by `divisor`, cap them (see `cap_scores`), and add a bias; 1, 0 and an empty bias change nothing."""
    if divisor != 1:
        for row in range(len(logits)):
            for place in range(logits.shape[1]):
                logits[row, place] /= divisor
    if cap > 0:
        powers = np.empty(logits.shape[1], dtype=np.int32)
        scratch = np.empty(logits.shape[1], dtype=np.float32)
        for row in range(len(logits)):
            cap_scores(logits[row], cap, powers, scratch)
    add_bias(logits, bias)


@compiled_without_counts
def add_sublayer(x: Array, more: Array, bias: Array, norm: Array, eps: float, extras: Extras) -> None:
    """Add the output of a sublayer, float32[rows, hidden or more columns], to x in place.

    Args:
        more: the output; overwritten if there is a bias or a norm.
        bias: float32[hidden], added to the output; or no numbers.
        norm: of the output, or of the sum, see `normalise_row`.
        extras: whether the norm is of the sum, and the factor of the normed output.
    """
    add_bias(more, bias)
    if len(norm) > 0 and not extras.norm_of_sum:
        for row in range(len(x)):
            one = more[row][: x.shape[1]]
            normalise_row(one, norm, eps, one)
    for row in range(len(x)):
        here = x[row]
        there = more[row]
        for place in range(len(here)):
            here[place] += there[place] * extras.residual
    if len(norm) > 0 and extras.norm_of_sum:
        normalise(x, norm, eps, x)

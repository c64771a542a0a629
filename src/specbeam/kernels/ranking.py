"""The best pairs of a joint law, with or without noise."""

from typing import Any

import numpy as np

from specbeam.kernels.compiling import BLOCK, Array, compiled
from specbeam.kernels.noise import gumbel, noise_bounds


@compiled
def _put(values: Array, pairs: Array, held: int, value: float, pair: int) -> int:
    """Into a list that is sorted by value, descending, then pair; gives how many it holds."""
    place = held
    if held == len(values):
        place -= 1
        if value < values[place] or (value == values[place] and pair > pairs[place]):
            return held
    else:
        held += 1
    while place > 0 and (values[place - 1] < value or (values[place - 1] == value and pairs[place - 1] > pair)):
        values[place], pairs[place] = values[place - 1], pairs[place - 1]
        place -= 1
    values[place], pairs[place] = value, pair
    return held


@compiled
def _in_blocks(size: int) -> Array:
    """Room for float32[size], of whole blocks; -inf behind what is used."""
    return np.full((size + BLOCK - 1) // BLOCK * BLOCK, np.float32(-np.inf))


@compiled
def _reached(block: Array, edge: float) -> Any:
    """Whether a value of the block is at least `edge`; looking at all of them becomes vector instructions."""
    some = np.uint8(0)
    for place in range(BLOCK):
        some |= np.uint8(block[place] >= edge)
    return some > 0


@compiled
def best(
    logits: Array, shift: Array, temperature: float, log_counts: Array, keys: Array, among: Array, count: int
) -> Array:
    """`JointLaw.best` without truncation: the pairs of largest (logit + shift) / temperature + log count + noise.

    Args:
        keys: of the beams' noise; empty for none.
        among: beams that count.
    """
    beams, vocab = logits.shape
    values, pairs = np.full(count, -np.inf), np.full(count, -1, dtype=np.int64)
    if count == 0:
        return pairs
    bound, upper = np.zeros(vocab, dtype=np.float32), _in_blocks(vocab)
    offset = shift.max() / temperature  # so that bounds are small numbers, which float32 holds finely
    noisy, held = len(keys) > 0, 0
    edge = np.float32(-np.inf)
    for beam in range(beams):
        if not among[beam]:
            continue
        row, base, extra = logits[beam], shift[beam], log_counts[beam]
        key = keys[beam] if noisy else np.uint64(0)
        if noisy:
            noise_bounds(key, bound)
        slack = 1e-3 + 4e-7 * (abs(base / temperature) + abs(offset))
        scale, add = np.float32(1 / temperature), np.float32(base / temperature + extra - offset + slack)
        for token in range(vocab):
            upper[token] = np.float32(row[token]) * scale + bound[token] + add
        for start in range(0, len(upper), BLOCK):
            if not _reached(upper[start : start + BLOCK], edge):
                continue
            for token in range(start, min(start + BLOCK, vocab)):
                if upper[token] >= edge and row[token] > -np.inf:
                    value = (row[token] + base) / temperature + extra
                    if noisy:
                        value += gumbel(key, token)
                    held = _put(values, pairs, held, value, beam * vocab + token)
                    if held == count:
                        edge = np.float32(values[count - 1] - offset)
    return pairs[:held]


@compiled
def ranked(
    pairs: Array, logits: Array, shift: Array, temperature: float, log_counts: Array, keys: Array, count: int
) -> Array:
    """`best` among the given pairs."""
    vocab = logits.shape[1]
    values, chosen = np.full(count, -np.inf), np.full(count, -1, dtype=np.int64)
    held = 0
    for pair in pairs:
        beam, token = pair // vocab, pair % vocab
        value = (logits[beam, token] + shift[beam]) / temperature + log_counts[beam]
        if len(keys):
            value += gumbel(keys[beam], token)
        held = _put(values, chosen, held, value, pair)
    return chosen[:held]


@compiled
def largest(x: Array, shift: Array, count: int) -> Array:
    """The pairs of the `count` largest x + shift, best first, without those of -inf; and all that equal the last."""
    beams, vocab = x.shape
    values, pairs = np.full(count, -np.inf), np.full(count, -1, dtype=np.int64)
    if count == 0:
        return pairs
    held, edge = 0, x.dtype.type(-np.inf)
    for beam in range(beams):
        row, base = x[beam], shift[beam]
        for token in range(vocab):
            value = row[token] + base
            if value > edge:
                held = _put(values, pairs, held, value, beam * vocab + token)
                if held == count:
                    edge = x.dtype.type(values[count - 1])
    if held < count:
        return pairs[:held]
    equals = 0
    for beam in range(beams):
        for token in range(vocab):
            equals += x[beam, token] + shift[beam] == edge
    better = np.searchsorted(-values, -edge)
    every = np.empty(better + equals, dtype=np.int64)
    every[:better] = pairs[:better]
    if better + equals == count:
        every[better:] = pairs[better:]
        return every
    place = better
    for beam in range(beams):
        for token in range(vocab):
            if x[beam, token] + shift[beam] == edge:
                every[place] = beam * vocab + token
                place += 1
    return every

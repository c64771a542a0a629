"""The best (beam, token) pairs, with or without noise, and those that a truncation keeps: temperature, top-k, top-p, min-p.

They are found without sorting the vocabulary. A pair is beam * vocabulary + token. What is decided is computed in float64;
float32 only narrows down which pairs matter.
"""

from typing import NamedTuple

import numpy as np

from specbeam.core.noise import bound_noise, gumbel
from specbeam.core.steps import BLOCK, Array, step

BUCKETS = 4096  # of values, by how far they are below the largest one
BUCKETS_PER_NAT = 64
INSERTED = 512  # rankings up to this length are made by insertion, longer ones by sorting what reaches the edge
FIRST_LOOK = 64  # pairs that are ranked at first where no top-k says how many can be kept
GROWTH = 8  # how much longer each further ranking is


@step
def insert(values: Array, pairs: Array, held: int, value: float, pair: int) -> int:
    """Insert a pair into a list sorted by value, descending, then pair. Returns the number of pairs it holds."""
    place = held
    if held == len(values):
        place -= 1
        if value < values[place] or (value == values[place] and pair > pairs[place]):
            return held
    else:
        held += 1
    while place > 0 and (values[place - 1] < value or (values[place - 1] == value and pairs[place - 1] > pair)):
        values[place] = values[place - 1]
        pairs[place] = pairs[place - 1]
        place -= 1
    values[place] = value
    pairs[place] = pair
    return held


@step
def _reaches(block: Array, base: float, edge: float) -> bool:
    """Return whether a value is, with `base`, at least `edge`, or there are fewer than `BLOCK` values.

    Looking at so many becomes vector instructions, so that blocks without such a value cost little.
    """
    if len(block) < BLOCK:
        return True
    some = np.uint8(0)
    for place in range(BLOCK):
        some |= np.uint8(block[place] + base >= edge)
    return bool(some > 0)


@step
def best_pairs(
    logits: Array, shift: Array, temperature: float, log_counts: Array, keys: Array, among: Array, count: int
) -> Array:
    """Return the `count` pairs of largest (logit + shift) / temperature + log count + noise, best first.

    Fewer where fewer have any odds. Of equal pairs the first comes first. With noise these are draws without replacement
    (Gumbel-top-k). The noise of a pair is computed only where its upper bound reaches the last pair held.

    Args:
        logits: float[beams, vocab].
        shift: float64[beams], what log-likelihoods are above logits.
        log_counts: float64[beams].
        keys: uint64[beams], of the beams' noise; empty for no noise.
        among: bool[beams], the beams that take part.
    """
    beams, vocab = logits.shape
    count = min(count, beams * vocab)
    values = np.full(count, -np.inf)
    pairs = np.full(count, -1, dtype=np.int64)
    if count == 0:
        return pairs
    noisy = len(keys) > 0
    bounds = np.zeros(vocab, dtype=np.float32)
    upper = np.full((vocab + BLOCK - 1) // BLOCK * BLOCK, np.float32(-np.inf))
    offset = shift.max() / temperature  # taken off so that bounds are small numbers, which float32 holds finely
    edge = np.float32(-np.inf)
    held = 0
    for beam in range(beams):
        if not among[beam]:
            continue
        row = logits[beam]
        base = shift[beam]
        extra = log_counts[beam]
        key = keys[beam] if noisy else np.uint64(0)
        if noisy:
            bound_noise(key, bounds)
        slack = 1e-3 + 4e-7 * (abs(base / temperature) + abs(offset))
        scale = np.float32(1 / temperature)
        added = np.float32(base / temperature + extra - offset + slack)
        for token in range(vocab):
            upper[token] = np.float32(row[token]) * scale + bounds[token] + added
        for start in range(0, vocab, BLOCK):
            if not _reaches(upper[start : start + BLOCK], np.float32(0), edge):
                continue
            for token in range(start, min(start + BLOCK, vocab)):
                if upper[token] >= edge and row[token] > -np.inf:
                    value = (np.float64(row[token]) + base) / temperature + extra
                    if noisy:
                        value += gumbel(key, token)
                    held = insert(values, pairs, held, value, beam * vocab + token)
                    if held == count:
                        edge = np.float32(values[count - 1] - offset)
    return pairs[:held]


@step
def rank_pairs(
    pairs: Array, logits: Array, shift: Array, temperature: float, log_counts: Array, keys: Array, count: int
) -> Array:
    """Return `best_pairs` among the given pairs, int64[n]."""
    vocab = logits.shape[1]
    count = min(count, len(pairs))
    values = np.full(count, -np.inf)
    chosen = np.full(count, -1, dtype=np.int64)
    held = 0
    if count == 0:
        return chosen
    for pair in pairs:
        beam = pair // vocab
        token = pair % vocab
        value = (np.float64(logits[beam, token]) + shift[beam]) / temperature + log_counts[beam]
        if len(keys) > 0:
            value += gumbel(keys[beam], token)
        held = insert(values, chosen, held, value, pair)
    return chosen[:held]


@step
def largest(x: Array, near: Array, count: int) -> Array:
    """Return the pairs of the `count` largest x + near, best first, and all that equal the last; none of -inf.

    Args:
        x: float[beams, vocab].
        near: float[beams] of the same precision, in which values are compared.
    """
    if count > INSERTED:
        return _largest_by_sorting(x, near, count)
    beams, vocab = x.shape
    values = np.full(count, -np.inf)
    pairs = np.full(count, -1, dtype=np.int64)
    if count == 0:
        return pairs
    edge = x.dtype.type(-np.inf)
    held = 0
    for beam in range(beams):
        row = x[beam]
        base = near[beam]
        for start in range(0, vocab, BLOCK):
            stop = min(start + BLOCK, vocab)
            if not _reaches(row[start:stop], base, edge):
                continue
            for token in range(start, stop):
                value = row[token] + base
                if value > edge:
                    held = insert(values, pairs, held, value, beam * vocab + token)
                    if held == count:
                        edge = x.dtype.type(values[count - 1])
    if held < count:
        return pairs[:held]
    return _with_equals(x, near, pairs, values, edge)


@step
def _with_equals(x: Array, near: Array, pairs: Array, values: Array, edge: float) -> Array:
    """Return a full ranking with all pairs, in order, that equal its last one."""
    beams, vocab = x.shape
    equals = 0
    for beam in range(beams):
        for token in range(vocab):
            equals += x[beam, token] + near[beam] == edge
    better = np.searchsorted(-values, -edge)
    every = np.empty(better + equals, dtype=np.int64)
    every[:better] = pairs[:better]
    if better + equals == len(pairs):
        every[better:] = pairs[better:]
        return every
    place = better
    for beam in range(beams):
        for token in range(vocab):
            if x[beam, token] + near[beam] == edge:
                every[place] = beam * vocab + token
                place += 1
    return every


@step
def _largest_by_sorting(x: Array, near: Array, count: int) -> Array:
    """Return `largest` for long rankings: what can be among the largest is gathered and sorted."""
    beams, vocab = x.shape
    top = x.dtype.type(-np.inf)
    for beam in range(beams):
        for token in range(vocab):
            top = max(top, x[beam, token] + near[beam])
    if top == -np.inf:
        return np.empty(0, dtype=np.int64)
    held_by = np.zeros(BUCKETS, dtype=np.int64)
    for beam in range(beams):
        for token in range(vocab):
            value = x[beam, token] + near[beam]
            if value > -np.inf:
                held_by[_bucket_of(top - value)] += 1
    last = 0
    held = held_by[0]
    while held < count and last < BUCKETS - 1:
        last += 1
        held += held_by[last]
    values = np.empty(held)
    pairs = np.empty(held, dtype=np.int64)
    place = 0
    for beam in range(beams):
        for token in range(vocab):
            value = x[beam, token] + near[beam]
            if value > -np.inf and _bucket_of(top - value) <= last:
                values[place] = value
                pairs[place] = beam * vocab + token
                place += 1
    ranked = pairs[sorted_places(values)]
    if held <= count:
        return ranked
    edge = x[ranked[count - 1] // vocab, ranked[count - 1] % vocab] + near[ranked[count - 1] // vocab]
    while count < held and x[ranked[count] // vocab, ranked[count] % vocab] + near[ranked[count] // vocab] == edge:
        count += 1
    return ranked[:count]


@step
def _bucket_of(below: float) -> int:
    """Return the bucket of a value that is so far below the largest one."""
    return min(int(min(below, 1e6) * BUCKETS_PER_NAT), BUCKETS - 1)


@step
def sorted_places(values: Array) -> Array:
    """Return the places of values, float64[n], from the largest to the smallest; of equal ones the first comes first."""
    places = np.arange(len(values))
    room = np.empty_like(places)
    width = 1
    while width < len(values):
        for start in range(0, len(values), 2 * width):
            middle = min(start + width, len(values))
            stop = min(start + 2 * width, len(values))
            left = start
            right = middle
            for goal in range(start, stop):
                if left < middle and (right == stop or values[places[left]] >= values[places[right]]):
                    room[goal] = places[left]
                    left += 1
                else:
                    room[goal] = places[right]
                    right += 1
        for place in range(len(values)):
            places[place] = room[place]
        width *= 2
    return places


class Truncation(NamedTuple):
    """What is cut from a law: applied in this order, each to what the former left. The laws of transformers' warpers."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    least: int = 1  # pairs that are kept whatever their odds
    by_row: bool = False  # it sees each beam's row by itself, as in transformers' beam modes; else the joint law

    @property
    def cuts(self) -> bool:
        """Whether any pair can be lost."""
        return cuts(self)


NO_TRUNCATION = Truncation()


@step
def cuts(truncation: Truncation) -> bool:
    """Return whether a truncation can cut anything."""
    return truncation.top_k > 0 or truncation.top_p < 1 or truncation.min_p > 0


@step
def warps(truncation: Truncation) -> bool:
    """Return whether a truncation changes anything: by its temperature, or as it cuts."""
    return truncation.temperature != 1 or cuts(truncation)


@step
def kept_of(values: Array, log_total: float, truncation: Truncation) -> int:
    """Return how many of `values`, log-odds that descend, top-p and min-p keep; -1 if more of them have to be known.

    Args:
        log_total: logsumexp of these values and of all that follow; NaN if none follow.
    """
    kept = len(values)
    complete = np.isnan(log_total)
    if kept == 0:
        return 0
    if truncation.top_p < 1:
        whole = log_total
        if complete:
            whole = values[0] + np.log(np.exp(values - values[0]).sum())
        mass = 0.0
        needed = 0
        while needed < kept and mass < truncation.top_p:
            mass += np.exp(values[needed] - whole)
            needed += 1
        if mass < truncation.top_p and not complete:
            return -1
        kept = min(max(needed, truncation.least), kept)
        complete = True
    if truncation.min_p > 0:
        edge = min(values[0] + np.log(truncation.min_p), values[min(truncation.least, kept) - 1])
        if not complete and values[kept - 1] >= edge:
            return -1
        while values[kept - 1] < edge:
            kept -= 1
    return kept


@step
def kept_pairs(logits: Array, shift: Array, offset: float, truncation: Truncation, log_total: float) -> Array:
    """Return the pairs that a truncation leaves of the law (logit + shift) / temperature, best first.

    Args:
        logits: float[beams, vocab]; shift: float64[beams].
        offset: the largest score, taken off so that float32 holds finely what is compared.
        log_total: logsumexp of all (logit + shift - offset) / temperature; not looked at under a top-k.
    """
    beams, vocab = logits.shape
    near = np.empty(beams, dtype=logits.dtype)
    for beam in range(beams):
        near[beam] = shift[beam] - offset
    looked = FIRST_LOOK if truncation.top_k == 0 else truncation.top_k
    looked = max(looked, truncation.least)
    while True:
        pairs = largest(logits, near, looked)
        values = np.empty(len(pairs))
        for place in range(len(pairs)):
            beam = pairs[place] // vocab
            value = np.float64(logits[beam, pairs[place] % vocab]) + shift[beam] - offset
            values[place] = value / truncation.temperature
        is_all = truncation.top_k > 0 or looked >= beams * vocab
        kept = kept_of(values, np.nan if is_all else log_total, truncation)
        if kept >= 0:
            return pairs[:kept]
        looked *= GROWTH

"""The best (beam, token) pairs, with or without noise, and the pairs that temperature, top-k, top-p and min-p keep.

All are found without sorting the vocabulary. Rows of logits are whole, or hold only listed tokens (`core.ranked`). A pair is
the number beam * columns + place, where `columns` is the length of a row; in whole rows the place is the token. Pairs are
compared in float64; float32 only preselects them.
"""

from typing import NamedTuple

import numpy as np

from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.noise import bound_noise, gumbel
from specbeam.core.steps import BLOCK, Array, step

CHUNK = 4096  # number of tokens whose noise is bounded at a time, so that buffers stay in the nearest cache
FIRST_LOOK = 64  # number of pairs in the first ranking without a top-k
GROWTH = 8  # growth factor of each further ranking
WHOLE_ROWS = np.zeros((0, 0), dtype=np.int64)  # in place of the tokens of lists: the place in a row is the token


@step
def token_in(names: Array, beam: int, place: int) -> int:
    """Return the token at a place of a beam's row; `names` are the tokens of lists, `WHOLE_ROWS` for whole rows."""
    return names[beam, place] if names.shape[1] > 0 else place


@step
def value_of(
    logits: Array, names: Array, shift: Array, temperature: float, log_counts: Array, keys: Array, beam: int, place: int
) -> float:
    """Return the value of a pair: (logit + shift) / temperature + log count + noise; see `pairs_of_best_value`."""
    value = (np.float64(logits[beam, place]) + shift[beam]) / temperature + log_counts[beam]
    if len(keys) > 0:
        value += gumbel(keys[beam], token_in(names, beam, place))
    return value


@step
def comes_before(value: float, pair: int, other_value: float, other_pair: int) -> bool:
    """Return whether a pair comes before another in a ranking: by descending value, then by pair."""
    return value > other_value or (value == other_value and pair < other_pair)


@step
def hold(values: Array, pairs: Array, held: int, value: float, pair: int) -> int:
    """Put a pair on a heap of the `held` best pairs so far, whose root comes last. Returns the new number of pairs.

    A full heap, of as many pairs as `values` has room for, drops the pair that comes last. Values are not NaN.
    """
    if held == len(values):
        if held > 0 and comes_before(value, pair, values[0], pairs[0]):
            _replace_last(values, pairs, held, value, pair)
        return held
    place = held
    while place > 0:
        parent = (place - 1) // 2
        if not comes_before(values[parent], pairs[parent], value, pair):
            break
        values[place] = values[parent]
        pairs[place] = pairs[parent]
        place = parent
    values[place] = value
    pairs[place] = pair
    return held + 1


@step
def _replace_last(values: Array, pairs: Array, held: int, value: float, pair: int) -> None:
    """Replace the root of a heap of `held` pairs, the pair that comes last; see `hold`."""
    place = 0
    child = 1
    while child < held:
        other = child + 1
        if other < held and comes_before(values[child], pairs[child], values[other], pairs[other]):
            child = other
        if comes_before(values[child], pairs[child], value, pair):
            break
        values[place] = values[child]
        pairs[place] = pairs[child]
        place = child
        child = 2 * place + 1
    values[place] = value
    pairs[place] = pair


@step
def rank_held(values: Array, pairs: Array, held: int) -> None:
    """Sort a heap of `held` pairs in place, best first; see `hold`."""
    for place in range(held - 1, 0, -1):
        value = values[place]
        pair = pairs[place]
        values[place] = values[0]
        pairs[place] = pairs[0]
        _replace_last(values, pairs, place, value, pair)


@step
def _reaches(block: Array, base: float | np.float32, edge: float | np.float32) -> bool:
    """Return whether some value + `base` is at least `edge`; always True for blocks of fewer than `BLOCK` values.

    A loop over exactly `BLOCK` values compiles to vector instructions, so skipping blocks is cheap.
    """
    if len(block) < BLOCK:
        return True
    reaches = np.uint8(0)
    for place in range(BLOCK):
        reaches |= np.uint8(block[place] + base >= edge)
    return bool(reaches > 0)


@step
def _reaches_scaled(block: Array, scale: np.float32, added: np.float32, edge: np.float32) -> bool:
    """Return whether some value * `scale` + `added` is at least `edge`; see `_reaches`."""
    if len(block) < BLOCK:
        return True
    reaches = np.uint8(0)
    for place in range(BLOCK):
        reaches |= np.uint8(np.float32(block[place]) * scale + added >= edge)
    return bool(reaches > 0)


@step
def best_pairs(
    logits: Array, shift: Array, temperature: float, log_counts: Array, keys: Array, among: Array, count: int
) -> Array:
    """Return the `count` pairs of largest value in whole rows, best first; see `pairs_of_best_value`."""
    names = np.empty((0, 0), dtype=np.int64)
    return pairs_of_best_value(logits, names, shift, temperature, log_counts, keys, among, count)[0]


@step
def pairs_of_best_value(
    logits: Array,
    names: Array,
    shift: Array,
    temperature: float,
    log_counts: Array,
    keys: Array,
    among: Array,
    count: int,
) -> tuple[Array, Array]:
    """Return the `count` pairs of largest (logit + shift) / temperature + log count + noise, best first, and these values.

    Returns fewer pairs if fewer have a logit above -inf. Pairs of equal value are in ascending order. With noise these are
    draws without replacement (Gumbel-top-k). The noise of a pair is computed only if its upper bound reaches the value of
    the last pair so far.

    Args:
        logits: float[beams, columns].
        names: int64[beams, columns], the tokens of lists, ascending in each row; `WHOLE_ROWS` for whole rows.
        shift: float64[beams], added to logits to get log-likelihoods.
        log_counts: float64[beams], log of the number of draws of each beam.
        keys: uint64[beams], keys of the beams' noise; empty for no noise.
        among: bool[beams], the participating beams.
    """
    beams, columns = logits.shape
    count = min(count, beams * columns)
    values = np.full(count, -np.inf)
    pairs = np.full(count, -1, dtype=np.int64)
    if count == 0:
        return pairs, values
    if names.shape[1] > 0:  # lists are too short to preselect
        return rank_pairs(_live_pairs(logits, among), logits, names, shift, temperature, log_counts, keys, count)
    noisy = len(keys) > 0
    bounds = np.empty(CHUNK if noisy else 0, dtype=np.float32)
    upper = np.empty(CHUNK if noisy else 0, dtype=np.float32)
    offset = shift.max() / temperature  # subtracted, because float32 is more precise for small bounds
    edge = np.float32(-np.inf)
    held = 0
    for beam in range(beams):
        if not among[beam]:
            continue
        row = logits[beam]
        base = shift[beam]
        extra = log_counts[beam]
        key = keys[beam] if noisy else np.uint64(0)
        slack = 1e-3 + 4e-7 * (abs(base / temperature) + abs(offset))
        scale = np.float32(1 / temperature)
        added = np.float32(base / temperature + extra - offset + slack)
        first = 0  # of the tokens whose bounds are in `upper`
        for start in range(0, columns, BLOCK):
            stop = min(start + BLOCK, columns)
            if noisy and start % CHUNK == 0:
                first = start
                count_here = min(CHUNK, columns - first)
                bound_noise(key, first, bounds[:count_here])
                for place in range(count_here):
                    upper[place] = np.float32(row[first + place]) * scale + bounds[place] + added
            if noisy:
                reaches = _reaches(upper[start - first : stop - first], np.float32(0), edge)
            else:
                reaches = _reaches_scaled(row[start:stop], scale, added, edge)
            if not reaches:
                continue
            for token in range(start, stop):
                bound = upper[token - first] if noisy else np.float32(row[token]) * scale + added
                if bound >= edge and row[token] > -np.inf:
                    value = (np.float64(row[token]) + base) / temperature + extra
                    if noisy:
                        value += gumbel(key, token)
                    held = hold(values, pairs, held, value, beam * columns + token)
                    if held == count:
                        edge = np.float32(values[0] - offset)
    rank_held(values, pairs, held)
    return pairs[:held], values[:held]


@step
def _live_pairs(logits: Array, among: Array) -> Array:
    """Return the pairs of participating beams whose logit is above -inf, in ascending order."""
    beams, columns = logits.shape
    pairs = np.empty(beams * columns, dtype=np.int64)
    held = 0
    for beam in range(beams):
        for place in range(columns):
            if among[beam] and logits[beam, place] > -np.inf:
                pairs[held] = beam * columns + place
                held += 1
    return pairs[:held]


@step
def rank_pairs(
    pairs: Array,
    logits: Array,
    names: Array,
    shift: Array,
    temperature: float,
    log_counts: Array,
    keys: Array,
    count: int,
) -> tuple[Array, Array]:
    """Return the `count` best of the given pairs, int64[n], best first, and their values; see `pairs_of_best_value`."""
    columns = logits.shape[1]
    count = min(count, len(pairs))
    values = np.empty(count)
    chosen = np.empty(count, dtype=np.int64)
    held = 0
    for pair in pairs:
        value = value_of(logits, names, shift, temperature, log_counts, keys, pair // columns, pair % columns)
        held = hold(values, chosen, held, value, pair)
    rank_held(values, chosen, held)
    return chosen, values


@step
def largest(x: Array, near: Array, count: int) -> Array:
    """Return the pairs of the `count` largest x + near, best first, and all ties with the last one; no pairs of -inf.

    Args:
        x: float[beams, vocab].
        near: float[beams], with the dtype of `x`, in which values are compared.
    """
    beams, vocab = x.shape
    count = min(count, beams * vocab)
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
                    held = hold(values, pairs, held, np.float64(value), beam * vocab + token)
                    if held == count:
                        edge = x.dtype.type(values[0])
    rank_held(values, pairs, held)
    if held < count:
        return pairs[:held]
    return _with_equals(x, near, pairs, values, edge)


@step
def _with_equals(x: Array, near: Array, pairs: Array, values: Array, edge: float) -> Array:
    """Return a full ranking of `largest` with all pairs whose value equals that of its last pair, `edge`, in order."""
    beams, vocab = x.shape
    equals = 0
    for beam in range(beams):
        for token in range(vocab):
            equals += x[beam, token] + near[beam] == edge
    better = 0
    while better < len(values) and values[better] > edge:
        better += 1
    every = np.empty(better + equals, dtype=np.int64)
    copy_numbers(every, pairs[:better])
    if better + equals == len(pairs):
        copy_numbers(every[better:], pairs[better:])
        return every
    place = better
    for beam in range(beams):
        for token in range(vocab):
            if x[beam, token] + near[beam] == edge:
                every[place] = beam * vocab + token
                place += 1
    return every


@step
def sorted_places(values: Array) -> Array:
    """Return the indices that sort values, float64[n], in descending order; equal values keep their order."""
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


@step
def ascending(numbers: Array) -> Array:
    """Return integers, int64[n], in ascending order; the array itself if it is.

    It replaces `np.sort`, which numba compiles from five functions that are longer than most steps.
    """
    is_sorted = True
    for place in range(1, len(numbers)):
        is_sorted &= numbers[place - 1] <= numbers[place]
    if is_sorted:
        return numbers
    heap = numbers.copy()
    for root in range(len(heap) // 2 - 1, -1, -1):
        _sink(heap, root, len(heap))
    for last in range(len(heap) - 1, 0, -1):
        largest = heap[0]
        heap[0] = heap[last]
        heap[last] = largest
        _sink(heap, 0, last)
    return heap


@step
def _sink(heap: Array, root: int, size: int) -> None:
    """Sift down the number at `root` in a heap of `size` numbers that is valid below it."""
    sinking = heap[root]
    place = root
    child = 2 * root + 1
    while child < size:
        if child + 1 < size and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= sinking:
            break
        heap[place] = heap[child]
        place = child
        child = 2 * place + 1
    heap[place] = sinking


class Truncation(NamedTuple):
    """Temperature, top-k, top-p and min-p, applied in this order, as in transformers."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    least: int = 1  # minimum number of kept pairs
    by_row: bool = False  # True: applies to each beam's row, as in transformers' beam modes; False: to the joint law
    # False: rows are log-probabilities, which transformers' beam modes do not renormalise after processors
    normalise: bool = True

    @property
    def cuts(self) -> bool:
        """Whether any pair can be cut."""
        return cuts(self)


NO_TRUNCATION = Truncation()


@step
def cuts(truncation: Truncation) -> bool:
    """Return whether a truncation can cut any pair: whether top-k, top-p or min-p is on."""
    return truncation.top_k > 0 or truncation.top_p < 1 or truncation.min_p > 0


@step
def warps(truncation: Truncation) -> bool:
    """Return whether a truncation can change laws, by its temperature or by cutting pairs."""
    return truncation.temperature != 1 or cuts(truncation)


@step
def kept_of(values: Array, log_total: float, truncation: Truncation) -> int:
    """Return the number of largest log-probabilities that top-p and min-p keep; -1 if more values are needed to decide.

    Args:
        values: float64[n], the largest unnormalised log-probabilities, descending.
        log_total: logsumexp of all values, including those after `values`; NaN if there are none after them.
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
    """Return the pairs of whole rows that a truncation keeps, best first; see `kept_of_rows`."""
    nothing_more = np.empty(0)
    return kept_of_rows(logits, nothing_more, shift, offset, truncation, log_total)[0]


@step
def kept_of_rows(
    logits: Array, rest: Array, shift: Array, offset: float, truncation: Truncation, log_total: float
) -> tuple[Array, bool]:
    """Return the pairs that a truncation keeps of the law with log-probabilities (logit + shift) / temperature, best first.

    The bool is whether the pairs are decided: False if a token that is not listed might be kept.

    Args:
        logits: float[beams, columns]; shift: float64[beams].
        rest: float64[beams], upper bounds of the logits that are not listed; empty for whole rows.
        offset: the largest score, subtracted because float32 is more precise for small numbers.
        log_total: logsumexp of all (logit + shift - offset) / temperature; ignored if there is a top-k.
    """
    beams, columns = logits.shape
    near = np.empty(beams, dtype=logits.dtype)
    for beam in range(beams):
        near[beam] = shift[beam] - offset
    below = logits.dtype.type(-np.inf)  # no pair that is not listed is above it
    for beam in range(len(rest)):
        below = max(below, logits.dtype.type(rest[beam]) + near[beam])
    looked = FIRST_LOOK if truncation.top_k == 0 else truncation.top_k
    looked = max(looked, truncation.least)
    while True:
        pairs = largest(logits, near, looked)
        values = np.empty(len(pairs))
        sure = 0
        for place in range(len(pairs)):
            beam = pairs[place] // columns
            logit = logits[beam, pairs[place] % columns]
            values[place] = (np.float64(logit) + shift[beam] - offset) / truncation.temperature
            sure += logit + near[beam] > below
        is_all = truncation.top_k > 0 or looked >= beams * columns
        if below > -np.inf:
            is_all = truncation.top_k > 0 and sure >= looked
        kept = kept_of(values[:sure], np.nan if is_all else log_total, truncation)
        if below > -np.inf and (sure < truncation.least or (truncation.top_k > 0 and not is_all)):
            kept = -1
        if kept >= 0:
            return pairs[:kept], True
        if looked >= beams * columns:
            return pairs, False
        looked *= GROWTH

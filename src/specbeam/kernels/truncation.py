"""Truncation as a head of the ranking, and the choice of a draft layer."""

from typing import NamedTuple

import numpy as np

from specbeam.kernels.compiling import BLOCK, Array, compiled
from specbeam.kernels.noise import child_keys
from specbeam.kernels.ranking import best, largest, ranked
from specbeam.kernels.stopping import is_end
from specbeam.kernels.sums import INF_RANK, MINUS_INF_RANK, extremes, log_norm


class Cut(NamedTuple):
    """A truncation, and how many of the best pairs tell what it leaves (`Truncation.looked`)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    least: int
    looked: int


@compiled
def head(values: Array, log_total: float, top_p: float, min_p: float, least: int) -> int:
    """How many of `values`, log-odds that descend, top-p and min-p keep (see `Truncation`); -1 if more have to be known.

    `log_total`: their logsumexp with those that follow; NaN if none do.
    """
    kept = len(values)
    if top_p < 1 and kept:
        whole = log_total
        if np.isnan(whole):
            whole = values[0] + np.log(np.exp(values - values[0]).sum())
        mass, needed = 0.0, 0
        while needed < kept and mass < top_p:
            mass += np.exp(values[needed] - whole)
            needed += 1
        if mass < top_p and not np.isnan(log_total):
            return -1
        kept = min(max(needed, least), kept)
    if min_p > 0 and kept:
        edge = min(values[0] + np.log(min_p), values[min(least, kept) - 1])
        while values[kept - 1] < edge:
            kept -= 1
    return kept


@compiled
def first_ones(
    logits: Array, shift: Array, offset: float, temperature: float, top_k: int, top_p: float, min_p: float, least: int,
    log_total: float, looked: int,
) -> tuple[Array, bool]:  # fmt: skip
    """The support of a joint law, (logit + shift) / temperature truncated, best first; and whether the `looked` best ones
    tell it.

    Args:
        offset: the largest score, taken out so that float32 holds what is compared finely.
        log_total: of all warped log-odds less the offset; NaN where a top-k cuts first.
    """
    near = np.empty(len(shift), dtype=logits.dtype)
    for beam in range(len(shift)):
        near[beam] = shift[beam] - offset
    pairs, vocab = largest(logits, near, looked), logits.shape[1]
    values = np.empty(len(pairs))
    for place in range(len(pairs)):
        beam = pairs[place] // vocab
        values[place] = (logits[beam, pairs[place] % vocab] + shift[beam] - offset) / temperature
    found = head(values, log_total, top_p, min_p, least)
    return pairs[: max(found, 0)], found >= 0


@compiled
def shifts(scores: Array, log_norm: Array) -> Array:
    """What log-likelihoods are above logits. A beam from which everything is banned has logits of -inf, and needs none."""
    shift = np.empty(len(scores))
    for beam in range(len(scores)):
        shift[beam] = scores[beam] - (log_norm[beam] if log_norm[beam] > -np.inf else 0.0)
    return shift


@compiled
def core_and_halo(
    logits: Array, scores: Array, log_norm: Array, log_counts: Array, keys: Array, among: Array, temperature: float,
    top_k: int, top_p: float, min_p: float, least: int, log_total: float, looked: int, count: int, width: int,
) -> tuple[Array, int, Array]:  # fmt: skip
    """`JointLaw.core_and_halo`: the pairs, how many of them are core, and their log-likelihoods; -1 of core where the best
    `looked` ones do not tell the support.

    Args:
        looked: 0: nothing is cut. log_total: see `first_ones`.
    """
    shift, every = shifts(scores, log_norm), np.ones(len(among), dtype=np.bool_)
    vocab, some, most = logits.shape[1], not among.all(), logits.size
    if looked > 0:
        by = (temperature, top_k, top_p, min_p, least)
        support, known = first_ones(logits, shift, scores.max(), *by, log_total, looked)
        if not known:
            return support, -1, shift
        if some:
            support = support[among[support // vocab]]
        core = ranked(support, logits, shift, temperature, log_counts, keys, count)
        halo = core[:0]
        if width > len(core):
            halo = best(logits, shift, temperature, log_counts, keys[:0], every, min(width, most))
    else:
        halo = best(logits, shift, temperature, log_counts, keys, every, min(max(width, count), most))
        core = halo[among[halo // vocab]][:count]
        if len(core) < count and some:  # the others are further down
            core = best(logits, shift, temperature, log_counts, keys, among, min(count, most))
    pairs, held = np.empty(max(width, len(core)), dtype=np.int64), len(core)
    pairs[:held] = core
    for pair in halo:
        if held < width and not (core == pair).any():
            pairs[held] = pair
            held += 1
    logj = np.empty(held)
    for place in range(held):
        beam = pairs[place] // vocab
        logj[place] = logits[beam, pairs[place] % vocab] + shift[beam]
    return pairs[:held], len(core), logj


@compiled
def whole(scores: Array, norm: Array, cut: Cut) -> float:
    """The `log_total` of a law at temperature 1, where each row has the odds of its beam; NaN where nobody asks."""
    if cut.looked <= 0 or cut.top_k > 0:
        return np.nan
    top, total = scores.max(), 0.0
    for beam in range(len(scores)):
        total += np.exp(scores[beam] - top) if norm[beam] > -np.inf else 0.0
    return np.log(total)


class Way(NamedTuple):
    """How a layer is chosen."""

    noisy: bool  # False: the best pairs without noise, each beam once
    cut: Cut  # `looked` may be 0: nothing is cut. Where top-p cuts without top-k, the temperature must be 1
    core: int  # pairs to be chosen for themselves
    width: int  # pairs in all, at least
    eos: Array  # int64[ends]


@compiled
def layer(
    logits: Array, places: Array, scores: Array, counts: Array, keys: Array, among: Array, way: Way
) -> tuple[Array, Array, Array, Array, Array, Array, int]:
    """`choice.choose` in one go: the norms of the rows; parents, tokens, scores and keys of the prolonged beams, which of
    them end; how many are core, -1 where this does not tell, or where the logits are none or leave nothing to draw.

    Args:
        places: rows of the beams; empty: all of them.
    """
    x, cut = logits, way.cut
    if len(places) > 0:
        x = np.empty((len(places), logits.shape[1]), dtype=logits.dtype)
        for beam in range(len(places)):
            x[beam] = logits[places[beam]]
    vocab, norm = x.shape[1], log_norm(x)
    pairs, core, logj = np.empty(0, dtype=np.int64), -1, np.empty(0)
    sound, some = True, False
    for beam in range(len(norm)):
        sound &= norm[beam] < np.inf  # nor NaN
        some |= norm[beam] > -np.inf
    if sound and some:
        log_total = whole(scores, norm, cut)
        log_counts = np.log(counts) if way.noisy else np.zeros(len(counts))
        pairs, core, logj = core_and_halo(
            x, scores, norm, log_counts, keys if way.noisy else keys[:0], among, cut.temperature, cut.top_k, cut.top_p,
            cut.min_p, cut.least, log_total, cut.looked, way.core, way.width,
        )  # fmt: skip
    held = len(pairs) if core >= 0 else 0
    parents, tokens = np.empty(held, dtype=np.int64), np.empty(held, dtype=np.int64)
    above, ends = np.empty(held, dtype=np.uint64), np.empty(held, dtype=np.bool_)
    for place in range(held):
        parents[place], tokens[place] = pairs[place] // vocab, pairs[place] % vocab
        above[place], ends[place] = keys[parents[place]], is_end(tokens[place], way.eos)
    return norm, parents, tokens, logj, child_keys(above, tokens), ends, core


@compiled
def kept(row: Array, temperature: float, top_k: int, top_p: float, min_p: float, least: int, most: int) -> Array:
    """`truncation.Truncation.support` of a row of float32 logits: its tokens, best first; [-1] if the `most` best ones do
    not tell. There is a `top_k` or a `top_p`.
    """
    rows, nothing = row.reshape(1, len(row)), np.zeros(1, dtype=np.float32)
    looked, total = max(top_k, least), np.nan
    if top_k == 0:
        looked, total = max(BLOCK, least), log_norm(rows / np.float32(temperature))[0]
    while looked <= most:
        tokens = largest(rows, nothing, looked)
        values = np.empty(len(tokens))
        for place in range(len(tokens)):
            values[place] = row[tokens[place]] / temperature
        found = head(values, np.nan if looked >= len(row) else total, top_p, min_p, least)
        if found >= 0:
            return tokens[:found]
        looked *= 4
    return np.full(1, -1, dtype=np.int64)


@compiled
def dense(row: Array, temperature: float, logp: Array) -> bool:
    """The law of a row of which nothing is cut, as `probs.row_logp` makes it; False if it is none."""
    scaled = row.reshape(1, len(row))
    if temperature != 1:
        scaled = scaled / np.float32(temperature)
    norm = log_norm(scaled)[0]
    for token in range(len(row)):
        logp[token] = np.float64(scaled[0, token]) - norm
    return -np.inf < norm < np.inf


@compiled
def truncated(
    logits: Array, temperature: float, top_k: int, top_p: float, min_p: float, least: int, most: int
) -> tuple[Array, Array, Array]:
    """The laws that `kept` leaves of float32 rows: their tokens, ascending, and log-odds, one row behind the other; and how
    many each row has: 0 where all is banned, -1 where `kept` does not tell, -2 where there is NaN or +inf.
    """
    rows = len(logits)
    tokens, logp = np.empty(rows * most, dtype=np.int64), np.empty(rows * most)
    counts, start = np.empty(rows, dtype=np.int64), 0
    for number in range(rows):
        low, high = extremes(logits[number].view(np.int32))
        if low < MINUS_INF_RANK or high >= INF_RANK:
            counts[number] = -2
            continue
        found = kept(logits[number], temperature, top_k, top_p, min_p, least, most)
        if len(found) > most or (len(found) == 1 and found[0] < 0):
            counts[number] = -1
            continue
        found.sort()
        counts[number], top, total = len(found), -np.inf, 0.0
        for place in range(len(found)):
            logp[start + place] = logits[number, found[place]] / temperature
            top = max(top, logp[start + place])
        for place in range(len(found)):
            total += np.exp(logp[start + place] - top)
        for place in range(len(found)):
            tokens[start + place] = found[place]
            logp[start + place] -= top + np.log(total)
        start += len(found)
    return tokens[:start], logp[:start], counts

"""The joint law over (beam, token) pairs: its odds, its support, and what the beams of a layer go on with.

A pair is beam * vocabulary + token.
"""

from typing import NamedTuple

import numpy as np

from specbeam.core.beams import is_end
from specbeam.core.noise import child_keys
from specbeam.core.steps import Array, step
from specbeam.laws.ranking import Truncation, best_pairs, cuts, kept_pairs, rank_pairs, warps
from specbeam.laws.reduce import log_norm, log_sum

SOUND, DEAD, BROKEN = range(3)  # what logits can be: some pair has odds; none has; they hold NaN or +inf
NO_KEYS = np.zeros(0, dtype=np.uint64)
HEAD = 14.0  # pairs whose odds are below exp(-14) of the best pair's do not move a width


class JointLaw(NamedTuple):
    """The law of one draw of a (beam, token) pair: count * exp((score + log p) / temperature), truncated and normalised."""

    logits: Array  # float[beams, vocab], after the logits processors; -inf bans a token
    scores: Array  # float64[beams]: log-likelihood of each beam so far
    log_norm: Array  # float64[beams]: what log-likelihoods are below logits; -inf if all of the row is banned
    log_counts: Array  # float64[beams]: of how often each beam occurs
    truncation: Truncation
    normalised: bool  # whether `log_norm` is the logsumexp of each row, so that the odds of its tokens sum to 1


@step
def joint_law(logits: Array, scores: Array, counts: Array, truncation: Truncation, normalise: bool) -> JointLaw:
    """Return the joint law of beams with these rows of logits.

    Args:
        normalise: False if the rows are log-probabilities already, as in transformers' beam modes, which do not normalise
            again what processors and warpers left of them.
    """
    norms = log_norm(logits)
    if truncation.by_row and warps(truncation):
        logits = warped_rows(logits, norms, truncation, normalise)
        norms = log_norm(logits)
        normalise = False
        truncation = Truncation(1.0, 0, 1.0, 0.0, 1, False)
    if not normalise:
        for beam in range(len(norms)):
            if norms[beam] > -np.inf and norms[beam] < np.inf:
                norms[beam] = 0.0
    return JointLaw(logits, scores, norms, np.log(counts), truncation, normalise)


@step
def warped_rows(rows: Array, norms: Array, truncation: Truncation, normalise: bool) -> Array:
    """Return log-probabilities, float[beams, vocab], each row warped by itself as in transformers' beam modes.

    They are divided by the temperature, and what is cut is -inf; what is left is not normalised again. A row that is all
    -inf, or holds NaN or +inf, stays as it is.

    Args:
        rows: logits, or log-probabilities.
        norms: float64[beams], their logsumexp.
        normalise: False if the rows are log-probabilities already.
    """
    temperature = truncation.temperature
    totals = norms
    if temperature != 1:
        totals = log_norm(rows / rows.dtype.type(temperature))
    warped = np.full_like(rows, -np.inf)
    for beam in range(len(rows)):
        norm = norms[beam]
        if not (norm > -np.inf and norm < np.inf):
            warped[beam] = rows[beam]
            continue
        shift = norm if normalise else 0.0
        if not cuts(truncation):
            for token in range(rows.shape[1]):
                warped[beam, token] = (np.float64(rows[beam, token]) - shift) / temperature
            continue
        alone = rows[beam : beam + 1]
        for token in kept_pairs(alone, np.zeros(1), 0.0, truncation, totals[beam]):
            warped[beam, token] = (np.float64(rows[beam, token]) - shift) / temperature
    return warped


@step
def condition_of(law: JointLaw) -> int:
    """Return SOUND, DEAD or BROKEN."""
    found = DEAD
    for norm in law.log_norm:
        if not norm < np.inf:
            return BROKEN
        if norm > -np.inf:
            found = SOUND
    return found


@step
def shift_of(law: JointLaw) -> Array:
    """Return what log-likelihoods are above logits, float64[beams].

    A beam from which everything is banned has logits of -inf alone, and needs no norm.
    """
    shift = np.empty(len(law.scores))
    for beam in range(len(shift)):
        norm = law.log_norm[beam]
        shift[beam] = law.scores[beam] - (norm if norm > -np.inf else 0.0)
    return shift


@step
def likelihoods_at(law: JointLaw, pairs: Array) -> Array:
    """Return the log-likelihood of each prolonged beam, float64[pairs]: what it carries on."""
    vocab = law.logits.shape[1]
    shift = shift_of(law)
    found = np.empty(len(pairs))
    for place in range(len(pairs)):
        beam = pairs[place] // vocab
        found[place] = np.float64(law.logits[beam, pairs[place] % vocab]) + shift[beam]
    return found


@step
def _log_weights_at(law: JointLaw, pairs: Array) -> Array:
    """Return the log of the warped odds of pairs, not normalised."""
    vocab = law.logits.shape[1]
    weights = likelihoods_at(law, pairs)
    for place in range(len(pairs)):
        weights[place] = weights[place] / law.truncation.temperature + law.log_counts[pairs[place] // vocab]
    return weights


@step
def _log_totals(law: JointLaw) -> Array:
    """Return the logsumexp of (logit + shift) / temperature over each beam's tokens, float64[beams]."""
    temperature = law.truncation.temperature
    totals = law.log_norm.copy()
    if temperature != 1 or not law.normalised:
        totals = log_norm(law.logits / law.logits.dtype.type(temperature))
    shift = shift_of(law)
    for beam in range(len(totals)):
        if totals[beam] > -np.inf:
            totals[beam] += shift[beam] / temperature
    return totals


@step
def support_of(law: JointLaw) -> Array:
    """Return the pairs that the truncation leaves, best first. It ranks beams, not their repeats."""
    offset = law.scores.max()
    log_total = np.nan
    if law.truncation.top_k == 0:
        log_total = log_sum(_log_totals(law)) - offset / law.truncation.temperature
    return kept_pairs(law.logits, shift_of(law), offset, law.truncation, log_total)


@step
def all_pairs(law: JointLaw) -> Array:
    """Return the pairs that have any odds, ascending."""
    if cuts(law.truncation):
        return np.sort(support_of(law))
    beams, vocab = law.logits.shape
    pairs = np.empty(beams * vocab, dtype=np.int64)
    held = 0
    for beam in range(beams):
        for token in range(vocab):
            if law.logits[beam, token] > -np.inf:
                pairs[held] = beam * vocab + token
                held += 1
    return pairs[:held]


@step
def odds_among(law: JointLaw, pairs: Array) -> Array:
    """Return the odds of pairs, given that one of them is drawn, float64[pairs]."""
    weights = _log_weights_at(law, pairs)
    odds = np.empty(len(pairs))
    if len(pairs) == 0:
        return odds
    top = weights.max()
    for place in range(len(pairs)):
        odds[place] = np.exp(weights[place] - top)
    return odds / odds.sum()


@step
def odds_at(law: JointLaw, pairs: Array) -> Array:
    """Return the odds of pairs before top-k, top-p and min-p, float64[pairs]."""
    total = log_sum(_log_totals(law) + law.log_counts)
    return np.exp(_log_weights_at(law, pairs) - total)


@step
def head_of(law: JointLaw) -> tuple[Array, Array]:
    """Return the pairs that carry the law, ascending, and their odds."""
    pairs = all_pairs(law)
    odds = odds_among(law, pairs)
    if cuts(law.truncation):
        return pairs, odds
    near = odds >= odds.max() * np.exp(-HEAD)
    return pairs[near], odds[near]


@step
def likeliest_pairs(law: JointLaw, count: int) -> Array:
    """Return the `count` pairs of largest odds before top-k, top-p and min-p, best first."""
    every = np.ones(len(law.scores), dtype=np.bool_)
    return best_pairs(law.logits, shift_of(law), law.truncation.temperature, law.log_counts, NO_KEYS, every, count)


@step
def core_and_extra(law: JointLaw, keys: Array, among: Array, core: int, width: int) -> tuple[Array, int]:
    """Return up to max(core, width) pairs, and how many of them are core.

    The core are the `core` best pairs of the beams `among`; the likeliest others are added until there are `width`. A
    truncation cuts the core alone. Where it cuts, the others are chosen without noise: they are there to be found, and what
    their maker cuts away another law may keep.

    Args:
        keys: uint64[beams], of the noise; empty for no noise.
        among: bool[beams].
    """
    vocab = law.logits.shape[1]
    shift = shift_of(law)
    temperature = law.truncation.temperature
    some = not among.all()
    if cuts(law.truncation):
        support = support_of(law)
        if some:
            support = support[among[support // vocab]]
        best = rank_pairs(support, law.logits, shift, temperature, law.log_counts, keys, core)
        others = best[:0]
        if width > len(best):
            others = likeliest_pairs(law, width)
    else:
        every = np.ones(len(among), dtype=np.bool_)
        others = best_pairs(law.logits, shift, temperature, law.log_counts, keys, every, max(width, core))
        best = others[among[others // vocab]][:core]
        if len(best) < core and some:  # the others are further down the ranking
            best = best_pairs(law.logits, shift, temperature, law.log_counts, keys, among, core)
    pairs = np.empty(max(width, len(best)), dtype=np.int64)
    held = len(best)
    pairs[:held] = best
    for pair in others:
        if held < width and not (best == pair).any():
            pairs[held] = pair
            held += 1
    return pairs[:held], len(best)


class Choice(NamedTuple):
    """The (beam, token) pairs that a layer goes on with, the first `core` of them chosen for themselves."""

    parents: Array  # int64[pairs]: which beam each prolongs
    tokens: Array  # int64[pairs]
    scores: Array  # float64[pairs]: log-likelihood of the prolonged beams
    keys: Array  # uint64[pairs]
    ends: Array  # bool[pairs]: end tokens
    core: int


@step
def choice_of(law: JointLaw, keys: Array, pairs: Array, core: int, eos: Array) -> Choice:
    """Return what becomes of beams with these keys when they are prolonged by these pairs."""
    vocab = law.logits.shape[1]
    parents = pairs // vocab
    tokens = pairs % vocab
    ends = np.empty(len(pairs), dtype=np.bool_)
    for place in range(len(pairs)):
        ends[place] = is_end(tokens[place], eos)
    return Choice(parents, tokens, likelihoods_at(law, pairs), child_keys(keys[parents], tokens), ends, core)


@step
def choose(law: JointLaw, keys: Array, noisy: bool, among: Array, core: int, width: int, eos: Array) -> Choice:
    """Return the pairs of `core_and_extra`, under the noise of the beams' keys if `noisy`."""
    noise = keys if noisy else keys[:0]
    pairs, kept = core_and_extra(law, noise, among, core, width)
    return choice_of(law, keys, pairs, kept, eos)

"""The joint law over (beam, token) pairs: its probabilities, its support, and the choice of a layer's pairs.

A pair is the number beam * vocabulary size + token.
"""

from typing import NamedTuple

import numpy as np

from specbeam.core.beams import is_end
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.laws.ranking import (
    Truncation,
    ascending,
    best_pairs,
    cuts,
    insert,
    kept_pairs,
    pairs_of_best_value,
    rank_pairs,
    sorted_places,
    warps,
)
from specbeam.core.laws.reduce import BROKEN, DEAD, SOUND, exponentials, log_norm, log_sum, norms_left_out
from specbeam.core.noise import ALL_TOKENS, child_keys, gumbel, with_largest
from specbeam.core.steps import Array, step

HEAD = 14.0  # pairs less probable than exp(-14) times the best pair do not affect widths


class JointLaw(NamedTuple):
    """The law of one draw of a (beam, token) pair: count * exp((score + log p) / temperature), truncated and normalised."""

    logits: Array  # float[beams, vocab], after the logits processors; -inf bans a token
    scores: Array  # float64[beams]: log-likelihood of each beam so far
    log_norm: Array  # float64[beams]: logit minus log-probability; -inf if all tokens are banned
    log_counts: Array  # float64[beams]: log of the number of draws of each beam
    truncation: Truncation
    normalised: bool  # whether `log_norm` is the logsumexp of each row, so that its probabilities sum to 1


@step
def joint_law(logits: Array, scores: Array, counts: Array, truncation: Truncation) -> JointLaw:
    """Return the joint law of beams with these rows of logits.

    Args:
        logits: float[beams, vocab], a row per beam, after the logits processors.
        scores: float64[beams], log-likelihood of each beam so far.
        counts: int64[beams], number of draws of each beam.
    """
    normalise = truncation.normalise
    if truncation.by_row and warps(truncation):
        logits = warped_rows(logits, log_norm(logits), truncation)
        normalise = False
        truncation = Truncation(1.0, 0, 1.0, 0.0, 1, False, False)
    norms = log_norm(logits) if normalise else norms_left_out(logits)
    return JointLaw(logits, scores, norms, np.log(counts), truncation, normalise)


@step
def warped_rows(rows: Array, norms: Array, truncation: Truncation) -> Array:
    """Return log-probabilities, float[beams, vocab], with each row warped separately, as in transformers' beam modes.

    They are divided by the temperature. Truncated tokens get -inf; the others are not renormalised. Rows that are all -inf,
    or contain NaN or +inf, are returned unchanged.

    Args:
        rows: logits, or log-probabilities, see `Truncation.normalise`.
        norms: float64[beams], logsumexp of the rows.
    """
    temperature = truncation.temperature
    totals = norms
    if temperature != 1:
        totals = log_norm(rows / rows.dtype.type(temperature))
    warped = np.full_like(rows, -np.inf)
    for beam in range(len(rows)):
        norm = norms[beam]
        if not (norm > -np.inf and norm < np.inf):
            copy_numbers(warped[beam], rows[beam])
            continue
        shift = norm if truncation.normalise else 0.0
        if not cuts(truncation):
            for token in range(rows.shape[1]):
                warped[beam, token] = (np.float64(rows[beam, token]) - shift) / temperature
            continue
        row = rows[beam : beam + 1]
        for token in kept_pairs(row, np.zeros(1), 0.0, truncation, totals[beam]):
            warped[beam, token] = (np.float64(rows[beam, token]) - shift) / temperature
    return warped


@step
def condition_of(law: JointLaw) -> int:
    """Return the condition of a law: SOUND, DEAD (every token is banned) or BROKEN (some logits are NaN or +inf)."""
    condition = DEAD
    for norm in law.log_norm:
        if not norm < np.inf:
            return BROKEN
        if norm > -np.inf:
            condition = SOUND
    return condition


@step
def shift_of(law: JointLaw) -> Array:
    """Return the difference of the log-likelihoods of each beam's extensions and its logits, float64[beams].

    The norm of a beam whose tokens are all banned is ignored, because all its logits are -inf.
    """
    shift = np.empty(len(law.scores))
    for beam in range(len(shift)):
        norm = law.log_norm[beam]
        shift[beam] = law.scores[beam] - (norm if norm > -np.inf else 0.0)
    return shift


@step
def likelihoods_at(law: JointLaw, pairs: Array) -> Array:
    """Return the log-likelihood of each extended beam, float64[pairs]."""
    vocab = law.logits.shape[1]
    shift = shift_of(law)
    logliks = np.empty(len(pairs))
    beam = 0
    first = 0
    for place in range(len(pairs)):
        pair = pairs[place]
        if pair < first or pair >= first + vocab:  # neighbouring pairs usually share a beam, and divisions are slow
            beam = pair // vocab
            first = beam * vocab
        logliks[place] = np.float64(law.logits[beam, pair - first]) + shift[beam]
    return logliks


@step
def log_weights_at(law: JointLaw, pairs: Array) -> Array:
    """Return the unnormalised log-probabilities of pairs, with temperature and counts, float64[pairs]."""
    vocab = law.logits.shape[1]
    weights = likelihoods_at(law, pairs)
    beam = 0
    first = 0
    for place in range(len(pairs)):
        pair = pairs[place]
        if pair < first or pair >= first + vocab:
            beam = pair // vocab
            first = beam * vocab
        weights[place] = weights[place] / law.truncation.temperature + law.log_counts[beam]
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
    """Return the pairs that the truncation keeps, best first. Counts of beams are ignored."""
    offset = law.scores.max()
    log_total = np.nan
    if law.truncation.top_k == 0:
        log_total = log_sum(_log_totals(law)) - offset / law.truncation.temperature
    return kept_pairs(law.logits, shift_of(law), offset, law.truncation, log_total)


@step
def all_pairs(law: JointLaw) -> Array:
    """Return all pairs of probability above 0, ascending."""
    if cuts(law.truncation):
        return ascending(support_of(law))
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
    """Return the probabilities of pairs, given that one of these pairs is drawn, float64[pairs]."""
    return log_odds_among(law, pairs)[1]


@step
def log_odds_among(law: JointLaw, pairs: Array) -> tuple[Array, Array]:
    """Return the log of `odds_among`, and `odds_among`, both float64[pairs]."""
    weights = log_weights_at(law, pairs)
    if len(pairs) == 0:
        return weights, np.empty(0)
    top = weights.max()
    odds = exponentials(weights - top)
    total = odds.sum()
    return weights - (top + np.log(total)), odds / total


@step
def odds_at(law: JointLaw, pairs: Array) -> Array:
    """Return the probabilities of pairs before top-k, top-p and min-p, float64[pairs]."""
    total = log_sum(_log_totals(law) + law.log_counts)
    return np.exp(log_weights_at(law, pairs) - total)


@step
def head_of(law: JointLaw) -> tuple[Array, Array]:
    """Return the pairs with nearly all of the probability, ascending, and their probabilities.

    With a truncation these are all kept pairs, otherwise pairs of at least exp(-HEAD) times the probability of the best one.
    """
    pairs = all_pairs(law)
    odds = odds_among(law, pairs)
    if cuts(law.truncation):
        return pairs, odds
    near = odds >= odds.max() * np.exp(-HEAD)
    return pairs[near], odds[near]


@step
def likeliest_pairs(law: JointLaw, count: int) -> Array:
    """Return the `count` most probable pairs before top-k, top-p and min-p, best first."""
    every = np.ones(len(law.scores), dtype=np.bool_)
    no_keys = np.empty(0, dtype=np.uint64)
    return best_pairs(law.logits, shift_of(law), law.truncation.temperature, law.log_counts, no_keys, every, count)


@step
def log_masses(law: JointLaw) -> Array:
    """Return the log of the total weight of each beam's pairs in a law without truncation, float64[beams].

    Without processors it is at most score / temperature at temperatures up to 1, and the score at temperature 1.
    """
    temperature = law.truncation.temperature
    if not law.normalised:
        return _log_totals(law) + law.log_counts
    bounds = law.scores / temperature
    if temperature != 1:
        totals = _log_totals(law)
        for beam in range(len(bounds)):
            is_bound = temperature < 1 and totals[beam] > bounds[beam]  # by rounding
            bounds[beam] = bounds[beam] if is_bound else totals[beam]
    for beam in range(len(bounds)):
        if law.log_norm[beam] == -np.inf:
            bounds[beam] = -np.inf
    return bounds + law.log_counts


@step
def bound_of(truncation: Truncation, noisy: bool, score: float, count: int, key: Array) -> float:
    """Return an upper bound, up to rounding, of a beam's values in a law without truncation, computed without its row.

    At temperatures up to 1 the total weight of a beam's pairs is at most exp(score / temperature), and their largest value
    is the log of this weight plus noise that only depends on the beam (see `drawn_pairs`). Without noise, values are scores,
    and no text is likelier than its beginning.

    Args:
        count: number of draws of the beam.
        key: the key of its noise.
    """
    # Separately warped rows already include the temperature.
    temperature = 1.0 if truncation.by_row else truncation.temperature
    bound = score / temperature + np.log(count)
    if noisy:
        bound += gumbel(key, ALL_TOKENS)
    return bound


@step
def drawn_pairs(law: JointLaw, keys: Array, among: Array, count: int) -> tuple[Array, Array]:
    """Return the `count` pairs of largest value under the noise of these keys, best first, and the values.

    The law must have no truncation. A value is a log weight plus Gumbel noise, drawn from the top down: first the largest
    value of each beam's pairs, from the beam's total weight; then the values of its pairs, given this one. So these are
    draws without replacement from the law, and beams that cannot win can be identified without their rows.

    Args:
        keys: uint64[beams]; empty for no noise.
        among: bool[beams], the participating beams.
    """
    beams, vocab = law.logits.shape
    shift = shift_of(law)
    temperature = law.truncation.temperature
    if len(keys) == 0:
        return pairs_of_best_value(law.logits, shift, temperature, law.log_counts, keys, among, count)
    tops = log_masses(law)
    for beam in range(beams):
        tops[beam] += gumbel(keys[beam], ALL_TOKENS)
    values = np.full(count, -np.inf)
    pairs = np.full(count, -1, dtype=np.int64)
    held = 0
    alone = np.ones(1, dtype=np.bool_)
    for beam in sorted_places(tops):
        if not among[beam] or (held == count and tops[beam] < values[count - 1]):
            continue
        here = slice(beam, beam + 1)
        own_pairs, own_values = pairs_of_best_value(
            law.logits[here], shift[here], temperature, law.log_counts[here], keys[here], alone, count
        )
        for place in range(len(own_pairs)):
            value = with_largest(own_values[place], own_values[0], tops[beam])
            held = insert(values, pairs, held, value, beam * vocab + own_pairs[place])
    return pairs[:held], values[:held]


@step
def best_of_all(law: JointLaw, keys: Array, among: Array, count: int) -> tuple[Array, Array]:
    """Return `drawn_pairs`, without the noise of whole beams if there is a single beam."""
    if len(law.scores) > 1:
        return drawn_pairs(law, keys, among, count)
    temperature = law.truncation.temperature
    return pairs_of_best_value(law.logits, shift_of(law), temperature, law.log_counts, keys, among, count)


@step
def values_within(law: JointLaw, keys: Array, support: Array, pairs: Array) -> Array:
    """Return the value of each pair, log weight plus noise, in a truncated law; -inf for truncated pairs.

    Args:
        keys: uint64[beams]; empty for no noise.
        support: int64[n], the pairs that the truncation keeps.
    """
    vocab = law.logits.shape[1]
    values = log_weights_at(law, pairs)
    for place in range(len(pairs)):
        if not (support == pairs[place]).any():
            values[place] = -np.inf
        elif len(keys) > 0:
            values[place] += gumbel(keys[pairs[place] // vocab], pairs[place] % vocab)
    return values


@step
def core_and_extra(law: JointLaw, keys: Array, among: Array, core: int, width: int) -> tuple[Array, Array, int]:
    """Return up to max(core, width) pairs, their values, and the number of core pairs.

    The core are the `core` best pairs of the beams `among`. The most probable other pairs are added as extra pairs, up
    to `width` pairs in all. A truncation cuts only core pairs, because the target may keep pairs that the draft's
    truncation cuts; extra pairs are then chosen without noise. The value of a truncated pair is -inf; others are log
    weights plus noise.

    Args:
        keys: uint64[beams], keys of the beams' noise; empty for no noise.
        among: bool[beams].
    """
    vocab = law.logits.shape[1]
    is_restricted = not among.all()
    if cuts(law.truncation):
        support = support_of(law)
        restricted = support
        if is_restricted:
            restricted = support[among[support // vocab]]
        temperature = law.truncation.temperature
        best = rank_pairs(restricted, law.logits, shift_of(law), temperature, law.log_counts, keys, core)
        best_values = values_within(law, keys, support, best)
        others = best[:0]
        other_values = best_values[:0]
        if width > len(best):
            others = likeliest_pairs(law, width)
            other_values = values_within(law, keys, support, others)
    else:
        every = np.ones(len(among), dtype=np.bool_)
        others, other_values = best_of_all(law, keys, every, max(width, core))
        is_core = among[others // vocab]
        best = others[is_core][:core]
        best_values = other_values[is_core][:core]
        if len(best) < core and is_restricted:  # the other core pairs are further down the ranking
            best, best_values = best_of_all(law, keys, among, core)
    pairs = np.empty(max(width, len(best)), dtype=np.int64)
    values = np.empty(len(pairs))
    held = len(best)
    copy_numbers(pairs, best)
    copy_numbers(values, best_values)
    for place in range(len(others)):
        if held < width and not (best == others[place]).any():
            pairs[held] = others[place]
            values[held] = other_values[place]
            held += 1
    return pairs[:held], values[:held], len(best)


class Choice(NamedTuple):
    """The chosen (beam, token) pairs of a layer, core pairs first (see `core_and_extra`), as extended beams."""

    parents: Array  # int64[pairs]: index of the beam that each pair extends
    tokens: Array  # int64[pairs]
    values: Array  # float64[pairs]: see `core_and_extra`; NaN if the pairs were drawn by dice
    scores: Array  # float64[pairs]: log-likelihoods of the extended beams
    keys: Array  # uint64[pairs]: keys of the extended beams
    ends: Array  # bool[pairs]: whether the token is an end token
    core: int  # number of core pairs


@step
def choice_of(law: JointLaw, keys: Array, pairs: Array, values: Array, core: int, eos: Array) -> Choice:
    """Return the choice of these pairs, the first `core` of which are core pairs; `keys` are those of the beams."""
    vocab = law.logits.shape[1]
    parents = pairs // vocab
    tokens = pairs % vocab
    ends = np.empty(len(pairs), dtype=np.bool_)
    for place in range(len(pairs)):
        ends[place] = is_end(tokens[place], eos)
    return Choice(parents, tokens, values, likelihoods_at(law, pairs), child_keys(keys[parents], tokens), ends, core)


@step
def choose(law: JointLaw, keys: Array, noisy: bool, among: Array, core: int, width: int, eos: Array) -> Choice:
    """Return the choice of the pairs that `core_and_extra` finds, under the noise of the beams' keys if `noisy`."""
    noise = keys if noisy else keys[:0]
    pairs, values, core_size = core_and_extra(law, noise, among, core, width)
    return choice_of(law, keys, pairs, values, core_size, eos)

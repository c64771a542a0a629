"""The joint law over (beam, token) pairs: its probabilities, its support, and the choice of a layer's pairs."""

from typing import NamedTuple

import numpy as np

from specbeam.core.beams import is_end
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.laws.listing import norms_of, warm_norms_of
from specbeam.core.laws.ranking import (
    Truncation,
    ascending,
    cuts,
    hold,
    kept_of_rows,
    pairs_of_best_value,
    rank_held,
    rank_pairs,
    sorted_places,
    token_in,
    warps,
)
from specbeam.core.laws.reduce import BROKEN, DEAD, SOUND, exponentials, log_norm, log_sum, norms_left_out
from specbeam.core.noise import ALL_TOKENS, child_keys, gumbel, with_largest
from specbeam.core.ranked import Ranked, rows_between
from specbeam.core.steps import Array, step

HEAD = 14.0  # pairs less probable than exp(-14) times the best pair do not affect widths


class JointLaw(NamedTuple):
    """The law of one draw of a (beam, token) pair: count * exp((score + log p) / temperature), truncated and normalised.

    A pair is the number beam * columns + place, see `laws.ranking`.
    """

    rows: Ranked  # a row per beam, after the logits processors; -inf bans a token
    scores: Array  # float64[beams]: log-likelihood of each beam so far
    log_norm: Array  # float64[beams]: logit minus log-probability; -inf if all tokens are banned
    log_counts: Array  # float64[beams]: log of the number of draws of each beam
    truncation: Truncation
    normalised: bool  # whether `log_norm` is the logsumexp of each row, so that its probabilities sum to 1
    # bool[1]: set by each step whose result might be different if the rows were whole; such a result is not used
    undecided: Array

    @property
    def logits(self) -> Array:
        """The logits of the rows, float[beams, columns]."""
        return self.rows.logits


@step
def joint_law(rows: Ranked, scores: Array, counts: Array, truncation: Truncation) -> JointLaw:
    """Return the joint law of beams with these rows of logits.

    Args:
        rows: a row per beam, after the logits processors.
        scores: float64[beams], log-likelihood of each beam so far.
        counts: int64[beams], number of draws of each beam.
    """
    normalise = truncation.normalise
    undecided = np.zeros(1, dtype=np.bool_)
    if truncation.by_row and warps(truncation):
        rows = warped_rows(rows, norms_of(rows), truncation, undecided)
        normalise = False
        truncation = Truncation(1.0, 0, 1.0, 0.0, 1, False, False)
    norms = norms_of(rows) if normalise else norms_left_out(rows.logits)
    return JointLaw(rows, scores, norms, np.log(counts), truncation, normalise, undecided)


@step
def warped_rows(rows: Ranked, norms: Array, truncation: Truncation, undecided: Array) -> Ranked:
    """Return log-probabilities, float[beams, columns], with each row warped separately, as in transformers' beam modes.

    They are divided by the temperature. Truncated tokens get -inf; the others are not renormalised. Rows that are all -inf,
    or contain NaN or +inf, are returned unchanged.

    Args:
        rows: logits, or log-probabilities, see `Truncation.normalise`.
        norms: float64[beams], logsumexp of the rows.
        undecided: see `JointLaw`.
    """
    temperature = truncation.temperature
    logits = rows.logits
    totals = norms
    if temperature != 1:
        totals = warm_norms_of(rows, temperature)
    warped = np.full_like(logits, -np.inf)
    unlisted = unlisted_logits(rows)
    rest = np.full(len(unlisted), -np.inf)
    sums = np.empty(len(unlisted))
    for beam in range(len(logits)):
        norm = norms[beam]
        if not (norm > -np.inf and norm < np.inf):
            copy_numbers(warped[beam], logits[beam])
            if len(sums) > 0:
                sums[beam] = norm
            continue
        shift = norm if truncation.normalise else 0.0
        if not cuts(truncation):
            for place in range(logits.shape[1]):
                warped[beam, place] = (np.float64(logits[beam, place]) - shift) / temperature
            if len(rest) > 0:
                value = rows.rest[beam] if rows.by_noise else rows.rest[beam] / temperature
                rest[beam] = value - shift / temperature
                sums[beam] = totals[beam] - shift / temperature
            continue
        here = slice(beam, beam + 1)
        kept, is_decided = kept_of_rows(logits[here], unlisted[here], np.zeros(1), 0.0, truncation, totals[beam])
        undecided[0] |= not is_decided
        for place in kept:
            warped[beam, place] = (np.float64(logits[beam, place]) - shift) / temperature
        if len(rest) > 0:
            sums[beam] = log_norm(warped[here])[0]
    by_noise = rows.by_noise and not cuts(truncation)
    return Ranked(rows.tokens, warped, rows.norms, sums, rest, rows.vocab, by_noise)


@step
def unlisted_logits(rows: Ranked) -> Array:
    """Return an upper bound of the logits that each list leaves out, float64[beams]; no entries for whole rows.

    It is -inf if none is above -inf, and inf if the list is by noise.
    """
    bounds = rows.rest.copy()
    for beam in range(len(bounds)):
        if rows.by_noise and bounds[beam] > -np.inf:
            bounds[beam] = np.inf
    return bounds


@step
def unlisted_value(law: JointLaw, shift: float, beam: int, noisy: bool) -> float:
    """Return an upper bound of the values of a beam's pairs that are not listed, without the noise of whole beams.

    It is -inf if there are none, and inf if the list is in another order than the values.

    Args:
        shift: see `shift_of`.
        noisy: whether the values include noise.
    """
    rows = law.rows
    if len(rows.rest) == 0 or rows.rest[beam] == -np.inf:
        return -np.inf
    if rows.by_noise != noisy:
        return np.inf
    temperature = law.truncation.temperature
    extra = law.log_counts[beam]
    if noisy:
        return rows.rest[beam] + shift / temperature + extra
    return (rows.rest[beam] + shift) / temperature + extra


@step
def token_of(law: JointLaw, pair: int) -> int:
    """Return the token of a pair."""
    columns = law.rows.logits.shape[1]
    return token_in(law.rows.tokens, pair // columns, pair % columns)


@step
def named_pairs(law: JointLaw, pairs: Array) -> Array:
    """Return pairs as the numbers beam * vocabulary size + token, which do not depend on lists, int64[n]."""
    vocab = law.rows.vocab
    columns = law.rows.logits.shape[1]
    named = np.empty(len(pairs), dtype=np.int64)
    for place in range(len(pairs)):
        beam = pairs[place] // columns
        named[place] = beam * vocab + token_in(law.rows.tokens, beam, pairs[place] % columns)
    return named


@step
def place_of_pair(law: JointLaw, pairs: Array, beam: int, token: int) -> int:
    """Return the index of a pair among ascending pairs; -1 if they lack it."""
    columns = law.rows.logits.shape[1]
    first = np.searchsorted(pairs, beam * columns)
    stop = np.searchsorted(pairs, (beam + 1) * columns)
    for place in range(first, stop):
        if token_in(law.rows.tokens, beam, pairs[place] - beam * columns) == token:
            return place
    return -1


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
    logits = law.rows.logits
    columns = logits.shape[1]
    shift = shift_of(law)
    logliks = np.empty(len(pairs))
    beam = 0
    first = 0
    for place in range(len(pairs)):
        pair = pairs[place]
        if pair < first or pair >= first + columns:  # neighbouring pairs usually share a beam, and divisions are slow
            beam = pair // columns
            first = beam * columns
        logliks[place] = np.float64(logits[beam, pair - first]) + shift[beam]
    return logliks


@step
def log_weights_at(law: JointLaw, pairs: Array) -> Array:
    """Return the unnormalised log-probabilities of pairs, with temperature and counts, float64[pairs]."""
    columns = law.rows.logits.shape[1]
    weights = likelihoods_at(law, pairs)
    beam = 0
    first = 0
    for place in range(len(pairs)):
        pair = pairs[place]
        if pair < first or pair >= first + columns:
            beam = pair // columns
            first = beam * columns
        weights[place] = weights[place] / law.truncation.temperature + law.log_counts[beam]
    return weights


@step
def _log_totals(law: JointLaw) -> Array:
    """Return the logsumexp of (logit + shift) / temperature over each beam's tokens, float64[beams]."""
    temperature = law.truncation.temperature
    totals = law.log_norm.copy()
    if temperature != 1 or not law.normalised:
        totals = warm_norms_of(law.rows, temperature).copy()
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
    unlisted = unlisted_logits(law.rows)
    pairs, is_decided = kept_of_rows(law.rows.logits, unlisted, shift_of(law), offset, law.truncation, log_total)
    law.undecided[0] |= not is_decided
    return pairs


@step
def all_pairs(law: JointLaw) -> Array:
    """Return all pairs of probability above 0, ascending."""
    if cuts(law.truncation):
        return ascending(support_of(law))
    logits = law.rows.logits
    beams, columns = logits.shape
    pairs = np.empty(beams * columns, dtype=np.int64)
    held = 0
    for beam in range(beams):
        for place in range(columns):
            if logits[beam, place] > -np.inf:
                pairs[held] = beam * columns + place
                held += 1
    for rest in law.rows.rest:
        law.undecided[0] |= rest > -np.inf
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
    return best_by_value(law, no_keys, every, count)[0]


@step
def best_by_value(law: JointLaw, keys: Array, among: Array, count: int) -> tuple[Array, Array]:
    """Return the `count` pairs of largest value, best first, and the values; see `ranking.pairs_of_best_value`.

    Args:
        keys: uint64[beams]; empty for no noise.
        among: bool[beams], the participating beams.
    """
    pairs, values, bound = best_and_bound(law, keys, among, count)
    note_undecided(law, values, count, bound)
    return pairs, values


@step
def best_and_bound(law: JointLaw, keys: Array, among: Array, count: int) -> tuple[Array, Array, float]:
    """Return the best listed pairs and their values, as `best_by_value`, and an upper bound of all other values."""
    rows = law.rows
    temperature = law.truncation.temperature
    shift = shift_of(law)
    pairs, values = pairs_of_best_value(
        rows.logits, rows.tokens, shift, temperature, law.log_counts, keys, among, count
    )
    bound = -np.inf
    for beam in range(len(rows.rest)):
        if among[beam]:
            bound = max(bound, unlisted_value(law, shift[beam], beam, len(keys) > 0))
    return pairs, values, bound


@step
def note_undecided(law: JointLaw, values: Array, count: int, bound: float) -> None:
    """Set `law.undecided` unless the `count` best values, descending, are above a bound of all other values."""
    if count > 0 and bound > -np.inf:
        law.undecided[0] |= len(values) < count or not values[count - 1] > bound


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
    if len(keys) == 0 or count == 0:
        return best_by_value(law, keys, among, count)
    tops = log_masses(law)
    beams = len(tops)
    columns = law.rows.logits.shape[1]
    for beam in range(beams):
        tops[beam] += gumbel(keys[beam], ALL_TOKENS)
    values = np.full(count, -np.inf)
    pairs = np.full(count, -1, dtype=np.int64)
    held = 0
    unlisted = -np.inf
    for beam in sorted_places(tops):
        if not among[beam] or (held == count and tops[beam] < values[0]):
            continue
        here = slice(beam, beam + 1)
        own_pairs, own_values, bound = best_and_bound(law_of_beam(law, beam), keys[here], among[here], count)
        for place in range(len(own_pairs)):
            value = with_largest(own_values[place], own_values[0], tops[beam])
            held = hold(values, pairs, held, value, beam * columns + own_pairs[place])
        if bound > -np.inf:
            is_below = len(own_values) > 0 and bound < own_values[0]
            unlisted = max(unlisted, with_largest(bound, own_values[0], tops[beam]) if is_below else np.inf)
    rank_held(values, pairs, held)
    note_undecided(law, values[:held], count, unlisted)
    return pairs[:held], values[:held]


@step
def law_of_beam(law: JointLaw, beam: int) -> JointLaw:
    """Return the law of the pairs of a single beam, as views; it shares `undecided`."""
    here = slice(beam, beam + 1)
    rows = rows_between(law.rows, beam, beam + 1)
    return JointLaw(
        rows, law.scores[here], law.log_norm[here], law.log_counts[here], law.truncation, law.normalised, law.undecided
    )


@step
def best_of_all(law: JointLaw, keys: Array, among: Array, count: int) -> tuple[Array, Array]:
    """Return `drawn_pairs`, without the noise of whole beams if there is a single beam."""
    if len(law.scores) > 1:
        return drawn_pairs(law, keys, among, count)
    return best_by_value(law, keys, among, count)


@step
def values_within(law: JointLaw, keys: Array, support: Array, pairs: Array) -> Array:
    """Return the value of each pair, log weight plus noise, in a truncated law; -inf for truncated pairs.

    Args:
        keys: uint64[beams]; empty for no noise.
        support: int64[n], the pairs that the truncation keeps.
    """
    columns = law.rows.logits.shape[1]
    values = log_weights_at(law, pairs)
    for place in range(len(pairs)):
        if not (support == pairs[place]).any():
            values[place] = -np.inf
        elif len(keys) > 0:
            values[place] += gumbel(keys[pairs[place] // columns], token_of(law, pairs[place]))
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
    columns = law.rows.logits.shape[1]
    is_restricted = not among.all()
    if cuts(law.truncation):
        support = support_of(law)
        restricted = support
        if is_restricted:
            restricted = support[among[support // columns]]
        temperature = law.truncation.temperature
        rows = law.rows
        best, _ = rank_pairs(
            restricted, rows.logits, rows.tokens, shift_of(law), temperature, law.log_counts, keys, core
        )
        best_values = values_within(law, keys, support, best)
        others = best[:0]
        other_values = best_values[:0]
        if width > len(best):
            others = likeliest_pairs(law, width)
            other_values = values_within(law, keys, support, others)
    else:
        every = np.ones(len(among), dtype=np.bool_)
        others, other_values = best_of_all(law, keys, every, max(width, core))
        is_core = among[others // columns]
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
    parents = pairs // law.rows.logits.shape[1]
    tokens = np.empty(len(pairs), dtype=np.int64)
    ends = np.empty(len(pairs), dtype=np.bool_)
    for place in range(len(pairs)):
        tokens[place] = token_of(law, pairs[place])
        ends[place] = is_end(tokens[place], eos)
    return Choice(parents, tokens, values, likelihoods_at(law, pairs), child_keys(keys[parents], tokens), ends, core)


@step
def choose(law: JointLaw, keys: Array, noisy: bool, among: Array, core: int, width: int, eos: Array) -> Choice:
    """Return the choice of the pairs that `core_and_extra` finds, under the noise of the beams' keys if `noisy`."""
    noise = keys if noisy else keys[:0]
    pairs, values, core_size = core_and_extra(law, noise, among, core, width)
    return choice_of(law, keys, pairs, values, core_size, eos)

"""Evidence against a declared law: bets on random outcomes, settled by the steps that draw them (see `audit.Audit`)."""

import math
from typing import NamedTuple

import numpy as np

from specbeam.core.compiling.compiler import compiled_loosely
from specbeam.core.laws.reduce import exponentials
from specbeam.core.steps import Array, step

TILTS = (1.0, -1.0, 1 / 4, -1 / 4, 1 / 16, -1 / 16, 1 / 64, -1 / 64)  # size and side of each bet
BETS = len(TILTS)
ACCEPT_SURPRISE, ACCEPT_VARIANCE, LOGP_SURPRISE, LOGP_VARIANCE, TRIALS, DRAWS, IMPOSSIBLE, FIRST_BET = range(8)
UNLIKELY = -16.0  # bets take lower log-odds for this number, so that exponentials of tilted outcomes stay finite
_NEVER = -1e3  # in place of the log of odds of 0
_TILTS = np.array(TILTS)
_LARGEST_TILT_RATIO = 64.0  # the largest tilt over the smallest one


class Evidence(NamedTuple):
    """Sums over the trials and draws of a turn or a run; empty without an audit."""

    # float64[7 + 2 * BETS]: the sums named above, then the log-wealth by tilt of bets on trials and of bets on draws
    numbers: Array


@step
def no_evidence(is_wanted: bool) -> Evidence:
    """Return the evidence before any outcome."""
    return Evidence(np.zeros(FIRST_BET + 2 * BETS if is_wanted else 0))


@step
def gathers(evidence: Evidence) -> bool:
    """Return whether an audit wants the evidence."""
    return len(evidence.numbers) > 0


@compiled_loosely
def _tilted_sums(odds: Array, powers: Array) -> tuple[float, ...]:
    """Return the sums of odds times exp(tilt * outcome), in the order of `TILTS`.

    Args:
        powers: float64[n]: exp(outcome / 64).
    """
    up_1 = up_4 = up_16 = up_64 = down_1 = down_4 = down_16 = down_64 = 0.0
    for place in range(len(odds)):
        share = odds[place]
        up = powers[place]
        down = 1.0 / up
        up_64 += share * up
        down_64 += share * down
        up = (up * up) * (up * up)
        down = (down * down) * (down * down)
        up_16 += share * up
        down_16 += share * down
        up = (up * up) * (up * up)
        down = (down * down) * (down * down)
        up_4 += share * up
        down_4 += share * down
        up_1 += share * (up * up) * (up * up)
        down_1 += share * (down * down) * (down * down)
    return up_1, down_1, up_4, down_4, up_16, down_16, up_64, down_64


@step
def add_gains(evidence: Evidence, first: int, outcome: float, outcomes: Array, odds: Array) -> None:
    """Add the log-gain of each bet on `outcome`: log(exp(tilt * outcome) / mean of exp(tilt * outcome)).

    Args:
        first: index of the first bet in the evidence.
        outcomes, odds: float64[n]: the possible outcomes, at most 16 apart, and their odds, which sum to 1 up to rounding.
    """
    largest = outcomes.max()
    total = odds.sum()
    sums = _tilted_sums(odds, exponentials((outcomes - largest) / _LARGEST_TILT_RATIO))
    for bet in range(BETS):
        evidence.numbers[first + bet] += _TILTS[bet] * (outcome - largest) - math.log(sums[bet] / total)


@compiled_loosely
def _moments(odds: Array, values: Array) -> tuple[float, float]:
    """Return the means of values and of their squares. Values may be -inf where odds are 0."""
    mean = 0.0
    square = 0.0
    for place in range(len(odds)):
        value = max(values[place], _NEVER)
        mean += odds[place] * value
        square += odds[place] * value * value
    return mean, square


@step
def note_draw(evidence: Evidence, logp: Array, odds: Array, place: int) -> None:
    """Record that the outcome at index `place` of a law was drawn.

    Args:
        logp: float64[n], the logs of the odds; -inf for odds of 0.
        odds: float64[n], summing to 1 up to rounding.
        place: -1 if the law does not contain the outcome.
    """
    numbers = evidence.numbers
    numbers[DRAWS] += 1
    if place < 0 or logp[place] == -np.inf:
        numbers[IMPOSSIBLE] += 1
        return
    mean, square = _moments(odds, logp)
    numbers[LOGP_SURPRISE] += logp[place] - mean
    numbers[LOGP_VARIANCE] += max(square - mean * mean, 0.0)
    add_gains(evidence, FIRST_BET + BETS, max(logp[place], UNLIKELY), np.maximum(logp, UNLIKELY), odds)


@step
def note_trial(evidence: Evidence, wanted: Array, drafted: Array, accepted: bool) -> None:
    """Record the trial of a candidate against the residual law: it is accepted with odds sum(min(wanted, drafted)).

    Args:
        wanted, drafted: float64[n], the residual law and the law of the candidate, which may sum to less than 1.
    """
    odds = 0.0
    for one in range(len(wanted)):
        odds += min(wanted[one], drafted[one])
    odds = min(odds, 1.0)
    outcome = 1.0 if accepted else 0.0
    numbers = evidence.numbers
    numbers[TRIALS] += 1
    numbers[ACCEPT_SURPRISE] += outcome - odds
    numbers[ACCEPT_VARIANCE] += odds * (1 - odds)
    add_gains(evidence, FIRST_BET, outcome, np.array([0.0, 1.0]), np.array([1.0 - odds, odds]))


@step
def note_acceptance(evidence: Evidence, wanted: Array, drafted: Array, probability: float) -> None:
    """Record the acceptance probability of a candidate, min(1, wanted / drafted) at its token, for rules that decide later.

    The only random choice is that of the token, by the candidate's law. If this law sums to less than 1, the remaining
    tokens have an acceptance probability of 0.
    """
    size = len(wanted)
    outcomes = np.zeros(size + 1)
    odds = np.zeros(size + 1)
    mean = 0.0
    square = 0.0
    for one in range(size):
        if drafted[one] > 0:
            outcomes[one] = min(wanted[one] / drafted[one], 1.0)
            odds[one] = drafted[one]
            mean += odds[one] * outcomes[one]
            square += odds[one] * outcomes[one] ** 2
    odds[size] = max(1.0 - odds.sum(), 0.0)
    numbers = evidence.numbers
    numbers[TRIALS] += 1
    numbers[ACCEPT_SURPRISE] += probability - mean
    numbers[ACCEPT_VARIANCE] += max(square - mean**2, 0.0)
    add_gains(evidence, FIRST_BET, probability, outcomes, odds)

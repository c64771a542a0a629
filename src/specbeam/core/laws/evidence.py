"""Evidence against a declared law: bets on random outcomes, settled by the steps that draw them (see `audit.Audit`)."""

import math
from typing import NamedTuple

import numpy as np

from specbeam.core.steps import Array, step

TILTS = (1.0, -1.0, 1 / 4, -1 / 4, 1 / 16, -1 / 16, 1 / 64, -1 / 64)  # size and side of each bet
BETS = len(TILTS)
ACCEPT_SURPRISE, ACCEPT_VARIANCE, LOGP_SURPRISE, LOGP_VARIANCE, TRIALS, DRAWS, IMPOSSIBLE, FIRST_BET = range(8)
UNLIKELY = -16.0  # draws of lower log-odds count as a single outcome, so that the long tail of a law costs little
SMALLEST = 1e-300  # smaller odds are left out of a mean, because exp(-log(odds)) would overflow
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


@step
def add_gains(evidence: Evidence, first: int, outcome: float, outcomes: Array, odds: Array) -> None:
    """Add the log-gain of each bet on `outcome`: log(exp(tilt * outcome) / mean of exp(tilt * outcome)).

    Args:
        first: index of the first bet in the evidence.
        outcomes, odds: float64[n]: the possible outcomes and their odds, which sum to 1 up to rounding.
    """
    total = 0.0
    largest = -np.inf
    for place in range(len(outcomes)):
        if odds[place] >= SMALLEST:
            total += odds[place]
            largest = max(largest, outcomes[place])
    sums = np.zeros(BETS)
    for place in range(len(outcomes)):
        share = odds[place]
        if share < SMALLEST:
            continue
        power = math.exp((outcomes[place] - largest) / _LARGEST_TILT_RATIO)
        for pair in range(BETS - 2, -1, -2):  # from 1/64 to 1: each tilt is four times the previous one
            sums[pair] += share * power
            sums[pair + 1] += share / power
            power = power * power
            power = power * power
    for bet in range(BETS):
        tilt = _TILTS[bet]
        evidence.numbers[first + bet] += tilt * (outcome - largest) - math.log(sums[bet] / total)


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
    mean = 0.0
    square = 0.0
    likely = 0
    for one in range(len(odds)):
        if odds[one] > 0:
            mean += odds[one] * logp[one]
            square += odds[one] * logp[one] * logp[one]
            likely += logp[one] >= UNLIKELY
    numbers[LOGP_SURPRISE] += logp[place] - mean
    numbers[LOGP_VARIANCE] += max(square - mean * mean, 0.0)
    outcomes = np.full(likely + 1, UNLIKELY)
    shares = np.zeros(likely + 1)
    held = 0
    for one in range(len(odds)):
        if odds[one] > 0 and logp[one] >= UNLIKELY:
            outcomes[held] = logp[one]
            shares[held] = odds[one]
            held += 1
        else:
            shares[likely] += odds[one]
    add_gains(evidence, FIRST_BET + BETS, max(logp[place], UNLIKELY), outcomes, shares)


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

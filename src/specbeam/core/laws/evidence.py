"""Evidence against a declared law: bets on chance outcomes, settled by the very steps that draw (see `audit.Audit`)."""

import math
from typing import NamedTuple

import numpy as np

from specbeam.core.steps import Array, step

TILTS = (1.0, -1.0, 1 / 4, -1 / 4, 1 / 16, -1 / 16, 1 / 64, -1 / 64)  # how boldly each bet is made, and on which side
BETS = len(TILTS)
ACCEPT_SURPRISE, ACCEPT_VARIANCE, LOGP_SURPRISE, LOGP_VARIANCE, TRIALS, DRAWS, IMPOSSIBLE, FIRST_BET = range(8)
UNLIKELY = (
    -16.0
)  # log-odds of draws below which bets do not tell them apart, so that the long tail of a law costs little
SMALLEST = 1e-300  # odds below this are left out of a mean: exp(-log(odds)) would overflow, and they never come
_TILTS = np.array(TILTS)
_BOLDEST = 64.0  # the boldest tilt over the most timid one


class Evidence(NamedTuple):
    """Sums over the trials and draws of a turn or a run; of no numbers where nobody audits."""

    numbers: (
        Array  # float64[7 + 2 * BETS]: see the names above; then log-wealth by tilt, of bets on trials and on draws
    )


@step
def no_evidence(is_wanted: bool) -> Evidence:
    """Return the evidence before any outcome."""
    return Evidence(np.zeros(FIRST_BET + 2 * BETS if is_wanted else 0))


@step
def gathers(evidence: Evidence) -> bool:
    """Return whether anybody audits."""
    return len(evidence.numbers) > 0


@step
def add_gains(evidence: Evidence, first: int, outcome: float, outcomes: Array, odds: Array) -> None:
    """Add what each bet gains, as a log, when `outcome` comes: the log of exp(tilt * outcome) over its mean.

    Args:
        first: where the bets stand in the evidence.
        outcomes, odds: float64[n]: what may come, with odds that sum to 1 up to rounding.
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
        timid = math.exp((outcomes[place] - largest) / _BOLDEST)
        power = timid
        for pair in range(BETS - 2, -1, -2):  # from 1/64 to 1: each tilt is four times the one before
            sums[pair] += share * power
            sums[pair + 1] += share / power
            power = power * power
            power = power * power
    for bet in range(BETS):
        tilt = _TILTS[bet]
        evidence.numbers[first + bet] += tilt * (outcome - largest) - math.log(sums[bet] / total)


@step
def note_draw(evidence: Evidence, logp: Array, odds: Array, place: int) -> None:
    """Note that the outcome at `place` of a law was drawn.

    Args:
        logp: float64[n], the logs of the odds; -inf where there are none.
        odds: float64[n], summing to 1 up to rounding.
        place: -1 if the law does not contain what was drawn.
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
    """Note the trial of a candidate against the law that is still wanted: it is accepted with odds sum(min(both laws)).

    Args:
        wanted, drafted: float64[n], the two laws; the candidate's may sum to less than 1.
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
def note_worth(evidence: Evidence, wanted: Array, drafted: Array, worth: float) -> None:
    """Note what a candidate is worth, min(1, wanted / drafted) at its token, in rules that toss the coin later.

    The candidate's law draws the token, and that is all the chance there is. Where it sums to less than 1, the rest is on
    tokens that are worth nothing.
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
    numbers[ACCEPT_SURPRISE] += worth - mean
    numbers[ACCEPT_VARIANCE] += max(square - mean**2, 0.0)
    add_gains(evidence, FIRST_BET, worth, outcomes, odds)

"""VERIFY: try draft draws, in order, against the wanted law: the law that the emitted token still has to have.

One lemma serves all rules: a candidate of law q is accepted with odds min(1, r / q); after a rejection the wanted law
is norm((r - q)^+). Then the emitted token has law r (docs/exactness.md).
"""

from typing import Any, NamedTuple

import numpy as np

from specbeam.core.dice import flip, pick
from specbeam.core.laws.evidence import Evidence, gathers, note_trial
from specbeam.core.steps import Array, step

NOTHING = 1e-12  # missing mass below this is rounding


@step
def residual(wanted: Array, drafted: Array) -> Array:
    """Return norm((wanted - drafted)^+): the wanted law after a draw from `drafted` was rejected.

    If both laws are equal up to rounding, the rejection had odds of about 0, and the result is `wanted` itself.
    """
    missing = np.maximum(wanted - drafted, 0.0)
    total = missing.sum()
    return missing / total if total > NOTHING else wanted


class Drafts(NamedTuple):
    """Draft draws on trial against a law over n tokens or pairs, and the law that they were drawn from."""

    places: Array  # int64[draws]: index of each in the wanted law; -1: the wanted law lacks it
    own_places: Array  # int64[draws]: index of each in its own law
    own: Array  # float64[...]: the own law, without earlier draws if draws are distinct
    on_wanted: Array  # float64[n]: the own law at the indices of the wanted law; may sum to less than 1
    distinct: bool
    chosen: bool  # not drawn: all the mass of the own law is on the draft


@step
def law_on_trial(drafts: Drafts, place: int, mass: float, size: int) -> Array:
    """Return the law of a candidate, given the draws before it, on the wanted law's tokens or pairs."""
    if not drafts.chosen:
        return drafts.on_wanted / mass
    law = np.zeros(size)
    if place >= 0:
        law[place] = 1.0
    return law


@step
def refuse(rest: Array, drafts: Drafts, place: int, mass: float) -> None:
    """Replace the wanted law `rest` by its `residual` after a rejected candidate, in place."""
    if drafts.chosen:
        if place < 0 or rest.sum() - rest[place] <= NOTHING:
            return
        rest[place] = 0.0
        rest /= rest.sum()
        return
    total = 0.0
    for one in range(len(rest)):
        missing = rest[one] - drafts.on_wanted[one] / mass
        if missing > 0:
            total += missing
    if total <= NOTHING:
        return
    for one in range(len(rest)):
        missing = rest[one] - drafts.on_wanted[one] / mass
        rest[one] = missing / total if missing > 0 else 0.0


@step
def try_drafts(rest: Array, drafts: Drafts, start: int, dice: Any, evidence: Evidence) -> int:
    """Try the draws from `start` on until one is accepted. Returns its index, or the number of draws if none is accepted.

    `rest`, float64[n], the wanted law, becomes the residual after the rejections.
    """
    places = drafts.places
    struck = drafts.distinct and not drafts.chosen
    for draw in range(start, len(places)):
        place = places[draw]
        mass = drafts.own.sum() if struck else 1.0
        accepted = False
        if place >= 0:
            odds = rest[place]
            if odds > 0 and not drafts.chosen:
                # A draw whose odds were rounded away to 0 is judged as if they were tiny.
                likely = drafts.on_wanted[place] / mass
                odds = odds / likely if likely > 0 else 1.0
            # Odds of 0 consume a number of the dice, too: rounding decides whether a residual is 0 or 1e-17, and must
            # not shift all later numbers.
            accepted = flip(dice, min(1.0, odds))
        if gathers(evidence):
            note_trial(evidence, rest, law_on_trial(drafts, place, mass, len(rest)), accepted)
        if not accepted:
            refuse(rest, drafts, place, mass)
        if struck:
            drafts.own[drafts.own_places[draw]] = 0.0
            if place >= 0:
                drafts.on_wanted[place] = 0.0
        if accepted:
            return draw
    return len(places)


@step
def without(law: Array, place: int) -> Array:
    """Return a law without the probability at `place`, normalised."""
    left = law.copy()
    left[place] = 0.0
    total = left.sum()
    return left / total if total > 0 else left


@step
def take_draws(
    wanted: Array, drafts: Drafts, count: int, again: bool, dice: Any, evidence: Evidence
) -> tuple[Array, int]:
    """Return the places of `count` draws from the law `wanted`, int64[draws], and how many draft draws were tried.

    Draft draws are tried until there are enough.

    Args:
        wanted: float64[n], sums to 1.
        again: whether draws are independent; otherwise they are without replacement, and fewer if too few tokens or
            pairs have positive odds.

    Law: `count` independent draws from `wanted`, or successive draws without replacement, whatever the drafts.
    Source: speculative sampling (arXiv 2211.17192) for one candidate and one draw; SpecInfer (2305.09781) and RSD
    (2402.14160) for several candidates; DSBD (2409.16560, alg. 1), corrected, for several draws.
    """
    if not again:
        count = min(count, int(np.count_nonzero(wanted)))
    taken = np.empty(count, dtype=np.int64)
    open_law = wanted
    rest = wanted.copy()
    draw = 0
    held = 0
    while held < count and draw < len(drafts.places):
        found = try_drafts(rest, drafts, draw, dice, evidence)
        draw = min(found + 1, len(drafts.places))
        if found < len(drafts.places):
            taken[held] = drafts.places[found]
            held += 1
            open_law = wanted if again else without(open_law, drafts.places[found])
            rest[:] = open_law
    complete = held == count
    while held < count:
        taken[held] = pick(dice, rest)
        open_law = wanted if again else without(open_law, taken[held])
        rest[:] = open_law
        held += 1
    return taken, draw if complete else len(drafts.places)

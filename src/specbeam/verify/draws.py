"""VERIFY: the kernel. Take draws from the target's law, reusing draft draws where possible.

One lemma serves everything: a candidate of law q is accepted with odds min(1, r/q); after a refusal the missing mass is
norm((r - q)^+). Whatever is emitted in the end has law r (docs/exactness.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from specbeam.dice import Dice
from specbeam.probs import residual


@dataclass(frozen=True)
class Taken:
    """What came of one draw."""

    token: int  # index into the law
    draft: int  # which proposal it was; -1 if it was drawn in place of the refused ones


def draws(
    proposals: Sequence[int],
    odds: Sequence[float],
    q: Float64[np.ndarray, " n"],
    p: Float64[np.ndarray, " n"],
    want: int,
    dice: Dice,
    drafted_with_replacement: bool,
    replacement: bool,
) -> list[Taken]:
    """`want` draws from `p`, with or without `replacement`, in order.

    Args:
        proposals: draft draws in draw order, as indices into `p`; -1 where the parent is dead.
        odds: draft odds of each proposal, had it been drawn first. Needed for the dead ones, which `q` does not show.
        q: draft law on the indices of `p`, float64[n]; sums to 1 less the odds of dead pairs.
        p: target law, float64[n], sums to 1.
        drafted_with_replacement: whether the proposals are independent draws, or each was struck out once drawn.

    Law: `want` independent draws from p, or successive draws without replacement (fewer if p's support is smaller).
    Source: DSBD (arXiv 2409.16560, alg. 1) corrected; RRS of RSD (arXiv 2402.14160).
    """
    if not replacement:
        want = min(want, int(np.count_nonzero(p)))
    taken: list[Taken] = []
    rest, open_p = p, p
    law, mass = q.copy(), 1.0  # draft law with the earlier draws struck out, and what is left of its total
    for number, (token, first_odds) in enumerate(zip(proposals, odds, strict=True)):
        if len(taken) == want:
            break
        trial = law / mass
        if token >= 0 and rest[token] > 0 and dice.flip(_ratio(rest[token], trial[token])):
            taken.append(Taken(token, number))
            open_p = rest = p if replacement else _without(open_p, token)
        else:
            rest = residual(rest, trial)
        if not drafted_with_replacement:
            mass = max(mass - first_odds, 1e-300)
            if token >= 0:
                law[token] = 0.0
    while len(taken) < want:
        token = dice.pick(rest)
        taken.append(Taken(token, -1))
        open_p = rest = p if replacement else _without(open_p, token)
    return taken


def _ratio(r: float, q: float) -> float:
    """Odds of acceptance. A draw whose odds were rounded away to 0 is judged as if they were tiny."""
    return min(1.0, r / q) if q > 0.0 else 1.0


def _without(p: Float64[np.ndarray, " n"], token: int) -> Float64[np.ndarray, " n"]:
    """p after `token` was drawn from it for good."""
    left = p.copy()
    left[token] = 0.0
    total = left.sum()
    return left / total if total > 0 else left

"""Draws from a law that reuse draft draws where possible, on whole laws, line by line as the lemma says it.

A candidate of law q is accepted with odds min(1, r / q), where r is the law still wanted. After a refusal the missing mass
norm((r - q)^+) is wanted. A draw from what is wanted in the end has law r.
"""

from typing import NamedTuple

import numpy as np


class Candidate(NamedTuple):
    """A draft draw on trial."""

    token: int  # index into the wanted law; -1 for one that it cannot contain
    law: np.ndarray  # what it was drawn from given all draws before it, on the wanted law's tokens


class Taken(NamedTuple):
    """What came of one draw."""

    token: int
    draft: int  # which candidate it was; -1 if it was drawn in place of the refused ones


def draws(candidates, p, want, dice, replacement=True):
    """Draw `want` times from `p`, with or without replacement, in order."""
    if not replacement:
        want = min(want, np.count_nonzero(p))
    taken = []
    left = p  # what the present draw has to be drawn from
    rest = p  # the same, given the refusals so far
    for number, (token, law) in enumerate(candidates):
        if len(taken) == want:
            break
        if token >= 0 and dice.flip(odds_of(rest[token], law[token])):
            taken.append(Taken(token, number))
            left = p if replacement else struck(left, token)
            rest = left
        else:
            rest = residual(rest, law)
    while len(taken) < want:
        token = dice.pick(rest)
        taken.append(Taken(token, -1))
        left = p if replacement else struck(left, token)
        rest = left
    return taken


def odds_of(r, q):
    """The odds of accepting a candidate; one whose own odds were rounded away is judged as if they were tiny."""
    if r == 0:
        return 0.0
    return min(1.0, r / q) if q > 0 else 1.0


def residual(r, q):
    """What is missing of r after a draw from q was refused. If that is rounding alone, the refusal had no odds."""
    missing = np.maximum(r - q, 0.0)
    return missing / missing.sum() if missing.sum() > 1e-12 else r


def struck(law, token):
    """A law after a token was drawn from it for good."""
    left = law.copy()
    left[token] = 0.0
    return left / left.sum() if left.sum() > 0 else left


def drawn(tokens, q, size, replacement):
    """Candidates that were drawn from q, independently or each struck out once drawn.

    Args:
        tokens: in draw order; from `size` on they are no tokens of the wanted law.
    """
    left = q
    for token in tokens:
        law = left / left.sum() if not replacement else left
        yield Candidate(token if token < size else -1, law[:size])
        if not replacement:
            left = left.copy()
            left[token] = 0.0


def sure(tokens, size):
    """Candidates that were chosen and not drawn: each stands for all the mass of its law."""
    for token in tokens:
        yield Candidate(token, np.eye(size)[token])

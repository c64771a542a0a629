"""How the children of one node are drawn, way by way, as laws over everything that can be drawn.

An outcome is a tuple of groups, in the order in which they are tried; a group is (kind, tokens, stated law).
"""

from typing import NamedTuple

import numpy as np

from specbeam.core.forest import CHOSEN, DISTINCT, INDEPENDENT
from tests.support.exact import successive


class Group(NamedTuple):
    """Siblings drawn together."""

    kind: int
    tokens: tuple[int, ...]
    law: tuple[float, ...]  # odds of all tokens; of a chosen group none is stated


def stated(law):
    """The odds of a law, as an outcome can hold them."""
    return tuple(np.round(law, 9).tolist())


def independent(q, count):
    """Independent draws from q."""
    law = successive(q, count, replacement=True)
    return {(Group(INDEPENDENT, tokens, stated(q)),): odds for tokens, odds in law.items()}


def distinct(q, count):
    """Draws from q, each struck out once drawn, while q holds anything."""
    law = successive(q, count, replacement=False)
    return {(Group(DISTINCT, tokens, stated(q)),): odds for tokens, odds in law.items()}


def distinct_then_any(q, count):
    """The same; what q could not supply is drawn uniformly from the tokens that were not drawn."""
    found = {}
    for tokens, odds in successive(q, count, replacement=False).items():
        first = Group(DISTINCT, tokens, stated(q))
        untried = np.ones(len(q))
        untried[list(tokens)] = 0.0
        if len(tokens) == count or not untried.any():
            found[(first,)] = odds
            continue
        untried /= untried.sum()
        for others, chance in successive(untried, count - len(tokens), replacement=False).items():
            found[first, Group(DISTINCT, others, stated(untried))] = odds * chance
    return found


def likeliest(q, count):
    """The tokens of largest odds, of equal ones the first. Nothing is drawn."""
    return {(Group(CHOSEN, best(q, count), ()),): 1.0}


def likeliest_and_one(q, count):
    """One token drawn from what the `count` - 1 likeliest leave, tried before these."""
    top = best(q, count - 1)
    chosen = (Group(CHOSEN, top, ()),) if top else ()
    rest = np.array(q, dtype=float)
    rest[list(top)] = 0.0
    if not rest.any():
        return {chosen: 1.0}
    rest /= rest.sum()
    return {
        (Group(DISTINCT, (int(token),), stated(rest)), *chosen): float(rest[token]) for token in np.flatnonzero(rest)
    }


def best(q, count):
    """The likeliest tokens, best first; of equal ones the first comes first."""
    order = np.argsort(-np.asarray(q), kind="stable")
    return tuple(int(token) for token in order if q[token] > 0)[:count]

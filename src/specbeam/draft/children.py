"""DRAFT: how the children of one node are drawn. Each way states the law that its draws can be tried against."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64

from specbeam.dice import Dice
from specbeam.probs import best

Law = Float64[np.ndarray, " vocab"]


@dataclass(frozen=True, eq=False)
class Draws:
    """Siblings drawn together; see `forest.Group` for what is known of them."""

    tokens: list[int]
    law: Law | None = None
    replacement: bool = False
    sure: bool = False


@runtime_checkable
class Children(Protocol):
    """Draw `count` children of a node whose next token has the draft law `q`: odds of the tokens that its truncation left.

    Tokens of the draws are places in `q`, and their laws are of its length.
    """

    def draw(self, q: Law, count: int, dice: Dice) -> list[Draws]: ...


@dataclass(frozen=True)
class Independent:
    """Independent draws; a token may come twice (SpecInfer, arXiv 2305.09781)."""

    def draw(self, q: Law, count: int, dice: Dice) -> list[Draws]:
        return [Draws([dice.pick(q) for _ in range(count)], q, replacement=True)]


@dataclass(frozen=True)
class Distinct:
    """Draws without replacement, in draw order (RSD, arXiv 2402.14160).

    If q's support is used up, `fallback` draws the rest uniformly among the tokens not tried yet, and says so
    (Sequoia, arXiv 2402.12374).
    """

    fallback: bool = False

    def draw(self, q: Law, count: int, dice: Dice) -> list[Draws]:
        groups = [Draws(_struck_draws(q, count, dice), q)]
        missing = count - len(groups[0].tokens)
        if missing and self.fallback and len(groups[0].tokens) < len(q):
            untried = np.ones_like(q)
            untried[groups[0].tokens] = 0.0
            untried /= untried.sum()
            groups.append(Draws(_struck_draws(untried, missing, dice), untried))
        return groups


@dataclass(frozen=True)
class Best:
    """The likeliest tokens; nothing is drawn (EAGLE-2, OPT-Tree, Medusa trees)."""

    def draw(self, q: Law, count: int, dice: Dice) -> list[Draws]:
        return [Draws(best(_support(q), count).tolist(), sure=True)]


@dataclass(frozen=True)
class BestAndOne:
    """The `count` - 1 likeliest tokens and one drawn from the rest, which is tried first (arXiv 2502.18779).

    With two children this is SpecHub (arXiv 2411.05289).
    """

    def draw(self, q: Law, count: int, dice: Dice) -> list[Draws]:
        top = best(_support(q), count - 1).tolist()
        rest = q.copy()
        rest[top] = 0.0
        groups = [Draws(top, sure=True)]
        if rest.sum() > 0:
            rest /= rest.sum()
            groups.insert(0, Draws([dice.pick(rest)], rest))
        return [group for group in groups if group.tokens]


def _struck_draws(q: Law, count: int, dice: Dice) -> list[int]:
    left, tokens = q.copy(), list[int]()
    while len(tokens) < count and left.any():
        tokens.append(dice.pick(left))
        left[tokens[-1]] = 0.0
    return tokens


def _support(q: Law) -> Law:
    return np.where(q > 0, q, -np.inf)


def distinct(tokens: Sequence[int]) -> list[int]:
    """Tokens without repeats, in the order of their first coming."""
    return list(dict.fromkeys(tokens))

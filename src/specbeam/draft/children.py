"""DRAFT: how the children of one node are drawn. Each way states the law that its draws can be tried against."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64

from specbeam.core.dice import Dice

Law = Float64[np.ndarray, " vocab"]
ONE_BY_ONE, STRUCK_OUT, STRUCK_OUT_THEN_ANY, LIKELIEST, LIKELIEST_AND_ONE = range(5)  # ways that steps know


@dataclass(frozen=True, eq=False)
class Draws:
    """Siblings drawn together; see `core.forest.Siblings` for what is known of them."""

    tokens: list[int]
    law: Law | None = None
    replacement: bool = False
    deterministic: bool = False


@runtime_checkable
class Children(Protocol):
    """A way of drawing `count` children of a node whose next token has the draft law `q`: odds of the tokens that its
    truncation left.

    Tokens of the draws are places in `q`, and their laws are of its length.
    """

    def draw(self, q: Law, count: int, dice: Dice) -> list[Draws]: ...


@dataclass(frozen=True)
class Independent:
    """Independent draws; a token may come twice (SpecInfer, arXiv 2305.09781)."""

    way: int = ONE_BY_ONE


@dataclass(frozen=True)
class Distinct:
    """Draws without replacement, in draw order (RSD, arXiv 2402.14160).

    If q's support is used up, `fallback` draws the rest uniformly among the tokens not tried yet, and says so
    (Sequoia, arXiv 2402.12374).
    """

    fallback: bool = False

    @property
    def way(self) -> int:
        """How steps draw them."""
        return STRUCK_OUT_THEN_ANY if self.fallback else STRUCK_OUT


@dataclass(frozen=True)
class Best:
    """The likeliest tokens; nothing is drawn (EAGLE-2, OPT-Tree, Medusa trees)."""

    way: int = LIKELIEST


@dataclass(frozen=True)
class BestAndOne:
    """The `count` - 1 likeliest tokens and one drawn from the rest, which is tried first (arXiv 2502.18779).

    With two children this is SpecHub (arXiv 2411.05289).
    """

    way: int = LIKELIEST_AND_ONE


KNOWN = (Independent, Distinct, Best, BestAndOne)
AnyChildren = Independent | Distinct | Best | BestAndOne | Children


def distinct(tokens: Sequence[int]) -> list[int]:
    """Return tokens without repeats, in the order of their first coming."""
    return list(dict.fromkeys(tokens))

"""DRAFT: ways to draw the children of a node. Each states the law of its draws."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64

from specbeam.core.dice import Dice
from specbeam.core.errors import BadForest

ROUNDING = 1e-3  # difference from 1 of the sum of a law, as a softmax in float32 may have with a large vocabulary
Law = Float64[np.ndarray, " vocab"]
ONE_BY_ONE, STRUCK_OUT, STRUCK_OUT_THEN_ANY, LIKELIEST, LIKELIEST_AND_ONE = range(5)  # ways that steps know


@dataclass(frozen=True, eq=False)
class Draws:
    """A group of siblings, in draw order; see `core.forest.Siblings`. Raises `BadForest` if a draw is not of its law."""

    tokens: list[int]
    law: Law | None = None  # the law of the draws, which sums to 1, with the length of the draft law; None: unknown
    replacement: bool = False  # whether they were drawn with replacement
    deterministic: bool = False  # whether they were chosen, not drawn

    def __post_init__(self) -> None:
        if self.law is None or self.deterministic:
            return
        law = np.asarray(self.law, dtype=np.float64)
        total = law.sum()
        if not (abs(total - 1) <= ROUNDING and law.min() >= 0):
            raise BadForest(
                f"the law of draws sums to {total:.6g}, its least number is {law.min():.6g}; expected a law that sums to 1"
            )
        excluded = [token for token in self.tokens if not 0 <= token < len(law) or law[token] == 0]
        if excluded:
            raise BadForest(f"{excluded[0]} was drawn, which has probability 0 in the law that its draw states")


@runtime_checkable
class Children(Protocol):
    """A way to draw the children of a node."""

    def draw(self, q: Law, count: int, dice: Dice) -> list[Draws]:
        """Return groups of `count` draws in all, in the order of their trials.

        Args:
            q: the draft law of the next token, on the tokens that the truncation kept. The tokens of the draws are indices
                into `q`, and their laws have its length.
        """
        ...


@dataclass(frozen=True)
class Independent:
    """Independent draws; a token may be drawn twice (SpecInfer, arXiv 2305.09781)."""

    way: int = ONE_BY_ONE


@dataclass(frozen=True)
class Distinct:
    """Draws without replacement, in draw order (RSD, arXiv 2402.14160).

    If all tokens of q's support are drawn, `fallback` draws the rest uniformly from the other tokens, as a group that states
    this law (Sequoia, arXiv 2402.12374).
    """

    fallback: bool = False

    @property
    def way(self) -> int:
        """The number of this way for steps."""
        return STRUCK_OUT_THEN_ANY if self.fallback else STRUCK_OUT


@dataclass(frozen=True)
class Best:
    """The likeliest tokens, chosen instead of drawn (EAGLE-2, OPT-Tree, Medusa trees)."""

    way: int = LIKELIEST


@dataclass(frozen=True)
class BestAndOne:
    """The `count` - 1 likeliest tokens and one drawn from the rest, which is tried first (arXiv 2502.18779).

    With two children this is SpecHub (arXiv 2411.05289).
    """

    way: int = LIKELIEST_AND_ONE


KNOWN = (Independent, Distinct, Best, BestAndOne)
AnyChildren = Independent | Distinct | Best | BestAndOne | Children

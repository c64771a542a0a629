"""PLAN, inside a turn: how many beams the next layer draws, decided before its drafts are looked at."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64

Odds = Callable[[], Float64[np.ndarray, " widths"]]


@runtime_checkable
class Width(Protocol):
    """A width policy. It may look at the laws of the layer, never at its draws."""

    @property
    def most(self) -> int: ...

    def choose(self, odds: Odds) -> int:
        """Width of a layer; `odds` gives those that one of 0, 1, 2, ... draws is accepted in full (`control.accepted`)."""
        ...


@dataclass(frozen=True)
class FixedWidth:
    most: int

    def choose(self, odds: Odds) -> int:
        return self.most


@dataclass(frozen=True)
class SureWidth:
    """The widest layer that is accepted in full with at least `threshold` odds (DSBD, arXiv 2409.16560, eq. 5)."""

    most: int
    least: int = 1
    threshold: float = 0.7

    def choose(self, odds: Odds) -> int:
        sure = int(np.flatnonzero(odds() >= self.threshold).max(initial=0))
        return min(max(sure, self.least), self.most)

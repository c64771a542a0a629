"""PLAN, inside a turn: how many beams the next layer draws, decided before its drafts are looked at."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64

from specbeam.kernels.values import Values, most_valued

DEEPEST = 8  # layers that a value is known for
GUESS, WEIGHT = 0.6, 3.0  # odds that a layer passes, before any was seen, and how many layers the guess is worth


@dataclass(frozen=True, eq=False)
class Outlook:
    """What the width of a drafted layer may be chosen by: laws of the layer, never its draws."""

    odds: Callable[[], Float64[np.ndarray, " widths"]]  # that 0, 1, 2, ... draws are all drafts (`control.accepted`)
    by_drafts: Callable[[int], Float64[np.ndarray, "widths drafts"]]  # the same if there were 0, 1, ..., so many drafts
    drafted: int  # drafts that there are
    left: int  # layers that were to be drafted from this one on
    memory: dict[Hashable, Any]  # of the session; each policy has an entry of its own


@runtime_checkable
class Width(Protocol):
    """A width policy."""

    @property
    def most(self) -> int: ...

    def choose(self, layer: Outlook) -> int: ...


@dataclass(frozen=True)
class FixedWidth:
    most: int

    def choose(self, layer: Outlook) -> int:
        return self.most


@dataclass(frozen=True)
class SureWidth:
    """The widest layer that is accepted in full with at least `threshold` odds (DSBD, arXiv 2409.16560, eq. 5)."""

    most: int
    least: int = 1
    threshold: float = 0.7

    def choose(self, layer: Outlook) -> int:
        sure = int(np.flatnonzero(layer.odds() >= self.threshold).max(initial=0))
        return min(max(sure, self.least), self.most)


@dataclass(frozen=True)
class ValuedWidth:
    """The width of most value: argmax over w of gain(w) + odds(w) V(k - 1), for a layer from which on k were
    to be drafted.

    A layer of w beams gains 1 + `worth` log2(w) layers of one beam. V(k) is what a turn gains from there on if it passes;
    V(0) is the gain of the layer behind the draft, V(k) the mean over all layers judged so far of the maximum above. Where
    a threshold narrows every layer alike, this narrows where much is behind it, and where the odds turn on it.

    Args:
        most, least: beams.
        worth: what twice the beams are worth, in layers.
        drafts: most drafts of a layer that a value is known for.
    """

    most: int
    least: int = 1
    worth: float = 2.0
    drafts: int = 8

    def choose(self, layer: Outlook) -> int:
        odds = layer.by_drafts(self.drafts)
        return most_valued(self.values(layer.memory), odds, layer.drafted, layer.left, self.least)

    def values(self, memory: dict[Hashable, Any]) -> Values:
        """What a session has learnt so far."""
        if self not in memory:
            sums = self._guess
            memory[self] = Values(sums.copy(), np.full(1, WEIGHT), float(self.worth))
        found: Values = memory[self]
        return found

    @cached_property
    def _guess(self) -> Float64[np.ndarray, "depths drafts"]:
        """As the bundled pair has it, two models that agree in most places: layers of about the root of the most beams. One
        drafted layer is worth most of the layer behind it, the next ones less and less, the more so the fewer drafts.
        """
        drafts, few = np.arange(self.drafts + 1), self.most + 2
        first = np.where(drafts > 0, 1 - 0.4 / np.maximum(drafts, 1) ** 0.8, 0.0)
        more = 0.33 + 0.5 * np.minimum(drafts / few, 1.0)
        behind = np.cumsum([np.zeros_like(first), *(first * more**depth for depth in range(DEEPEST))], axis=0)
        sums = (1 + self.worth * np.log2(self.most) / 2) * (1 + behind)
        return WEIGHT * sums


NO_VALUES = Values(np.zeros((0, 1)), np.ones(1), 0.0)

"""PLAN by what was accepted so far: stop rules and lengths for drafts of one sequence.

A controller reads past outcomes and tokens that are already drafted, and draws from a stream of its own; so no law depends
on it.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from specbeam.records import Shape, Turn
from specbeam.session import Session


@runtime_checkable
class Stopping(Protocol):
    """A controller that may also end a draft between layers. Where that depends on its settings it has a property
    `between_layers`.
    """

    def more(self, session: Session, depth: int, confidence: float) -> bool:
        """Whether to draft below `depth` layers; `confidence` is the largest draft odds of a token of the newest one."""
        ...


def stops_between_layers(controller: object) -> bool:
    """Whether it has to be asked between layers to do what it is for."""
    return isinstance(controller, Stopping) and getattr(controller, "between_layers", True)


@dataclass(frozen=True)
class SureDraft:
    """Draft on while the newest token's draft odds are at least `threshold` (the token itself stays)."""

    threshold: float = 0.4
    most: int = 8
    width: int = 1

    def plan(self, session: Session) -> Shape:
        return Shape(min(self.most, session.remaining - 1), self.width)

    def more(self, session: Session, depth: int, confidence: float) -> bool:
        return confidence >= self.threshold

    def settle(self, session: Session, turn: Turn) -> None:
        """Nothing to learn."""


@dataclass(frozen=True)
class TrackedThreshold:
    """`SureDraft` whose threshold follows the acceptance rate (Draft & Verify, arXiv 2309.08168).

    The threshold rises by `step` when fewer than `wanted` of the drafts were accepted and falls when more were, except
    after a draft of full length; both are smoothed.
    """

    start: float = 0.6
    wanted: float = 0.9
    step: float = 0.01
    smooth_rate: float = 0.5
    smooth_threshold: float = 0.9
    most: int = 8
    width: int = 1

    def plan(self, session: Session) -> Shape:
        return Shape(min(self.most, session.remaining - 1), self.width)

    def more(self, session: Session, depth: int, confidence: float) -> bool:
        return confidence >= session.state.get(self, (self.start, self.wanted))[0]

    def settle(self, session: Session, turn: Turn) -> None:
        drafted = turn.forest.layers
        if drafted == 0:
            return
        threshold, rate = session.state.get(self, (self.start, self.wanted))
        rate = self.smooth_rate * rate + (1 - self.smooth_rate) * turn.verdict.accepted / drafted
        moved = threshold
        if rate < self.wanted:
            moved = threshold + self.step
        elif drafted < self.most:
            moved = threshold - self.step
        threshold = self.smooth_threshold * threshold + (1 - self.smooth_threshold) * moved
        session.state[self] = (float(np.clip(threshold, 0.0, 1.0)), rate)

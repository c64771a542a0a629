"""PLAN: the length of drafts of one sequence, by the draft model's confidence and past acceptance.

A controller reads past outcomes and tokens that are already drafted, and has a random stream of its own. So it does not
change the law of the output.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from specbeam.records import Shape, Turn
from specbeam.session import Session


@runtime_checkable
class Stopping(Protocol):
    """A controller that may also end a draft between layers.

    If that depends on its settings, it has a property `between_layers`, which is False where it never does.
    """

    def more(self, session: Session, depth: int, confidence: float) -> bool:
        """Return whether to draft more than the `depth` layers there are.

        Args:
            confidence: the largest draft probability of a token of the newest layer.
        """
        ...


def stops_between_layers(controller: object) -> bool:
    """Return whether a controller, with its settings, may end a draft between layers."""
    return isinstance(controller, Stopping) and getattr(controller, "between_layers", True)


@dataclass(frozen=True)
class SureDraft:
    """A controller that drafts on while the newest token's draft probability is at least `threshold`.

    The token that falls below the threshold stays in the draft.

    Args:
        most: the most layers of a draft.
        width: number of draft nodes per layer.
    """

    threshold: float = 0.4
    most: int = 8
    width: int = 1

    def plan(self, session: Session) -> Shape:
        return Shape(min(self.most, session.remaining - 1), self.width)

    def more(self, session: Session, depth: int, confidence: float) -> bool:
        return confidence >= self.threshold

    def settle(self, session: Session, turn: Turn) -> None:
        """Do nothing: there is nothing to learn."""


@dataclass(frozen=True)
class TrackedThreshold:
    """A `SureDraft` whose threshold follows the acceptance rate (Draft & Verify, arXiv 2309.08168).

    The threshold rises by `step` if the share of drafts that are accepted is below `wanted`, and falls by `step` if not,
    except after a draft of full length. Both the share and the threshold are smoothed.

    Args:
        start: the first threshold.
        wanted: the acceptance rate aimed at, as a share of drafted tokens.
        smooth_rate, smooth_threshold: weight of the old value in the smoothed one.
        most: the most layers of a draft.
        width: number of draft nodes per layer.
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

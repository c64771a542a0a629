"""PLAN: the length of drafts of one sequence, by the draft model's confidence and past acceptance.

A controller reads past outcomes and tokens that are already drafted, and has a random stream of its own. So it does not
change the law of the output.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from specbeam.core.control.planning import Plan, plan_of_shape
from specbeam.core.control.stops import BY_THRESHOLD, StopSpec, new_stop
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session
from specbeam.core.steps import step


@runtime_checkable
class Stopping(Protocol):
    """A controller that may also end a draft between layers.

    If that depends on its settings, it has a property `between_layers`, which is False where it never does. If steps can
    decide in its place, it has a method `stops`, see `control.stopping.stops_of`.
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


THRESHOLD, RATE = range(
    2
)  # indices into `StopSpec.learnt` of kind BY_THRESHOLD: the last is the smoothed acceptance rate
# Its settings: those of `TrackedThreshold`, and whether the threshold moves at all.
WANTED, STEP, SMOOTH_RATE, SMOOTH_THRESHOLD, MOST, MOVES = range(6)


@step
def is_sure(stop: StopSpec, confidence: float) -> bool:
    """Return whether to draft on after a token of this draft probability."""
    return confidence >= stop.learnt[THRESHOLD]


@step
def learn_threshold(stop: StopSpec, drafted: int, accepted: int) -> None:
    """Move the threshold after a turn of which `accepted` of the `drafted` layers passed."""
    settings = stop.settings
    if settings[MOVES] == 0 or drafted == 0:
        return
    threshold = stop.learnt[THRESHOLD]
    rate = settings[SMOOTH_RATE] * stop.learnt[RATE] + (1 - settings[SMOOTH_RATE]) * accepted / drafted
    moved = threshold
    if rate < settings[WANTED]:
        moved = threshold + settings[STEP]
    elif drafted < settings[MOST]:
        moved = threshold - settings[STEP]
    threshold = settings[SMOOTH_THRESHOLD] * threshold + (1 - settings[SMOOTH_THRESHOLD]) * moved
    stop.learnt[THRESHOLD] = min(max(threshold, 0.0), 1.0)
    stop.learnt[RATE] = rate


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

    def numbers(self, session: Session) -> Plan:
        """Return the plan as numbers for steps."""
        return plan_of_shape(self.most, self.width)

    def stops(self, session: Session, tosses: int) -> StopSpec:
        """Return the threshold as numbers for steps; see `control.stopping.stops_of`."""
        return new_stop(BY_THRESHOLD, np.zeros(6), np.array([self.threshold, 0.0]), self.most)

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

    def numbers(self, session: Session) -> Plan:
        """Return the plan as numbers for steps."""
        return plan_of_shape(self.most, self.width)

    def stops(self, session: Session, tosses: int) -> StopSpec:
        """Return threshold and rate as numbers for steps, which change them; see `control.stopping.stops_of`."""
        if self not in session.state:
            session.state[self] = np.array([self.start, self.wanted])
        settings = np.array(
            [self.wanted, self.step, self.smooth_rate, self.smooth_threshold, self.most, 1.0], dtype=np.float64
        )
        return new_stop(BY_THRESHOLD, settings, session.state[self], self.most)

    def more(self, session: Session, depth: int, confidence: float) -> bool:
        return bool(is_sure(self.stops(session, 0), confidence))

    def settle(self, session: Session, turn: Turn) -> None:
        learn_threshold(self.stops(session, 0), turn.forest.layers, turn.verdict.accepted)

"""PLAN: the length of drafts of one sequence, by the draft model's confidence and past acceptance.

These controllers read past turns, tokens that are already drafted, and random numbers of their own. So they do not change
the law of the output.
"""

from dataclasses import dataclass

import numpy as np

from specbeam.core.control.planning import BY_THRESHOLD, PlansMostLayers, StopSpec, new_stop
from specbeam.core.records import Turn
from specbeam.core.session import Session
from specbeam.core.steps import step

# Indices into `StopSpec.learnt` for BY_THRESHOLD: the threshold and the smoothed acceptance rate.
THRESHOLD, RATE = range(2)
# Indices into `StopSpec.settings`: the settings of `TrackedThreshold`, and whether the threshold changes (1) or not (0).
WANTED, STEP, SMOOTH_RATE, SMOOTH_THRESHOLD, MOST, MOVES = range(6)


@step
def is_sure(stop: StopSpec, confidence: float) -> bool:
    """Return whether to continue the draft after a token of this draft probability."""
    return confidence >= stop.learnt[THRESHOLD]


@step
def learn_threshold(stop: StopSpec, drafted: int, accepted: int) -> None:
    """Move the threshold after a turn that accepted `accepted` of `drafted` layers."""
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
class SureDraft(PlansMostLayers):
    """A controller that continues a draft while the draft probability of its newest token is at least `threshold`.

    The token that falls below the threshold stays in the draft.

    Args:
        most: maximum number of layers of a draft.
        width: number of draft nodes per layer.
    """

    threshold: float = 0.4
    most: int = 8
    width: int = 1

    def stops(self, session: Session, tosses: int) -> StopSpec:
        """Return the threshold for steps; see `control.stopping.stops_of`."""
        return new_stop(BY_THRESHOLD, np.zeros(6), np.array([self.threshold, 0.0]), self.most)

    def more(self, session: Session, depth: int, confidence: float) -> bool:
        return confidence >= self.threshold

    def settle(self, session: Session, turn: Turn) -> None:
        """Do nothing: the threshold is fixed."""


@dataclass(frozen=True)
class TrackedThreshold(PlansMostLayers):
    """A `SureDraft` whose threshold follows the acceptance rate (Draft & Verify, arXiv 2309.08168).

    The threshold rises by `step` after a turn whose smoothed acceptance rate is below `wanted`. Otherwise it falls by
    `step`, except after a draft of full length. The threshold is smoothed, too.

    Args:
        start: the first threshold.
        wanted: the target acceptance rate, as a share of drafted tokens.
        smooth_rate, smooth_threshold: weight of the old value in the smoothed one.
        most: maximum number of layers of a draft.
        width: number of draft nodes per layer.
    """

    start: float = 0.6
    wanted: float = 0.9
    step: float = 0.01
    smooth_rate: float = 0.5
    smooth_threshold: float = 0.9
    most: int = 8
    width: int = 1

    def stops(self, session: Session, tosses: int) -> StopSpec:
        """Return threshold and rate for steps, which change them; see `control.stopping.stops_of`."""
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

"""PLAN: by what a draft ends between two layers, as numbers for steps; one type for all controllers that may end one.

So a compiled loop is compiled once, whichever controller it follows.
"""

from typing import Any, NamedTuple

import numpy as np

from specbeam.core.dice import Uniforms
from specbeam.core.steps import Array, borrowed, step

NEVER, BY_THRESHOLD, BY_COIN, BY_SURVIVAL = range(4)  # kinds of `StopSpec`


@borrowed
class StopSpec(NamedTuple):
    """By what a draft ends between layers. What the arrays hold is said where each kind of controller is."""

    kind: int  # NEVER, BY_THRESHOLD, BY_COIN or BY_SURVIVAL
    settings: Array  # float64[settings]: what does not change
    learnt: Array  # float64[learnt]: what steps change
    hits: Array  # float64[bins]: for BY_SURVIVAL, as the next; empty otherwise
    tries: Array  # float64[bins]
    scores: Array  # float64[most]: draft probabilities of this turn's layers
    counted: Array  # int64[1]: how many of them there are
    coins: Any  # `Uniforms` of the controller's own


def no_coins() -> Uniforms:
    """Return the coins of a controller that tosses none."""
    return Uniforms(np.zeros(0), np.zeros(1, dtype=np.int64))


def new_stop(kind: int, settings: Array, learnt: Array, most: int) -> StopSpec:
    """Return the numbers of a controller that has seen nothing.

    Args:
        most: the most layers of a draft.
    """
    none = np.zeros(0)
    scores = np.zeros(max(most, 1) + 1)
    return StopSpec(kind, settings, learnt, none, none, scores, np.zeros(1, dtype=np.int64), no_coins())


NO_STOP = new_stop(NEVER, np.zeros(0), np.zeros(0), 0)


@step
def note_score(stop: StopSpec, confidence: float) -> None:
    """Note the draft probability of the surest token of the newest layer."""
    scores = stop.scores
    scores[min(stop.counted[0], len(scores) - 1)] = confidence
    stop.counted[0] = min(stop.counted[0] + 1, len(scores))

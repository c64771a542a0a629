"""PLAN: the records by which steps plan the next draft (`Plan`) and end it between layers (`StopSpec`).

A controller may return a record of its own from `numbers`, with a field `width` (draft nodes per layer). It then registers
steps for `plan_depth` and `deepest_of`, and for `learn_passed` if it learns from turns.
"""

from typing import Any, NamedTuple

import numpy as np

from specbeam.core.dice import Uniforms
from specbeam.core.records import Shape
from specbeam.core.session import Session
from specbeam.core.steps import Array, borrowed, step, verb

BY_ODDS = -1  # `Plan.depth` of plans that choose the depth from their tables
GUESS = 0.8  # odds that a layer passes, before the first turn
GUESS_WEIGHT = 2.0  # in layers
SHARED_WEIGHT = 5.0  # weight of the odds of all layers in the odds of one layer, in layers
FORGET = 0.95  # weight of earlier turns after each turn with drafts
# Turns without drafts until one layer is drafted as a trial. The wait doubles after each trial that does not pass, until
# trials take a share of `TRIALS` of the time.
FIRST_WAIT = 4.0
LONGEST_WAIT = 64.0
TRIALS = 0.01
IDLE, WAIT = range(2)  # indices of `Plan.pause`


@verb(0, has_body=False, by_address=True)
def plan_depth(plan: Any, roots: int, turns: int, remaining: int) -> int:  # type: ignore[empty-body]
    """Return the depth of the next draft, after `turns` turns and with at most `remaining` tokens to emit."""


@verb(0, by_address=True)
def learn_passed(plan: Any, passed: Array) -> None:
    """Learn from a turn's judged layers.

    Args:
        passed: bool[layers], whether each judged draft layer passed.
    """
    return


@verb(0, has_body=False)
def deepest_of(plan: Any) -> int:  # type: ignore[empty-body]
    """Return the maximum number of layers that a plan may draft."""


@borrowed
class Plan(NamedTuple):
    """The plan of a controller, for steps: a fixed depth, or tables to choose the depth with the most layers per second."""

    depth: int  # number of draft layers, or BY_ODDS
    width: int  # draft nodes per layer
    beyond: int  # number of layers that a turn may emit in addition to the drafted ones
    seconds: Array  # float64[roots + 1, depths]: seconds of a turn that emits nothing
    judge_s: float  # seconds per emitted layer
    seen: Array  # float64[2, layers]: how often each layer passed and was reached; changed by `learn_passed`
    pause: Array  # float64[2]: turns since the last draft, and the wait until a trial; changed by `learn_passed`


def plan_of_shape(depth: int, width: int, beyond: int = 1) -> Plan:
    """Return a plan with a fixed shape."""
    return Plan(depth, width, beyond, np.zeros((1, 1)), 0.0, np.zeros((2, 1)), np.zeros(2))


@step
def layers_by_depth(seen: Array) -> Array:
    """Return the expected number of layers that a turn emits if it drafts 0, 1, 2, ... layers, float64[layers + 1].

    The odds of a layer are its counts and `SHARED_WEIGHT` times the odds of all layers together, so that a few failures of
    the first layer count against the deeper ones, which were not reached.

    Args:
        seen: float64[2, layers], how often each layer passed and was reached.
    """
    passed = GUESS_WEIGHT * GUESS
    reached = GUESS_WEIGHT
    for layer in range(seen.shape[1]):
        passed += seen[0, layer]
        reached += seen[1, layer]
    of_all = passed / reached
    emitted = np.ones(seen.shape[1] + 1)
    survive = 1.0
    for layer in range(seen.shape[1]):
        survive *= (seen[0, layer] + SHARED_WEIGHT * of_all) / (seen[1, layer] + SHARED_WEIGHT)
        emitted[layer + 1] = emitted[layer] + survive
    return emitted


@step
def longest_wait(seconds: Array) -> float:
    """Return the largest number of turns between two trials.

    Args:
        seconds: float64[depths], seconds of a turn by its depth.
    """
    if len(seconds) < 2:
        return LONGEST_WAIT
    extra = seconds[1] / seconds[0] - 1
    return max(extra / TRIALS, FIRST_WAIT)


@plan_depth.of(Plan)
@step
def plan_fixed_or_by_odds(plan: Plan, roots: int, turns: int, remaining: int) -> int:
    """Return the fixed depth, or the depth with the most expected layers per second; see `plan_depth`."""
    depth = plan.depth
    if depth < 0:
        seconds = plan.seconds[min(roots, len(plan.seconds) - 1)]
        emitted = layers_by_depth(plan.seen)
        depth = int(np.argmax(emitted / (seconds + emitted * plan.judge_s)))
        if depth == 0 and plan.pause[IDLE] >= min(plan.pause[WAIT], longest_wait(seconds)):
            depth = 1
    return min(depth, remaining - plan.beyond)


@learn_passed.of(Plan)
@step
def count_passed(plan: Plan, passed: Array) -> None:
    """Count in `plan.seen` which layers passed, and in `plan.pause` turns without drafts; see `learn_passed`."""
    if plan.depth < 0:
        count_layers(plan.seen, plan.pause, passed)


@step
def count_layers(seen: Array, pause: Array, passed: Array) -> None:
    """Count a turn's judged layers, or the turn as one without drafts.

    Args:
        seen, pause: as in `Plan`; changed in place.
        passed: bool[layers], whether each judged draft layer passed.
    """
    judged = min(len(passed), seen.shape[1])
    if judged == 0:
        pause[IDLE] += 1
        return
    for layer in range(seen.shape[1]):
        seen[0, layer] *= FORGET
        seen[1, layer] *= FORGET
    for layer in range(judged):
        seen[0, layer] += passed[layer]
        seen[1, layer] += 1
    if passed[0]:
        pause[WAIT] = FIRST_WAIT
    elif pause[IDLE] >= pause[WAIT]:
        pause[WAIT] = min(2 * pause[WAIT], LONGEST_WAIT)
    pause[IDLE] = 0


@deepest_of.of(Plan)
def deepest_of_tables(plan: Plan) -> int:
    """Return the fixed depth, or the largest in the tables; see `deepest_of`."""
    return int(plan.depth if plan.depth >= 0 else plan.seconds.shape[1] - 1)


class PlansMostLayers:
    """Base class of controllers that plan `most` layers of `width` nodes, and end drafts between layers."""

    most: int
    width: int

    @property
    def largest(self) -> Shape:
        """The largest shape that it plans."""
        return Shape(self.most, self.width)

    def plan(self, session: Session) -> Shape:
        return Shape(min(self.most, session.remaining - 1), self.width)

    def numbers(self, session: Session) -> Plan | None:
        """Return the plan for steps."""
        return plan_of_shape(self.most, self.width)


NEVER, BY_THRESHOLD, BY_COIN, BY_SURVIVAL = range(4)  # kinds of `StopSpec`


@borrowed
class StopSpec(NamedTuple):
    """The state of a controller that ends drafts between layers, for steps.

    All such controllers share this type, so a compiled loop is compiled once. The modules of the controllers define the
    contents of `settings` and `learnt`.
    """

    kind: int  # NEVER, BY_THRESHOLD, BY_COIN or BY_SURVIVAL
    settings: Array  # float64[settings]: constants
    learnt: Array  # float64[learnt]: changed by steps
    hits: Array  # float64[bins]: accepted tokens by draft probability, for BY_SURVIVAL; otherwise empty
    tries: Array  # float64[bins]: judged tokens by draft probability, for BY_SURVIVAL; otherwise empty
    scores: Array  # float64[most]: draft probabilities of this turn's layers
    counted: Array  # int64[1]: number of entries of `scores` in use
    coins: Any  # `Uniforms`: the controller's own random numbers


def new_stop(kind: int, settings: Array, learnt: Array, most: int) -> StopSpec:
    """Return the state of a controller before its first turn, with no random numbers.

    Args:
        most: maximum number of layers of a draft.
    """
    none = np.zeros(0)
    scores = np.zeros(max(most, 1) + 1)
    no_coins = Uniforms(none, np.zeros(1, dtype=np.int64))
    return StopSpec(kind, settings, learnt, none, none, scores, np.zeros(1, dtype=np.int64), no_coins)


NO_STOP = new_stop(NEVER, np.zeros(0), np.zeros(0), 0)


@step
def note_score(stop: StopSpec, confidence: float) -> None:
    """Append the draft probability of the surest token of the newest layer to `stop.scores`."""
    scores = stop.scores
    scores[min(stop.counted[0], len(scores) - 1)] = confidence
    stop.counted[0] = min(stop.counted[0] + 1, len(scores))

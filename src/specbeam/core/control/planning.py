"""PLAN: depth and width of the next draft, from numbers that steps can read.

A controller whose numbers are a record of another kind, with a field `width`, registers its own steps for these verbs.
"""

from typing import Any, NamedTuple

import numpy as np

from specbeam.core.steps import Array, borrowed, step, verb

BY_ODDS = -1  # the value of `Plan.depth` if the depth is chosen


@verb(0, has_body=False)
def plan_depth(plan: Any, roots: int, turns: int, remaining: int) -> int:  # type: ignore[empty-body]
    """Return the depth of the next draft, after `turns` turns and with `remaining` tokens that may be emitted."""


@verb(0)
def learn_passed(plan: Any, passed: Array) -> None:
    """Learn which of the drafted layers that were judged in a turn passed, bool[layers]."""
    return


@verb(0, has_body=False)
def deepest_of(plan: Any) -> int:  # type: ignore[empty-body]
    """Return the most layers that a plan may draft."""


@borrowed
class Plan(NamedTuple):
    """What a controller decides by, as numbers for steps: a fixed depth, or tables from which a depth is chosen.

    BY_ODDS chooses the depth of most expected layers per second.
    """

    depth: int  # of a draft; or BY_ODDS
    width: int  # drafts per layer
    beyond: int  # number of layers that a turn may emit beyond those it drafts
    seconds: Array  # float64[roots + 1, depths]: of a turn that emits nothing
    judge_s: float  # seconds of each layer that is emitted
    seen: Array  # float64[2, layers]: how often each layer passed, and was reached; changed by `learn_passed`
    explore: int  # every `explore`-th turn drafts one layer if it would draft none


def plan_of_shape(depth: int, width: int, beyond: int = 1) -> Plan:
    """Return the plan of drafts that all have the same shape."""
    return Plan(depth, width, beyond, np.zeros((1, 1)), 0.0, np.ones((2, 1)), 1)


@step
def layers_by_depth(seen: Array) -> Array:
    """Return the expected number of layers that a turn emits if it drafts 0, 1, 2, ... layers, float64[layers + 1].

    Args:
        seen: float64[2, layers], how often each layer passed, and was reached.
    """
    emitted = np.ones(seen.shape[1] + 1)
    survive = 1.0
    for layer in range(seen.shape[1]):
        survive *= seen[0, layer] / seen[1, layer]
        emitted[layer + 1] = emitted[layer] + survive
    return emitted


@plan_depth.of(Plan)
@step
def plan_fixed_or_by_odds(plan: Plan, roots: int, turns: int, remaining: int) -> int:
    """Return the fixed depth, or the one of most expected layers per second; see `plan_depth`."""
    depth = plan.depth
    if depth < 0:
        seconds = plan.seconds[min(roots, len(plan.seconds) - 1)]
        emitted = layers_by_depth(plan.seen)
        depth = int(np.argmax(emitted / (seconds + emitted * plan.judge_s)))
        if depth == 0 and turns % plan.explore == plan.explore - 1:
            depth = 1
    return min(depth, remaining - plan.beyond)


@learn_passed.of(Plan)
@step
def count_passed(plan: Plan, passed: Array) -> None:
    """Count in `plan.seen` which layers passed; see `learn_passed`."""
    if plan.depth < 0:
        for layer in range(min(len(passed), plan.seen.shape[1])):
            plan.seen[0, layer] += passed[layer]
            plan.seen[1, layer] += 1


@deepest_of.of(Plan)
def deepest_of_tables(plan: Plan) -> int:
    """Return the fixed depth, or the largest in the tables; see `deepest_of`."""
    return int(plan.depth if plan.depth >= 0 else plan.seconds.shape[1] - 1)

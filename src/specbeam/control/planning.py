"""PLAN: how deep and wide the next draft is, by numbers that steps can read."""

from typing import NamedTuple

import numpy as np

from specbeam.control.values import Values
from specbeam.core.steps import Array, step

# what stands in place of a depth that is chosen
BY_ODDS = -1
BY_VALUE = -2


class Plan(NamedTuple):
    """A depth, or what one is chosen by."""

    depth: int  # or BY_ODDS, BY_VALUE
    widths: Array  # int64[sizes]: drafts of a layer, of which one is chosen by value
    beyond: int  # layers that a turn may emit more than it drafts
    seconds: Array  # float64[roots + 1, depths, sizes]: of a turn that emits nothing
    judge_s: float  # seconds of each layer that is emitted
    seen: Array  # float64[2, layers]: how often each layer passed, and was reached; changed by `learn_passed`
    explore: int  # every so many turns that draft nothing, draft one layer
    values: Values  # changed where widths are chosen


@step
def layers_by_depth(seen: Array) -> Array:
    """Return the number of layers that a turn emits, by the depth of its draft: 0, 1, 2, ..."""
    emitted = np.ones(seen.shape[1] + 1)
    survive = 1.0
    for layer in range(seen.shape[1]):
        survive *= seen[0, layer] / seen[1, layer]
        emitted[layer + 1] = emitted[layer] + survive
    return emitted


@step
def plan_shape(plan: Plan, roots: int, turns: int, remaining: int) -> tuple[int, int]:
    """Return depth and width of the next draft, after so many turns and with so many tokens still to come."""
    depth = plan.depth
    place = 0
    if depth < 0:
        seconds = plan.seconds[min(roots, len(plan.seconds) - 1)]
        emitted = layers_by_depth(plan.seen)
        top = -1.0
        for layers in range(seconds.shape[0]):
            for size in range(seconds.shape[1]):
                value = emitted[layers]
                if plan.depth == BY_VALUE:
                    value = plan.values.sums[layers, plan.widths[size]]
                rate = value / (seconds[layers, size] + emitted[layers] * plan.judge_s)
                if rate > top:
                    depth = layers
                    place = size
                    top = rate
        if depth == 0 and turns % plan.explore == plan.explore - 1:
            depth = 1
    return min(depth, remaining - plan.beyond), plan.widths[place]


@step
def learn_passed(plan: Plan, passed: Array) -> None:
    """Count which of the drafted layers that were judged have passed, bool[layers]."""
    if plan.depth < 0:
        for layer in range(min(len(passed), plan.seen.shape[1])):
            plan.seen[0, layer] += passed[layer]
            plan.seen[1, layer] += 1


def deepest_of(plan: Plan) -> int:
    """Return the most layers that a plan may draft."""
    return int(plan.depth if plan.depth >= 0 else plan.seconds.shape[1] - 1)

"""How deep the next draft is, as a loop asks: what `control` decides turn by turn."""

from typing import NamedTuple

import numpy as np

from specbeam.kernels.compiling import Array, compiled
from specbeam.kernels.values import Values

BY_ODDS, BY_VALUE = -1, -2


class Plan(NamedTuple):
    """A depth, or what one is chosen by."""

    depth: int  # BY_ODDS, BY_VALUE: chosen
    widths: Array  # int64[sizes]: drafts of a layer, of which one is chosen by value
    beyond: int  # layers that a turn may emit more than it drafts
    seconds: Array  # float64[roots + 1, depths, sizes]: of a turn that emits nothing
    judge_s: float  # of each layer that is emitted
    seen: Array  # float64[2, layers]: how often each layer passed, and was reached; changed by `learnt`
    explore: int  # every so many turns that draft nothing, draft one layer
    values: Values  # changed where widths are chosen


@compiled
def layers_by_depth(seen: Array) -> Array:
    """Layers that a turn emits, by the depth of its draft: 0, 1, 2, ..."""
    emitted, survive = np.ones(seen.shape[1] + 1), 1.0
    for layer in range(seen.shape[1]):
        survive *= seen[0, layer] / seen[1, layer]
        emitted[layer + 1] = emitted[layer] + survive
    return emitted


@compiled
def planned(plan: Plan, roots: int, turns: int, remaining: int) -> tuple[int, int]:
    """Depth and width of the next draft, behind so many turns and with so many tokens still to come."""
    depth, place = plan.depth, 0
    if depth < 0:
        seconds, top = plan.seconds[min(roots, len(plan.seconds) - 1)], -1.0
        emitted = layers_by_depth(plan.seen)
        for layers in range(seconds.shape[0]):
            for size in range(seconds.shape[1]):
                value = emitted[layers]
                if plan.depth == BY_VALUE:
                    value = plan.values.sums[layers, plan.widths[size]]
                rate = value / (seconds[layers, size] + emitted[layers] * plan.judge_s)
                if rate > top:
                    depth, place, top = layers, size, rate
        if depth == 0 and turns % plan.explore == plan.explore - 1:
            depth = 1
    return min(depth, remaining - plan.beyond), plan.widths[place]


@compiled
def learnt(plan: Plan, passed: Array) -> None:
    """Count which of the drafted layers that were judged have passed."""
    if plan.depth < 0:
        for layer in range(min(len(passed), plan.seen.shape[1])):
            plan.seen[0, layer] += passed[layer]
            plan.seen[1, layer] += 1

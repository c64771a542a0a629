"""How deep the next draft is, as a loop asks: what `control` decides turn by turn."""

from typing import NamedTuple

import numpy as np

from specbeam.kernels.compiling import Array, compiled


class Plan(NamedTuple):
    """A depth, or what one is chosen by."""

    depth: int  # -1: by cost
    width: int
    beyond: int  # layers that a turn may emit more than it drafts
    seconds: Array  # float64[roots + 1, depths]: of a turn that emits nothing
    judge_s: float  # of each layer that is emitted
    seen: Array  # float64[2, layers]: how often each layer passed, and was reached; changed by `learnt`
    explore: int  # every so many turns that draft nothing, draft one layer


@compiled
def layers_by_depth(seen: Array) -> Array:
    """Layers that a turn emits, by the depth of its draft: 0, 1, 2, ..."""
    emitted, survive = np.ones(seen.shape[1] + 1), 1.0
    for layer in range(seen.shape[1]):
        survive *= seen[0, layer] / seen[1, layer]
        emitted[layer + 1] = emitted[layer] + survive
    return emitted


@compiled
def planned(plan: Plan, roots: int, turns: int, remaining: int) -> int:
    """The depth of the next draft, behind so many turns and with so many tokens still to come."""
    depth = plan.depth
    if depth < 0:
        emitted = layers_by_depth(plan.seen)
        depth = int((emitted / (plan.seconds[min(roots, len(plan.seconds) - 1)] + emitted * plan.judge_s)).argmax())
        if depth == 0 and turns % plan.explore == plan.explore - 1:
            depth = 1
    return min(depth, remaining - plan.beyond)


@compiled
def learnt(plan: Plan, passed: Array) -> None:
    """Count which of the drafted layers that were judged have passed."""
    if plan.depth < 0:
        for layer in range(len(passed)):
            plan.seen[0, layer] += passed[layer]
            plan.seen[1, layer] += 1

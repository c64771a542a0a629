"""A controller of one's own: drafts of depth 1, 2, ..., `most`, and then from 1 on again."""

from dataclasses import dataclass
from typing import NamedTuple

from specbeam.core.control.planning import deepest_of, plan_depth
from specbeam.core.records import Shape
from specbeam.core.steps import borrowed, step


@borrowed
class SawtoothPlan(NamedTuple):
    width: int
    most: int


@plan_depth.of(SawtoothPlan)
@step
def plan_sawtooth(plan, roots, turns, remaining):
    return min(1 + turns % plan.most, remaining - 1)


@deepest_of.of(SawtoothPlan)
def deepest_of_sawtooth(plan):
    return plan.most


@dataclass(frozen=True)
class Sawtooth:
    most: int
    width: int = 1

    def numbers(self, session):
        return SawtoothPlan(self.width, self.most)

    def plan(self, session):
        depth = plan_depth(self.numbers(session), 1, session.count.target_passes, session.remaining)
        return Shape(int(depth), self.width)

    def settle(self, session, turn):
        pass

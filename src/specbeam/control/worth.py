"""PLAN: as many draft layers as pay for themselves, by what passes cost on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Float64

from specbeam.control.cost import CostCurve, HostCost
from specbeam.control.planning import BY_ODDS, BY_VALUE, Plan, layers_by_depth, plan_shape
from specbeam.control.values import NO_VALUES, Values
from specbeam.control.width import DEEPEST, GUESS, WEIGHT, ValuedWidth
from specbeam.errors import BadSetting
from specbeam.records import Shape, Turn
from specbeam.session import Session


@dataclass(frozen=True)
class Option:
    """A depth and what is expected of it."""

    depth: int
    nodes: int  # scored by the target, roots included
    layers: float  # emitted per turn
    seconds: float

    @property
    def rate(self) -> float:
        return self.layers / self.seconds


class PassOdds:
    """How often the k-th draft layer of a turn passed, when it was reached."""

    def __init__(self, most: int) -> None:
        self.seen = np.full((2, most), WEIGHT)  # passed, reached
        self.seen[0] *= GUESS

    def learn(self, passed: Sequence[bool]) -> None:
        self.seen[0, : len(passed)] += passed
        self.seen[1, : len(passed)] += 1

    def layers(self) -> Float64[np.ndarray, " depths"]:
        """Layers that a turn emits, by the depth of its draft: 0, 1, 2, ..."""
        return layers_by_depth(self.seen)


@dataclass(frozen=True)
class DepthByCost:
    """The depth of most expected layers per second: argmax E(d) / T(d).

    E(d) = 1 + the sum over layers of the odds that all layers down to it pass, as this session has seen them; T(d) adds the
    target's pass over the roots and d layers, d passes of the draft model, and what the host does beside. Of a pass that is
    shared it pays its share: with many prompts at once rows are dear, and drafts have to be better to be worth it. It reads
    past turns alone, and each session learns by itself, so neither the law nor the other prompts of a batch are touched.

    Args:
        target, draft: seconds of a pass by scored nodes; see `specbeam tune`.
        beams: roots of a turn, at most.
        layers: draft nodes of each layer; the last number stands for all deeper ones.
        most: deepest draft.
        host: what a turn costs outside the models.
        explore: every so many turns that drafted nothing, draft one layer, or nothing could be learnt.
        alone: plan as if a pass were never shared, for rules whose text depends on the depth: the same seed has to give the
            same text, whatever else is in the batch.
    """

    target: CostCurve
    draft: CostCurve
    beams: int
    layers: tuple[int, ...]
    most: int = 8
    host: HostCost = field(default_factory=HostCost)
    explore: int = 8
    alone: bool = False

    def plan(self, session: Session) -> Shape:
        plan = self.numbers(session)
        count = session.count
        return Shape(*plan_shape(plan, session.beams.size, count.target_passes, session.remaining))

    def numbers(self, session: Session) -> Plan:
        """Return what it decides by, for steps."""
        seconds = self._passes_s(1 if self.alone else session.beside)[:, :, None]
        return Plan(
            BY_ODDS, np.array(self.layers[:1]), 1, seconds, self.host.judge_s, self._seen(session).seen,
            self.explore, NO_VALUES,
        )  # fmt: skip

    def settle(self, session: Session, turn: Turn) -> None:
        self._seen(session).learn(_passed(turn))

    def options(self, seen: PassOdds, roots: int, beside: int = 1) -> list[Option]:
        """What is expected of each depth, with so many sessions in a pass."""
        layers = seen.layers()
        turns_s = self._passes_s(beside)[max(roots, 1)] + layers * self.host.judge_s
        turns = zip(layers.tolist(), turns_s.tolist(), strict=True)
        return [
            Option(depth, max(roots, 1) + sum(self._drafted(depth)), emitted, seconds)
            for depth, (emitted, seconds) in enumerate(turns)
        ]

    def _passes_s(self, beside: int) -> Float64[np.ndarray, "roots depths"]:
        """Seconds of a turn that emits nothing, by roots and depth, with so many sessions in a pass."""
        drafted = [self._drafted(depth) for depth in range(self.most + 1)]
        return _passes_s(self.target, self.draft, self.host, self.beams, tuple(map(tuple, drafted)), beside)

    def _drafted(self, depth: int) -> list[int]:
        """Nodes of each draft layer."""
        return [self.layers[min(layer, len(self.layers) - 1)] for layer in range(depth)]

    def _seen(self, session: Session) -> PassOdds:
        return session.state.setdefault(self, PassOdds(self.most))


@dataclass(frozen=True)
class ShapeByValue:
    """Depth and drafts per layer of most value per second: argmax V(d, n) / T(d, n).

    V(d, n) is what a turn with d drafted layers of n nodes gains if widths are chosen by value, as this session has seen it
    (`ValuedWidth`; known for every n, for the odds behind it follow from laws alone); T(d, n) as in `DepthByCost`. Texts
    depend on it, so it plans as if passes were never shared.

    Args:
        target, draft: seconds of a pass by scored nodes; see `specbeam tune`.
        width: what chooses widths.
        sizes: drafts per layer to choose from.
        host, explore: see `DepthByCost`.
    """

    target: CostCurve
    draft: CostCurve
    width: ValuedWidth
    sizes: tuple[int, ...]
    host: HostCost = field(default_factory=HostCost)
    explore: int = 8

    def __post_init__(self) -> None:
        if max(self.sizes) > self.width.drafts:
            raise BadSetting(
                f"sizes go up to {max(self.sizes)} drafts, and values are known for {self.width.drafts} at most; "
                f"say ValuedWidth(..., drafts={max(self.sizes)})"
            )

    def plan(self, session: Session) -> Shape:
        plan = self.numbers(session)
        count = session.count
        return Shape(*plan_shape(plan, session.beams.size, count.target_passes, session.remaining))

    def numbers(self, session: Session) -> Plan:
        """Return what it decides by, for steps. At temperature 0 no width is chosen, and depth goes by layers alone."""
        seen = self._seen(session).seen
        judge_s = self.host.judge_s
        if session.warp.greedy:
            seconds = np.ascontiguousarray(self.seconds[:, :, -1:])
            return Plan(BY_ODDS, np.array(self.sizes[-1:]), 1, seconds, judge_s, seen, self.explore, NO_VALUES)
        values = self.width.values(session.state)
        return Plan(BY_VALUE, np.array(self.sizes), 1, self.seconds, judge_s, seen, self.explore, values)

    def settle(self, session: Session, turn: Turn) -> None:
        self._seen(session).learn(_passed(turn))

    def rates(self, values: Values, roots: int) -> Float64[np.ndarray, "depths sizes"]:
        """Value per second of each shape, in layers of one beam."""
        means = values.sums[:, list(self.sizes)] / values.count[0]
        return means / (self.seconds[roots] + PassOdds(DEEPEST).layers()[:, None] * self.host.judge_s)

    @cached_property
    def seconds(self) -> Float64[np.ndarray, "roots depths sizes"]:
        """Of a turn that emits nothing."""
        tables = [
            _passes_s(self.target, self.draft, self.host, self.width.most, _layers(size, DEEPEST), 1)
            for size in self.sizes
        ]
        return np.stack(tables, axis=2)

    def _seen(self, session: Session) -> PassOdds:
        return session.state.setdefault(self, PassOdds(DEEPEST))


def _layers(size: int, deepest: int) -> tuple[tuple[int, ...], ...]:
    return tuple((size,) * depth for depth in range(deepest + 1))


def _passed(turn: Turn) -> list[bool]:
    """Of the drafted layers that were judged."""
    return [step.passed for step in turn.verdict.steps[: turn.forest.layers]]


@lru_cache(maxsize=256)
def _passes_s(
    target: CostCurve,
    draft: CostCurve,
    host: HostCost,
    beams: int,
    drafted: tuple[tuple[int, ...], ...],
    beside: int,
) -> Float64[np.ndarray, "roots depths"]:
    def share(curve: CostCurve, nodes: int) -> float:
        return curve.pass_s(beside * nodes) / beside

    def seconds(roots: int, layers: tuple[int, ...]) -> float:
        draft_s = sum(share(draft, nodes) for nodes in [roots, *layers][: len(layers)])
        return share(target, roots + sum(layers)) + draft_s + host.seconds(len(layers), 0)

    return np.array([[seconds(max(roots, 1), layers) for layers in drafted] for roots in range(beams + 1)])

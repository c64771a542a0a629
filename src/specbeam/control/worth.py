"""PLAN: as many draft layers as pay for themselves, by what passes cost on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64

from specbeam.control.cost import CostCurve, HostCost
from specbeam.records import Shape, Turn
from specbeam.session import Session

GUESS, WEIGHT = 0.6, 3.0  # odds that a layer passes, before any was seen, and how many layers the guess is worth


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
        self.passed = np.full(most, GUESS * WEIGHT)
        self.reached = np.full(most, WEIGHT)

    def learn(self, passed: Sequence[bool]) -> None:
        for layer, fine in enumerate(passed):
            self.passed[layer] += fine
            self.reached[layer] += 1

    def layers(self) -> Float64[np.ndarray, " depths"]:
        """Layers that a turn emits, by the depth of its draft: 0, 1, 2, ..."""
        survive = np.cumprod(self.passed / self.reached)
        return 1 + np.concatenate([[0.0], np.cumsum(survive)])


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
    known: dict[tuple[int, int], Float64[np.ndarray, " depths"]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def plan(self, session: Session) -> Shape:
        layers = self._seen(session).layers()
        beside = 1 if self.alone else session.beside
        best = int((layers / self._turns_s(layers, len(session.beams), beside)).argmax())
        if best == 0 and session.count.target_passes % self.explore == self.explore - 1:
            best = 1
        return Shape(min(best, session.remaining - 1), self.layers[0])

    def settle(self, session: Session, turn: Turn) -> None:
        drafted = turn.forest.layers
        self._seen(session).learn([step.passed for step in turn.verdict.steps[:drafted]])

    def options(self, seen: PassOdds, roots: int, beside: int = 1) -> list[Option]:
        """What is expected of each depth, with so many sessions in a pass."""
        layers = seen.layers()
        turns = zip(layers.tolist(), self._turns_s(layers, roots, beside).tolist(), strict=True)
        return [
            Option(depth, max(roots, 1) + sum(self._drafted(depth)), emitted, seconds)
            for depth, (emitted, seconds) in enumerate(turns)
        ]

    def _turns_s(
        self, layers: Float64[np.ndarray, " depths"], roots: int, beside: int
    ) -> Float64[np.ndarray, " depths"]:
        """Seconds of a turn by depth, in which so many layers are emitted."""
        key = roots, beside
        if key not in self.known:
            self.known[key] = np.array([self._passes_s(depth, max(roots, 1), beside) for depth in range(len(layers))])
        return self.known[key] + layers * self.host.judge_s

    def _passes_s(self, depth: int, roots: int, beside: int) -> float:
        """Seconds of a turn that emits nothing."""

        def share(curve: CostCurve, nodes: int) -> float:
            return curve.pass_s(beside * nodes) / beside

        drafted = self._drafted(depth)
        draft_s = sum(share(self.draft, nodes) for nodes in [roots, *drafted][:depth])
        return share(self.target, roots + sum(drafted)) + draft_s + self.host.seconds(depth, 0)

    def _drafted(self, depth: int) -> list[int]:
        """Nodes of each draft layer."""
        return [self.layers[min(layer, len(self.layers) - 1)] for layer in range(depth)]

    def _seen(self, session: Session) -> PassOdds:
        return session.state.setdefault(self, PassOdds(self.most))

"""PLAN: the depth with the most expected layers per second, from the measured costs of passes on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from jaxtyping import Float64

from specbeam.core.control.cost import CostCurve, HostCost
from specbeam.core.control.planning import BY_ODDS, FIRST_WAIT, Plan, count_layers, layers_by_depth, plan_depth
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session


@dataclass(frozen=True)
class Option:
    """A draft depth, with its expected gain and cost per turn."""

    depth: int
    nodes: int  # nodes that the target scores, including roots
    layers: float  # expected number of emitted layers
    seconds: float  # expected time of the turn

    @property
    def rate(self) -> float:
        """The expected layers per second."""
        return self.layers / self.seconds


class PassOdds:
    """Counts of how often the k-th draft layer of a turn was reached and how often it then passed."""

    def __init__(self, most: int) -> None:
        self.seen = np.zeros((2, most))  # how often each layer passed, and was reached
        self.pause = np.array([0.0, FIRST_WAIT])  # see `Plan`

    def learn(self, passed: Sequence[bool]) -> None:
        """Count the judged layers of a turn; `passed` holds whether each of them passed."""
        count_layers(self.seen, self.pause, np.array(passed, dtype=np.bool_))

    def layers(self) -> Float64[np.ndarray, " depths"]:
        """Return the expected number of layers that a turn emits if it drafts 0, 1, 2, ... layers."""
        return layers_by_depth(self.seen)


@dataclass(frozen=True)
class DepthByCost:
    """A controller that plans the depth with the most expected layers per second: argmax E(d) / T(d).

    E(d) is 1 plus, for each of the d drafted layers, the probability that this layer and all layers above it pass, as
    measured in this session. T(d) is the time of the target's pass over the roots and d layers, of d passes of the draft
    model, and of the work outside the models. In a batch, each session is charged its share of a pass, so in large
    batches rows are expensive and drafts are shorter. The controller reads only past turns of its own session, so it
    affects neither the law of the output nor the other prompts of a batch.

    Where no draft pays, one layer is drafted as a trial after 4 turns, then after 8, 16, ... until one passes, as long as
    trials take more than 1 % of the time.

    Args:
        target, draft: seconds of a pass by number of scored nodes; see `specbeam tune`.
        beams: maximum number of roots of a turn.
        layers: number of draft nodes of each layer; the last number also holds for all deeper layers.
        most: maximum number of layers of a draft.
        host: seconds of a turn outside the models.
        width: width of the planned shapes; None: the number of nodes of the first layer.
        alone: plan as if passes were never shared; for rules whose text depends on the depth, so that a seed gives the
            same text in every batch.
    """

    target: CostCurve
    draft: CostCurve
    beams: int
    layers: tuple[int, ...]
    most: int = 8
    host: HostCost = field(default_factory=HostCost)
    width: int | None = None
    alone: bool = False

    @property
    def largest(self) -> Shape:
        """The largest shape that it plans."""
        return Shape(self.most, max(self.layers) if self.width is None else self.width)

    def plan(self, session: Session) -> Shape:
        plan = self.numbers(session)
        depth = plan_depth(plan, session.beams.size, session.count.target_passes, session.remaining)
        return Shape(int(depth), plan.width)

    def numbers(self, session: Session) -> Plan:
        """Return the plan for steps."""
        seconds = self._turn_seconds(1 if self.alone else session.batch_size)
        odds = self._pass_odds(session)
        width = self.layers[0] if self.width is None else self.width
        return Plan(BY_ODDS, width, 1, seconds, self.host.judge_s, odds.seen, odds.pause)

    def settle(self, session: Session, turn: Turn) -> None:
        self._pass_odds(session).learn(_passed_layers(turn))

    def options(self, seen: PassOdds, roots: int, batch_size: int = 1) -> list[Option]:
        """Return the expected gain and cost of each depth, for turns with `roots` roots."""
        layers = seen.layers()
        turns_s = self._turn_seconds(batch_size)[max(roots, 1)] + layers * self.host.judge_s
        turns = zip(layers.tolist(), turns_s.tolist(), strict=True)
        return [
            Option(depth, max(roots, 1) + sum(self._layer_sizes(depth)), emitted, seconds)
            for depth, (emitted, seconds) in enumerate(turns)
        ]

    def _turn_seconds(self, batch_size: int) -> Float64[np.ndarray, "roots depths"]:
        """Return the seconds of a turn that emits nothing, by number of roots and depth."""
        drafted = tuple(self._layer_sizes(depth) for depth in range(self.most + 1))
        return _turn_seconds(self.target, self.draft, self.host, self.beams, drafted, batch_size)

    def _layer_sizes(self, depth: int) -> tuple[int, ...]:
        """Return the number of nodes of each layer of a draft."""
        return tuple(self.layers[min(layer, len(self.layers) - 1)] for layer in range(depth))

    def _pass_odds(self, session: Session) -> PassOdds:
        return session.state.setdefault(self, PassOdds(self.most))


def _passed_layers(turn: Turn) -> list[bool]:
    """Return whether each judged draft layer of a turn passed."""
    return [step.passed for step in turn.verdict.steps[: turn.forest.layers]]


@lru_cache(maxsize=256)
def _turn_seconds(
    target: CostCurve,
    draft: CostCurve,
    host: HostCost,
    beams: int,
    drafted: tuple[tuple[int, ...], ...],
    batch_size: int,
) -> Float64[np.ndarray, "roots depths"]:
    """Return the seconds of a turn that emits nothing, by number of roots (0 counts as 1) and by draft.

    Args:
        beams: maximum number of roots.
        drafted: the layer sizes of each draft.
        batch_size: number of sessions that share a pass; each of them is charged its share.
    """

    def share(curve: CostCurve, nodes: int) -> float:
        return curve.pass_s(batch_size * nodes) / batch_size

    def seconds(roots: int, layers: tuple[int, ...]) -> float:
        draft_s = sum(share(draft, nodes) for nodes in [roots, *layers][: len(layers)])
        return share(target, roots + sum(layers)) + draft_s + host.seconds(len(layers), 0)

    return np.array([[seconds(max(roots, 1), layers) for layers in drafted] for roots in range(beams + 1)])

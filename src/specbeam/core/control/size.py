"""PLAN: the number of nodes, by a latency model fitted while decoding (ProPD, arXiv 2402.13485)."""

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64

from specbeam.core.control.cost import PassTimes
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session


class PassStatistics:
    """Measurements of all sessions of a method: pass times, and the accuracy of the k-th candidate of a layer."""

    def __init__(self, depth: int, ranks: int) -> None:
        self.times = PassTimes()
        guess = 0.6 * 0.3 ** np.arange(ranks)
        self.hits = np.tile(2 * guess, (depth, 1))
        self.tries = np.full((depth, ranks), 2.0)

    def accuracy(self) -> Float64[np.ndarray, "depth ranks"]:
        """Return the share of trials in which the k-th candidate of each layer was correct."""
        return self.hits / self.tries

    def learn(self, turn: Turn) -> None:
        """Count the tried and the correct candidates of a turn."""
        groups = turn.forest.siblings.groups()
        children = {int(group.parents[0]): group.tokens.tolist() for group in groups}
        for layer, step in enumerate(turn.verdict.steps[: len(self.hits)]):
            candidates = children.get(int(step.parents[0]), [])[: self.hits.shape[1]]
            self.tries[layer, : len(candidates)] += 1
            if int(step.beams.tokens[0]) in candidates:
                self.hits[layer, candidates.index(int(step.beams.tokens[0]))] += 1


@dataclass(frozen=True)
class SizeByLatency:
    """A controller that plans the number of nodes with the most expected tokens per second: argmax A(n) / T(n).

    A(n) is the expected number of tokens of the best tree of n nodes at the measured accuracies; T(n) is a line fitted to
    the times of past turns. All sessions share the measurements. The first turn of a session is not timed, because it
    includes the prompt.

    Args:
        most: maximum number of nodes below the root.
        depth: maximum number of layers.
        ranks: number of candidates per node whose accuracy is measured.
        explore: every `explore`-th turn doubles or halves the size, so that the line is fitted to different sizes.
    """

    most: int = 32
    depth: int = 5
    ranks: int = 8
    explore: int = 8
    learnt: dict[str, PassStatistics] = field(default_factory=dict, compare=False)

    @property
    def largest(self) -> Shape:
        """The largest shape that it plans."""
        return Shape(self.depth, self.most)

    def plan(self, session: Session) -> Shape:
        memory = self._memory()
        turns = session.count.target_passes
        size = best_size(memory.accuracy(), *memory.times.line(), self.most + 1) - 1
        if turns % self.explore == self.explore - 1:
            size = size // 2 if turns // self.explore % 2 else 2 * size + 2
        session.state[self] = time.perf_counter()
        return Shape(min(self.depth, session.remaining - 1), min(max(size, 1), self.most))

    def settle(self, session: Session, turn: Turn) -> None:
        memory = self._memory()
        began = session.state.pop(self)
        memory.learn(turn)
        if session.count.target_passes > 1:
            memory.times.add(turn.shape.width + 1, time.perf_counter() - began)

    def _memory(self) -> PassStatistics:
        return self.learnt.setdefault("all", PassStatistics(self.depth, self.ranks))


def best_size(
    accuracy: Float64[np.ndarray, "depth ranks"] | Sequence[Sequence[float]], fixed_s: float, node_s: float, most: int
) -> int:
    """Return the number of nodes, including the root, with the most expected tokens per second.

    A pass over n nodes takes `fixed_s` + `node_s` n seconds.

    >>> ranks = [(0.7, 0.175, 0.125)] * 9
    >>> [best_size(ranks, 10, slope, 9) for slope in (0.1, 0.35, 1.0, 3.0)]
    [9, 9, 5, 3]
    """
    tokens = np.cumsum(best_values(accuracy, most))
    seconds = fixed_s + node_s * np.arange(1, len(tokens) + 1)
    return int(np.argmax(tokens / seconds)) + 1


def best_values(accuracy: Float64[np.ndarray, "depth ranks"] | Sequence[Sequence[float]], most: int) -> list[float]:
    """Return the acceptance probabilities of the `most` likeliest nodes of the infinite tree, root included, descending."""
    heap: list[tuple[float, int]] = [(-1.0, 0)]
    values: list[float] = []
    while heap and len(values) < most:
        negative, layer = heapq.heappop(heap)
        values.append(-negative)
        if layer < len(accuracy):
            for odds in accuracy[layer]:
                heapq.heappush(heap, (negative * float(odds), layer + 1))
    return values

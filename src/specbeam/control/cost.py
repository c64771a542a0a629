"""PLAN: what a pass of the target costs, measured beforehand or while decoding."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a target pass by scored nodes, and of one draft layer."""

    nodes: tuple[int, ...]
    seconds: tuple[float, ...]
    draft_layer_s: float = 0.0

    def pass_s(self, nodes: float) -> float:
        """Seconds of a pass over so many nodes; beyond the last one measured the last slope goes on."""
        if nodes <= self.nodes[-1] or len(self.nodes) == 1:
            return float(np.interp(nodes, self.nodes, self.seconds))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.nodes[-1] - self.nodes[-2])
        return float(self.seconds[-1] + slope * (nodes - self.nodes[-1]))


@dataclass(frozen=True)
class HostCost:
    """Seconds outside the models: of a turn, of each layer drafted, of each layer judged and emitted."""

    turn_s: float = 0.0
    draft_s: float = 0.0
    judge_s: float = 0.0

    def seconds(self, drafted: int, emitted: float) -> float:
        """Of a turn that drafts and emits so many layers."""
        return self.turn_s + drafted * self.draft_s + emitted * self.judge_s


@dataclass
class PassTimes:
    """A line through (nodes, seconds) samples, of which older ones count less (ProPD, arXiv 2402.13485, sec. 4.2).

    >>> times = PassTimes(decay=0.9)
    >>> for nodes, seconds in [(8, 10.6), (16, 11.4), (32, 13.2), (32, 13.0), (64, 16.6)]:
    ...     times.add(nodes, seconds)
    >>> [round(value, 4) for value in times.line()]
    [9.6827, 0.1077]
    """

    decay: float = 0.98
    moments: Float64[np.ndarray, " 5"] = field(default_factory=lambda: np.zeros(5))  # 1, n, n^2, s, n s

    def add(self, nodes: int, seconds: float) -> None:
        fresh = np.array([1.0, nodes, nodes**2, seconds, nodes * seconds])
        self.moments = self.decay * self.moments + fresh

    def line(self) -> tuple[float, float]:
        """Seconds of a pass over no node, and seconds per node (never negative); a flat line where all sizes were equal."""
        weight, n, nn, s, ns = self.moments
        if weight == 0:
            return 1.0, 0.0
        spread = weight * nn - n * n
        slope = max((weight * ns - n * s) / spread, 0.0) if spread > 1e-9 * weight * nn else 0.0
        return float((s - slope * n) / weight), float(slope)

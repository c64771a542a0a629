"""PLAN: the time of passes of the models, measured in advance or while decoding."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64


@dataclass(frozen=True)
class CostCurve:
    """The measured seconds of a pass by its number of scored nodes, and the seconds of one draft layer."""

    nodes: tuple[int, ...]  # numbers of scored nodes, ascending
    seconds: tuple[float, ...]  # time of a pass for each of these numbers
    draft_layer_s: float = 0.0

    def pass_s(self, nodes: float) -> float:
        """Return the seconds of a pass over `nodes` nodes, interpolated, or extrapolated by `last_slope`."""
        if nodes <= self.nodes[-1] or len(self.nodes) == 1:
            return float(np.interp(nodes, self.nodes, self.seconds))
        return float(self.seconds[-1] + self.last_slope * (nodes - self.nodes[-1]))

    @property
    def last_slope(self) -> float:
        """The seconds of an additional node: the larger slope of the last two sizes and of the last doubling.

        The last two sizes alone may have equal times by chance; then additional nodes would seem to cost nothing.
        """
        half = min(int(np.searchsorted(self.nodes, self.nodes[-1] / 2)), len(self.nodes) - 2)
        return max(
            (self.seconds[-1] - self.seconds[place]) / (self.nodes[-1] - self.nodes[place])
            for place in (len(self.nodes) - 2, half)
        )


@dataclass(frozen=True)
class HostCost:
    """The seconds of a turn outside the models: fixed, per drafted layer, and per judged and emitted layer."""

    turn_s: float = 0.0
    draft_s: float = 0.0
    judge_s: float = 0.0

    def seconds(self, drafted: int, emitted: float) -> float:
        """Return the seconds outside the models of a turn that drafts and emits these numbers of layers."""
        return self.turn_s + drafted * self.draft_s + emitted * self.judge_s


@dataclass
class PassTimes:
    """A line fitted to (nodes, seconds) samples with exponentially decaying weights (ProPD, arXiv 2402.13485, sec. 4.2).

    >>> times = PassTimes(decay=0.9)
    >>> for nodes, seconds in [(8, 10.6), (16, 11.4), (32, 13.2), (32, 13.0), (64, 16.6)]:
    ...     times.add(nodes, seconds)
    >>> [round(value, 4) for value in times.line()]
    [9.6827, 0.1077]
    """

    decay: float = 0.98  # weight of a sample relative to the next one
    moments: Float64[np.ndarray, " 5"] = field(default_factory=lambda: np.zeros(5))  # 1, n, n^2, s, n s

    def add(self, nodes: int, seconds: float) -> None:
        """Add a sample: a pass over `nodes` nodes took `seconds`."""
        fresh = np.array([1.0, nodes, nodes**2, seconds, nodes * seconds])
        self.moments = self.decay * self.moments + fresh

    def line(self) -> tuple[float, float]:
        """Return intercept, in seconds, and slope, in seconds per node: at least 0, and 0 if all sizes were equal."""
        weight, n, nn, s, ns = self.moments
        if weight == 0:
            return 1.0, 0.0
        spread = weight * nn - n * n
        slope = max((weight * ns - n * s) / spread, 0.0) if spread > 1e-9 * weight * nn else 0.0
        return float((s - slope * n) / weight), float(slope)

"""Histograms for Prometheus, written by one thread and read by others without a lock."""

from bisect import bisect_left
from collections.abc import Sequence

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)


class Buckets:
    """Numbers of values by size.

    Args:
        bounds: ascending upper bounds; one more bucket holds larger values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value that occurred `times` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def cumulated(self) -> list[tuple[str, float]]:
        """The bounds in Prometheus' format, each with the number of values up to it."""
        found: list[tuple[str, float]] = []
        sum_so_far = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            sum_so_far += count
            found.append((bound, sum_so_far))
        return found

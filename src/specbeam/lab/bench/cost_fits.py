"""Least-squares fits of costs: straight lines, and lines that are flat up to a knee."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_KNEE_STEP = 0.25  # distance between the knees that are tried, in units of x


@dataclass(frozen=True)
class Fit:
    """The line y = start + slope * max(0, x - knee), fitted by least squares.

    >>> fit = knee_fit([1, 2, 4, 8, 16, 32], [3, 3, 3, 7, 15, 31])
    >>> [round(value, 6) for value in (fit.start, fit.slope, fit.knee, fit.r2, fit.at(64))]
    [3.0, 1.0, 4.0, 1.0, 63.0]
    """

    start: float
    slope: float
    knee: float  # 0 for a straight line
    r2: float  # share of the variance of y that the line explains; 1 if y does not vary

    def at(self, x: float) -> float:
        """Return the fitted y at x."""
        return self.start + self.slope * max(0.0, x - self.knee)


def straight_fit(x: Sequence[float], y: Sequence[float]) -> Fit:
    """Fit a straight line to two or more points."""
    return _fit(np.array(x, dtype=float), np.array(y, dtype=float), 0.0)


def knee_fit(x: Sequence[float], y: Sequence[float]) -> Fit:
    """Fit a line that is flat up to a knee and straight after it, to four or more points of ascending x.

    The knee is the one of largest R² in a grid of step 0.25. At least three points lie beyond it, because a line
    through two points always fits.
    """
    points = np.array(x, dtype=float)
    values = np.array(y, dtype=float)
    knees = np.arange(points[0], points[-3], _KNEE_STEP)
    return max((_fit(points, values, float(knee)) for knee in knees), key=lambda fit: fit.r2)


def _fit(x: np.ndarray, y: np.ndarray, knee: float) -> Fit:
    columns = np.stack([np.ones_like(x), np.maximum(0.0, x - knee)], 1)
    start, slope = np.linalg.lstsq(columns, y, rcond=None)[0]
    residual = float(((y - columns @ [start, slope]) ** 2).sum())
    total = float(((y - y.mean()) ** 2).sum())
    return Fit(float(start), float(slope), knee, 1 - residual / total if total > 0 else 1.0)

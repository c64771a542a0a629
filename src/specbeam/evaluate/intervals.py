"""Confidence intervals by bootstrap over the units that were drawn: prompts, not tokens."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float64

RESAMPLES = 2000
Values = Sequence[float] | Float64[np.ndarray, " n"]


def interval(columns: Sequence[Values], statistic: Callable[..., Float64[np.ndarray, " n"]]) -> tuple[float, float]:
    """95 % interval of a statistic of column sums, where the n units stand in the same order in all columns.

    `statistic` takes an array of sums per column, one entry per resample. With one unit the interval is a point.
    """
    table = np.column_stack([np.asarray(values, dtype=float) for values in columns])
    rng = np.random.default_rng(0)
    sums = np.stack([table[rng.integers(0, len(table), len(table))].sum(0) for _ in range(RESAMPLES)])
    low, high = np.quantile(statistic(*sums.T), [0.025, 0.975])
    return float(low), float(high)


def ratio_interval(above: Values, below: Values) -> tuple[float, float]:
    """95 % interval of sum(above) / sum(below)."""
    return interval((above, below), lambda a, b: a / b)

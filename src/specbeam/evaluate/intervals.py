"""Confidence intervals by bootstrap over the units that were drawn: prompts, not tokens."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float64

RESAMPLES = 2000
Z = 1.959963984540054  # 97.5 % of a normal law lie below
Column = Sequence[float] | Float64[np.ndarray, " n"]


def interval(columns: Sequence[Column], statistic: Callable[..., Float64[np.ndarray, " n"]]) -> tuple[float, float]:
    """95 % interval of a statistic of column sums, where the n units stand in the same order in all columns.

    `statistic` takes an array of sums per column, one entry per resample. With one unit the interval is a point.
    """
    table = np.column_stack([np.asarray(values, dtype=float) for values in columns])
    rng = np.random.default_rng(0)
    sums = np.stack([table[rng.integers(0, len(table), len(table))].sum(0) for _ in range(RESAMPLES)])
    low, high = np.quantile(statistic(*sums.T), [0.025, 0.975])
    return float(low), float(high)


def ratio_interval(above: Column, below: Column) -> tuple[float, float]:
    """95 % interval of sum(above) / sum(below)."""
    return interval((above, below), lambda a, b: a / b)


def share_interval(hits: Column, tries: Column) -> tuple[float, float]:
    """95 % interval of a share, sum(hits) / sum(tries): Wilson's where all or none hit, for resamples know only these."""
    units = len(tries)
    share = sum(hits) / sum(tries)
    beyond = Z**2 / (units + Z**2)
    if share == 0:
        return 0.0, beyond
    return (1 - beyond, 1.0) if share == 1 else ratio_interval(hits, tries)

"""Confidence intervals by bootstrap over the units that were drawn at random: prompts, not tokens."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float64

RESAMPLES = 2000
Z = 1.959963984540054  # the 97.5 % quantile of the standard normal law
Column = Sequence[float] | Float64[np.ndarray, " n"]


def interval(columns: Sequence[Column], statistic: Callable[..., Float64[np.ndarray, " n"]]) -> tuple[float, float]:
    """Return the 95 % interval of a statistic of column sums. With a single unit the interval is a point.

    Args:
        columns: values of the n units, in the same order in all columns.
        statistic: takes an array of sums for each column, with an entry per resample, and returns an entry per
            resample.
    """
    table = np.column_stack([np.asarray(values, dtype=float) for values in columns])
    rng = np.random.default_rng(0)
    sums = np.empty((RESAMPLES, table.shape[1]))
    for number in range(RESAMPLES):
        drawn = rng.integers(0, len(table), len(table))
        sums[number] = table[drawn].sum(0)
    low, high = np.quantile(statistic(*sums.T), [0.025, 0.975])
    return float(low), float(high)


def ratio_interval(above: Column, below: Column) -> tuple[float, float]:
    """Return the 95 % interval of sum(above) / sum(below)."""
    return interval((above, below), lambda a, b: a / b)


def share_interval(hits: Column, tries: Column) -> tuple[float, float]:
    """Return the 95 % interval of the share sum(hits) / sum(tries).

    If all or no tries hit, all resamples are equal, so the interval is Wilson's, with the units as trials.
    """
    units = len(tries)
    share = sum(hits) / sum(tries)
    beyond = Z**2 / (units + Z**2)
    if share == 0:
        return 0.0, beyond
    if share == 1:
        return 1 - beyond, 1.0
    return ratio_interval(hits, tries)

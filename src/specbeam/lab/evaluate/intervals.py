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
    """Return the 95 % interval of the share sum(hits) / sum(tries); `edge_interval` if all or no tries hit."""
    share = sum(hits) / sum(tries)
    return edge_interval(share == 1, len(tries)) if share in (0, 1) else ratio_interval(hits, tries)


def edge_interval(is_all: bool, units: int) -> tuple[float, float]:
    """Return the 95 % interval of a share that was 1 or 0 in each of the units, where all resamples are equal.

    It is Wilson's, with the units as trials. There it is one division, so scipy, which has it too, is a package of the
    tests only; they compare the two.

    Args:
        is_all: whether the share was 1.
    """
    beyond = Z**2 / (units + Z**2)
    return (1 - beyond, 1.0) if is_all else (0.0, beyond)

"""Confidence intervals of quotients of sums, by bootstrap over the units that were drawn: prompts, not tokens."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

RESAMPLES = 2000


def ratio_interval(
    above: Sequence[float] | Float64[np.ndarray, " n"], below: Sequence[float] | Float64[np.ndarray, " n"]
) -> tuple[float, float]:
    """95 % interval of sum(above) / sum(below) over n units that are drawn together. With one unit it is a point."""
    table = np.column_stack([np.asarray(above, dtype=float), np.asarray(below, dtype=float)])
    rng = np.random.default_rng(0)
    sums = np.stack([table[rng.integers(0, len(table), len(table))].sum(0) for _ in range(RESAMPLES)])
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])
    return float(low), float(high)

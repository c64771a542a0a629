"""Reductions over the vocabulary: logsumexp and condition of rows of logits, and log-probabilities."""

from typing import Any

import numpy as np

from specbeam.core.compiling.sums import INF_RANK, MINUS_INF_RANK, exponentials, extremes
from specbeam.core.compiling.sums import log_norm as log_norm_of_singles
from specbeam.core.compiling.sums import picked as place_of
from specbeam.core.steps import BLOCK, Array, compiled_as, step

__all__ = ["BLOCK", "INF_RANK", "MINUS_INF_RANK", "exponentials", "extremes", "log_norm", "log_sum", "place_of"]

# Conditions of logits: drawable; all -inf; some NaN or +inf. UNDECIDED: a law cannot be decided from lists of tokens.
SOUND, DEAD, BROKEN, UNDECIDED = range(4)


def log_norm(logits: Array) -> Array:
    """Return the logsumexp of each row, float64[rows]: -inf for rows of -inf, NaN for rows with NaN or +inf.

    Args:
        logits: float32 or float64[rows, vocab], contiguous. Sums are computed in the precision of the logits.
    """
    if logits.dtype == np.float32:
        return log_norm_of_singles(logits)
    return log_norm_of_doubles(logits)


@step
def log_norm_of_doubles(logits: Array) -> Array:
    """Return the logsumexp of each float64 row; see `log_norm`."""
    norms = np.empty(len(logits))
    for row in range(len(logits)):
        top = -np.inf
        broken = False
        for value in logits[row]:
            broken |= not value < np.inf
            top = max(top, value)
        if broken:
            norms[row] = np.nan
        elif top == -np.inf:
            norms[row] = -np.inf
        else:
            total = 0.0
            for value in logits[row]:
                total += np.exp(value - top)
            norms[row] = top + np.log(total)
    return norms


@compiled_as(log_norm)
def _by_precision(logits: Any) -> Any:
    chosen = log_norm_of_singles if str(logits.dtype) == "float32" else log_norm_of_doubles
    return lambda logits: chosen(logits)


def condition_of_row(row: Array) -> int:
    """Return the condition of a row of logits: SOUND, DEAD (all -inf) or BROKEN (some NaN or +inf).

    Args:
        row: float32 or float64[vocab].
    """
    if row.dtype == np.float32:
        return condition_of_singles(row)
    return condition_of_doubles(row)


@step
def condition_of_singles(row: Array) -> int:
    """Return the condition of a float32 row, see `condition_of_row`. Compares bits with vector instructions."""
    least, most = extremes(row.view(np.int32))
    if least < MINUS_INF_RANK or most >= INF_RANK:
        return BROKEN
    return SOUND if most > MINUS_INF_RANK else DEAD


@step
def condition_of_doubles(row: Array) -> int:
    """Return the condition of a float64 row, see `condition_of_row`."""
    condition = DEAD
    for value in row:
        if not value < np.inf:
            return BROKEN
        if value > -np.inf:
            condition = SOUND
    return condition


@compiled_as(condition_of_row)
def _condition_by_precision(row: Any) -> Any:
    chosen = condition_of_singles if str(row.dtype) == "float32" else condition_of_doubles
    return lambda row: chosen(row)


@step
def condition_of_norm(norm: float) -> int:
    """Return whether a row with this logsumexp is SOUND, DEAD or BROKEN; see `log_norm`."""
    if not norm < np.inf:
        return BROKEN
    return SOUND if norm > -np.inf else DEAD


@step
def norms_left_out(logits: Array) -> Array:
    """Return norms for unnormalised rows, float64[rows]: 0; -inf for rows of -inf; NaN for rows with NaN or +inf."""
    norms = np.zeros(len(logits))
    for row in range(len(logits)):
        condition = condition_of_row(logits[row])
        if condition == DEAD:
            norms[row] = -np.inf
        elif condition == BROKEN:
            norms[row] = np.nan
    return norms


@step
def log_probabilities(rows: Array) -> Array:
    """Return rows of logits minus their logsumexp, with their dtype; rows of -inf or with NaN or +inf are unchanged."""
    norms = log_norm(rows)
    found = np.empty_like(rows)
    for row in range(len(rows)):
        norm = norms[row] if norms[row] > -np.inf and norms[row] < np.inf else 0.0
        for token in range(rows.shape[1]):
            found[row, token] = np.float64(rows[row, token]) - norm
    return found


@step
def log_sum(values: Array) -> float:
    """Return the logsumexp of values, float64[n]; -inf if all of them are -inf."""
    top = -np.inf
    for value in values:
        top = max(top, value)
    if top == -np.inf:
        return top
    total = 0.0
    for value in values:
        total += np.exp(value - top)
    return top + np.log(total)

"""Sums whose order no compiler chooses: the compiled form gives the same bits as the source."""

import numpy as np
import pytest

from specbeam.core.compiling.compiler import Array, compiled
from specbeam.core.compiling.ordered_sums import sum_of, sum_of_squares


@compiled
def _compiled_sums(x: Array) -> tuple[float, float]:
    return sum_of(x), sum_of_squares(x)


@pytest.mark.parametrize("length", [0, 1, 5, 31, 32, 33, 63, 96, 100, 257, 1000])
def test_compiled_sums_have_the_bits_of_the_source(length: int) -> None:
    x = (100 * np.random.default_rng(length).standard_normal(length)).astype(np.float32)
    assert _compiled_sums(x) == (sum_of(x), sum_of_squares(x))
    assert sum_of(x) == pytest.approx(x.sum(dtype=np.float64), abs=length * 1e-3)


def test_zeros_at_the_end_do_not_change_a_sum() -> None:
    x = np.random.default_rng(0).standard_normal(70).astype(np.float32)
    longer = np.concatenate([x, np.zeros(58, dtype=np.float32)])
    assert _compiled_sums(longer) == _compiled_sums(x)


def test_numbers_behind_the_end_are_not_read() -> None:
    room = np.full(64, np.nan, dtype=np.float32)
    room[:33] = 1
    assert _compiled_sums(room[:33]) == (33, 33)

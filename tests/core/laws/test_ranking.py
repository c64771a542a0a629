"""Rankings of pairs: the largest of them, with those that equal the last."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbeam.core.laws.ranking import (
    WHOLE_ROWS,
    ascending,
    largest,
    pairs_of_best_value,
    rank_pairs,
    sorted_places,
)
from specbeam.core.laws.warp import best_places
from tests.oracles import noise
from tests.support.steps import source_of_steps


def largest_plainly(x, near, count):
    """All pairs above -inf that reach the value of rank `count`, best first; equal ones keep their order."""
    values = (x + near[:, None]).ravel()
    order = np.argsort(-values, kind="stable")
    edge = values[order[min(count, len(order)) - 1]]
    return [pair for pair in order.tolist() if values[pair] >= edge and values[pair] > -np.inf]


@given(seed=st.integers(0, 10**6), count=st.integers(1, 9), values=st.sampled_from([2, 5, 1000]))
def test_the_largest_come_with_all_that_equal_the_last(seed, count, values):
    x = np.random.default_rng(seed).integers(0, values, (2, 20)).astype(np.float32)
    x[0, :15] = -np.inf
    near = np.zeros(2, dtype=np.float32)
    expected = largest_plainly(x, near, count)
    assert largest(x, near, count).tolist() == expected
    with source_of_steps():
        assert largest(x, near, count).tolist() == expected


@pytest.mark.parametrize("kind", ["spread", "equal", "far", "banned"])
@pytest.mark.parametrize("count", [1, 100, 1500, 2400, 5000])
def test_long_rankings_are_those_of_a_sort(kind, count):
    rng = np.random.default_rng(count)
    x = rng.normal(0, 3, (3, 800)).astype(np.float32)
    if kind == "equal":
        x = x.round()
    if kind == "far":
        x *= 1e4
    if kind == "banned":
        x[:, 100:] = -np.inf
    near = np.array([0.0, -2.5, 0.25], dtype=np.float32)
    assert largest(x, near, count).tolist() == largest_plainly(x, near, count)


def test_of_nothing_nothing_is_largest():
    x = np.full((2, 5), -np.inf, dtype=np.float32)
    near = np.zeros(2, dtype=np.float32)
    assert largest(x, near, 3).tolist() == []
    assert largest(x, near, 100).tolist() == []
    assert largest(x, near, 0).tolist() == []


@given(seed=st.integers(0, 10**6), size=st.integers(0, 70), values=st.sampled_from([2, 1000]))
def test_sorting_keeps_the_order_of_equals(seed, size, values):
    x = np.random.default_rng(seed).integers(0, values, size).astype(np.float64)
    assert sorted_places(x).tolist() == np.argsort(-x, kind="stable").tolist()


@pytest.mark.parametrize("run", [ascending, getattr(ascending, "py_func", ascending)])
def test_whole_numbers_are_sorted_upwards_whichever_are_equal_and_stay_where_they_were_given(run):
    rng = np.random.default_rng(5)
    for size in (0, 1, 2, 3, 4, 7, 8, 100):
        for most in (2, 1000):
            numbers = rng.integers(-most, most, size)
            given_ones = numbers.tolist()
            assert run(numbers).tolist() == sorted(given_ones)
            assert numbers.tolist() == given_ones


@given(seed=st.integers(0, 10**6), count=st.integers(1, 9), noisy=st.booleans())
def test_given_pairs_are_ranked_as_the_dense_law_ranks_them(seed, count, noisy):
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, 3, (3, 20)).astype(np.float32)
    shift = rng.normal(-5, 2, 3)
    log_counts = np.log(rng.integers(1, 4, 3))
    keys = rng.integers(0, 2**63, 3 if noisy else 0, dtype=np.uint64)
    pairs = np.sort(rng.choice(60, 12, replace=False))
    values = (rows.astype(np.float64) + shift[:, None]) / 0.7 + log_counts[:, None]
    if noisy:
        values = values + noise.gumbel_of_all(keys, 20)
    order = np.argsort(-values.ravel()[pairs], kind="stable")[:count]
    assert rank_pairs(pairs, rows, WHOLE_ROWS, shift, 0.7, log_counts, keys, count)[0].tolist() == pairs[order].tolist()


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("count", [1, 100, 2000, 5000])
def test_long_rankings_of_pairs_are_those_of_a_sort(count, noisy):
    rng = np.random.default_rng(count)
    rows = rng.normal(0, 1, (4, 700)).round(1).astype(np.float32)  # with many equal ones
    rows[0, 50:] = -np.inf
    shift = np.array([-0.5, -1.0, -1.0, 0.0])
    log_counts = np.log(np.array([1.0, 2.0, 2.0, 1.0]))
    keys = rng.integers(0, 2**63, 4 if noisy else 0, dtype=np.uint64)
    among = np.array([True, True, True, False])
    values = (rows.astype(np.float64) + shift[:, None]) / 0.7 + log_counts[:, None]
    if noisy:
        values = values + noise.gumbel_of_all(keys, 700)
    values[3] = -np.inf
    order = np.argsort(-values.ravel(), kind="stable")
    expected = [pair for pair in order.tolist() if values.ravel()[pair] > -np.inf][:count]
    pairs, found = pairs_of_best_value(rows, WHOLE_ROWS, shift, 0.7, log_counts, keys, among, count)
    assert pairs.tolist() == expected
    assert found == pytest.approx(values.ravel()[expected], rel=1e-12)
    given = rng.permutation(expected).astype(np.int64)
    assert rank_pairs(given, rows, WHOLE_ROWS, shift, 0.7, log_counts, keys, count)[0].tolist() == expected


def test_best_places_leave_out_what_has_no_odds():
    values = np.array([0.5, -np.inf, 2.0, 0.5])
    assert best_places(values, 2).tolist() == [2, 0]
    assert best_places(values, 4).tolist() == [2, 0, 3]
    assert best_places(values, 0).tolist() == []

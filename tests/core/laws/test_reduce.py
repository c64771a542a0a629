"""Sums over the vocabulary: norms of rows of logits, and draws from laws."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbeam.core.compiling.sums import exponentials, picked_by_blocks
from specbeam.core.laws.reduce import log_norm, log_sum, norms_left_out, place_of
from tests.support.steps import needs_numba, source_of_steps

DTYPES = st.sampled_from([np.float32, np.float64])


@needs_numba
@given(
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.01, 3.0, 300.0]),
    banned=st.sampled_from([0.0, 0.9]),
    dtype=DTYPES,
)
def test_norms_are_those_of_a_float64_sum(seed, spread, banned, dtype):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (3, 1000)).astype(dtype)
    logits[:, 1:][rng.random((3, 999)) < banned] = -np.inf
    logits[2] = -np.inf
    expected = np.logaddexp.reduce(logits[:2].astype(np.float64), axis=1)
    found = log_norm(logits)
    close = 1e-6 if dtype is np.float32 else 1e-12
    assert found[:2] == pytest.approx(expected, abs=close, rel=close)
    assert found[2] == -np.inf


@needs_numba
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 2, 63, 64, 65, 200]),
    where=st.integers(0, 10**6),
    dtype=DTYPES,
)
def test_norms_see_what_is_no_logit(seed, vocab, where, dtype):
    logits = np.random.default_rng(seed).normal(0, 3, (6, vocab)).astype(dtype)
    expected = np.logaddexp.reduce(logits.astype(np.float64), axis=1)
    logits[1:4, where % vocab] = np.nan, -dtype(np.nan), np.inf
    logits[4] = -np.inf
    found = log_norm(logits)
    assert np.isnan(found[1:4]).all()
    assert found[4] == -np.inf
    assert found[[0, 5]] == pytest.approx(expected[[0, 5]], abs=1e-6, rel=1e-6)


def test_norms_of_the_source_are_those_of_a_float64_sum():
    logits = np.random.default_rng(0).normal(0, 3, (4, 130)).astype(np.float32)
    logits[1, 5:] = -np.inf
    logits[2] = -np.inf
    logits[3, 7] = np.nan
    with np.errstate(invalid="ignore"):
        expected = np.logaddexp.reduce(logits.astype(np.float64), axis=1)
    for dtype in (np.float32, np.float64):
        with source_of_steps():
            found = log_norm(logits.astype(dtype))
        assert found[:3] == pytest.approx(expected[:3], abs=1e-6)
        assert np.isnan(found[3])


def test_a_sum_of_logs_is_that_of_numpy():
    values = np.array([-np.inf, 0.5, -3.0, 700.0, 699.0])
    assert log_sum(values) == pytest.approx(np.logaddexp.reduce(values))
    assert log_sum(values[:1]) == -np.inf


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_a_law_is_picked_from_by_its_cumulated_sums(size):
    rng = np.random.default_rng(size)
    for number in range(100):
        law = rng.dirichlet(np.full(size, 0.3)) * rng.choice([1.0, 0.1])
        law[rng.random(size) < 0.5] = 0.0
        law[rng.integers(size)] += 1e-3
        edges = np.cumsum(law)
        uniform = rng.random()
        expected = np.searchsorted(edges, uniform * edges[-1], side="right")
        for way in (picked_by_blocks, place_of):  # in blocks, and whatever its length asks for
            assert way(law, uniform) == expected, number
            assert law[way(law, 0.0)] > 0
            assert way(law, 1.0) == np.flatnonzero(law)[-1]


@given(
    numbers=st.lists(
        st.one_of(st.floats(-750, 700), st.just(-np.inf), st.floats(-1e-9, 1e-9)), min_size=1, max_size=70
    ),
    way=st.sampled_from(["compiled", "source"]),
)
def test_exponentials_are_those_of_the_c_library(numbers, way):
    x = np.array(numbers)
    with source_of_steps() if way == "source" else contextlib.nullcontext():
        found = exponentials(x)
    expected = np.array([math.exp(number) for number in numbers])
    assert found == pytest.approx(np.where(x < -708, 0.0, expected), rel=1e-15, abs=0)
    assert (found[x < -708] == 0).all()


@needs_numba
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("compiles", [True, False])
def test_norms_that_are_left_out_show_which_rows_are_no_logits(dtype, compiles):
    rows = np.zeros((6, 70), dtype=dtype)
    rows[1] = -np.inf
    rows[2, 1:] = -np.inf
    rows[3, 69] = np.nan
    rows[4, 0] = -np.nan
    rows[5, 64] = np.inf
    with contextlib.nullcontext() if compiles else source_of_steps():
        found = norms_left_out(rows)
        norms = log_norm(rows)
    assert found[:3].tolist() == [0.0, -np.inf, 0.0]
    assert np.isnan(found[3:]).all()
    assert np.array_equal(np.isfinite(found), np.isfinite(norms))

"""Truncations of one row: what is kept is what transformers' own warpers keep."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TypicalLogitsWarper

from specbeam.core.beams import Beams
from specbeam.core.laws.joint import all_pairs, odds_among, odds_at
from specbeam.core.laws.ranking import NO_TRUNCATION, Truncation
from specbeam.core.laws.rows import RowLaw
from specbeam.core.laws.warp import Warp, dense_logp, law_of_beams, row_laws, truncation_of
from specbeam.errors import BrokenLaw, NotSupported
from tests.oracles.laws import log_softmax, warped, warpers_of
from tests.support.steps import source_of_steps

TRUNCATIONS = st.builds(
    Truncation,
    temperature=st.sampled_from([1.0, 0.3, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    least=st.sampled_from([1, 2]),
    by_row=st.just(False),
    normalise=st.just(True),
)


def kept_of(row, truncation):
    """Tokens that a truncation keeps of a row of logits."""
    (law,) = row_laws(row[None], Warp(truncation=truncation))
    return np.flatnonzero(law.spread().logp > -np.inf)


def expected_logp(row, truncation):
    """Log-law of a row, by transformers' warpers in the precision of the row."""
    left = torch.from_numpy(row[None].copy())
    for warper in warpers_of(truncation) or []:
        left = warper(torch.zeros(1, 0, dtype=torch.long), left)
    return log_softmax(left.numpy())[0]


def check_row(row, truncation, close):
    logp = dense_logp(row[None], Warp(truncation=truncation))[0]
    expected = expected_logp(row, truncation)
    assert np.flatnonzero(logp > -np.inf).tolist() == np.flatnonzero(expected > -np.inf).tolist()
    assert np.abs(np.exp(logp) - np.exp(expected)).max() < close


@settings(max_examples=300)
@given(truncation=TRUNCATIONS, seed=st.integers(0, 10**6))
def test_a_truncation_is_that_of_transformers(truncation, seed):
    row = np.random.default_rng(seed).normal(0, 3, 300).astype(np.float32)
    # Logits of up to 12 divided by 0.3 are rounded to a float32 of up to 2^-24 * 40 beside the quotient, on both sides.
    check_row(row, truncation, close=5e-6)
    again, others = truncation_of(warpers_of(truncation) or [])
    assert others == ()
    assert kept_of(row, again).tolist() == kept_of(row, truncation).tolist()


@settings(max_examples=60)
@given(truncation=TRUNCATIONS, seed=st.integers(0, 10**6))
def test_a_truncation_of_float64_rows_is_that_of_transformers(truncation, seed):
    row = np.random.default_rng(seed).normal(0, 3, 300)
    with source_of_steps():
        check_row(row, truncation, close=1e-12)


def test_equal_values_are_kept_together():
    row = np.array([1.0] * 30 + [0.0] * 30, dtype=np.float32)
    assert len(kept_of(row, Truncation(top_k=3))) == 30
    assert len(kept_of(row, Truncation(top_k=31))) == 60


def test_of_equal_values_a_least_number_keeps_all_by_min_p_and_no_more_by_top_p():
    row = np.array([-5, 0, 3, 0, 0, -5], dtype=np.float32)
    assert kept_of(row, Truncation(min_p=0.5)).tolist() == [2]
    assert kept_of(row, Truncation(min_p=0.5, least=2)).tolist() == [1, 2, 3, 4]
    assert kept_of(row, Truncation(top_p=0.5, least=2)).tolist() == [1, 2]


def test_other_warpers_of_transformers_come_last():
    row = np.random.default_rng(0).normal(0, 3, 300).astype(np.float32)
    typical = TypicalLogitsWarper(0.6)
    truncation, others = truncation_of([*warpers_of(Truncation(0.7, top_k=50)), typical])
    assert truncation == Truncation(0.7, top_k=50)
    assert others == (typical,)
    nothing = torch.zeros(1, 0, dtype=torch.long)
    cut = torch.from_numpy(warped(log_softmax(row[None])[0], truncation))
    expected = typical(nothing, cut[None].clone())[0].softmax(-1).numpy()
    assert 0 < np.count_nonzero(expected) < 50
    warp = Warp(truncation=truncation, others=others)
    law = law_of_beams(row[None], Beams.start(0, 0), warp)
    pairs = all_pairs(law)
    assert pairs.tolist() == np.flatnonzero(expected).tolist()
    assert odds_among(law, pairs) == pytest.approx(expected[pairs], abs=1e-6)
    assert odds_at(law, pairs) == pytest.approx(expected[pairs], abs=1e-6)
    assert np.exp(dense_logp(row[None], warp)[0]) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(NotSupported, match="put it first"):
        truncation_of([typical, *warpers_of(Truncation(0.7))])


@settings(max_examples=300)
@given(
    truncation=TRUNCATIONS,
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 20, 64, 3000]),
    banned=st.sampled_from([0.0, 0.3, 1.0]),
    tied=st.booleans(),
)
def test_a_truncated_row_is_what_transformers_leaves_of_it(truncation, seed, vocab, banned, tied):
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, 3, (3, vocab)).astype(np.float32)
    if tied:  # equal odds must not add up to the mass that is asked for: rounding would decide
        rows = rows.round()
        truncation = truncation._replace(top_p=min(1.0, truncation.top_p * 1.0137), least=1)
    rows[rng.random((3, vocab)) < banned] = -np.inf
    for row, law in zip(rows, row_laws(rows, Warp(truncation=truncation)), strict=True):
        assert (law is None) == (row == -np.inf).all()
        if law is None:
            continue
        expected = log_softmax(warped(row.astype(np.float64), truncation)[None])[0]
        found = law.spread().logp
        assert np.sort(found) == pytest.approx(np.sort(expected), abs=1e-5)
        if truncation.cuts:
            assert (np.diff(law.tokens) > 0).all()
        if truncation.cuts and not tied:
            assert law.tokens.tolist() == np.flatnonzero(expected > -np.inf).tolist()


@pytest.mark.parametrize("cuts", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_row_that_is_no_law_is_refused(cuts, wrong):
    rows = np.zeros((2, 200), dtype=np.float32)
    rows[1, 77] = wrong
    with pytest.raises(BrokenLaw, match="NaN" if np.isnan(wrong) else r"\+inf"):
        row_laws(rows, Warp(truncation=Truncation(**cuts)))


@pytest.mark.parametrize("size", [2, 64, 100, 600, 3000])
@pytest.mark.parametrize("top_p", [0.5, 0.99])
def test_a_nearly_flat_law_is_ranked_as_far_as_it_has_to_be(size, top_p):
    row = np.linspace(0, 1e-2, size).astype(np.float32)
    expected = warped(row.astype(np.float64), Truncation(top_p=top_p))
    assert kept_of(row, Truncation(top_p=top_p)).tolist() == np.flatnonzero(expected > -np.inf).tolist()
    assert len(kept_of(row, Truncation(min_p=0.5))) == size


def test_a_law_on_few_tokens_is_the_law_on_all():
    law = RowLaw(np.array([1, 4, 6]), np.log([0.25, 0.5, 0.25]), 8)
    every = np.arange(8)
    assert law.at(every) == pytest.approx(law.spread().at(every))
    assert law.spread().at(every) == pytest.approx([0, 0.25, 0, 0, 0.5, 0, 0.25, 0])
    assert [law.place(token) for token in range(8)] == [-1, 0, -1, -1, 1, -1, 2, -1]
    assert law.tokens_at([2, 0]).tolist() == [6, 1]
    assert [law.token(place) for place in range(3)] == [1, 4, 6]
    assert [law.spread().place(token) for token in range(8)] == list(range(8))
    assert law.possible
    nothing = RowLaw(np.zeros(0, dtype=np.int64), np.zeros(0), 8)
    assert nothing.at(every).tolist() == [0.0] * 8
    assert not nothing.possible


def test_at_temperature_zero_nothing_is_cut():
    row = np.random.default_rng(1).normal(0, 3, (1, 50)).astype(np.float32)
    warp = Warp(truncation=Truncation(0.7, top_k=2), greedy=True)
    assert warp.cut == NO_TRUNCATION
    assert dense_logp(row, warp) == pytest.approx(log_softmax(row), abs=1e-5)

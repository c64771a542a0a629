"""The quick ways through a law against the plain ones: truncation, noise, best pairs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import TypicalLogitsWarper

from specbeam import kernels
from specbeam.dice import coarse, gumbel, gumbel_at
from specbeam.draft.tree import first_in_race
from specbeam.errors import BrokenLaw, NotSupported
from specbeam.forest import Row
from specbeam.kernels import noise
from specbeam.laws import JointLaw, log_norm
from specbeam.probs import Warp, best, cut, joint_law, row_logp
from specbeam.laws.truncation import Truncation

TRUNCATIONS = st.builds(
    Truncation,
    temperature=st.sampled_from([1.0, 0.3, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    least=st.sampled_from([1, 2]),
)
COMPILED = st.booleans() if kernels.AVAILABLE else st.just(False)
NO_PATHS = lambda: np.zeros((1, 1), dtype=np.int64)  # noqa: E731


def random_law(seed, beams, vocab, truncation, dtype, banned=0.0, repeats=False):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (beams, vocab))).to(dtype)
    logits[torch.from_numpy(rng.random((beams, vocab)) < banned)] = -torch.inf
    logits[-1, -2:] = 1.0  # something is always left
    counts = rng.integers(1, 4, beams) if repeats else np.ones(beams, dtype=np.int64)
    return joint_law(logits, rng.normal(-20, 5, beams), counts, Warp(truncation=truncation), NO_PATHS)


@settings(max_examples=300)
@given(truncation=TRUNCATIONS, seed=st.integers(0, 10**6), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_truncation_is_that_of_transformers(truncation, seed, dtype):
    x = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (1, 300))).to(dtype)
    processors = truncation.processors()
    expected = processors(torch.zeros(1, 0, dtype=torch.long), x.clone()) if processors else x
    scaled = (x / truncation.temperature)[0]
    kept = truncation.support(scaled, float(scaled.double().logsumexp(0)))
    assert sorted(kept.tolist()) == np.flatnonzero(expected[0] > -torch.inf).tolist()
    logp = row_logp(x, Warp(truncation=truncation), NO_PATHS)
    assert np.abs(np.exp(logp) - expected.double().softmax(-1).numpy()).max() < (
        1e-12 if dtype is torch.float64 else 1e-6
    )
    again = Truncation.of(processors or [])
    assert again.support(scaled, float(scaled.double().logsumexp(0))).tolist() == kept.tolist()


def test_equal_values_are_kept_together():
    x = torch.tensor([1.0] * 30 + [0.0] * 30)
    assert len(Truncation(top_k=3).support(x, float(x.logsumexp(0)))) == 30
    assert len(Truncation(top_k=31).support(x, float(x.logsumexp(0)))) == 60


def test_other_warpers_of_transformers_come_last():
    x = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (1, 300)))
    truncation = Truncation.of([*Truncation(0.7, top_k=50).processors(), TypicalLogitsWarper(0.6)])
    assert truncation.top_k == 50
    expected = truncation.processors()(torch.zeros(1, 0, dtype=torch.long), x.clone())
    scaled = (x / 0.7)[0]
    kept = truncation.support(scaled, float(scaled.logsumexp(0)))
    assert sorted(kept.tolist()) == np.flatnonzero(expected[0] > -torch.inf).tolist()
    with pytest.raises(NotSupported, match="put it first"):
        Truncation.of([TypicalLogitsWarper(0.6), *Truncation(0.7).processors()])


def test_noise_is_gumbel_and_independent_between_paths_and_tokens():
    keys = np.random.default_rng(1).integers(0, 2**63, 300, dtype=np.uint64)
    noise = gumbel(keys, 200)
    assert stats.kstest(noise.ravel(), stats.gumbel_r.cdf).pvalue > 1e-3
    uniform = np.exp(-np.exp(-noise))
    for other in (np.roll(uniform, 1, 0), np.roll(uniform, 1, 1)):
        assert abs(np.corrcoef(uniform.ravel(), other.ravel())[0, 1]) < 4 / np.sqrt(uniform.size)
    neighbours = gumbel(np.arange(300, dtype=np.uint64), 200)  # keys that differ in their last bits only
    assert stats.kstest(neighbours.ravel(), stats.gumbel_r.cdf).pvalue > 1e-3
    assert abs(np.corrcoef(neighbours[:-1].ravel(), neighbours[1:].ravel())[0, 1]) < 4 / np.sqrt(uniform.size)
    cells, _, _ = np.histogram2d(uniform[:, :-1].ravel(), uniform[:, 1:].ravel(), bins=16, range=[[0, 1], [0, 1]])
    assert stats.chisquare(cells.ravel()).pvalue > 1e-3


def test_the_same_noise_on_every_machine():
    keys = np.array([0, 1, 2**64 - 1], dtype=np.uint64)
    assert coarse(keys, 2).tolist() == FROZEN
    assert np.array_equal(gumbel(keys, 5)[2], gumbel_at(keys[[2] * 5], np.arange(5)))


FROZEN = [[2993088481, 3451807066], [3682614598, 992318866], [3669821167, 1021858111]]


def test_the_coarse_bits_bound_the_noise():
    keys = np.random.default_rng(2).integers(0, 2**63, 100, dtype=np.uint64)
    with np.errstate(divide="ignore"):
        assert (gumbel(keys, 1000) <= -np.log(coarse(keys, 1000) * 2.0**-32)).all()


@settings(max_examples=200)
@given(
    truncation=TRUNCATIONS,
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    beams=st.integers(1, 5),
    vocab=st.sampled_from([3, 50, 700]),
    count=st.integers(1, 12),
    banned=st.sampled_from([0.0, 0.5, 0.99]),
    noisy=st.booleans(),
    compiled=COMPILED,
)
def test_best_pairs_are_those_of_the_dense_law(truncation, seed, dtype, beams, vocab, count, banned, noisy, compiled):
    law = random_law(seed, beams, vocab, truncation, dtype, banned if vocab > 10 else 0.0, repeats=True)
    law = replace(law, compiled=compiled)
    keys = np.random.default_rng(seed).integers(0, 2**63, beams, dtype=np.uint64)
    noise = gumbel(keys, vocab) if noisy else 0.0
    expected = best((law.logp + noise).ravel(), count)
    found = law.best(count, keys if noisy else None, lambda: coarse(keys, vocab))
    assert found.tolist() == expected.tolist()
    some = np.arange(beams) % 2 == 0
    expected = best(np.where(some[:, None], law.logp + noise, -np.inf).ravel(), count)
    assert law.best(count, keys if noisy else None, lambda: coarse(keys, vocab), some).tolist() == expected.tolist()


@settings(max_examples=200)
@given(
    truncation=TRUNCATIONS,
    seed=st.integers(0, 10**6),
    beams=st.integers(1, 5),
    vocab=st.sampled_from([3, 50, 700]),
    count=st.integers(1, 6),
    width=st.integers(0, 12),
    banned=st.sampled_from([0.0, 0.5, 0.99]),
    noisy=st.booleans(),
    compiled=COMPILED,
)
def test_core_and_halo(truncation, seed, beams, vocab, count, width, banned, noisy, compiled):
    """The core is what the law takes among some beams; the halo are the best others, without noise where the law cuts."""
    law = random_law(seed, beams, vocab, truncation, torch.float32, banned if vocab > 10 else 0.0, repeats=True)
    law = replace(law, compiled=compiled)
    keys = np.random.default_rng(seed).integers(0, 2**63, beams, dtype=np.uint64)
    given_keys, coarsely = (keys if noisy else None), lambda: coarse(keys, vocab)
    some = np.arange(beams) % 2 == 0
    pairs, core = law.core_and_halo(count, width, given_keys, coarsely, some)
    assert pairs[:core].tolist() == law.best(count, given_keys, coarsely, some).tolist()
    halo = law.uncut if truncation.cuts else law
    others = halo.best(beams * vocab, None if truncation.cuts else given_keys, coarsely).tolist()
    looked = others[: max(width, 0 if truncation.cuts else count)]
    expected = [pair for pair in looked if pair not in pairs[:core]][: max(width - core, 0)]
    assert pairs[core:].tolist() == expected


@settings(max_examples=100)
@given(
    truncation=TRUNCATIONS,
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    compiled=COMPILED,
)
def test_odds_of_pairs_are_those_of_transformers_on_the_flattened_joint(truncation, seed, dtype, compiled):
    law = replace(random_law(seed, 3, 90, truncation, dtype, repeats=True), compiled=compiled)
    row = torch.from_numpy(law.logj.reshape(1, -1).copy())
    processors = truncation.processors()
    warped = processors(torch.zeros(1, 0, dtype=torch.long), row) if processors else row
    expected = (warped.reshape(3, 90).numpy() + np.log(law.counts)[:, None]).reshape(-1)
    expected = torch.from_numpy(expected).softmax(-1).numpy().reshape(3, 90)
    close = 1e-12 if dtype is torch.float64 else 1e-5
    assert law.p == pytest.approx(expected, abs=close)
    rows, tokens = np.divmod(np.arange(270), 90)
    assert law.odds(rows, tokens) == pytest.approx(expected.ravel(), abs=close)
    assert (law.odds(np.full(90, -1), np.arange(90)) == 0).all()
    assert law.size == np.count_nonzero(expected)
    pairs = law.head()
    odds = np.exp(law.logp_at(pairs))
    assert odds.sum() > 0.99
    assert odds == pytest.approx(law.p.ravel()[pairs], abs=close)


needs_numba = pytest.mark.skipif(not kernels.AVAILABLE, reason="numba is not installed")


@needs_numba
def test_compiled_noise_is_the_noise_of_every_machine():
    keys = np.random.default_rng(3).integers(0, 2**63, 50, dtype=np.uint64)
    for key in (np.uint64(0), np.uint64(2**64 - 1), *keys):
        mine = [noise.gumbel(key, token) for token in range(100)]
        assert mine == pytest.approx(gumbel(np.array([key]), 100)[0], rel=1e-14)
        bound = np.empty(100, dtype=np.float32)
        noise.noise_bounds(key, bound)
        assert (bound >= np.array(mine) - 1e-4).all()
        assert (bound <= np.array(mine) + 40).all()


@needs_numba
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.01, 3.0, 300.0]), banned=st.sampled_from([0.0, 0.9]))
def test_compiled_norms_are_those_of_a_float64_sum(seed, spread, banned):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (3, 1000)).astype(np.float32)
    logits[:, 1:][rng.random((3, 999)) < banned] = -np.inf
    logits[2] = -np.inf
    expected = np.logaddexp.reduce(logits[:2].astype(np.float64), axis=1)
    found = kernels.log_norm(logits)
    assert found[:2] == pytest.approx(expected, abs=1e-6, rel=1e-6)
    assert found[2] == -np.inf


@needs_numba
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from([1, 2, 63, 64, 65, 200]), where=st.integers(0, 10**6))
def test_compiled_sums_see_what_is_no_logit(seed, vocab, where):
    logits = np.random.default_rng(seed).normal(0, 3, (6, vocab)).astype(np.float32)
    expected = np.logaddexp.reduce(logits.astype(np.float64), axis=1)
    logits[1:4, where % vocab] = np.nan, -np.float32(np.nan), np.inf
    logits[4] = -np.inf
    found = kernels.log_norm(logits)
    assert np.isnan(found[1:4]).all()
    assert found[4] == -np.inf
    assert found[[0, 5]] == pytest.approx(expected[[0, 5]], abs=1e-6, rel=1e-6)


@needs_numba
@settings(max_examples=300, deadline=None)
@given(
    truncation=TRUNCATIONS,
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 20, 64, 3000]),
    banned=st.sampled_from([0.0, 0.3, 1.0]),
    tied=st.booleans(),
)
def test_a_truncated_row_is_what_array_code_leaves_of_it(truncation, seed, vocab, banned, tied):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (3, vocab))).float()
    if tied:  # equal odds must not add up to the mass that is asked for: rounding would decide
        logits, truncation = logits.round(), replace(truncation, top_p=min(1.0, truncation.top_p * 1.0137))
    logits[torch.from_numpy(rng.random((3, vocab)) < banned)] = -torch.inf
    warp = Warp(truncation=truncation)
    for fast, plain in zip(cut(logits, warp, True), cut(logits, warp, False), strict=True):
        assert np.sort(fast.logp) == pytest.approx(np.sort(plain.logp), abs=1e-5)
        if truncation.cuts:
            assert (np.diff(fast.tokens) > 0).all()
        if truncation.cuts and not tied:
            assert fast.tokens.tolist() == plain.tokens.tolist()


@pytest.mark.parametrize("cuts", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_row_that_is_no_law_is_refused(cuts, wrong):
    logits = torch.zeros(2, 200)
    logits[1, 77] = wrong
    with pytest.raises(BrokenLaw):
        cut(logits, Warp(truncation=Truncation(**cuts)))


def test_a_law_on_few_tokens_is_the_law_on_all():
    row = Row(np.log([0.25, 0.5, 0.25]), 8, np.array([1, 4, 6]))
    every, none = np.arange(8), np.zeros(8, dtype=np.int64)
    assert row.at(every) == pytest.approx(row.spread().at(every))
    assert row.spread().at(every) == pytest.approx([0, 0.25, 0, 0, 0.5, 0, 0.25, 0])
    assert row.odds(none - 1, every).tolist() == [0.0] * 8
    assert [row.place(token) for token in range(8)] == [-1, 0, -1, -1, 1, -1, 2, -1]
    assert row.named([2, 0]) == [6, 1]
    assert Row(np.zeros(0), 8, np.zeros(0, dtype=np.int64)).at(every).tolist() == [0.0] * 8


@needs_numba
@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_a_long_law_is_picked_from_by_its_cumulated_sums(size):
    rng = np.random.default_rng(size)
    for number in range(100):
        law = rng.dirichlet(np.full(size, 0.3)) * rng.choice([1.0, 0.1])
        law[rng.random(size) < 0.5] = 0.0
        law[rng.integers(size)] += 1e-3
        edges, uniform = np.cumsum(law), rng.random()
        assert kernels.pick(law, uniform) == np.searchsorted(edges, uniform * edges[-1], side="right"), number
        assert law[kernels.pick(law, 0.0)] > 0
        assert kernels.pick(law, 1.0) == np.flatnonzero(law)[-1]


@pytest.mark.parametrize("size", [3, 70, 2000])
def test_the_first_in_a_race_are_those_of_largest_noisy_odds(size):
    rng = np.random.default_rng(size)
    for number in range(50):
        logp = np.log(rng.dirichlet(np.full(size, 0.1)) + 1e-300)
        logp[rng.random(size) < 0.2] = -np.inf
        u = rng.random(size)
        places, noise = first_in_race(Row(logp, size), u, 3)
        value = logp - np.log(-np.log(u))
        assert places.tolist() == sorted(best(value, 3).tolist()), number
        assert noise == pytest.approx(value[places] - logp[places])


@needs_numba
@given(seed=st.integers(0, 10**6), count=st.integers(1, 9), values=st.sampled_from([2, 5, 1000]))
def test_the_largest_come_with_all_that_equal_the_last(seed, count, values):
    x = np.random.default_rng(seed).integers(0, values, (2, 20)).astype(np.float32)
    x[0, :15] = -np.inf
    found = kernels.largest(x, np.zeros(2, dtype=np.float32), count)
    order = np.lexsort((np.arange(40), -x.ravel()))
    edge = x.ravel()[order[count - 1]]
    expected = [pair for pair in order.tolist() if x.ravel()[pair] >= edge and x.ravel()[pair] > -np.inf]
    assert found.tolist() == expected


def test_dead_rows_have_no_odds():
    logits = torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf]])
    law = JointLaw(logits, np.array([-1.0, -0.5]), log_norm(logits), np.ones(2, dtype=np.int64), Truncation())
    assert law.p[1].tolist() == [0, 0]
    assert law.p.sum() == pytest.approx(1)
    assert law.best(4).tolist() == [1, 0]


def test_beams_far_behind_still_have_their_place():
    """At a low temperature the odds of the second beam's tokens are below any float32, but two beams were asked for."""
    logits = torch.tensor([[30.0, 0.0, -1.0, -2.0]])
    law = JointLaw(logits, np.zeros(1), log_norm(logits), np.ones(1, dtype=np.int64), Truncation(0.1))
    assert law.best(3).tolist() == [0, 1, 2]
    keys = np.array([5], dtype=np.uint64)
    assert set(law.best(4, keys, lambda: coarse(keys, 4)).tolist()) == {0, 1, 2, 3}

"""Joint laws of (beam, token) pairs, and what a layer goes on with: steps against the law on whole vocabularies."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbeam.core.beams import Beams
from specbeam.core.laws.joint import (
    all_pairs,
    choose,
    condition_of,
    core_and_extra,
    head_of,
    joint_law,
    likeliest_pairs,
    likelihoods_at,
    odds_among,
    odds_at,
    support_of,
)
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.reduce import BROKEN, DEAD, SOUND
from specbeam.core.laws.warp import Warp, law_of_beams
from specbeam.core.ranked import whole_rows
from specbeam.errors import BrokenLaw, DeadEnd
from tests.core.laws.test_truncation import TRUNCATIONS
from tests.oracles import laws as plain
from tests.oracles import noise
from tests.support.steps import source_of_steps

EOS = np.array([2, 40])
NO_KEYS = np.zeros(0, dtype=np.uint64)
STEPS = ("compiled", "source")  # the source runs on float64 rows of few tokens


def running(way):
    """Let steps run compiled, or as their source."""
    return source_of_steps() if way == "source" else contextlib.nullcontext()


class Example:
    """Random beams and their rows."""

    def __init__(self, seed, beams, vocab, truncation, banned=0.0, dtype=np.float32):
        rng = np.random.default_rng(seed)
        self.vocab = vocab
        self.truncation = truncation
        self.rows = rng.normal(0, 3, (beams, vocab)).astype(dtype)
        self.rows[rng.random((beams, vocab)) < banned] = -np.inf
        self.rows[-1, -2:] = 1.0, 1.5  # something is always left, and no values are equal
        self.scores = rng.normal(-20, 5, beams)
        self.counts = rng.integers(1, 4, beams)
        self.keys = rng.integers(0, 2**63, beams, dtype=np.uint64)
        self.some = np.arange(beams) % 2 == 0

    @property
    def law(self):
        return joint_law(whole_rows(self.rows), self.scores, self.counts, self.truncation)

    def logp(self, truncation=None):
        return plain.joint_logp(self.rows, self.scores, self.counts, truncation or self.truncation)

    @property
    def noise(self):
        """What is added to the log-odds of pairs; where the law cuts pairs, each has noise of its own."""
        if self.truncation.cuts:
            return noise.gumbel_of_all(self.keys, self.vocab)
        values = noise.from_the_top(self.uncut, self.keys)
        return np.subtract(values, self.uncut, out=np.zeros_like(values), where=np.isfinite(values))

    @property
    def uncut(self):
        return self.logp(Truncation(self.truncation.temperature))


def example_of(way, seed, beams, vocab, truncation, banned):
    """An example that is quick to compute in that way."""
    banned = banned if vocab > 10 else 0.0
    if way == "source":
        return Example(seed, beams, min(vocab, 50), truncation, banned, np.float64)
    return Example(seed, beams, vocab, truncation, banned)


ANY = {
    "truncation": TRUNCATIONS,
    "seed": st.integers(0, 10**6),
    "beams": st.integers(1, 5),
    "vocab": st.sampled_from([3, 50, 700]),
    "banned": st.sampled_from([0.0, 0.5, 0.99]),
}


@settings(max_examples=200)
@given(**ANY, core=st.integers(1, 6), width=st.integers(0, 12), noisy=st.booleans(), way=st.sampled_from(STEPS))
def test_the_core_is_what_the_law_takes_and_the_others_are_the_likeliest(
    truncation, seed, beams, vocab, banned, core, width, noisy, way
):
    """The core are the best pairs of some beams; the others come without noise where the law cuts."""
    one = example_of(way, seed, beams, vocab, truncation, banned)
    with running(way):
        pairs, _, held = core_and_extra(one.law, one.keys if noisy else NO_KEYS, one.some, core, width)
        alone, _, all_core = core_and_extra(one.law, one.keys if noisy else NO_KEYS, one.some, core, 0)
    added = one.noise if noisy else 0.0 * one.noise
    mine, extra = plain.core_and_extra(one.logp(), one.uncut, added, one.some, core, width, truncation.cuts)
    assert pairs[:held].tolist() == mine
    assert pairs[held:].tolist() == extra
    assert alone.tolist() == mine
    assert all_core == len(mine)


@settings(max_examples=100)
@given(**ANY, count=st.integers(1, 12), noisy=st.booleans(), way=st.sampled_from(STEPS))
def test_best_pairs_are_those_of_the_dense_law(truncation, seed, beams, vocab, banned, count, noisy, way):
    one = example_of(way, seed, beams, vocab, truncation, banned)
    every = np.ones(beams, dtype=bool)
    with running(way):
        found, _, _ = core_and_extra(one.law, one.keys if noisy else NO_KEYS, every, count, 0)
        likeliest = likeliest_pairs(one.law, count)
    assert found.tolist() == plain.best(one.logp() + (one.noise if noisy else 0.0), count).tolist()
    assert likeliest.tolist() == plain.best(one.uncut, count).tolist()


@settings(max_examples=100)
@given(truncation=TRUNCATIONS, seed=st.integers(0, 10**6), way=st.sampled_from(STEPS))
def test_odds_of_pairs_are_those_of_transformers_on_the_flattened_joint(truncation, seed, way):
    one = example_of(way, seed, 3, 90, truncation, 0.0)
    expected = np.exp(one.logp()).ravel()
    uncut = np.exp(one.uncut).ravel()
    close = 1e-12 if way == "source" else 1e-5
    with running(way):
        law = one.law
        pairs = all_pairs(law)
        odds = odds_among(law, pairs)
        support = support_of(law) if truncation.cuts else pairs
        every = np.arange(expected.size)
        before = odds_at(law, every)
        head, odds_of_head = head_of(law)
        carried = likelihoods_at(law, every)
    assert pairs.tolist() == np.flatnonzero(expected).tolist()
    assert sorted(support.tolist()) == pairs.tolist()
    assert odds == pytest.approx(expected[pairs], abs=close)
    assert before == pytest.approx(uncut, abs=close)
    assert carried == pytest.approx(plain.likelihoods(one.rows, one.scores).ravel(), abs=close)
    assert (np.diff(head) > 0).all()
    assert odds_of_head.sum() > 0.99
    assert odds_of_head == pytest.approx(expected[head], abs=close)


@settings(max_examples=200)
@given(**ANY, core=st.integers(1, 6), width=st.integers(0, 12), greedy=st.booleans(), way=st.sampled_from(STEPS))
def test_a_choice_says_what_becomes_of_its_pairs(truncation, seed, beams, vocab, banned, core, width, greedy, way):
    one = example_of(way, seed, beams, max(vocab, 50), truncation, banned)
    with running(way):
        found = choose(one.law, one.keys, not greedy, one.some, core, width, EOS)
    added = 0.0 * one.noise if greedy else one.noise
    mine, extra = plain.core_and_extra(one.logp(), one.uncut, added, one.some, core, width, truncation.cuts)
    pairs = np.array([*mine, *extra], dtype=np.int64)
    assert found.core == len(mine)
    assert found.parents.tolist() == (pairs // one.vocab).tolist()
    assert found.tokens.tolist() == (pairs % one.vocab).tolist()
    assert found.keys.tolist() == noise.child_keys(one.keys[found.parents], found.tokens).tolist()
    assert found.ends.tolist() == [token in EOS for token in found.tokens]
    carried = plain.likelihoods(one.rows, one.scores).ravel()[pairs]
    assert found.scores == pytest.approx(carried, abs=1e-9 if way == "source" else 1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_compiled_choice_is_that_of_its_source(dtype):
    for seed in range(6):
        for truncation in (Truncation(), Truncation(0.7, top_k=4), Truncation(top_p=0.9, min_p=0.01)):
            one = Example(seed, 3, 60, truncation, banned=0.2, dtype=dtype)
            given_to_both = one.keys, True, one.some, 2, 5, EOS
            compiled = choose(one.law, *given_to_both)
            with source_of_steps():
                source = choose(one.law, *given_to_both)
            for name in ("parents", "tokens", "keys", "ends"):
                assert getattr(compiled, name).tolist() == getattr(source, name).tolist(), name
            assert compiled.scores == pytest.approx(source.scores, abs=1e-5)
            assert compiled.core == source.core


@pytest.mark.parametrize("kind", ["nan", "inf", "dead"])
@pytest.mark.parametrize("truncation", [Truncation(), Truncation(top_k=5), Truncation(top_p=0.9)])
def test_logits_that_are_none_are_refused(kind, truncation):
    rows = np.random.default_rng(0).normal(0, 3, (3, 50)).astype(np.float32)
    rows[1, 4] = {"nan": np.nan, "inf": np.inf, "dead": 0.0}[kind]
    if kind == "dead":
        rows[:] = -np.inf
    one = np.arange(3)
    live = Beams(one, one, np.array([-1.0, -2.0, -3.0]), np.ones(3, dtype=np.int64), one.astype(np.uint64))
    law = joint_law(whole_rows(rows), live.scores, live.counts, truncation)
    assert condition_of(law) == (DEAD if kind == "dead" else BROKEN)
    wrong = DeadEnd if kind == "dead" else BrokenLaw
    says = {"nan": "NaN", "inf": r"\+inf", "dead": "every token is banned: the model left nothing to draw"}[kind]
    with pytest.raises(wrong, match=says):
        law_of_beams(rows, live, Warp(truncation=truncation))


def test_a_beam_without_a_way_on_is_left_out():
    one = Example(0, 3, 50, Truncation(top_p=0.9))
    one.rows[1] = -np.inf
    every = np.ones(3, dtype=bool)
    found = choose(one.law, one.keys, True, every, 6, 12, EOS)
    assert condition_of(one.law) == SOUND
    assert len(found.tokens) == 12
    assert 1 not in found.parents
    assert np.isfinite(found.scores).all()


def test_dead_rows_have_no_odds():
    rows = np.array([[0.0, 1.0], [-np.inf, -np.inf]], dtype=np.float32)
    law = joint_law(whole_rows(rows), np.array([-1.0, -0.5]), np.ones(2, dtype=np.int64), Truncation())
    assert all_pairs(law).tolist() == [0, 1]
    assert odds_at(law, np.arange(4))[2:].tolist() == [0, 0]
    assert odds_at(law, np.arange(4)).sum() == pytest.approx(1)
    assert likeliest_pairs(law, 4).tolist() == [1, 0]


def test_beams_far_behind_still_have_their_place():
    """At a low temperature the odds of the second beam's tokens are below any float32, but two beams were asked for."""
    rows = np.array([[30.0, 0.0, -1.0, -2.0]], dtype=np.float32)
    every = np.ones(1, dtype=bool)
    law = joint_law(whole_rows(rows), np.zeros(1), np.ones(1, dtype=np.int64), Truncation(0.1))
    assert likeliest_pairs(law, 3).tolist() == [0, 1, 2]
    found, _, core = core_and_extra(law, np.array([5], dtype=np.uint64), every, 4, 0)
    assert core == 4
    assert set(found.tolist()) == {0, 1, 2, 3}


def test_scores_of_transformers_are_not_normalised_again():
    """What processors left of log-probabilities is taken as it is: a beam that lost half of its odds has half of them."""
    rows = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.0, 0.0]]).log().numpy()
    law = joint_law(whole_rows(rows), np.zeros(2), np.ones(2, dtype=np.int64), Truncation(normalise=False))
    assert np.exp(likelihoods_at(law, np.arange(4))) == pytest.approx([0.5, 0.5, 0.0, 0.25])
    assert odds_at(law, np.arange(4)) == pytest.approx([0.4, 0.4, 0.0, 0.2])

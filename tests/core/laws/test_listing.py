"""Lists of the best tokens decide as whole rows do, or say that they cannot."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbeam.core.laws.joint import (
    JointLaw,
    all_pairs,
    choose,
    condition_of,
    core_and_extra,
    drawn_pairs,
    head_of,
    joint_law,
    likeliest_pairs,
    likelihoods_at,
    log_masses,
    named_pairs,
    odds_among,
    support_of,
)
from specbeam.core.laws.listing import listed_rows
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.reduce import BROKEN, DEAD, SOUND
from specbeam.core.ranked import Listing, whole_rows
from tests.support.steps import source_of_steps

VOCAB = 12
TRUNCATIONS = [
    Truncation(),
    Truncation(0.7),
    Truncation(1.4, top_k=3),
    Truncation(top_k=1),
    Truncation(top_p=0.8),
    Truncation(0.6, top_k=4, top_p=0.9),
    Truncation(min_p=0.2),
    Truncation(top_p=0.7, min_p=0.1, least=2),
    Truncation(0.8, by_row=True),
    Truncation(0.8, top_k=3, by_row=True),
    Truncation(top_p=0.8, by_row=True),
]
EOS = np.array([1, 5])


class Layer:
    """Beams with rows of logits, many of them equal, and the same rows as lists."""

    def __init__(self, seed, beams, truncation, listing, banned=0.2):
        rng = np.random.default_rng(seed)
        self.logits = np.round(rng.normal(0, 2, (beams, VOCAB)) * 2).astype(np.float32) / 2
        if not listing.by_noise:
            self.logits[rng.random(self.logits.shape) < banned] = -np.inf
        self.scores = rng.normal(-5, 1, beams)
        self.counts = rng.integers(1, 3, beams)
        self.keys = rng.integers(0, 2**60, beams, dtype=np.uint64)
        self.truncation = truncation
        self.lists = listed_rows(self.logits, self.keys, listing)

    @property
    def whole(self) -> JointLaw:
        return joint_law(whole_rows(self.logits), self.scores, self.counts, self.truncation)

    @property
    def listed(self) -> JointLaw:
        return joint_law(self.lists, self.scores, self.counts, self.truncation)


def listing_of(count, by_noise, truncation):
    return Listing(count, by_noise, truncation.temperature)


ANY = {
    "seed": st.integers(0, 10**6),
    "beams": st.integers(1, 4),
    "truncation": st.sampled_from(TRUNCATIONS),
    "count": st.sampled_from([2, 3, 6, VOCAB]),
    "by_noise": st.booleans(),
}
QUESTIONS = {
    "support": lambda law, keys: support_of(law) if law.truncation.cuts else all_pairs(law),
    "likeliest": lambda law, keys: likeliest_pairs(law, 3),
    "drawn": lambda law, keys: drawn_pairs(law, keys, np.ones(len(keys), dtype=np.bool_), 3)[0],
    "core": lambda law, keys: core_and_extra(law, keys, np.arange(len(keys)) > 0, 2, 4)[0],
    "head": lambda law, keys: head_of(law)[0],
}


@pytest.mark.parametrize("question", QUESTIONS)
@settings(max_examples=100, deadline=None)
@given(**ANY, noisy=st.booleans())
def test_a_list_gives_the_pairs_of_the_whole_rows_or_is_undecided(
    question, seed, beams, truncation, count, by_noise, noisy
):
    with source_of_steps():
        layer = Layer(seed, beams, truncation, listing_of(count, by_noise, truncation))
        keys = layer.keys if noisy else layer.keys[:0]
        if question in ("drawn", "core") and not noisy:
            return
        whole = layer.whole
        listed = layer.listed
        if condition_of(whole) != SOUND:
            return
        expected = QUESTIONS[question](whole, keys)
        found = QUESTIONS[question](listed, keys)
        assert not whole.undecided[0]
        if count == VOCAB:
            assert not listed.undecided[0]
        if listed.undecided[0]:
            return
        assert named_pairs(listed, found).tolist() == named_pairs(whole, expected).tolist()
        np.testing.assert_array_equal(likelihoods_at(listed, found), likelihoods_at(whole, expected))
        np.testing.assert_allclose(odds_among(listed, found), odds_among(whole, expected), rtol=1e-12)
        np.testing.assert_allclose(log_masses(listed), log_masses(whole), rtol=1e-6)


@pytest.mark.parametrize("truncation", TRUNCATIONS[:8], ids=str)
@pytest.mark.parametrize("beams", [1, 3])
def test_lists_with_enough_tokens_are_never_undecided(truncation, beams):
    """By noise as many tokens as the layer has pairs; by logit the pairs that a truncation keeps, and those equal to the last."""
    width = 4
    noisy = not truncation.cuts
    with source_of_steps():
        for seed in range(50):
            count = width if noisy else VOCAB - 1
            layer = Layer(seed, beams, truncation, listing_of(count, noisy, truncation), banned=0.0)
            rng = np.random.default_rng(seed)
            layer.logits = rng.normal(0, 2, layer.logits.shape).astype(np.float32)
            layer.lists = listed_rows(layer.logits, layer.keys, listing_of(count, noisy, truncation))
            every = np.ones(beams, dtype=np.bool_)
            whole = choose(layer.whole, layer.keys, True, every, width, 0, EOS)
            law = layer.listed
            found = choose(law, layer.keys, True, every, width, 0, EOS)
            if (truncation.top_p < 1 or truncation.min_p > 0) and law.undecided[0]:
                continue
            assert not law.undecided[0]
            for name in ("parents", "tokens", "keys", "ends", "core"):
                np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
            np.testing.assert_array_equal(found.scores, whole.scores)


def test_the_least_number_of_tokens_needs_as_many_sure_ones():
    """A list whose first token holds the wanted mass does not tell which one comes next, if several are equal to the rest."""
    logits = np.array([[5.0, 0.0, 0.0, 0.0]], dtype=np.float32)
    cut = Truncation(top_p=0.5, least=2)
    with source_of_steps():
        lists = listed_rows(logits, np.zeros(0, dtype=np.uint64), Listing(2))
        law = joint_law(lists, np.zeros(1), np.ones(1, dtype=np.int64), cut)
        support_of(law)
        assert law.undecided[0]
        whole = joint_law(whole_rows(logits), np.zeros(1), np.ones(1, dtype=np.int64), cut)
        assert support_of(whole).tolist() == [0, 1]


def test_lists_keep_the_conditions_of_rows():
    logits = np.array([[0.0, 1.0, np.nan], [-np.inf] * 3, [2.0, -np.inf, 1.0], [np.inf, 0.0, 0.0]], dtype=np.float32)
    keys = np.arange(4, dtype=np.uint64)
    with source_of_steps():
        for by_noise in (False, True):
            lists = listed_rows(logits, keys, Listing(2, by_noise))
            laws = [
                joint_law(
                    listed_rows(logits[[row]], keys[[row]], Listing(2, by_noise)), np.zeros(1), np.ones(1, int), cut
                )
                for row in range(4)
                for cut in (Truncation(), Truncation(0.5, by_row=True))
            ]
            assert [condition_of(law) for law in laws] == [BROKEN, BROKEN, DEAD, DEAD, SOUND, SOUND, BROKEN, BROKEN]
            assert np.isnan(lists.norms[[0, 3]]).all()
            assert lists.norms[1] == -np.inf
            assert lists.tokens[2].tolist() == [0, 2]
            assert lists.rest[2] == -np.inf


def test_equal_logits_are_listed_in_the_order_of_the_vocabulary():
    logits = np.array([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]], dtype=np.float32)
    with source_of_steps():
        lists = listed_rows(logits, np.zeros(0, dtype=np.uint64), Listing(3))
    assert lists.tokens.tolist() == [[1, 2, 3]]
    assert lists.logits.tolist() == [[3.0, 2.0, 3.0]]
    assert lists.rest.tolist() == [2.0]

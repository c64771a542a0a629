"""Laws of transformers' beam modes, in which warpers see each beam's row by itself and nothing is normalised again."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from specbeam.core.beams import Beams
from specbeam.core.laws.joint import all_pairs, condition_of, joint_law, likelihoods_at, odds_among, odds_at
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.reduce import BROKEN, SOUND
from specbeam.core.laws.warp import Warp, law_of_beams, processed_rows
from specbeam.core.ranked import whole_rows
from tests.core.laws.test_joint import STEPS, running
from tests.core.laws.test_truncation import TRUNCATIONS
from tests.oracles.laws import log_softmax, warped


def searched_scores(rows, scores, truncation, normalise):
    """Scores of pairs as transformers makes them, float64[beams, vocab]: -inf where cut or banned."""
    logp = log_softmax(rows) if normalise else np.asarray(rows, dtype=np.float64)
    left = [warped(row, truncation) if (row > -np.inf).any() else row for row in logp]
    return np.array(left) + scores[:, None]


@settings(max_examples=200)
@given(
    truncation=TRUNCATIONS,
    seed=st.integers(0, 10**6),
    beams=st.integers(1, 4),
    banned=st.sampled_from([0.0, 0.5, 0.97]),
    normalise=st.booleans(),
    way=st.sampled_from(STEPS),
)
def test_each_row_is_warped_by_itself_and_not_normalised_again(truncation, seed, beams, banned, normalise, way):
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, 3, (beams, 50)).astype(np.float64 if way == "source" else np.float32)
    rows[rng.random(rows.shape) < banned] = -np.inf
    rows[-1, -2:] = 1.0, 1.5  # something is always left
    scores = rng.normal(-20, 5, beams)
    counts = np.ones(beams, dtype=np.int64)
    expected = searched_scores(rows, scores, truncation, normalise).ravel()
    with running(way):
        law = joint_law(whole_rows(rows), scores, counts, truncation._replace(by_row=True, normalise=normalise))
        pairs = all_pairs(law)
        carried = likelihoods_at(law, pairs)
        odds = odds_among(law, pairs)
        at_all = odds_at(law, np.arange(expected.size))
    assert condition_of(law) == SOUND
    assert pairs.tolist() == np.flatnonzero(expected > -np.inf).tolist()
    close = 1e-9 if way == "source" else 1e-4
    assert carried == pytest.approx(expected[pairs], abs=close)
    total = np.logaddexp.reduce(expected)
    assert odds == pytest.approx(np.exp(expected[pairs] - total), abs=close)
    assert at_all == pytest.approx(np.exp(expected - total), abs=close)


@pytest.mark.parametrize("truncation", [Truncation(), Truncation(0.5, top_k=2), Truncation(top_p=0.9)])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_rows_that_are_none_are_still_told(truncation, wrong):
    rows = np.zeros((2, 9), dtype=np.float32)
    rows[1, 3] = wrong
    law = joint_law(whole_rows(rows), np.zeros(2), np.ones(2, dtype=np.int64), truncation._replace(by_row=True))
    assert condition_of(law) == BROKEN


@pytest.mark.parametrize("search", [False, True])
def test_processors_see_logits_or_in_beam_modes_log_probabilities(search):
    """A penalty multiplies what is negative: of log-probabilities it leaves less than of logits."""
    rows = np.random.default_rng(0).normal(0, 3, (2, 20)).astype(np.float32)
    paths = np.array([[3, 5], [4, 4]])
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
    truncation = Truncation(0.7, top_k=6, by_row=search)
    warp = Warp(penalty, truncation, search=search)
    beams = Beams(
        nodes=np.arange(2),
        tokens=paths[:, 1],
        scores=np.array([-1.0, -1.5]),
        counts=np.ones(2, dtype=np.int64),
        keys=np.arange(2, dtype=np.uint64),
    )
    given_to_penalty = torch.from_numpy(rows).log_softmax(-1) if search else torch.from_numpy(rows)
    penalised = penalty(torch.from_numpy(paths), given_to_penalty.clone()).numpy()
    if search:
        expected = searched_scores(penalised, beams.scores, truncation, normalise=False).ravel()
    else:
        expected = warped((log_softmax(penalised) + beams.scores[:, None]).ravel(), truncation)
    law = law_of_beams(processed_rows(rows, warp, lambda: paths), beams, warp)
    pairs = all_pairs(law)
    assert pairs.tolist() == np.flatnonzero(expected > -np.inf).tolist()
    total = np.logaddexp.reduce(expected)
    assert odds_among(law, pairs) == pytest.approx(np.exp(expected[pairs] - total), abs=1e-5)

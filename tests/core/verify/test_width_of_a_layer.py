"""What a width is chosen by, against array code on the odds of all pairs."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbeam.core.beams import Beams
from specbeam.core.control.races import ENTRANTS, RACE_NOISE
from specbeam.core.control.width import odds_when_shared
from specbeam.core.forest import Forest, FrontierRows
from specbeam.core.laws.joint import all_pairs, joint_law
from specbeam.core.laws.ranking import NO_TRUNCATION, Truncation
from specbeam.core.ranked import whole_rows
from tests.oracles.laws import joint_logp
from tests.oracles.widths import odds_of_layer
from tests.support.steps import source_of_steps

MOST = 4


class Layer(NamedTuple):
    """Live beams of a target with their rows of logits, and a draft whose only layer was drawn from some of the nodes."""

    rows: np.ndarray
    live: Beams
    forest: Forest
    truncation: Truncation

    @property
    def law(self) -> Any:
        """The target's law."""
        return joint_law(whole_rows(self.rows), self.live.scores, self.live.counts, self.truncation)

    def odds(self, drafts):
        """What a width is chosen by."""
        return odds_when_shared(self.law, self.live, self.forest, 0, drafts, MOST, RACE_NOISE)

    def expected(self, drafts):
        """The same in array code."""
        frontier_rows = self.forest.frontier_rows
        of_target = joint_logp(self.rows, self.live.scores, self.live.counts, self.truncation)
        of_draft, uncut = (
            joint_logp(frontier_rows.rows.logits, frontier_rows.scores, frontier_rows.counts, truncation)
            for truncation in (self.truncation, Truncation(self.truncation.temperature))
        )
        nodes = frontier_rows.nodes.tolist()
        row_of = np.array([nodes.index(node) if node in nodes else -1 for node in self.live.nodes.tolist()])
        laws = np.exp(of_target), np.exp(of_draft), np.exp(uncut)
        return odds_of_layer(*laws, row_of, self.truncation.cuts, drafts, MOST, RACE_NOISE)


def random_layer(rng, truncation, beams, rows, vocab, agreement):
    """Live beams and rows of the draft that share some nodes; the draft's logits are more or less those of the target."""
    nodes = 12
    scored = rng.normal(0, 2, (nodes, vocab)).astype(np.float32)
    live = Beams(
        nodes=rng.choice(nodes, beams, replace=False),
        tokens=np.zeros(beams, dtype=np.int64),
        scores=rng.normal(-9, 1, beams),
        counts=rng.integers(1, 3, beams),
        keys=rng.integers(0, 2**60, beams, dtype=np.uint64),
    )
    parents = rng.choice(nodes, rows, replace=False)
    own = rng.normal(0, 2, (rows, vocab)).astype(np.float32)
    frontier_rows = FrontierRows(
        nodes=parents,
        scores=rng.normal(-9, 1, rows),
        counts=np.ones(rows, dtype=np.int64),
        row_ends=np.array([rows]),
        rows=whole_rows(np.float32(agreement) * scored[parents] + np.float32(1 - agreement) * own),
    )
    return Layer(scored[live.nodes], live, Forest.rooted([0])._replace(frontier_rows=frontier_rows), truncation)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    truncation=st.builds(
        Truncation,
        temperature=st.sampled_from([1.0, 0.3, 1.7]),
        top_k=st.sampled_from([0, 1, 3, 20]),
        top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
        min_p=st.sampled_from([0.0, 0.02]),
        least=st.sampled_from([1, 3]),
        by_row=st.just(False),
        normalise=st.just(True),
    ),
    beams=st.integers(1, 5),
    rows=st.integers(1, 6),
    vocab=st.sampled_from([5, 60, 700]),
    drafts=st.sampled_from([1, 2, 3, 5, 8, 70]),
    agreement=st.sampled_from([0.0, 0.7, 1.0]),
)
def test_the_step_estimates_what_array_code_does(seed, truncation, beams, rows, vocab, drafts, agreement):
    layer = random_layer(np.random.default_rng(seed), truncation, beams, rows, vocab, agreement)
    np.testing.assert_allclose(layer.odds(drafts), layer.expected(drafts), atol=1e-12)


USUAL = [
    NO_TRUNCATION,
    Truncation(top_k=10, top_p=0.9),
    Truncation(temperature=0.7, top_k=50),
    Truncation(top_p=0.1),
    Truncation(min_p=0.05),
]


@pytest.mark.parametrize("truncation", USUAL, ids=str)
def test_there_are_odds_for_each_width_that_can_be(truncation):
    layer = random_layer(np.random.default_rng(0), truncation, 4, 6, 700, 0.7)
    odds = layer.odds(6)
    assert odds.shape == (1 + min(MOST, len(all_pairs(layer.law))), 7)
    assert (odds[0] == 1).all()


@pytest.mark.parametrize("truncation", USUAL, ids=str)
def test_the_compiled_step_is_its_source(truncation):
    for seed in range(3):
        layer = random_layer(np.random.default_rng(seed), truncation, 3, 4, 60, 0.7)
        found = layer.odds(6)
        with source_of_steps():
            np.testing.assert_array_equal(found, layer.odds(6))


def test_of_more_pairs_than_can_run_the_likeliest_do():
    layer = random_layer(np.random.default_rng(0), Truncation(top_k=400), 4, 6, 700, 0.7)
    assert len(all_pairs(layer.law)) > ENTRANTS
    np.testing.assert_allclose(layer.odds(6), layer.expected(6), atol=1e-12)


@pytest.mark.parametrize("beams", [3, 12])
def test_pairs_that_the_target_cannot_draw_keep_none_that_it_can_from_the_race(beams):
    """The draft likes pairs that the target cuts away; with twelve beams, which all have rows, more of them than can run."""
    rng = np.random.default_rng(0)
    layer = random_layer(rng, Truncation(top_k=10), beams, beams, 700, 0.0)
    drafts = 2 * ENTRANTS
    odds = layer.odds(drafts)
    assert len(odds) == 1 + MOST
    np.testing.assert_allclose(odds, layer.expected(drafts), atol=1e-12)

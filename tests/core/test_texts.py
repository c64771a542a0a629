"""Texts of beams, from one turn to the next."""

import numpy as np
import pytest

from specbeam.core.beams import BEAMS, LENGTH, Texts, paths_to, prolong_texts, room_for_texts
from specbeam.core.forest import Forest
from tests.support.seats import random_forest
from tests.support.steps import source_of

STEPS = {"compiled": prolong_texts, "source": source_of(prolong_texts)}


def texts_of(tokens):
    """Texts of these beams, int64[beams, length], of which the tokens that all share are settled."""
    beams, length = tokens.shape
    settled = 0
    while settled < length and (tokens[:, settled] == tokens[0, settled]).all():
        settled += 1
    return Texts(tokens.copy(), np.array([beams, length, settled]))


def prolonged(step, texts, forest, parents, newest):
    """The texts after a turn whose survivors hang under these forest nodes."""
    deepest = int(forest.depths().max())
    longer = room_for_texts(texts, len(parents), int(texts.sizes[LENGTH]) + deepest + 1)
    step(longer, forest.tokens, forest.parents, parents, newest)
    return longer


def rows_of(texts):
    """What each live beam says."""
    settled = texts.settled.tolist()
    return [[*settled, *tail] for tail in texts.tails.tolist()]


def random_survivors(rng, forest, count):
    """Nodes of one depth, of which some may come twice, and a new token under each."""
    depths = forest.depths()
    parents = rng.choice(np.flatnonzero(depths == rng.integers(0, depths.max() + 1)), count)
    return parents, rng.integers(0, 2, count)


def expected_rows(before, forest, parents, newest):
    """The text of the root of each survivor, the path down to it, and its newest token."""
    roots = forest.root_of(parents)
    return [
        [*before[root], *forest.path(parent), int(token)]
        for root, parent, token in zip(roots, parents, newest, strict=True)
    ]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("seed", range(40))
def test_survivors_keep_their_texts(seed, step):
    rng = np.random.default_rng(seed)
    roots = int(rng.integers(1, 4))
    before = int(rng.integers(0, 3))
    texts = texts_of(rng.integers(0, 2, (roots, before)))
    known = rows_of(texts)
    forest = random_forest(rng, rng.integers(0, 2, roots), 2, int(rng.integers(1, 9)))
    parents, newest = random_survivors(rng, forest, 3)
    longer = prolonged(STEPS[step], texts, forest, parents, newest)
    assert rows_of(longer) == expected_rows(known, forest, parents, newest)
    rest = longer.tails
    assert rest.shape[1] == 0 or len(set(rest[:, 0].tolist())) > 1  # all that is common was settled


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("seed", range(10))
def test_texts_are_kept_over_many_turns(seed, step):
    """Beams come and go; what was settled stays as it was."""
    rng = np.random.default_rng(seed)
    texts = room_for_texts(None, 1, 1)
    rows = [[]]
    for _ in range(6):
        forest = random_forest(rng, rng.integers(0, 2, len(rows)), 2, int(rng.integers(1, 9)))
        parents, newest = random_survivors(rng, forest, int(rng.integers(1, 5)))
        settled = texts.settled.tolist()
        rows = expected_rows(rows, forest, parents, newest)
        texts = prolonged(STEPS[step], texts, forest, parents, newest)
        assert rows_of(texts) == rows
        assert texts.settled.tolist()[: len(settled)] == settled


@pytest.mark.parametrize("step", STEPS)
def test_one_beam_settles_all_and_none_nothing(step):
    forest = random_forest(np.random.default_rng(0), [5], 9, 4)
    some = np.array([3])
    unsettled = Texts(np.zeros((1, 2), dtype=np.int64), np.array([1, 2, 0]))
    one = prolonged(STEPS[step], unsettled, forest, some, some)
    assert one.settled.tolist() == [0, 0, *forest.path(3), 3]
    assert one.tails.shape == (1, 0)
    unsettled = Texts(np.zeros((1, 2), dtype=np.int64), np.array([1, 2, 0]))
    none = prolonged(STEPS[step], unsettled, forest, some[:0], some[:0])
    assert none.settled.tolist() == []
    assert none.sizes[BEAMS] == 0
    assert len(none.tails) == 0


@pytest.mark.parametrize("seed", range(20))
def test_paths_to_nodes_begin_with_the_head_and_the_text_of_their_beam(seed):
    rng = np.random.default_rng(seed)
    roots = int(rng.integers(1, 4))
    texts = texts_of(rng.integers(0, 9, (roots, int(rng.integers(0, 3)))))
    forest = random_forest(rng, rng.integers(0, 9, roots), 9, int(rng.integers(1, 9)))
    before = rng.integers(0, 9, int(rng.integers(1, 4)))
    depths = forest.depths()
    for depth in range(int(depths.max()) + 1):
        nodes = np.flatnonzero(depths == depth)
        paths = paths_to(texts, before, forest, nodes)
        rows = rows_of(texts)
        roots_above = forest.root_of(nodes)
        expected = [
            [*before.tolist(), *rows[root], *forest.path(node)] for root, node in zip(roots_above, nodes, strict=True)
        ]
        assert paths.tolist() == expected
    assert paths_to(texts, before, forest, nodes[:0]).shape == (0, len(before) + texts.sizes[LENGTH])


def test_a_forest_of_roots_alone_has_the_texts_of_its_beams():
    texts = texts_of(np.array([[1, 2, 3], [1, 2, 4]]))
    found = paths_to(texts, np.array([7]), Forest.rooted([3, 4]), np.arange(2))
    assert found.tolist() == [[7, 1, 2, 3], [7, 1, 2, 4]]

"""Texts of beams, from one turn to the next."""

import numpy as np
import pytest

from specbeam.kernels import prolonged
from tests.support.seats import random_forest


@pytest.mark.parametrize("seed", range(40))
def test_survivors_keep_their_texts(seed):
    rng = np.random.default_rng(seed)
    roots, before = int(rng.integers(1, 4)), int(rng.integers(0, 3))
    tails = rng.integers(0, 2, (roots, before))
    forest = random_forest(rng, rng.integers(0, 2, roots), 2, int(rng.integers(1, 9)))
    depths = forest.depths()
    parents = rng.choice(np.flatnonzero(depths == rng.integers(0, depths.max() + 1)), 3)
    newest = rng.integers(0, 2, 3)
    common, rest = prolonged(tails, forest.tokens, forest.parents, parents, newest)
    texts = [
        [*tails[forest.root_of(np.array([parent]))[0]].tolist(), *forest.path(parent), int(token)]
        for parent, token in zip(parents, newest, strict=True)
    ]
    assert [[*common.tolist(), *one.tolist()] for one in rest] == texts
    assert rest.shape[1] == 0 or len(set(rest[:, 0].tolist())) > 1  # all that is common was settled


def test_one_beam_settles_all_and_none_nothing():
    forest, some = random_forest(np.random.default_rng(0), [5], 9, 4), np.array([3])
    common, rest = prolonged(np.zeros((1, 2), dtype=np.int64), forest.tokens, forest.parents, some, some)
    assert common.tolist() == [0, 0, *forest.path(3), 3]
    assert rest.shape == (1, 0)
    none = some[:0]
    common, rest = prolonged(np.zeros((1, 2), dtype=np.int64), forest.tokens, forest.parents, none, none)
    assert common.tolist() == []
    assert rest.shape == (0, 3)

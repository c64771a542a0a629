"""Growths that have no form in Python, and drafts without a model: what is compiled of their steps, against the source."""

import numpy as np
import pytest

from specbeam.core.beams import Beams, Texts
from specbeam.core.dice import Dice
from specbeam.core.draft.best_first import BestFirst, BestFirstDraws
from specbeam.core.draft.indexes import gram_index
from specbeam.core.draft.recycle import RecyclingSpec, learn_rows, likeliest, rank_tree, recycled
from specbeam.core.draft.retrieval import RetrievalSpec, find_chains, hang_chains
from specbeam.core.draft.stochastic import StochasticBeam
from specbeam.core.draft.suffixes import suffix_index
from specbeam.core.draft.tree import finish_growth, grow_one_layer, most_draws, start_growth
from specbeam.core.forest import Forest
from specbeam.core.laws.listing import listed_rows
from specbeam.core.laws.ranking import NO_TRUNCATION, Truncation
from specbeam.core.laws.reduce import BROKEN, SOUND, UNDECIDED
from specbeam.core.ranked import Listing, whole_rows
from tests.support.forests import assert_same_forests
from tests.support.steps import needs_numba, source_of_steps

GROWTHS = {
    "stochastic": StochasticBeam(),
    "draws": BestFirstDraws(0.02),
    "best first": BestFirst(4, 3),
    "best within a layer": BestFirst(4, 3, within_layer=True),
}
CUTS = {"whole": NO_TRUNCATION, "top-k": Truncation(top_k=3), "warm and top-p": Truncation(temperature=1.5, top_p=0.8)}
DEPTH, WIDTH, VOCAB = 4, 6, 13
EOS = np.array([3, 11])


def live_beams():
    one = np.zeros(2, dtype=np.int64)
    return Beams(np.arange(2), np.array([5, 6]), np.array([-1.0, -1.5]), one + 1, one.astype(np.uint64))


def spec_of(growth, cut, greedy):
    spec = growth.spec(cut, EOS, greedy, False)
    return spec._replace(vocab=VOCAB) if "vocab" in spec._fields else spec


def grown(spec, rows_of_layers, key):
    """The draft after each layer and the whole, and the next uniforms."""
    dice = Dice(key)
    draft = start_growth(Forest.rooted([5, 6]), spec, live_beams(), DEPTH, WIDTH)
    seen = []
    for make_rows in rows_of_layers:
        if len(draft.frontier) == 0:
            break
        draft, condition = grow_one_layer(
            draft, whole_rows(make_rows(len(draft.frontier))), spec, dice.ready(most_draws(draft, spec))
        )
        assert condition == SOUND
        seen.append((draft.frontier.tolist(), float(draft.surest)))
    done = finish_growth(draft, spec)
    return seen, done, dice.uniform((3,)).tolist()


def rows_by_seed(seed):
    def rows_of(count):
        rng = np.random.default_rng(seed)
        rows = rng.normal(0, 2, (count, VOCAB)).astype(np.float32)
        rows[rng.random(rows.shape) < 0.2] = -np.inf
        if seed % 3 == 1:
            rows[:1] = -np.inf
        return rows

    return rows_of


@needs_numba
@pytest.mark.parametrize("name", GROWTHS)
def test_the_compiled_layers_of_a_growth_are_its_source(name):
    """Layers under two beams, with ends, banned tokens, and a row from which all is banned."""
    sizes = set()
    for cut in CUTS.values():
        for greedy in (False, True):
            spec = spec_of(GROWTHS[name], NO_TRUNCATION if greedy else cut, greedy)
            for key in range(6):
                rows = [rows_by_seed(9 * key + layer) for layer in range(DEPTH)]
                seen, done, uniforms = grown(spec, rows, key)
                with source_of_steps():
                    expected, whole, others = grown(spec, rows, key)
                assert [front for front, _ in seen] == [front for front, _ in expected]
                assert [odds for _, odds in seen] == pytest.approx([odds for _, odds in expected])
                assert_same_forests(done.forest, whole.forest, near=1e-5)
                assert done.node_map.tolist() == whole.node_map.tolist()
                assert done.whole.tokens.tolist() == whole.whole.tokens.tolist()
                assert uniforms == others
                sizes.add(done.forest.size)
    assert max(sizes) > 6


@pytest.mark.parametrize("name", GROWTHS)
def test_a_row_that_is_none_leaves_a_draft_as_it_was(name):
    rows = np.zeros((2, VOCAB), dtype=np.float32)
    rows[1, 2] = np.nan
    spec = spec_of(GROWTHS[name], NO_TRUNCATION, False)
    draft = start_growth(Forest.rooted([5, 6]), spec, live_beams(), DEPTH, WIDTH)
    found, condition = grow_one_layer(draft, whole_rows(rows), spec, Dice(1).ready(99))
    assert condition == BROKEN
    assert found.frontier.tolist() == [0, 1]
    assert found.forest.size == 2


@pytest.mark.parametrize("name", GROWTHS)
def test_a_growth_by_lists_is_that_by_whole_rows_or_undecided(name):
    undecided = 0
    grown = 0
    for cut in CUTS.values():
        if not cut.cuts:
            continue
        spec = spec_of(GROWTHS[name], cut, False)
        for key in range(6):
            rows = rows_by_seed(key)(2)
            draft = start_growth(Forest.rooted([5, 6]), spec, live_beams(), DEPTH, WIDTH)
            expected, _ = grow_one_layer(draft, whole_rows(rows), spec, Dice(key).ready(99))
            for count in (1, 3, VOCAB):
                lists = listed_rows(rows, live_beams().keys, Listing(count, False, cut.temperature))
                found, condition = grow_one_layer(draft, lists, spec, Dice(key).ready(99))
                if condition == SOUND:
                    assert_same_forests(found.forest, expected.forest)
                    assert found.frontier.tolist() == expected.frontier.tolist()
                    grown += 1
                else:
                    assert condition == UNDECIDED
                    assert count < VOCAB
                    undecided += 1
    assert grown > 0
    assert undecided > 0


def texts_of(rng, settled, length):
    tokens = np.zeros((4, 64), dtype=np.int64)
    tokens[:3, :length] = rng.integers(0, 4, (3, length))
    tokens[:3, :settled] = tokens[0, :settled]
    return Texts(tokens, np.array([3, length, settled]))


@needs_numba
@pytest.mark.parametrize("make", [lambda: gram_index(3, False, 64), lambda: suffix_index(2.0, 64)])
def test_compiled_chains_are_those_of_the_source(make):
    rng = np.random.default_rng(3)
    drafted = 0
    for _ in range(20):
        index, other = make(), make()
        offset = int(rng.integers(1, 20))
        index.text[:offset] = other.text[:offset] = rng.integers(0, 4, offset)
        roots = Forest.rooted([1, 2, 3])
        for settled in (0, 3, 9):
            texts = texts_of(np.random.default_rng(offset), settled, settled + 2)
            spec = RetrievalSpec(index, offset, EOS)
            found = hang_chains(roots, index.text, *find_chains(spec, texts, 5), EOS)
            with source_of_steps():
                chains = find_chains(RetrievalSpec(other, offset, EOS), texts, 5)
                expected = hang_chains(roots, other.text, *chains, EOS)
            assert_same_forests(found, expected)
            drafted += found.size - 3
    assert drafted > 0


@needs_numba
def test_compiled_recycled_trees_are_those_of_the_source():
    rng = np.random.default_rng(4)
    table, other = np.zeros((VOCAB, 6), dtype=np.int32), np.zeros((VOCAB, 6), dtype=np.int32)
    tree = rank_tree(likeliest(30))
    for depth in (1, 2, 3, 6):
        roots = Forest.rooted(rng.integers(0, VOCAB, 3))
        tokens = rng.integers(0, VOCAB, 40)
        rows = rng.normal(size=(40, VOCAB)).astype(np.float32)
        learn_rows(table, tokens, rows)
        found = recycled(roots, depth, RecyclingSpec(table, tree, EOS))
        with source_of_steps():
            learn_rows(other, tokens, rows)
            expected = recycled(roots, depth, RecyclingSpec(other, tree, EOS))
        assert table.tolist() == other.tolist()
        assert_same_forests(found, expected)
        assert found.size > 3

"""Draft beams ranked by joint likelihood: the beams of worked examples, their order, their ends, known mistakes."""

import math

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.dice import Dice
from specbeam.core.draft.tree import TreeDrafter
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.records import Shape
from specbeam.errors import BadSetting
from specbeam.models.table import TableLM
from specbeam.recipes.joint.beam_drafter import JointBeams, drawn_candidates
from specbeam.recipes.joint.block_drafter import EveryBlock
from tests.support import words
from tests.support.exact import exact_law, successive
from tests.support.joint import P, Q, drafted, first_order, letters, odds_of
from tests.support.programs import random_table, session_of


def layer(forest, depth):
    return [letters(forest.path(node)) for node in np.flatnonzero(forest.depths() == depth)]


@pytest.mark.parametrize(
    ("width", "beams"), [(1, ["baa"]), (2, ["baa", "bab"]), (3, ["baa", "bab", "bac"])]
)  # equal ones by parent slot, then token
def test_beam_search_of_the_worked_draft(width, beams):
    forest, _ = drafted(JointBeams("search"), Q, 3, width)
    assert layer(forest, 3) == beams
    odds = [odds_of(Q, ["abc".index(letter) for letter in beam]) for beam in beams]
    assert np.exp(forest.logq[-width:]) == pytest.approx(odds)
    assert odds == pytest.approx([0.126, 0.0945, 0.0945][:width])


def test_only_the_best_chains_are_handed_on():
    for chains, nodes in ((1, {"b", "ba", "baa"}), (2, {"b", "ba", "baa", "bab"})):
        forest, _ = drafted(JointBeams("search", chains=chains), Q, 3, 3)
        assert {letters(forest.path(node)) for node in range(1, forest.size)} == nodes


STEEP = first_order((0.5, 0.45, 0.05), (0.5, 0.25, 0.25), (0.34, 0.33, 0.33), (0.05, 0.05, 0.9))


@pytest.mark.parametrize("mode", ["search", "sample"])
def test_history_counts_at_temperature_zero(mode):
    """Layers are ranked by the whole path there too, by raw odds: not by a softmax over the best of each layer."""
    forest, _ = drafted(JointBeams(mode, chains=1), STEEP, 2, 3, warp=Warp(greedy=True))
    assert layer(forest, 2) == ["aa"]
    assert np.exp(forest.logq) == pytest.approx([1, 0.5, 0.25])
    whole, _ = drafted(JointBeams(mode), STEEP, 2, 3, warp=Warp(greedy=True))
    assert layer(whole, 2) == ["aa", "ba", "bb"]
    assert np.exp(whole.logq[-3:]) == pytest.approx([0.25, 0.45 * 0.34, 0.45 * 0.33])


def test_history_counts():
    """Two beams with history .5 and .05 and last steps .5 and .9: .25 beats .045. Weights that are log-softmax of odds
    instead of log of normalised odds flatten (.5882, .3529, .0588) to (.4071, .3333, .2596) and choose the wrong one.
    """
    forest, _ = drafted(JointBeams("search", chains=1), STEEP, 2, 3)
    assert layer(forest, 2) == ["aa"]
    assert math.exp(forest.logq[-1]) == pytest.approx(0.25)
    scores = np.log([0.5, 0.3, 0.05])
    shares = exact_law(lambda dice: int(drawn_candidates(scores, np.ones(3, dtype=np.int64), 1, False, dice)[0][0]))
    assert [shares[beam] for beam in range(3)] == pytest.approx([0.5882, 0.3529, 0.0588], abs=1e-4)


@pytest.mark.parametrize("mode", ["search", "sample"])
@pytest.mark.parametrize("replacement", [False, True])
def test_scores_are_those_of_the_paths(mode, replacement):
    """The score of a node is the teacher-forced sum over its path, through every change of slots."""
    for key in range(20):
        draft = random_table(key, 4)
        forest, _ = drafted(JointBeams(mode, replacement and mode == "sample"), draft, 4, 3, key=key)
        for node in range(1, forest.size):
            assert forest.logq[node] == pytest.approx(math.log(odds_of(draft, forest.path(node))))


def test_drawn_layers_follow_the_normalised_joint_odds():
    """Both layers by enumeration: the first from q, the second from the odds of all pairs of a beam and a token."""
    draft = random_table(3, 3)

    def program(dice):
        forest, _ = drafted(JointBeams("sample"), draft, 2, 2, dice)
        return tuple(sorted(layer(forest, 1))), tuple(sorted(layer(forest, 2)))

    found = exact_law(program)
    expected = {}
    for first, odds in _sets(draft(()), 2).items():
        pairs = [(token, other) for token in first for other in range(3)]
        joint = np.array([odds_of(draft, pair) for pair in pairs])
        for second, chance in _sets(joint / joint.sum(), 2).items():
            key = tuple(sorted(letters([token]) for token in first)), tuple(sorted(letters(pairs[n]) for n in second))
            expected[key] = expected.get(key, 0.0) + odds * chance
    assert found == pytest.approx(expected, abs=1e-12)


def _sets(p, want):
    law = {}
    for drawn, odds in successive(p, want, False).items():
        law[tuple(sorted(drawn))] = law.get(tuple(sorted(drawn)), 0.0) + odds
    return law


def test_a_constant_added_to_the_scores_changes_nothing():
    rng = np.random.default_rng(0)
    for key in range(50):
        scores = rng.normal(-20, 5, 30)
        counts = np.ones(30, dtype=np.int64)
        plain, shifted = (drawn_candidates(s, counts, 4, False, Dice(key)) for s in (scores, scores - 700.0))
        assert plain[0].tolist() == shifted[0].tolist()


@pytest.mark.parametrize("mode", ["search", "sample"])
def test_no_path_twice_and_none_of_no_odds(mode):
    """A support smaller than the width keeps fewer beams: no fill-up with tokens that the draft never says."""
    for key in range(30):
        draft = random_table(key, 4, zeros=True)
        for warp in (Warp(), Warp(truncation=Truncation(top_p=0.5))):
            forest, _ = drafted(JointBeams(mode), draft, 3, 6, key=key, warp=warp)
            paths = [tuple(forest.path(node)) for node in range(forest.size)]
            assert len(set(paths)) == len(paths)
            assert np.isfinite(forest.logq).all()
    forest, _ = drafted(JointBeams(mode), lambda path: np.array([0.0, 1.0, 0.0]), 3, 4)
    assert forest.tokens.tolist() == [0, 1, 1, 1]
    assert forest.logq.tolist() == [0, 0, 0, 0]


def test_scores_are_of_the_warped_law_each_row_by_itself():
    warp = Warp(truncation=Truncation(temperature=0.5, top_k=2))
    forest, _ = drafted(JointBeams("search"), Q, 2, 2, warp=warp)
    row = np.array([0.35, 0.45, 0.0]) ** 2
    assert layer(forest, 1) == ["b", "a"]
    assert np.exp(forest.logq[1:3]) == pytest.approx([row[1] / row.sum(), row[0] / row.sum()])
    below = np.array([0.7, 0.2]) ** 2  # after b: a and b are left
    assert layer(forest, 2)[0] == "ba"
    assert math.exp(forest.logq[3]) == pytest.approx(row[1] / row.sum() * below[0] / below.sum())


def test_repeated_draws_are_one_beam_that_weighs_twice():
    draft = random_table(5, 3)
    counts = set()
    for key in range(60):
        forest, _ = drafted(JointBeams("sample", replacement=True), draft, 2, 3, key=key)
        paths = [tuple(forest.path(node)) for node in range(forest.size)]
        assert len(set(paths)) == len(paths)
        counts.add(len(layer(forest, 1)))
    assert counts == {1, 2, 3}
    shares = exact_law(lambda dice: int(drawn_candidates(np.log([0.3, 0.3]), np.array([2, 1]), 1, True, dice)[0][0]))
    assert shares == pytest.approx({0: 2 / 3, 1: 1 / 3})


def ending(draft, mode="search", chains=None, width=3, depth=3, key=0):
    return drafted(JointBeams(mode, chains=chains), draft, depth, width, eos=(2,), key=key)[0]


def test_an_ended_beam_stays_in_the_race_and_is_not_prolonged():
    """c ends. As the draft's best path it is handed on at its own length; nothing hangs below it."""
    sure = first_order((0.1, 0.2, 0.7), (0.4, 0.4, 0.2), (0.4, 0.4, 0.2), (1 / 3, 1 / 3, 1 / 3))
    forest = ending(sure, chains=1)
    assert [letters(forest.path(node)) for node in range(1, forest.size)] == ["c"]
    whole = ending(sure)
    assert "c" in layer(whole, 1)
    assert all("c" not in path[:-1] for depth in (1, 2, 3) for path in layer(whole, depth))
    assert len(layer(whole, 3)) == 2  # the ended beam holds the third slot


def test_an_ended_beam_that_lost_the_race_is_not_handed_on():
    """c ends with .2; two layers on, three live beams are likelier."""
    steep = first_order((0.5, 0.3, 0.2), (0.9, 0.05, 0.05), (0.9, 0.05, 0.05), (1 / 3, 1 / 3, 1 / 3))
    slow = lambda path: np.array([0.55, 0.43, 0.02]) if len(path) < 2 else np.array([0.5, 0.48, 0.02])  # noqa: E731
    assert "c" in layer(ending(steep), 1)
    forest = ending(slow, width=3)
    assert "c" not in layer(forest, 1)


def test_the_beams_that_were_left_are_handed_on():
    """With replacement all draws may take the ended beam: the live one is dead, although it is as deep as any."""
    draft = first_order((0.6, 0.0, 0.4), *[(0.6, 0.0, 0.4)] * 3)
    dead = 0
    for key in range(200):
        forest, _ = drafted(JointBeams("sample", replacement=True), draft, 2, 2, eos=(2,), key=key)
        ends = [letters(forest.path(node)) for node in forest.beams]
        assert len(set(ends)) == len(ends)
        assert all(len(one) == 2 or one.endswith("c") for one in ends)
        assert [odds_of(draft, ["abc".index(x) for x in one]) for one in ends] == pytest.approx(
            np.exp(forest.logq[forest.beams])
        )
        assert (np.diff(forest.logq[forest.beams]) <= 0).all()
        dead += ends == ["c"] and forest.size > 2
        chained, _ = drafted(JointBeams("sample", True, chains=1), draft, 2, 2, eos=(2,), key=key)
        assert [letters(chained.path(node)) for node in chained.beams] == ends[:1]
    assert dead > 5


def test_equal_beams_stand_by_parent_slot_and_token():
    """A beam that ended stands where it stood. Drawn ones stand as they were drawn, so that no token is favoured."""
    even = first_order((0.3, 0.3, 0.4), *[(0.5, 0.5, 0.0)] * 3)
    firsts = set()
    for key in range(10):
        for mode in ("search", "sample"):
            forest, _ = drafted(JointBeams(mode), even, 2, 9, key=key)
            assert [letters(forest.path(node)) for node in forest.beams] == layer(forest, 2)
            if mode == "search":
                assert layer(forest, 2) == ["ca", "cb", "aa", "ab", "ba", "bb"]
            else:
                assert sorted(layer(forest, 2)[:2]) == ["ca", "cb"]
                firsts.add(layer(forest, 2)[0])
    assert firsts == {"ca", "cb"}
    halves = first_order((0.5, 0.0, 0.5), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0))
    forest, _ = drafted(JointBeams("search"), halves, 2, 2, eos=(2,))
    assert [letters(forest.path(node)) for node in forest.beams] == ["aa", "c"]
    forest, _ = drafted(JointBeams("search"), first_order((0.0, 0.5, 0.5), *[(0.0, 1.0, 0.0)] * 3), 2, 2, eos=(1,))
    assert [letters(forest.path(node)) for node in forest.beams] == ["b", "cb"]


def test_no_candidate_is_too_unlikely_to_be_taken():
    """Odds are relative to the best that is left: nothing underflows but what is impossible."""
    scores = np.array([0.0, -800.0, -900.0, -1000.0, -np.inf])
    ones = np.ones(5, dtype=np.int64)
    assert drawn_candidates(scores, ones, 4, False, Dice(0))[0].tolist() == [0, 1, 2, 3]
    assert drawn_candidates(scores, ones, 9, False, Dice(0))[0].tolist() == [0, 1, 2, 3]
    assert drawn_candidates(scores - 1e5, ones, 4, True, Dice(0))[0].tolist() == [0]


def test_a_beam_that_cannot_go_on_leaves_the_race():
    """After a the draft says nothing, so of two beams one is left."""

    def stuck(path):
        return np.array([0.0, 0.0, 0.0]) if path[-1:] == (0,) else np.array([0.6, 0.4, 0.0])

    for mode in ("search", "sample"):
        forest, _ = drafted(JointBeams(mode), stuck, 2, 2)
        assert layer(forest, 1) == ["a", "b"]
        assert [letters(forest.path(node)) for node in forest.beams] == ["ba", "bb"]


@pytest.mark.parametrize("name", ["mtad", "mjsd", "mmtad"])
def test_logits_processors_are_not_asked_what_follows_an_end(name):
    """A grammar that raises behind its end costs no prompt."""

    def allowed(number, tokens):
        if 1 in tokens[5:]:
            raise ValueError("there is nothing after the end")
        return [*range(3, 9), 1]

    pair = words.pair()
    for seed in range(12):
        (one,) = sb.generate(pair, [[4, 5, 6, 7, 8]], getattr(sb, name)(depth=4), seed=seed, max_new_tokens=12,
                             eos_token_id=1, prefix_allowed_tokens_fn=allowed)  # fmt: skip
        assert set(one.tokens) <= {1, *range(3, 9)}


def test_drafting_stops_when_all_beams_ended():
    draft = TableLM([0.0, 0.0, 1.0])
    session = session_of(sb.mtad(4, 5), draft, eos=(2,))
    forest = TreeDrafter(draft, JointBeams("search")).draft([session], [Shape(5, 4)])[0]
    assert forest.tokens.tolist() == [0, 2]
    assert draft.passes == 1


def test_at_temperature_zero_nothing_is_drawn():
    searched, _ = drafted(JointBeams("search"), Q, 3, 3)
    for key in range(3):
        forest, _ = drafted(JointBeams("sample"), Q, 3, 3, key=key, warp=Warp(greedy=True))
        assert forest.tokens.tolist() == searched.tokens.tolist()
        assert forest.siblings.have_laws


def test_every_block_is_every_path():
    session = session_of(sb.sampling(), None, steps=9, eos=(1,))
    forest = EveryBlock(3).draft([session], [Shape(2, 0)])[0]
    assert [letters(forest.path(node)) for node in range(1, forest.size)] == ["a", "c", "aa", "ac", "ca", "cc"]
    other = session_of(sb.sampling(), None, steps=9)
    every = EveryBlock(7, most=50).draft([other, session], [Shape(2, 0)] * 2)
    assert isinstance(other.failure, BadSetting)  # 7 + 49 nodes; without an end token 6 + 36
    assert session.failure is None
    assert [forest.size for forest in every] == [1, 43]


def test_more_candidates_than_a_multinomial_takes():
    """torch.multinomial ends at 2^24 categories."""
    scores = np.full(2**24 + 8, -30.0)
    scores[-1] = 0.0
    assert drawn_candidates(scores, np.ones(len(scores), dtype=np.int64), 1, False, Dice(0))[0].tolist() == [2**24 + 7]


def test_limits_and_draft_agree_on_what_is_left():
    session, limits = session_of(sb.mtad(2, 4), TableLM(P), steps=3), Limits(3)
    assert session.parts.controller.plan(session) == Shape(limits.max_new_tokens - 1, 2)
    free = session_of(sb.mtad(2, 4, bonus="none"), TableLM(P), steps=3)
    assert free.parts.controller.plan(free) == Shape(3, 2)

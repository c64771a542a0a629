"""Drafts that are cut by the odds that their rows are needed: what is chosen, what is learnt, and that no text changes."""

import itertools
import json

import numpy as np
import pytest

import specbeam as sb
from specbeam.core import compiling
from specbeam.core.beams import Beams, Layers
from specbeam.core.control import needs
from specbeam.core.control.cost import CostCurve, HostCost
from specbeam.core.control.needs import (
    CUT,
    HITS,
    MOST_TRIALS,
    NO_BUDGET,
    STEPS,
    TRIALS,
    UNSURE,
    Budget,
    NodeOdds,
    NodesByNeed,
    OddsMemory,
    best_count,
    edge_of,
    learn_odds,
    live_cell,
    margin_cell,
    nodes_to_extend,
    nodes_to_score,
    prior_odds,
)
from specbeam.core.forest import SHARED, Forest, KnownRows, forest_of_nodes, siblings
from specbeam.core.measure import saved_figures
from specbeam.core.ranked import whole_rows
from specbeam.core.session import Parts
from specbeam.generation import turns_of
from specbeam.models.table import TableLM
from tests.support.loops import pair
from tests.support.programs import random_table, run, session_of, texts
from tests.support.quick import first_quick
from tests.support.steps import needs_numba, source_of_steps

__all__ = ["pair"]  # a fixture
FREE_ROWS = CostCurve((1, 100), (1.0, 1.0 + 1e-6))
DEAR_ROWS = CostCurve((1, 100), (1.0, 100.0))
QUICK_DRAFT = CostCurve((1,), (1e-3,))
NONE = np.zeros((3, 0), dtype=np.int64)


def budget_of(target=FREE_ROWS, draft=QUICK_DRAFT, rows=60, lazy=False):
    seconds = np.array([target.pass_s(max(count, 1)) for count in range(rows)])
    return Budget(seconds, np.full(rows, draft.seconds[0]), 0.0, lazy, prior_odds())


def test_the_edge_is_where_the_expected_number_of_live_beams_is_reached():
    values = np.array([5.0, 1.0, 4.0, -np.inf, 3.0, 2.0])
    assert edge_of(values, np.ones(6), 2) == 4.0
    assert edge_of(values, np.array([0.5, 1, 0.5, 1, 0.5, 1]), 2) == 2.0
    assert edge_of(values, np.ones(6), 9) == 1.0  # too few drafts: the last one that counts
    assert edge_of(np.full(2, -np.inf), np.ones(2), 1) == np.inf


def test_cells_tell_margins_and_drafts_apart():
    assert [margin_cell(x) for x in (-9, -0.3, 0.0, 0.1, 9)] == [0, 4, 5, 6, needs.MARGINS - 1]
    cells = {live_cell(margin, steps) for margin in (-9, -2.5, 0, 9, -np.inf) for steps in range(STEPS + 2)}
    assert len(cells) == 5 * STEPS
    assert live_cell(-np.inf, 9) == CUT + STEPS - 1


@pytest.mark.parametrize("seed", range(20))
def test_the_number_of_drafts_is_that_of_most_needed_rows_per_second(seed):
    """Against all numbers."""
    rng = np.random.default_rng(seed)
    chances = np.sort(rng.random(12))[::-1]
    seconds = np.cumsum(rng.random(40))
    budget = budget_of()._replace(target_s=seconds)
    sure = int(rng.integers(0, 5))
    speeds = [(0.7 + chances[:count].sum()) / (seconds[max(sure + count, 1)] + 0.3) for count in range(13)]
    count, speed = best_count(chances, sure, 0.7, budget, 0.3)
    assert count == int(np.argmax(speeds))
    assert speed == pytest.approx(max(speeds))


def forest_with_odds(rng, nodes=14, beams=3):
    """A forest with SHARED layers of which some nodes are known, and random odds."""
    forest = Forest.rooted(np.arange(beams))
    front = np.arange(beams)
    while forest.size < nodes + beams:
        count = int(rng.integers(1, 5))
        rows = rng.integers(0, len(front), count)
        tokens = np.arange(forest.size, forest.size + count)
        group = siblings(SHARED, front, tokens, np.arange(forest.size, forest.size + count), rows)
        start = forest.size
        forest = forest.grown(tokens, front[rows], groups=[group])
        front = np.arange(start, forest.size)
    is_known = rng.random(forest.size) < 0.3
    for node in range(beams, forest.size):
        is_known[node] &= is_known[forest.parents[node]]
    known = np.flatnonzero(is_known)
    forest = forest._replace(known=KnownRows(known, whole_rows(rng.normal(size=(len(known), 2)).astype(np.float32))))
    size = forest.size
    live = rng.random(size)
    cells = np.full(size, -1)
    cells[beams:] = rng.integers(0, CUT + STEPS, size - beams)
    return forest, NodeOdds(
        live, live.copy(), cells, np.full(size, -1), np.zeros(size, dtype=np.int64), live, NONE, 0.1
    )


@pytest.mark.parametrize("seed", range(20))
def test_chosen_nodes_come_with_their_parents_and_what_is_known(seed):
    rng = np.random.default_rng(seed)
    forest, odds = forest_with_odds(rng)
    for curve in (FREE_ROWS, CostCurve((1, 50), (1.0, 3.0)), DEAR_ROWS):
        chosen = nodes_to_score(budget_of(curve), forest, odds)
        assert {0, 1, 2, *forest.known.nodes} <= {*chosen.tolist()}
        assert all(forest.parents[node] in chosen for node in chosen if node > 2)
        if curve is FREE_ROWS:
            assert len(chosen) == forest.size
        fewer = forest_of_nodes(forest, chosen)
        assert fewer.tokens.tolist() == forest.tokens[chosen].tolist()
        for node in range(fewer.size):
            assert fewer.path(node) == forest.path(int(chosen[node]))
        groups = fewer.siblings
        assert [fewer.tokens[node] for node in groups.nodes] == groups.tokens.tolist()
        assert groups.draw_parents.tolist() == fewer.parents[groups.nodes].tolist()
        assert chosen[fewer.known.nodes].tolist() == forest.known.nodes.tolist()


def test_dear_rows_end_a_draft_and_free_ones_do_not():
    forest = Forest.rooted([1, 2, 3])
    odds = NodeOdds(
        np.ones(3), np.ones(3), np.full(3, -1), np.full(3, -1), np.zeros(3, dtype=np.int64), np.zeros(3), NONE, 0.0
    )
    assert nodes_to_extend(budget_of(FREE_ROWS), forest, odds, np.arange(3)).all()
    dear = CostCurve((3, 4, 100), (1.0, 9.0, 900.0))
    assert not nodes_to_extend(budget_of(dear), forest, odds, np.arange(3)).any()
    known = forest._replace(known=KnownRows(np.array([1]), whole_rows(np.zeros((1, 2), dtype=np.float32))))
    assert nodes_to_extend(budget_of(dear), known, odds, np.array([1])).tolist() == [
        True
    ]  # costs no pass of the draft model


def told(forest, draws):
    """Layers of (parent, token) pairs, of which each live one is looked up in the forest."""
    pairs = [pair for layer in draws for pair in layer]
    parents = np.array([parent for parent, _ in pairs])
    tokens = np.array([token for _, token in pairs])
    count = len(pairs)
    beams = Beams(
        forest.find(parents, tokens),
        tokens,
        np.zeros(count),
        np.ones(count, dtype=np.int64),
        np.zeros(count, np.uint64),
    )
    ends = np.cumsum([len(layer) for layer in draws])
    layers = len(draws)
    nothing = np.zeros((layers, 3), dtype=np.int64)
    edges = np.full(layers, 0.5)
    return Layers(parents, beams, np.zeros(count, dtype=bool), ends, ends, np.zeros(layers, dtype=bool), nothing, edges)


@pytest.mark.parametrize("by_source", [True, pytest.param(False, marks=needs_numba)])
def test_what_became_of_drafts_is_counted(by_source):
    """Two roots; under the first 10 and 11, under the second 12; under 10 then 20 and 21. The target takes 10 and 13.

    Three drafts were dropped: 17 under the first root, 13 under the second, 22 under 10.
    """
    whole = Forest(np.array([0, 0, 10, 11, 12, 20, 21]), np.array([-1, -1, 0, 0, 1, 2, 2]))
    cells = np.array([-1, -1, 4, 5, 6, 7, 8])
    bounds = np.array([0.7, 0.3, 0.6, 0.0, 0.0, 0.0, 0.0])
    own = np.array([2, 2, 3, 3, 3, UNSURE, UNSURE])
    chances = np.array([1, 1, 0.5, 0.5, 0.5, 0.2, 0.2])
    dropped = np.array([[0, 1, 2], [17, 13, 22], [20, 21, 22]])
    odds = NodeOdds(chances, chances, cells, own, np.zeros(7, dtype=np.int64), bounds, dropped, 0.0)
    names = np.array([0, 1, 2, 5])
    scored = forest_of_nodes(whole, names)
    learnt = prior_odds()
    before = prior_odds()
    layers = told(scored, [[(0, 10), (1, 13)], [(2, 20), (2, 22)]])

    def count():
        learn_odds(learnt, odds, whole, layers, names)

    if by_source:
        with source_of_steps():
            count()
    else:
        count()
    live = (learnt.live - before.live).round(9)
    assert {cell: live[cell].tolist() for cell in np.flatnonzero(live[:, TRIALS])} == {
        4: [1, 1], 5: [0, 1], 6: [0, 1], 7: [1, 1], 8: [0, 1], 20: [0, 1], 21: [1, 1], 22: [1, 1],
    }  # fmt: skip
    needed = (learnt.needed - before.needed).round(9)
    assert needed[2].tolist() == [1, 2]  # of the roots, one is above the edge of 0.5
    assert needed[3].tolist() == [1, 1]  # node 10, before the second layer
    assert needed[UNSURE].tolist() == [0, 0]
    sums = needs.FORGET * before.growth
    assert learnt.growth[0].tolist() == pytest.approx((sums[0] + [1.5, 2.0]).tolist())
    assert learnt.growth[1].tolist() == pytest.approx((sums[1] + [0.4, 1.5]).tolist())
    assert learnt.growth[2, HITS] / learnt.growth[2, TRIALS] == pytest.approx(needs.GROWTH)


# Texts.


def by_need(target, width=5, beams=3, most=5, draft=QUICK_DRAFT):
    """A controller and parts of `dsbd` of fixed width."""
    control = NodesByNeed(target, draft, beams, width, most, HostCost(0.01, 0.01, 0.01))
    return sb.dsbd(beams, width, 2, "fixed").with_parts(controller=control)


@pytest.mark.parametrize(
    "curve", first_quick([CostCurve((1, 50), (1.0, 5.0)), FREE_ROWS, DEAR_ROWS]), ids=["usual", "free", "dear"]
)
def test_texts_are_those_of_beam_sampling_whatever_is_cut(curve):
    nodes = []
    for case in range(30):
        target, draft = TableLM(random_table(case, 8)), TableLM(random_table(500 + case, 8))
        plain = session_of(sb.beam_sampling(3), None, steps=8, eos=(0,), key=case)
        run(plain, target)
        session = session_of(by_need(curve), draft, steps=8, eos=(0,), key=case)
        turns = run(session, target)
        assert texts(session) == texts(plain)
        nodes += [turn.forest.size for turn in turns]
    if curve is DEAR_ROWS:
        assert np.mean(nodes) < 5


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"temperature": 0.0}, {"repetition_penalty": 1.2}], ids=str)
def test_runs_and_batches_give_the_beams_of_plain_decoding(pair, options):
    """Also with logits processors, which see the rows of kept nodes again."""
    options = {"max_new_tokens": 14, "eos_token_id": [9], "seed": 5, **options}
    prompts = [[3, 4, 5], [7, 8], [1, 2, 3, 4]]
    curve = CostCurve((1, 50), (1.0, 2.0))
    for batch_size in (1, 3):
        expected = sb.generate(pair, prompts, sb.beam_sampling(3), batch_size=batch_size, **options)
        found = sb.generate(pair, prompts, by_need(curve), batch_size=batch_size, **options)
        for one, other in zip(found, expected, strict=True):
            assert [beam.tokens for beam in one.beams] == [beam.tokens for beam in other.beams]
        if batch_size == 1:
            passes = [sum(one.report.target_passes for one in each) for each in (found, expected)]
            assert passes[0] <= passes[1]


def test_the_draft_model_keeps_what_the_target_was_not_given(pair, monkeypatch):
    """A beam that was drafted and cut has no node in the target's forest, and goes on from its node in the draft's."""
    method = by_need(CostCurve((1, 4, 50), (1.0, 1.0, 30.0)))
    settled = {pair.target: [], pair.draft: []}
    for lm, nodes in settled.items():
        settle = lm.settle

        def noting(session, turn, settle=settle, nodes=nodes):
            nodes.append(turn.verdict.beams.nodes.tolist())
            settle(session, turn)

        monkeypatch.setattr(lm, "settle", noting)
    for seed in range(6):
        list(turns_of(pair, [3, 4, 5], method, seed=seed, max_new_tokens=16))
    pairs = [
        (one, other)
        for turn, same in zip(*settled.values(), strict=True)
        for one, other in zip(turn, same, strict=True)
    ]
    assert all(other >= 0 for one, other in pairs if one >= 0)
    assert any(one < 0 <= other for one, other in pairs)


@pytest.mark.parametrize(
    "method",
    [
        sb.dsbd(3, 4, 3, "dynamic"), sb.dsbd(3, 4, 3, "fixed", coupling="rejection"),
        sb.dsbd(3, 4, 3, "fixed", collapse=True),
    ],
    ids=["dynamic", "rejection", "collapse"],
)  # fmt: skip
def test_drafts_are_not_cut_where_texts_depend_on_them(method):
    """A width would look at how many drafts a layer has, and these were cut by the noise of that layer."""
    control = NodesByNeed(FREE_ROWS, QUICK_DRAFT, 3, 4)
    session = session_of(method.with_parts(controller=control), TableLM([0.5, 0.5]), steps=6)
    assert control.budget(session) is NO_BUDGET
    fixed = session_of(by_need(FREE_ROWS), TableLM([0.5, 0.5]), steps=6)
    assert fixed.parts.controller.budget(fixed) is not NO_BUDGET


def test_recipes_cut_drafts_where_the_depth_is_left_to_them(pair):
    def controller(method):
        return type(method.parts(pair.target, pair.draft).controller)

    assert controller(sb.dsbd(3)) is NodesByNeed
    assert controller(sb.dsbd(3, width="auto")) is NodesByNeed
    assert controller(sb.speculative_beam_search(3)) is NodesByNeed
    assert controller(sb.dsbd(3, width="fixed", semantics="hf")) is NodesByNeed
    for method in (
        sb.dsbd(3, width="fixed", depth=2), sb.dsbd(3, width="dynamic"), sb.dsbd(3, collapse=True),
        sb.dsbd(3, width="fixed", depth="auto", coupling="rejection"),
        sb.dsbd(3, width="fixed", depth="auto", collapse=True),
    ):  # fmt: skip
        assert controller(method) is not NodesByNeed


# What is remembered.


@pytest.mark.remembers
def test_a_session_begins_with_what_those_before_it_have_learnt():
    memory = OddsMemory()
    control = NodesByNeed(FREE_ROWS, QUICK_DRAFT, 3, 5, memory=memory)
    method = sb.dsbd(3, 5, 2, "fixed").with_parts(controller=control)
    trials = []
    for case in range(4):
        target, draft = TableLM(random_table(case, 8)), TableLM(random_table(500 + case, 8))
        session = session_of(method, draft, steps=8, eos=(), key=case)
        begun = control.budget(session).odds
        trials.append(begun.live[:, TRIALS].sum())
        run(session, target)
    assert all(one < other for one, other in itertools.pairwise(trials))
    for _ in range(300):
        begun, ended = memory.begin("x"), memory.begin("x")
        ended.live[0] += [3, 4]
        memory.add("x", begun, ended)
    known = memory.begin("x")
    assert known.live[0, TRIALS] == pytest.approx(MOST_TRIALS)
    assert known.live[0, HITS] / known.live[0, TRIALS] == pytest.approx(0.75, abs=0.01)


@pytest.mark.remembers
def test_what_is_learnt_is_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBEAM_CACHE", str(tmp_path))
    memory = OddsMemory(["a pair"])
    begun, ended = memory.begin("x"), memory.begin("x")
    ended.needed[1] += [1, 1]
    memory.add("x", begun, ended)
    np.testing.assert_array_equal(OddsMemory(["a pair"]).begin("x").needed, memory.begin("x").needed)
    np.testing.assert_array_equal(OddsMemory(["another"]).begin("x").needed, prior_odds().needed)
    (file,) = saved_figures.folder().glob("odds-*.json")
    for broken in ("{", json.dumps({"live": [[1, 2]]}), json.dumps({"live": "many"})):
        file.write_text(broken)
        np.testing.assert_array_equal(OddsMemory(["a pair"]).begin("x").live, prior_odds().live)


@pytest.mark.skipif(not compiling.AVAILABLE, reason="needs numba")
@pytest.mark.parametrize("seed", range(5))
def test_compiled_steps_are_their_source(seed):
    forest, odds = forest_with_odds(np.random.default_rng(seed))
    front = np.flatnonzero(forest.depths() == forest.depths().max())
    for curve in (FREE_ROWS, CostCurve((1, 50), (1.0, 3.0)), DEAR_ROWS):
        budget = budget_of(curve, lazy=bool(seed % 2))
        found = nodes_to_score(budget, forest, odds), nodes_to_extend(budget, forest, odds, front)
        with source_of_steps():
            expected = nodes_to_score(budget, forest, odds), nodes_to_extend(budget, forest, odds, front)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_rule_that_does_not_say_so_is_taken_to_look_at_drafts():
    class Own:
        keeps_nodes = True

        def verify(self, session, forest, scored):
            raise NotImplementedError

    control = NodesByNeed(FREE_ROWS, QUICK_DRAFT, 2, 3)
    drafter = sb.dsbd(2, 3, 2, "fixed").parts(None, TableLM([0.5, 0.5])).drafter
    session = session_of(sb.Method("", "", 2, lambda *_: Parts(drafter, Own(), control, "")), None)
    assert control.budget(session) is NO_BUDGET

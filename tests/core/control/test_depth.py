"""Depth by cost: what is worth drafting, and that turns without a draft do no harm."""

import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core import compiling
from specbeam.core.control.cost import CostCurve, HostCost
from specbeam.core.control.depth import DepthByCost, PassOdds
from specbeam.core.control.fixed import FixedShape
from specbeam.core.control.pace import DraftsIfFaster
from specbeam.core.control.planning import FIRST_WAIT, learn_passed, plan_depth
from specbeam.core.control.width import FixedWidth
from specbeam.core.draft.beams import BeamDrafter
from specbeam.core.records import Shape
from specbeam.core.session import Parts
from specbeam.core.verify.beams import BeamRule
from specbeam.core.verify.search import SearchRule
from specbeam.core.verify.walk import MatchRule
from specbeam.errors import BadSetting
from specbeam.models.table import TableLM
from specbeam.recipes.depth import ROWS, depth_by_sizes, depth_control
from specbeam.recipes.tuning.costs import (
    DEEP,
    curve_of,
    curves_in_turns,
    host_cost,
    known_curve,
    measure,
    measure_host,
    measure_loops,
)
from specbeam.recipes.tuning.idle_model import IdleLM
from specbeam.recipes.tuning.stored_prompt import StoredPrompt, TurnCost, seconds_of
from tests.support import words
from tests.support.heads import VOCAB, head_of
from tests.support.programs import run, session_of
from tests.support.tiny_models import tiny

FLAT, STEEP = CostCurve((1, 100), (1.0, 1.0)), CostCurve((1, 100), (1.0, 100.0))
CHEAP, DEAR = CostCurve((1,), (0.01,)), CostCurve((1,), (5.0,))


def best(control, seen):
    return max(control.options(seen, control.beams), key=lambda option: option.rate).depth


def seen(*passed, times=20):
    odds = PassOdds(8)
    for _ in range(times):
        odds.learn(passed)
    return odds


def test_what_costs_nothing_is_drafted_and_what_costs_too_much_is_not():
    always, never = seen(*[True] * 8), seen(False)
    assert best(DepthByCost(FLAT, CHEAP, 4, (6,)), always) == 8
    assert best(DepthByCost(FLAT, DEAR, 4, (6,)), always) == 0
    assert best(DepthByCost(STEEP, CHEAP, 4, (6,)), always) == 0
    assert best(DepthByCost(FLAT, CostCurve((1,), (0.3,)), 4, (6,)), never) == 0


def depths_of(accepted, cost=0.1, turns=40):
    """The planned depth of each turn of a chain, if `accepted(turn)` of its layers pass; a layer costs `cost` passes."""
    session = session_of(sb.sampling(), None)
    plan = DepthByCost(FLAT, CostCurve((1,), (cost,)), 1, (1,), 5).numbers(session)
    found = []
    for turn in range(turns):
        depth = int(plan_depth(plan, 1, turn, 100))
        found.append(depth)
        passing = min(accepted(turn), depth)
        judged = min(passing + 1, depth)
        learn_passed(plan, np.arange(judged) < passing)
    return found


@pytest.mark.parametrize(
    ("cost", "turns", "waits"), [(0.1, 7, [8, 11, 11]), (0.2, 4, [8, 16, 20]), (0.5, 1, [8, 16, 32, 50])]
)
def test_drafts_that_never_pass_end_after_a_few_turns_and_are_tried_ever_more_rarely(cost, turns, waits):
    """Until trials of one layer take 1 % of the time."""
    found = depths_of(lambda turn: 0, cost, 200)
    assert found[0] > 0
    assert set(found[turns:]) == {0, 1}
    trials = np.flatnonzero(found[turns:])
    assert trials[0] == pytest.approx(FIRST_WAIT, abs=2)
    assert (np.diff(trials) - 1).tolist()[: len(waits)] == waits
    assert np.diff(trials).max() == waits[-1] + 1


def test_drafts_that_pass_stay_and_a_few_that_fail_do_not_end_them():
    assert set(depths_of(lambda turn: 5)) == {5}
    now_and_then = depths_of(lambda turn: 0 if turn % 4 == 0 else 4)
    assert min(now_and_then) > 1
    assert min(now_and_then[2:]) == 4


def test_drafts_that_pass_now_and_then_are_short():
    found = depths_of(lambda turn: turn % 2)
    assert set(found[10:]) <= {1, 2}


def test_drafts_come_back_soon_after_they_begin_to_pass():
    found = depths_of(lambda turn: 5 if turn >= 40 else 0, turns=120)
    assert found[38:40] == [0, 0]
    assert set(found[85:]) == {5}


def test_expected_layers_follow_the_odds():
    odds = PassOdds(8)
    odds.seen[:, :3] = [[1e6, 1e6, 0], [1e6, 1e6, 1e6]]
    assert odds.layers()[:4] == pytest.approx([1, 2, 3, 3], abs=0.01)
    option = DepthByCost(CostCurve((4, 16), (1.0, 2.0)), CHEAP, 4, (6,)).options(odds, 4)[2]
    assert (option.nodes, option.layers) == (16, pytest.approx(3, abs=0.01))
    assert option.seconds == pytest.approx(2.02)


def test_what_the_host_does_counts():
    """A target that costs little is not drafted for by a host that is slow."""
    odds, cheap = seen(*[True] * 8, times=1000), CostCurve((1,), (1e-3,))
    quick = DepthByCost(FLAT, cheap, 4, (6,), host=HostCost(0.1, 0.1, 0.1))
    assert quick.options(odds, 4)[1].seconds == pytest.approx(1 + 1e-3 + 0.1 + 0.1 + 0.2, abs=1e-3)
    assert best(quick, odds) == 8
    assert best(replace(quick, host=HostCost(0.1, 2.0, 0.1)), odds) == 0


@pytest.mark.parametrize("rule", [BeamRule(FixedWidth(2)), SearchRule(2)], ids=["beams", "search"])
def test_the_host_is_timed_around_models_that_cost_nothing(rule, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBEAM_CACHE", str(tmp_path))
    monkeypatch.setattr("specbeam.recipes.tuning.costs._HOST", {})
    search = isinstance(rule, SearchRule)
    turns = {True: [], False: []}

    class Watched:
        def __init__(self, lm, depth):
            self.agree = lm._rows[0, 0] == IdleLM(40, 0)._rows[0, 0]
            self.shape = FixedShape(depth, 3)

        def plan(self, session):
            return self.shape.plan(session)

        def settle(self, session, turn):
            if turn.forest.layers:
                turns[bool(self.agree)].append(turn.verdict.accepted)

    def parts(lm, depth):
        return Parts(BeamDrafter(lm, 2, search=search), rule, Watched(lm, depth), "")

    found = host_cost(40, parts, 2, ["a rule"])
    assert found.seconds(3, 4) > 0
    assert np.mean(turns[True]) > DEEP - 0.5  # a truncation over core and halo may cut what one over the core keeps
    assert np.mean(turns[False]) < 1
    turns[True].clear()
    assert host_cost(40, parts, 2, ["a rule"]) == found  # from memory
    monkeypatch.setattr("specbeam.recipes.tuning.costs._HOST", {})
    assert host_cost(40, parts, 2, ["a rule"]) == found  # from disk
    assert not turns[True]


def test_wide_layers_are_timed_in_fewer_turns(monkeypatch):
    """Twelve turns of a thousand beams took more than a minute before the first text."""
    timed = []

    def measured(vocab, parts, turns):
        timed.append(turns)
        return HostCost()

    monkeypatch.setattr("specbeam.recipes.tuning.costs.measure_host", measured)
    for width in (1, 6, 100, 4000):
        host_cost(40, lambda lm, depth: None, width, ["of this width"])
    assert timed == [12, 12, 3, 3]


def test_costs_are_told_apart(monkeypatch):
    """Turns that are priced by a formula give its terms."""

    def priced(vocab, parts, depth, agree, turns):
        return 0.7 + 0.2 * depth + 0.1 * (1 + depth * agree)

    monkeypatch.setattr("specbeam.recipes.tuning.costs._turn_s", priced)
    found = measure_host(40, lambda lm, depth: None)
    assert (found.turn_s, found.draft_s, found.judge_s) == pytest.approx((0.7, 0.2, 0.1))


def test_a_curve_goes_on_with_its_last_slope():
    curve = CostCurve((1, 4, 8), (1.0, 1.0, 3.0))
    assert [curve.pass_s(n) for n in (1, 6, 8, 10)] == [1, 2, 3, 4]


def test_a_curve_whose_last_sizes_were_measured_alike_goes_on_with_its_last_doubling():
    curve = CostCurve((1, 8, 16, 24, 32), (1.0, 1.0, 2.0, 4.0, 4.0))
    assert curve.pass_s(48) == pytest.approx(4 + 16 * 2 / 16)
    assert CostCurve((1, 32), (1.0, 1.0)).pass_s(64) == 1  # as far as is known, rows are free
    assert CostCurve((1, 2), (1.0, 3.0)).pass_s(4) == 7


@dataclass(frozen=True)
class NowAndThen:
    """Drafts in some turns only, not in the first."""

    depths: tuple[int, ...]

    def plan(self, session):
        return Shape(min(self.depths[session.count.target_passes % len(self.depths)], session.remaining - 1), 5)

    def settle(self, session, turn):
        pass


@pytest.mark.parametrize("depths", [(0, 2), (0, 0, 0, 3), (2, 0), (0,)])
def test_turns_without_a_draft_change_no_beam(depths):
    pair = words.pair()
    method = sb.dsbd(3, 5, depth=2, width="fixed")
    now_and_then = sb.Method(
        "dsbd", method.law, 3, lambda *lms: replace(method.build(*lms), controller=NowAndThen(depths)), needs_draft=True
    )
    prompts = ["abc", "Hello world", "x", "no yes"]
    plain = sb.generate(pair, prompts, sb.beam_sampling(3), seed=4, max_new_tokens=14)
    drafted = sb.generate(pair, prompts, now_and_then, seed=4, max_new_tokens=14)
    assert [one.tokens for one in plain] == [one.tokens for one in drafted]


def test_depth_auto_has_the_beams_of_beam_sampling():
    pair = words.pair()
    for seed in range(3):
        plain = sb.generate(pair, ["abc", "Hello"], sb.beam_sampling(3), seed=seed, max_new_tokens=20)
        tuned = sb.generate(pair, ["abc", "Hello"], sb.dsbd(3, 5, width="fixed"), seed=seed, max_new_tokens=20)
        assert [one.tokens for one in plain] == [one.tokens for one in tuned]


def test_curves_are_measured_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBEAM_CACHE", str(tmp_path))
    lm = words.pair().target
    assert known_curve(lm) is None
    curve = measure(lm, (1, 2, 8), repeats=3, least_s=0.0)
    lm.curves.clear()
    assert curve.nodes == (1, 2, 8)
    assert 0 < curve.seconds[0] <= curve.seconds[1] <= curve.seconds[2]
    assert curve_of(lm) == known_curve(lm) == curve
    assert not lm.caches  # nothing is left behind


@pytest.mark.parametrize(
    "changed",
    [
        ("specbeam.core.measure.saved_figures.source_key", lambda *rooms: "newer"),
        ("specbeam.recipes.tuning.costs.uses_tiles", lambda: "none"),
    ],
    ids=["source", "tiles"],
)
def test_a_curve_of_other_kernels_is_not_taken(changed, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBEAM_CACHE", str(tmp_path))
    lm = words.pair().target
    measure(lm, (1, 2), repeats=1, least_s=0.0)
    assert known_curve(lm) is not None
    monkeypatch.setattr(*changed)
    assert known_curve(lm) is None


def test_wrong_depths_are_refused():
    for depth in (0, -1):
        with pytest.raises(BadSetting, match="at least 1, or 'auto'"):
            sb.dsbd(depth=depth)
        with pytest.raises(BadSetting, match="at least 1, or 'auto'"):
            sb.speculative_beam_search(depth=depth)
    assert depth_control(3, 4, 6, None, None, BeamDrafter, SearchRule(4)).depth == 3


def test_of_a_shared_pass_a_session_pays_its_share():
    """Twelve rows cost what one costs, and more of them more: drafts pay for one prompt, and not for sixteen."""
    target, draft = CostCurve((1, 12, 112), (1.0, 1.0, 9.0)), CostCurve((1, 12, 112), (0.05, 0.05, 0.45))
    control = DepthByCost(target, draft, 4, (4,))
    alone, many = ([round(one.seconds, 6) for one in control.options(PassOdds(8), 4, size)][:3] for size in (1, 16))
    assert alone == pytest.approx([1.0, 1.05, 1.1])
    assert many == pytest.approx([(1 + 0.08 * 52) / 16, (1 + 0.08 * 116 + 0.05 + 0.004 * 52) / 16,
                                  (1 + 0.08 * 180 + 2 * (0.05 + 0.004 * 52)) / 16])  # fmt: skip
    session = session_of(sb.beam_sampling(4), None, steps=50)
    depths = []
    for batch_size in (1, 16):
        session.batch_size = batch_size
        depths.append(control.plan(session).depth)
    assert depths[0] > 1
    assert depths[1] == 0


@pytest.mark.skipif(not compiling.AVAILABLE, reason="needs numba")
def test_what_loops_do_beside_the_models_is_measured(pair_of_loops):
    """Real models, by the laps of the loops; far less than a turn of Python."""
    target, draft = pair_of_loops.target, pair_of_loops.draft

    def parts(lm, depth):
        return Parts(BeamDrafter(lm, 4), BeamRule(FixedWidth(4)), FixedShape(depth, 6), "")

    cost = measure_loops(target, draft, parts, budget_s=0.2)
    assert all(0 < one < 2e-3 for one in (cost.turn_s, cost.draft_s, cost.judge_s))


@pytest.mark.skipif(not compiling.AVAILABLE, reason="needs numba")
def test_wide_layers_of_a_head_are_timed():
    """A head drafts nothing in the first turn, and a single timed turn divided by its draft passes."""
    model = tiny("llama", seed=1, vocab_size=VOCAB)
    target = sb.load(model).target
    parts = sb.dsbd(200, draft_beams=202, depth="auto").parts(target, head_of(model, "eagle3"))
    assert parts.controller.host.draft_s > 0


@pytest.fixture(scope="module")
def pair_of_loops():
    return sb.load(tiny("llama", seed=1, vocab_size=64), tiny("llama", seed=2, vocab_size=64))


def seconds_of_chain(controller, target_s, draft_s, agreement=0.6, tokens=400):
    """Seconds of a text by the cost of its passes, relative to one without drafts; drafts pass with odds `agreement`."""
    target, draft = TableLM([0.5, 0.5]), TableLM([0.5 + (1 - agreement), agreement - 0.5])
    session = session_of(sb.speculative_sampling(5, controller=controller), draft, steps=tokens)
    turns = run(session, target)
    seconds = sum(target_s.pass_s(len(turn.forest.tokens)) + draft_s.pass_s(1) * turn.forest.layers for turn in turns)
    return seconds / (tokens * target_s.pass_s(1))


def test_a_chain_costs_hardly_more_than_no_draft_where_drafts_are_dear():
    """A target in 4 bits, which its caches hold while nothing drafts, and a draft in 16: the costs that were measured."""
    target_s = CostCurve((1, 2, 4, 6), (2.9, 4.0, 5.5, 6.6))
    draft_s = CostCurve((1,), (1.6,))
    by_cost = DepthByCost(target_s, draft_s, 1, (1,), 5)
    assert seconds_of_chain(by_cost, target_s, draft_s) < 1.08
    assert seconds_of_chain("fixed", target_s, draft_s) > 1.5
    cheap_s = CostCurve((1,), (0.1,))
    by_cost = DepthByCost(FLAT, cheap_s, 1, (1,), 5)
    assert seconds_of_chain(by_cost, FLAT, cheap_s, 0.9) < 0.5


@pytest.fixture(scope="module")
def models():
    return sb.load(tiny("llama", seed=1), tiny("llama", seed=2, num_hidden_layers=1), check=False)


@pytest.fixture
def sized(models, monkeypatch):
    """What a pass of each model reads, by model: as if the target were larger than the caches."""
    sizes = {models.target: 1000, models.draft: 100}
    monkeypatch.setattr(type(models.target), "bytes_read", property(sizes.__getitem__))
    monkeypatch.setattr(type(models.target), "is_small", False)
    return sizes


def planned(models, method):
    controller = method.parts(models.target, models.draft).controller
    assert isinstance(controller, DraftsIfFaster)
    return controller.planned


def test_chains_are_planned_by_cost_where_a_pass_of_the_draft_reads_much(models, sized, monkeypatch):
    """Texts by noise may be planned by measured times; others are planned by sizes, like those of cheap drafts."""
    monkeypatch.setattr("specbeam.recipes.depth.curves_in_turns", lambda *given: (FLAT, CHEAP))
    monkeypatch.setattr("specbeam.recipes.depth.host_cost", lambda *given: HostCost())
    for read, engine, is_timed in ((250, "compiled", False), (251, "compiled", True), (100, "int4", True)):
        sized[models.draft] = read
        monkeypatch.setattr(models.target, "engine", engine)
        by_noise = planned(models, sb.speculative_sampling(rule="match"))
        assert not by_noise.alone
        assert (by_noise.target == ROWS) is not is_timed
        by_sizes = planned(models, sb.speculative_sampling())
        assert by_sizes.alone
        assert by_sizes.target == ROWS
        fixed = sb.speculative_sampling(controller="fixed").parts(models.target, models.draft).controller
        assert fixed == FixedShape(5, 1)
    sized[models.draft] = 100
    tree = planned(models, sb.opt_tree(24))
    assert (tree.layers, tree.width) == ((8, 16, 0, 0, 0, 0), 24)
    assert tree.target == FLAT  # texts do not depend on it, and the cost of many rows differs between machines
    assert planned(models, sb.opt_tree(24, rule="path")).target == ROWS
    sized[models.draft] = 900
    monkeypatch.setattr(type(models.target), "is_small", True)
    assert planned(models, sb.speculative_sampling()).draft.pass_s(1) == 0.1  # small passes do not follow their bytes


@pytest.mark.parametrize("rule", ["path", "traversal", MatchRule("dice"), "match"])
def test_no_clock_is_asked_where_texts_depend_on_the_depth(rule, models, sized, monkeypatch):
    """Nor how many sessions are decoded side by side: a seed gives the same text in every batch."""
    asked = []
    flat = CostCurve((1, 8), (1.0, 1.0))
    monkeypatch.setattr("specbeam.recipes.depth.curves_in_turns", lambda *given: asked.append(given) or (flat, flat))
    monkeypatch.setattr("specbeam.recipes.depth.host_cost", lambda *given: asked.append(given) or HostCost())
    sized[models.draft] = 563
    plan = planned(models, sb.speculative_sampling(5, rule))
    assert bool(asked) == (rule == "match")
    assert plan.alone == (rule != "match")
    if rule != "match":
        draft_s = CostCurve((1, 8, 16), (0.6, 0.6 * 1.5, 0.6 * 2.4))
        assert plan == DepthByCost(ROWS, draft_s, 1, (1,), 5, alone=True)


def test_depths_by_what_passes_read_are_those_that_pay(models, sized, monkeypatch):
    """Relative to a text without drafts, by the costs that are assumed: a draft that costs too much is left out."""
    for read, agreement, least, most in (
        (50, 0.9, 0.3, 0.5),
        (500, 0.9, 0.7, 1.0),
        (1000, 0.6, 0.99, 1.15),
    ):
        sized[models.draft] = read
        plan = depth_by_sizes((1,), 5, models.target, models.draft)
        assert least < seconds_of_chain(plan, plan.target, plan.draft, agreement) < most


def test_the_bytes_that_a_pass_reads_follow_the_rounding_and_not_the_engine():
    model = tiny("llama", hidden_size=32, intermediate_size=64)
    weights = sum(weight.numel() for weight in model.parameters())
    for options, bits in (({}, 16), ({"engine": "plain"}, 16), ({"quantize": "int8"}, 8), ({"quantize": "int4"}, 4)):
        assert sb.load(model, check=False, **options).target.bytes_read == weights * bits // 8


def test_curves_in_turns_know_that_models_drive_each_other_from_the_caches(tmp_path, monkeypatch):
    """A pass that follows one of the other model takes longer by 2; both have kept curves of their own."""
    monkeypatch.setenv("SPECBEAM_CACHE", str(tmp_path))  # saved curves are of shapes, which other tests have, too
    draft = tiny("llama", seed=92, num_hidden_layers=1)
    models = sb.load(tiny("llama", seed=91), draft, check=False)  # of no other test
    last = []
    passes = []

    def turn(self, rows):
        is_cold = bool(last) and last[-1] is not self.lm
        last.append(self.lm)
        passes.append((self.lm is models.target, rows))
        seconds = (1.0 if self.lm is models.target else 0.1) + 0.01 * rows
        return TurnCost(seconds + 2.0 * is_cold, 0.0, 1)

    monkeypatch.setattr(StoredPrompt, "turn", turn)
    monkeypatch.setattr("specbeam.recipes.tuning.costs.ALONE_S", 0.0)
    monkeypatch.setattr("specbeam.recipes.tuning.costs.QUICK_S", 0.0)
    target_s, draft_s = curves_in_turns(models.target, models.draft)
    assert target_s.pass_s(1) == pytest.approx(1.01)
    assert target_s.pass_s(2) == pytest.approx(1.02 + 2.0 + 2.0)  # and the draft's first pass
    assert target_s.pass_s(8) == pytest.approx(1.08 + 2.0 + 2.0)
    assert draft_s.pass_s(4) == pytest.approx(0.14)
    count = len(passes)
    del models.target.curves_in_turns[models.draft]
    assert curves_in_turns(models.target, models.draft) == (target_s, draft_s)
    assert len(passes) == count


def test_a_moment_in_which_the_thread_rests_does_not_count():
    device = torch.device("cpu")
    assert seconds_of(device, lambda: time.sleep(0.02)) >= 0.02
    assert seconds_of(device, lambda: time.sleep(0.02), is_of_thread=True) < 0.015

"""Controllers: what they learn, and that they change speed and never the law."""

from weakref import WeakKeyDictionary

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.beams import Beams, Layers
from specbeam.core.control.best_tree import depth_of_tree, fastest_tree, layers_of, sequoia_tree, size_of
from specbeam.core.control.confidence import SureDraft, TrackedThreshold
from specbeam.core.control.cost import CostCurve, PassTimes
from specbeam.core.control.size import SizeByLatency, best_size
from specbeam.core.control.survival import COST, TOKENS, Survival, odds_of_score
from specbeam.core.control.thompson import ACCEPTED, REFUSED, SCORE_ERROR, Thompson, best_length, calibrated_odds
from specbeam.core.draft.children import Best, BestAndOne, Distinct, Independent
from specbeam.core.draft.lookup import retrieved
from specbeam.core.draft.tree import Branching, TreeDrafter, _confidence
from specbeam.core.forest import Forest
from specbeam.core.laws.rows import RowLaw
from specbeam.core.laws.warp import Warp
from specbeam.core.measure import saved_figures
from specbeam.core.records import Scored, Shape, Turn, Verdict
from specbeam.core.session import Parts
from specbeam.core.verify.walk import MatchRule
from specbeam.models.table import TableLM
from specbeam.recipes.tuning.acceptance import GUESS, save_acceptance, saved_acceptance, with_guess
from tests.support.exact import distance
from tests.support.examples import PAIRS, completed, law_and_mean, one_turn
from tests.support.loops import pair
from tests.support.programs import random_table, run, session_of

__all__ = ["pair"]  # a fixture

RANKS = (0.7, 0.175, 0.125)


@pytest.mark.parametrize(
    ("nodes", "tokens"),
    [(2, 1.7), (3, 2.19), (5, 2.7731), (6, 2.9481), (7, 3.11617), (8, 3.24117), (9, 3.36367)],
)
def test_sequoia_finds_the_worked_optima(nodes, tokens):
    tree, found = sequoia_tree(RANKS, nodes, nodes)
    assert found == pytest.approx(tokens, abs=1e-9)
    assert size_of(tree) == nodes - 1
    assert expected_tokens(tree) == pytest.approx(found)


def expected_tokens(tree):
    return 1 + sum(odds * expected_tokens(child) for odds, child in zip(RANKS, tree, strict=False))


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_sequoia_is_the_heap_when_odds_fall(depth):
    for nodes in (2, 4, 7, 9):
        values, front = [1.0], [1.0]
        for _ in range(depth):
            front = [value * odds for value in front for odds in RANKS]
            values += front
        best = sum(sorted(values, reverse=True)[:nodes])
        assert sequoia_tree(RANKS, nodes, depth)[1] == pytest.approx(best)


def test_the_hardware_rule_on_its_worked_example():
    """Counting the root as a layer: 3.970 time units per token with 16 nodes and 6 layers."""
    cost = CostCurve((1, 2, 4, 8, 16), (10, 10, 10, 12, 14), 0.3)
    tree, time = fastest_tree(RANKS, cost, 16, 9)
    tokens = expected_tokens(tree)
    assert (size_of(tree) + 1, depth_of_tree(tree) + 1) == (16, 6)
    assert (6 * 0.3 + 14) / tokens == pytest.approx(3.970, abs=5e-4)
    assert time == pytest.approx((5 * 0.3 + 14) / tokens)


def test_best_length_is_the_published_table():
    table = {
        0.5: (5, 4, 3, 2, 1), 0.6: (7, 6, 4, 3, 2), 0.7: (9, 8, 6, 4, 3), 0.8: (14, 11, 8, 6, 4), 0.9: (24, 19, 13, 10, 7)
    }  # fmt: skip
    for rate, lengths in table.items():
        assert tuple(best_length(rate, cost, 40) for cost in (0.01, 0.02, 0.05, 0.1, 0.2)) == lengths


CONTROLLERS = ["fixed", "confidence", "tracked", "thompson", "calibrated", "survival", "beta_ts", "calibration_ts"]


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("rule", ["path", "traversal"])
def test_no_controller_changes_the_law(controller, rule):
    target, draft = PAIRS["EX3M"]

    def make(lm):
        return sb.speculative_sampling(2, rule, controller)

    law, _ = law_and_mean(one_turn(make, target, draft), target, 3)
    assert distance(law, completed(target, (), 3)) < 1e-12


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_controllers_change_no_greedy_text(controller):
    target, draft = TableLM(random_table(1, 5)), TableLM(random_table(2, 5))
    plain = session_of(sb.greedy(), None, steps=20, warp=Warp(greedy=True))
    run(plain, target)
    session = session_of(sb.speculative_sampling(6, controller=controller), draft, steps=20, warp=Warp(greedy=True))
    run(session, target)
    assert session.settled == plain.settled


def test_thompson_learns_the_rate():
    """Drafts of a twin of the target are always accepted, those of a stranger hardly ever; lengths follow."""
    lengths = {}
    for name, seed in (("twin", 1), ("stranger", 2)):
        target, draft = TableLM(random_table(1, 6)), TableLM(random_table(seed, 6))
        controller = Thompson(cost=0.3, most=8)
        session = session_of(sb.speculative_sampling(8, controller=controller), draft, steps=150)
        turns = run(session, target)
        lengths[name] = np.mean([turn.shape.depth for turn in turns[-10:-2]])
        accepted, refused, _ = session.state[controller].numbers.learnt
        assert accepted - 1 == sum(turn.verdict.accepted for turn in turns)
        assert refused - 1 == sum(turn.verdict.accepted < turn.forest.siblings.size for turn in turns)
    assert lengths["twin"] > 6
    assert lengths["stranger"] < 5


def test_the_tracked_threshold_follows_acceptance():
    target = TableLM(random_table(1, 6))
    ends = []
    for seed in (1, 2):
        controller = TrackedThreshold(start=0.2, wanted=0.9, most=4)
        session = session_of(
            sb.speculative_sampling(4, controller=controller), TableLM(random_table(seed, 6)), steps=120
        )
        run(session, target)
        ends.append(session.state[controller][0])
    assert ends[0] < 0.2 < ends[1]


@pytest.mark.parametrize("controller", [*CONTROLLERS, "cost"])
def test_a_plan_never_drafts_beyond_the_limit(controller):
    session = session_of(sb.speculative_sampling(9, controller=controller), TableLM([0.5, 0.5]), steps=3)
    if controller == "cost":  # so sure of its drafts that it would take all there is
        session.parts.controller._pass_odds(session).seen[0] = 1e6
    for key in range(20):
        if controller == "thompson":
            session.parts.controller._known(session).numbers.learnt[ACCEPTED] = 1e9
        shape = session.parts.controller.plan(session)
        assert shape == Shape(2, 1), key


def test_a_size_by_latency_never_drafts_beyond_the_limit():
    session = session_of(sb.opt_tree(9, 9, controller="latency"), TableLM([0.5, 0.5]), steps=3)
    assert session.parts.controller.plan(session).depth == 2


def told(accepted, drafted):
    """A turn of one sequence that drafted a chain."""
    forest = Forest.rooted([0])
    for depth in range(drafted):
        forest = forest.grown([0], [depth], groups=[retrieved([0], depth, [depth + 1])])
    number = np.arange(accepted + 1)
    zeros = np.zeros_like(number)
    layers = Layers(
        parents=number,
        beams=Beams(zeros, zeros, zeros.astype(float), zeros + 1, zeros.astype(np.uint64)),
        ended=zeros > 0,
        draw_ends=number + 1,
        widths=zeros + 1,
        passed=number < accepted,
        sources=np.zeros((len(number), 3), dtype=np.int64),
        edges=np.full(len(number), np.nan),
    )
    return Turn(Shape(drafted, drafted), forest, Scored(), Verdict(layers))


def test_survival_counts_what_it_spent():
    session = session_of(sb.speculative_sampling(5), TableLM([0.5, 0.5]), steps=9)
    controller = Survival(cost=0.2, most=5)
    controller.plan(session)
    for confidence in (0.95, 0.85, 0.35):
        controller.more(session, 1, confidence)
    controller.settle(session, told(accepted=1, drafted=3))
    seen = controller.stops(session, 0)
    assert (seen.learnt[TOKENS], seen.learnt[COST]) == (3.0, pytest.approx(2.6))
    assert seen.tries.tolist() == [4, 4, 4, 4, 4, 4, 4, 4, 5, 5]  # what was not reached is not counted
    assert odds_of_score(seen, 0.95) == pytest.approx((0.95 * 4 + 1) / 5)
    assert odds_of_score(seen, 0.85) == pytest.approx(0.85 * 4 / 5)


def test_a_tracked_threshold_is_not_lowered_by_a_draft_of_full_length():
    ends = {}
    for drafted in (4, 3):
        session = session_of(sb.speculative_sampling(4), TableLM([0.5, 0.5]), steps=9)
        controller = TrackedThreshold(most=4)
        controller.settle(session, told(accepted=drafted, drafted=drafted))
        ends[drafted] = session.state[controller][0]
    assert ends[4] == pytest.approx(0.6)  # it could not have drafted more
    assert ends[3] == pytest.approx(0.9 * 0.6 + 0.1 * 0.59)


def test_calibration_weighs_rate_and_score_by_their_certainty():
    controller = Thompson(calibrated=True, mode="round", most=5)
    session = session_of(sb.speculative_sampling(5, controller=controller), TableLM([0.5, 0.5]), steps=9)
    stops = controller.stops(session, 0)
    numbers = stops.learnt
    numbers[[ACCEPTED, REFUSED]] = 60.0, 40.0
    odds = {}
    for error in (1e-6, 0.05, 1e6):
        numbers[SCORE_ERROR] = error
        odds[error] = calibrated_odds(stops, 0.9)
    assert odds[1e-6] == pytest.approx(0.9, abs=0.01)  # a score that never errs is believed
    assert odds[1e6] == pytest.approx(0.6, abs=0.02)  # one that always does is not
    assert odds[0.05] == pytest.approx(0.75, abs=0.02)  # as uncertain as the rate
    numbers[SCORE_ERROR] = 0.05
    stops.scores[:2] = 0.9
    stops.counted[0] = 2
    controller.settle(session, told(accepted=1, drafted=2))
    surprises = [max(0.002, 0.01 - 0.09), max(0.002, 0.81 - 0.09)]
    expected = 0.95 * (0.95 * 0.05 + 0.05 * surprises[0]) + 0.05 * surprises[1]
    assert numbers[SCORE_ERROR] == pytest.approx(expected)


def test_the_first_turn_of_a_session_holds_its_prompt_and_says_nothing_of_nodes():
    session, controller = session_of(sb.opt_tree(4, 2), TableLM([0.5, 0.5]), steps=9), SizeByLatency(4, 2)
    for passes, weight in ((1, 0.0), (2, 1.0)):
        session.count.target_passes = passes
        controller.plan(session)
        controller.settle(session, told(1, 2))
        assert controller._memory().times.moments[0] == pytest.approx(weight)


def test_the_confidence_of_a_layer_is_that_of_its_surest_token():
    before = Forest.rooted([0])
    law = RowLaw(np.zeros(0, dtype=np.int64), np.log([0.7, 0.2, 0.1]), 3)
    assert _confidence(before.grown([1, 0, 2], [0, 0, 0]), before, {0: law}) == pytest.approx(0.7)


class Hearing(SureDraft):
    """Drafts on, and remembers how sure it was told to be of each layer."""

    def more(self, session, depth, confidence):
        session.state.setdefault(self, []).append(confidence)
        return True


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(
    "children", [Independent(), Distinct(), Distinct(fallback=True), Best(), BestAndOne()], ids=str
)
def test_controllers_are_told_draft_odds_however_children_are_drawn(children, greedy):
    """Of all tokens that were drawn, ends too; never the odds among what another draw had left."""
    table = random_table(2, 5)
    controller = Hearing(most=2)
    layers = 0
    for key in range(8):
        drafter = TreeDrafter(TableLM(table), Branching((2, 2), children))
        parts = Parts(drafter, MatchRule(), controller, "")
        method = sb.Method("", "", 1, lambda *_, parts=parts: parts)
        session = session_of(method, None, steps=9, eos=(4,), key=key, warp=Warp(greedy=greedy))
        (forest,) = drafter.draft([session], [controller.plan(session)])
        groups = forest.siblings.groups()
        odds = {}
        for group in groups:
            parent = int(group.parents[0])
            law = table(tuple(forest.path(parent)))
            odds.setdefault(int(forest.depths()[parent]), []).extend(law[group.tokens])
        told = session.state.get(controller, [])
        layers += len(told)
        assert told == pytest.approx([max(odds[layer]) for layer in range(len(told))])
    assert layers > 8


def test_pass_times_follow_a_planted_line_through_noise_and_a_step():
    rng, times = np.random.default_rng(0), PassTimes(decay=0.95)
    for fixed, slope in ((10.0, 0.2), (30.0, 1.0)):
        for _ in range(300):
            nodes = int(rng.integers(1, 65))
            times.add(nodes, fixed + slope * nodes + rng.normal(0, 0.5))
        found = times.line()
        assert found[0] == pytest.approx(fixed, abs=1)
        assert found[1] == pytest.approx(slope, abs=0.03)


def test_pass_times_without_spread_are_flat():
    times = PassTimes()
    assert times.line() == (1.0, 0.0)
    for _ in range(3):
        times.add(8, 2.0)
    assert times.line() == (pytest.approx(2.0), 0.0)


def test_the_best_size_never_grows_with_the_cost_of_a_node():
    sizes = [best_size([RANKS] * 9, 10, slope, 40) for slope in np.linspace(0, 5, 50)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 40
    assert sizes[-1] <= 3


def test_size_by_latency_drafts_less_when_nodes_are_dear():
    means = {}
    for slope in (0.0, 1.0):
        target, draft = TableLM(random_table(1, 6)), TableLM(random_table(1, 6))
        controller = SizeByLatency(most=16, depth=4)
        for nodes in (1, 4, 16):
            controller._memory().times.add(nodes, 1000.0 * (1 + slope * nodes))
        controller._memory().times.decay = 1.0  # what is measured here is nothing beside these
        session = session_of(sb.opt_tree(16, 4, 4, controller=controller), draft, steps=60)
        turns = run(session, target)
        means[slope] = np.mean([turn.shape.width for turn in turns])
        memory = controller._memory()
        assert memory.tries[0].sum() > memory.hits[0].sum() > 2
    assert means[1.0] < 6 < 12 < means[0.0]


def test_survival_drafts_as_far_as_the_draft_is_good_and_cheap():
    lengths = {}
    for name, seed, cost in (("twin", 1, 0.05), ("dear twin", 1, 0.9), ("stranger", 2, 0.05)):
        controller = Survival(cost=cost, most=8)
        session = session_of(
            sb.speculative_sampling(8, controller=controller), TableLM(random_table(seed, 6)), steps=200
        )
        turns = run(session, TableLM(random_table(1, 6)))
        lengths[name] = np.mean([turn.forest.siblings.size for turn in turns[5:-5]])
    assert lengths["twin"] > 5
    assert lengths["dear twin"] < 2
    assert lengths["stranger"] < lengths["twin"] - 2


def test_sequoia_takes_the_fastest_tree_under_a_cost_curve():
    cheap, dear = (CostCurve((1, 2, 4, 8, 16), tuple(10 + slope * n for n in (1, 2, 4, 8, 16))) for slope in (0, 10))
    sizes = [size_of(sb.sequoia(16, 6, RANKS, cost=cost).parts(None, TableLM([1.0])).drafter.growth.topology)
             for cost in (cheap, dear)]  # fmt: skip
    assert sizes[0] == 16
    assert sizes[1] <= 3


def test_sequoia_takes_what_was_measured_of_the_pair(pair, tmp_path, monkeypatch):
    """The tree follows the acceptance that was kept and the cost of passes; without either, guesses and all nodes."""
    monkeypatch.setenv("SPECBEAM_CACHE", str(tmp_path))
    monkeypatch.setattr("specbeam.recipes.tuning.acceptance._KNOWN", WeakKeyDictionary())
    free = CostCurve((1, 4, 16, 64), (1.0, 1.0, 1.0, 1.0))
    monkeypatch.setattr(
        "specbeam.recipes.sequence.curve_of", lambda lm: free if lm is pair.target else CostCurve((1,), (0.0,))
    )

    def shape(**settings):
        return layers_of(sb.sequoia(12, 4, **settings).parts(pair.target, pair.draft).drafter.growth.topology)

    guessed = shape()
    assert sum(guessed) == 12
    save_acceptance(pair.target, pair.draft, [0.95, 0.0])
    assert shape() == (1, 1, 1, 1)  # a second child is never accepted
    assert shape(acceptance=(0.7, 0.12, 0.05, 0.03, 0.02)) == guessed
    dear = CostCurve((1, 4, 16, 64), (1.0, 4.0, 16.0, 64.0))
    monkeypatch.setattr("specbeam.recipes.sequence.curve_of", lambda lm: dear)
    assert sum(shape()) < 12
    assert sum(shape(cost=None, acceptance=(0.7, 0.12, 0.05, 0.03, 0.02))) == 12
    (file,) = saved_figures.folder().glob("acceptance-*.json")
    for broken in ('{"odds": []}', '{"odds": [0.9, 0.9]}', '{"odds": "many"}', "{}"):
        file.write_text(broken)
        assert saved_acceptance(pair.target, pair.draft) == (0.95, 0.0)  # it stays while the pair is loaded
        monkeypatch.setattr("specbeam.recipes.tuning.acceptance._KNOWN", WeakKeyDictionary())
        assert saved_acceptance(pair.target, pair.draft) is None
        save_acceptance(pair.target, pair.draft, [0.95, 0.0])


def test_few_nodes_make_nothing_impossible():
    """What was measured at seven nodes is little more than the guess, what was measured at many is itself."""
    few = with_guess([1.0, 0.0, 0.0, 0.0, 0.0], 7)
    assert few[0] < 0.8
    assert min(few) > 0.01
    assert with_guess([0.8, 0.1, 0.0], 10**6) == pytest.approx((0.8, 0.1, 0.0), abs=1e-4)
    assert with_guess([0.0] * 5, 0) == pytest.approx(GUESS)
    assert sum(with_guess([0.5, 0.1, 0.1, 0.1, 0.1, 0.1, 0.0], 30)) <= 1


@pytest.mark.parametrize("name", ["thompson", "survival"])
def test_the_cost_of_a_draft_layer_is_measured(name, pair, monkeypatch):
    """It is the draft's pass and the rows in the target's, as a share of a pass without drafts; a part keeps its own."""
    curves = {pair.target: CostCurve((1, 11), (1.0, 2.0)), pair.draft: CostCurve((1, 4), (0.2, 0.5))}
    monkeypatch.setattr("specbeam.recipes.depth.curve_of", curves.get)

    def cost(method):
        return method.parts(pair.target, pair.draft).controller.cost

    assert cost(sb.speculative_sampling(5, controller=name)) == 0.3  # 0.2 + 0.1
    assert cost(sb.rsd_s(4, 2, controller=name)) == 0.9  # 0.5 + 0.4
    assert cost(sb.speculative_sampling(5, controller=Survival(cost=0.7))) == 0.7
    assert sb.speculative_sampling(5, controller=name).parts(None, TableLM([1.0])).controller.cost == 0.1
    if name == "thompson":
        assert cost(sb.prompt_lookup(5, controller=name)) == 0.1  # nothing but rows


@pytest.mark.parametrize("acceptance", [(0.7, 0.0), (0.0, 0.5), (0.7, 0.0, 0.1)])
def test_sequoia_with_ranks_that_are_never_accepted(acceptance):
    tree, tokens = sequoia_tree(acceptance, 9, 4)
    assert np.isfinite(tokens)
    assert size_of(tree) == 8


def test_sequoia_takes_a_smaller_tree_if_none_of_the_size_fits():
    tree, tokens = sequoia_tree((0.7, 0.2), 17, 1)
    assert (size_of(tree), tokens) == (2, pytest.approx(1.9))
    with pytest.raises(sb.SpecbeamError, match="at least one"):
        sb.sequoia(acceptance=())


def test_stop_rules_see_the_confidence_of_best_first_trees():
    target, draft = TableLM(random_table(1, 6)), TableLM(random_table(2, 6))
    depths = {}
    for threshold in (0.0, 0.99):
        session = session_of(sb.opt_tree(12, 4, 3, controller=SureDraft(threshold, most=4, width=12)), draft, steps=40)
        depths[threshold] = np.mean([turn.forest.layers for turn in run(session, target)])
    assert depths[0.99] < depths[0.0] - 0.5

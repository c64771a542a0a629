"""DSBD (arXiv 2409.16560) end to end on tables: the law of whole trajectories by enumeration."""

import inspect
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from scipy import stats

import specbeam as sb
from specbeam.core.control.cost import CostCurve
from specbeam.core.control.depth import DepthByCost
from specbeam.core.control.fixed import FixedShape
from specbeam.core.control.needs import NodesByNeed
from specbeam.core.control.width import FixedWidth, NucleusWidth, SureWidth
from specbeam.core.decode import turns
from specbeam.core.draft.beams import BeamDrafter
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.warp import Warp
from specbeam.core.session import Parts
from specbeam.core.verify.beams import BeamRule
from specbeam.errors import BadSetting
from specbeam.models.table import TableLM
from tests.support import words
from tests.support.exact import beam_sampling_law, distance, exact_law
from tests.support.programs import outcome_of, random_table, run, session_of, texts
from tests.support.quick import first_quick
from tests.support.steps import source_of_steps

CLOSE = 1e-12


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize(
    ("depth", "draft_beams", "steps", "vocab", "eos"),
    [
        (1, 2, 2, 3, ()),
        (1, 3, 2, 2, ()),
        (2, 2, 2, 2, (1,)),
        (1, 2, 3, 2, (0,)),
        pytest.param(2, 2, 3, 2, (), marks=pytest.mark.slow),
        pytest.param(2, 2, 3, 2, (1,), marks=pytest.mark.slow),
    ],
)
def test_fixed_width_has_the_law_of_beam_sampling(depth, draft_beams, steps, vocab, eos, replacement):
    target, draft = random_table(1, vocab), random_table(2, vocab)
    method = sb.dsbd(2, draft_beams, depth, "fixed", coupling="rejection", replacement=replacement)
    found = exact_law(outcome_of(method, target, draft, steps, eos, replacement))
    expected = beam_sampling_law(target, 2, steps, replacement, eos)
    assert distance(found, expected) < CLOSE


@pytest.mark.parametrize("drafter", ["prompt_lookup", "suffix_match", "token_recycling"])
@pytest.mark.parametrize("options", [{"width": "fixed"}, {"width": "auto"}, {"semantics": "hf"}])
def test_drafts_without_a_model_leave_beams_as_they_are(drafter, options):
    pair = words.pair(draft_seed=None)
    prompts = ["abcabcabc", "Hello Hello Hel"]
    wanted = {"seed": 5, "max_new_tokens": 20, "top_k": 6}
    plain = sb.generate(pair, prompts, sb.beam_sampling(3, **options), **wanted)
    drafted = sb.generate(pair, prompts, sb.dsbd(3, depth=3, drafter=drafter, **options), **wanted)
    assert [one.beams for one in drafted] == [one.beams for one in plain]
    assert sum(one.report.rows.scored for one in drafted) > sum(one.report.rows.scored for one in plain)


def test_drafts_without_a_model_need_beams_that_do_not_depend_on_them():
    for options in ({"width": "dynamic"}, {"coupling": "rejection"}, {"collapse": True}):
        with pytest.raises(
            BadSetting, match="drafter is 'prompt_lookup', which needs beams that do not depend on drafts"
        ):
            sb.dsbd(3, drafter="prompt_lookup", **options)
    with pytest.raises(BadSetting, match="drafter is 'promt_lookup'; it must be one of model, prompt_lookup"):
        inspect.unwrap(sb.dsbd)(3, drafter="promt_lookup")


@pytest.mark.parametrize("replacement", [True, False])
def test_beams_whose_drafts_are_left_out_after_a_failure_have_the_law_of_beam_sampling(replacement):
    target, draft = random_table(1, 2), random_table(2, 2)
    dear = DepthByCost(CostCurve((1, 8), (1.0, 1.2)), CostCurve((1,), (0.45,)), 2, (2,), 1, alone=True)
    method = sb.dsbd(2, 2, coupling="rejection", replacement=replacement, controller=dear)
    depths = set()

    def program(dice):
        session = session_of(method, TableLM(draft), dice, 3)
        depths.add(tuple(turn.shape.depth for turn in run(session, TableLM(target))))
        return texts(session, replacement)

    assert distance(exact_law(program), beam_sampling_law(target, 2, 3, replacement)) < CLOSE
    assert {turns[:2] for turns in depths} >= {(1, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("replacement", [True, False])
def test_fixed_width_on_three_tokens_and_two_layers(replacement):
    target, draft = random_table(3, 3, zeros=True), random_table(4, 3)
    rule = BeamRule(FixedWidth(2), "rejection", replacement)
    method = sb.Method(
        "dsbd", "", 2, lambda _, lm: Parts(BeamDrafter(lm, 2, "rejection", replacement), rule, FixedShape(2, 2), "")
    )
    found = exact_law(outcome_of(method, target, draft, 3, (), replacement))
    assert distance(found, beam_sampling_law(target, 2, 3, replacement)) < CLOSE


@pytest.mark.parametrize("replacement", [True, False])
def test_beam_sampling_has_its_law(replacement):
    target = random_table(5, 3)
    method = sb.dsbd(2, 2, 1, "fixed", coupling="rejection", replacement=replacement)
    plain = sb.Method(
        "plain",
        "",
        2,
        lambda _, lm: Parts(sb.beam_sampling().parts().drafter, method.parts(None, lm).rule, FixedShape(0, 0), ""),
    )
    found = exact_law(outcome_of(plain, target, target, 2, (2,), replacement))
    assert distance(found, beam_sampling_law(target, 2, 2, replacement, (2,))) < CLOSE


def test_one_beam_is_speculative_sampling():
    """Width 1: plain sampling's law, with one draft (Leviathan et al.) and with several (SpecInfer, RSD)."""
    target, draft = random_table(6, 3), random_table(7, 3)
    for draft_beams, replacement, depth in ((1, True, 2), (2, True, 1), (2, False, 1)):
        method = sb.dsbd(1, draft_beams, depth, "fixed", coupling="rejection", replacement=replacement)
        found = exact_law(outcome_of(method, target, draft, 3, (), replacement))
        assert distance(found, beam_sampling_law(target, 1, 3, True)) < CLOSE


def laws_by_width(rule, replacement, seed=8):
    """For each history and width of the second layer: the law of its draws, and what it should be."""
    target, draft = random_table(seed, 2), random_table(seed + 1, 2)
    method = sb.Method(
        "dynamic",
        "",
        2,
        lambda _, lm: Parts(BeamDrafter(lm, 2, "rejection", replacement), rule, FixedShape(1, 3), ""),
    )
    found = defaultdict(lambda: defaultdict(float))

    def program(dice):
        session = session_of(method, TableLM(draft), dice, 2)
        turns = run(session, TableLM(target))
        history = turns[0].verdict.steps[0]
        return tuple(history.beams.tokens), turns[0].verdict.steps[0].width, texts(session, replacement)[1][:9]

    for (outcome, width, _), odds in exact_law(program).items():
        found[width][outcome] += odds
    return found, target


def first_layer(target, width, replacement):
    from tests.support.exact import successive

    return successive(target(()), width, replacement)


@pytest.mark.parametrize("replacement", [False])
def test_given_its_width_a_dynamic_layer_has_the_law_of_that_width(replacement):
    from specbeam.core.control.width import SureWidth

    widths = set()
    for seed in range(8, 24, 2):
        for threshold in (0.3, 0.6, 0.9):
            found, target = laws_by_width(
                BeamRule(SureWidth(2, 1, threshold), "rejection", replacement),
                replacement,
                seed,
            )
            assert len(found) == 1  # the first layer's width is a function of the two laws alone
            ((width, law),) = found.items()
            widths.add(width)
            total = sum(law.values())
            law = {drawn: odds / total for drawn, odds in law.items()}
            assert distance(law, first_layer(target, width, replacement)) < CLOSE
    assert widths == {1, 2}


@source_of_steps()
def test_shared_noise_gives_the_beams_of_beam_sampling_whatever_the_draft():
    rng = np.random.default_rng(0)
    for case in range(60):
        vocab = int(rng.integers(2, 7))
        target, draft = (
            TableLM(random_table(case, vocab, zeros=case % 3 == 0)),
            TableLM(random_table(1000 + case % 7, vocab)),
        )
        beams = int(rng.integers(1, 5))
        plain = session_of(sb.beam_sampling(beams), None, steps=7, eos=(0,), key=case)
        run(plain, target)
        for depth in (1, 2, 4):
            method = sb.dsbd(beams, beams + int(rng.integers(0, 3)), depth, "fixed")
            fast = session_of(method, draft, steps=7, eos=(0,), key=case)
            turns = run(fast, target)
            assert texts(fast) == texts(plain)
            assert [len(turn.verdict.steps) <= depth + 1 for turn in turns]
            np.testing.assert_allclose(
                [one.loglik for one in fast.hypotheses()], [one.loglik for one in plain.hypotheses()], atol=1e-9
            )


@pytest.mark.parametrize("mass", first_quick([0.5, 0.9]))
@source_of_steps()
def test_widths_by_the_nucleus_give_the_beams_of_beam_sampling_with_them_whatever_the_draft(mass):
    """With all drafts, with those alone that are worth it, and with laziness."""
    widths = set()
    lazy = 0
    for case in range(60):
        vocab = 4 + case % 5
        target = TableLM(random_table(case, vocab, zeros=case % 3 == 0))
        draft = TableLM(random_table(1000 + case % 7, vocab))
        warp = Warp(truncation=Truncation([1.0, 0.7, 1.3][case % 3], top_k=[0, 0, 0, 3][case % 4]))
        settings = {"width": "auto", "min_beams": 1, "mass": mass}
        plain = session_of(sb.beam_sampling(4, **settings), None, steps=7, eos=(0,), key=case, warp=warp)
        run(plain, target)
        widths |= {*plain.count.widths}
        for depth in (1, 3, "auto"):
            fast = session_of(sb.dsbd(4, 5, depth, **settings), draft, steps=7, eos=(0,), key=case, warp=warp)
            run(fast, target)
            assert texts(fast) == texts(plain)
            assert fast.count.widths == plain.count.widths
            lazy += fast.count.rows.lazy_layers
    assert widths == {1, 2, 3, 4}
    assert lazy > 0


@pytest.mark.parametrize("width", [{"width": "dynamic"}, {"width": "auto", "mass": 0.5}], ids=["dynamic", "auto"])
@source_of_steps()
def test_given_its_widths_shared_noise_gives_the_beams_of_beam_sampling(width):
    """The same seed, and plain beam sampling that takes the widths that were chosen, step by step."""
    widths = set()
    for case in range(40):
        target, draft = TableLM(random_table(case, 6)), TableLM(random_table(1000 + case, 6))
        fast = session_of(sb.dsbd(4, 5, 1 + case % 3, min_beams=1, **width), draft, steps=8, eos=(0,), key=case)
        taken = [step.width for turn in run(fast, target) for step in turn.verdict.steps]
        plain = session_of(sb.beam_sampling(4), None, steps=8, eos=(0,), key=case)
        for most in taken:
            plain.parts = replace(plain.parts, rule=BeamRule(FixedWidth(most)))
            (turn,) = turns(target, [plain])
            assert len(turn[1].verdict.steps) == 1
        assert texts(fast) == texts(plain)
        widths |= {*taken}
    assert widths == {1, 2, 3, 4}


@pytest.mark.parametrize("width", [NucleusWidth(2, 1, 0.38), NucleusWidth(2), SureWidth(2, 1, 0.5)], ids=str)
@source_of_steps()
def test_a_first_width_is_the_same_for_every_seed(width):
    """Nothing was drawn before it. A draft whose beams have all ended is shorter, which tells of the noise of its layers: a
    width must not look at that, for the target draws by the same noise.
    """
    target, draft = TableLM([0.35, 0.15, 0.35, 0.15]), TableLM([0.2, 0.3, 0.3, 0.2])
    method = sb.Method("", "", 2, lambda _, lm: Parts(BeamDrafter(lm, 2), BeamRule(width), FixedShape(4, 2), ""))
    widths, layers = set(), set()
    for key in range(150):
        session = session_of(method, draft, steps=8, eos=(0, 1), key=key)
        ((_, turn),) = turns(target, [session])
        widths.add(turn.verdict.steps[0].width)
        layers.add(turn.forest.layers)
    assert len(widths) == 1
    assert layers == {1, 2, 3, 4}


@dataclass(frozen=True)
class Counting:
    """Says that it ignores drafts, and draws as many beams as the layer has of them."""

    most: int = 3
    ignores_drafts: ClassVar[bool] = True

    def choose(self, layer):
        """Return the number of draws."""
        is_drafted = layer.number < layer.forest.siblings.size
        return max(min(layer.drafted, self.most), 1) if is_drafted else self.most


@pytest.mark.parametrize("width", [NucleusWidth(3, 1, 0.6), Counting()], ids=["honest", "counting"])
def test_a_width_must_not_count_the_drafts_that_their_noise_left(width):
    """Of the drafts of later layers the target gets those that are worth it, which their noise decides. In each turn the width
    of the second layer is a function of what the first one drew; a width that counts drafts takes several values.
    """
    target, draft = TableLM([0.3, 0.3, 0.3, 0.1]), TableLM([0.4, 0.3, 0.2, 0.1])
    costs = CostCurve((1, 40), (1.0, 9.0)), CostCurve((1,), (0.01,))

    def parts(_, lm):
        drafter = BeamDrafter(lm, 3, keeps_rows=False, width=width)
        return Parts(drafter, BeamRule(width), NodesByNeed(*costs, 3, 4), "")

    found = defaultdict(set)
    for key in range(200):
        session = session_of(sb.Method("", "", 3, parts), draft, steps=6, key=key)
        for turn in run(session, target)[:1]:
            first, *others = turn.verdict.steps
            if others:
                found[tuple(first.beams.tokens)].add(others[0].width)
    is_function_of_the_past = max(map(len, found.values())) == 1
    assert is_function_of_the_past == isinstance(width, NucleusWidth)


def test_with_the_target_as_its_draft_every_layer_passes():
    """Core and halo: the draft model's own choice is always among the drafts, also with halo beams competing."""
    for case in range(20):
        table, twin = TableLM(random_table(case, 6)), TableLM(random_table(case, 6))
        for beams, draft_beams in ((1, 1), (2, 2), (2, 4), (3, 6)):
            session = session_of(sb.dsbd(beams, draft_beams, 3, "fixed"), twin, steps=12, key=case)
            turns = run(session, table)
            assert [len(turn.verdict.steps) for turn in turns] == [4, 4, 4]


def test_equal_laws_by_rejection_accept_the_first_layer():
    for replacement in (True, False):
        for case in range(10):
            table, twin = TableLM(random_table(case, 5)), TableLM(random_table(case, 5))
            method = sb.dsbd(2, 2, 1, "fixed", coupling="rejection", replacement=replacement)
            session = session_of(method, twin, steps=2, key=case)
            assert len(run(session, table)) == 1


@source_of_steps()
def test_noise_follows_the_law_of_draws_without_replacement():
    target, draft = random_table(31, 3), random_table(32, 3)
    expected = beam_sampling_law(target, 2, 2, False)
    counts = dict.fromkeys(expected, 0)
    number = 3000
    for key in range(number):
        session = session_of(sb.dsbd(2, 3, 1, "fixed"), TableLM(draft), steps=2, key=key * 7919 + 1)
        run(session, TableLM(target))
        counts[texts(session)] += 1
    cells = [(counts[cell], odds * number) for cell, odds in expected.items() if odds * number >= 5]
    rest = (number - sum(c for c, _ in cells), number - sum(e for _, e in cells))
    seen, hoped = zip(*(cells + ([rest] if rest[1] > 1 else [])), strict=True)
    assert stats.chisquare(seen, np.array(hoped) * sum(seen) / sum(hoped)).pvalue > 1e-3


@pytest.mark.parametrize("coupling", ["noise", "rejection"])
def test_at_temperature_zero_it_is_beam_search(coupling):
    for case in range(20):
        table = random_table(case, 5)
        session = session_of(
            sb.dsbd(3, 4, 3, "fixed", coupling=coupling),
            TableLM(random_table(99, 5)),
            steps=5,
            key=case,
            warp=Warp(greedy=True),
        )
        run(session, TableLM(table))
        beams = [((), 0.0)]
        for _ in range(5):
            longer = [((*path, v), score + np.log(table(path)[v])) for path, score in beams for v in range(5)]
            beams = sorted(longer, key=lambda one: -one[1])[:3]
        assert texts(session)[1] == tuple(path for path, _ in beams)


def test_a_support_smaller_than_the_width_narrows_the_layer():
    lone, twin = TableLM([0.0, 1.0, 0.0]), TableLM([0.0, 1.0, 0.0])
    for method in (sb.beam_sampling(4), sb.dsbd(4, 6, 2, "fixed"), sb.dsbd(4, 6, 2, "fixed", coupling="rejection")):
        session = session_of(method, twin, steps=4)
        run(session, lone)
        assert session.count.widths == [1, 1, 1, 1]


def test_limits_inside_a_turn_are_kept():
    table, twin = TableLM(random_table(3, 5)), TableLM(random_table(3, 5))
    for steps in (1, 2, 3, 5):
        session = session_of(sb.dsbd(2, 3, 4, "fixed"), twin, steps=steps)
        run(session, table)
        assert session.length == steps


def test_ended_beams_are_put_aside_inside_a_turn():
    """Target and draft agree, so ends happen in the middle of turns; nothing is drawn behind an end."""
    for case in range(20):
        table, twin = TableLM(random_table(case, 4)), TableLM(random_table(case, 4))
        session = session_of(sb.dsbd(3, 4, 4, "fixed"), twin, steps=8, eos=(0, 1), key=case)
        run(session, table)
        for one in session.hypotheses():
            ends = [place for place, token in enumerate(one.tokens) if token in (0, 1)]
            assert ends == ([len(one.tokens) - 1] if one.finished else [])


def test_collapse_keeps_the_best_beam_after_each_turn():
    table, draft = TableLM(random_table(3, 5)), TableLM(random_table(4, 5))
    session = session_of(sb.dsbd(3, 4, 2, "fixed", collapse=True), draft, steps=6)
    for turn in run(session, table):
        if turn.verdict.steps[-1].live.size:
            assert turn.verdict.beams.size == 1
            assert turn.verdict.beams.scores[0] == turn.verdict.steps[-1].live.scores.max()

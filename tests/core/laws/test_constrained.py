"""Constrained laws beyond plain drawn trees: truncation, shared noise, dynamic widths, matched trees, transformers' sampling.

Each is the law of the definition with the table renormalised over what the automaton allows.
"""

import itertools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.control.fixed import FixedShape
from specbeam.core.control.width import SureWidth
from specbeam.core.draft.beams import BeamDrafter
from specbeam.core.laws.ranking import Truncation
from specbeam.core.session import Parts
from specbeam.core.verify.beams import BeamRule
from specbeam.core.verify.search import SearchRule
from specbeam.core.verify.walk import MatchRule
from specbeam.models.table import TableLM
from tests.methods.test_sequences import DRAWN, MATCHED, parts_on
from tests.oracles.noise import child_keys, from_the_top, gumbel_of_all
from tests.support.constraints import Automaton, renormalised, warp_of
from tests.support.exact import beam_sampling_law, distance, exact_law, hf_beam_sampling_law, successive
from tests.support.examples import completed, law_and_mean, one_turn
from tests.support.programs import outcome_of, random_table, run, session_of, texts
from tests.test_constraint import CLOSE, CONSTRAINTS, END, LOOPING, random_automaton

CUTS = {
    "temperature": Truncation(0.6),
    "top-k": Truncation(1.4, top_k=2),
    "top-p": Truncation(top_p=0.8),
    "min-p": Truncation(0.9, min_p=0.4),
}


def warped(cut):
    """A truncation, straight from its definition: temperature, the k likeliest, the fewest that hold p, a share of the best."""

    def law(odds):
        p = np.where(odds > 0, odds, 0.0) ** (1 / cut.temperature)
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        if cut.top_k:
            p[order[cut.top_k :]] = 0
        if cut.top_p < 1:
            before = np.cumsum(p[order] / p.sum()) - p[order] / p.sum()
            p[order[before >= cut.top_p]] = 0
        p[p < cut.min_p * p.max()] = 0
        return p / p.sum()

    return law


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "name", ["chain", "sequoia", *(pytest.param(name, marks=pytest.mark.slow) for name in DRAWN if name != "chain")]
)
def test_drawn_trees_under_truncation(name, cut):
    target, draft, cut = random_table(3, 3), random_table(4, 3), CUTS[cut]
    bound = renormalised(target, LOOPING, END)
    law = lambda path: warped(cut)(bound(path))  # noqa: E731
    program = one_turn(
        parts_on(DRAWN[name], target), target, draft, eos=END, warp=lambda: warp_of(LOOPING, END, truncation=cut)
    )
    found, _ = law_and_mean(program, law, 3, END)
    assert distance(found, completed(law, (), 3, END)) < CLOSE


@pytest.mark.parametrize("cut", CUTS)
def test_dsbd_under_truncation(cut):
    """It sees the joint law over all beams."""
    target, draft, cut = random_table(1, 3), random_table(2, 3), CUTS[cut]
    method = sb.dsbd(2, 2, 1, "fixed", coupling="rejection")
    warp = lambda: warp_of(LOOPING, END, truncation=cut)  # noqa: E731
    found = exact_law(outcome_of(method, target, draft, 2, END, False, warp))
    expected = beam_sampling_law(renormalised(target, LOOPING, END), 2, 2, False, END, warped(cut))
    assert distance(found, expected) < CLOSE


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("name", MATCHED)
def test_matched_trees_have_the_renormalised_law(name, constraint):
    target, draft = random_table(5, 3), random_table(6, 3)
    automaton = CONSTRAINTS[constraint]

    def make(lm):
        made = parts_on(MATCHED[name], target)(lm)
        parts = made.parts(None, lm)
        return sb.Method("", "", 1, lambda *_: Parts(parts.drafter, MatchRule("dice"), parts.controller, ""))

    law = renormalised(target, automaton, END)
    program = one_turn(make, target, draft, eos=END, warp=lambda: warp_of(automaton, END))
    found, _ = law_and_mean(program, law, 3, END)
    assert distance(found, completed(law, (), 3, END)) < CLOSE


def by_definition(law, beams, steps, eos, key, cut):
    """(ended texts, live texts): the best pairs of log-odds plus the noise of the place, which are draws without
    replacement from the law (Gumbel-top-k).
    """
    ended, live = [], [((), 0.0, np.array([key], dtype=np.uint64))]
    for _ in range(steps):
        pairs = [(*beam, token, odds) for beam in live for token, odds in enumerate(law(beam[0])) if odds > 0]
        if not pairs:
            break
        joint = warped(cut)(np.exp([logp + np.log(odds) for _, logp, _, _, odds in pairs]))
        with np.errstate(divide="ignore"):
            logp = np.log(joint)
        keys = np.concatenate([path_key for _, _, path_key in live])
        places = [[path for path, _, _ in live].index(pair[0]) for pair in pairs], [pair[3] for pair in pairs]
        rows = np.full((len(live), len(law(live[0][0]))), -np.inf)
        rows[places] = logp
        value = (rows + gumbel_of_all(keys, rows.shape[1]) if cut.cuts else from_the_top(rows, keys))[places]
        best = [place for place in np.argsort(-value)[:beams] if joint[place] > 0]
        drawn = [pairs[place] for place in best]
        grown = [((*path, t), logp + np.log(odds), child_keys(k, np.array([t]))) for path, logp, k, t, odds in drawn]
        ended += [path for path, _, _ in grown if path[-1] in eos]
        live = [beam for beam in grown if beam[0][-1] not in eos]
    return tuple(ended), tuple(path for path, _, _ in live)


@pytest.mark.parametrize("cut", [Truncation(), *CUTS.values()], ids=["none", *CUTS])
def test_shared_noise_draws_the_renormalised_law(cut):
    methods = [sb.beam_sampling(1), sb.dsbd(1, 3, 2, "fixed"), sb.beam_sampling(3), sb.dsbd(3, 4, 3, "fixed")]
    for seed in range(12):
        automaton = random_automaton(seed, 5, (4,))
        target, draft = random_table(seed, 5), random_table(seed + 50, 5)
        for method in methods:
            warp = warp_of(automaton, (4,), truncation=cut)
            session = session_of(method, TableLM(draft), steps=6, eos=(4,), key=seed, warp=warp)
            run(session, TableLM(target))
            law = renormalised(target, automaton, (4,))
            assert texts(session) == by_definition(law, method.beams, 6, (4,), seed, cut)


def test_given_its_width_a_dynamic_layer_has_the_renormalised_law_of_that_width():
    automaton, widths = (
        Automaton({0: {0: 1, 1: 1, 3: 1}, 1: {0: 1}}, set(), 5),
        set(),
    )  # chance in the first layer alone
    for seed, threshold in itertools.product(range(8, 14, 2), (0.3, 0.6, 0.9)):
        target, draft = random_table(seed, 5), random_table(seed + 1, 5)
        rule = BeamRule(SureWidth(2, 1, threshold), "rejection")
        parts = lambda _, lm, rule=rule: Parts(BeamDrafter(lm, 2, "rejection"), rule, FixedShape(1, 2), "")  # noqa: E731
        found = defaultdict(float)

        def program(dice, parts=parts, target=target, draft=draft):
            session = session_of(
                sb.Method("", "", 2, parts), TableLM(draft), dice, 2, (4,), warp=warp_of(automaton, (4,))
            )
            step = run(session, TableLM(target))[0].verdict.steps[0]
            return step.width, tuple(step.beams.tokens.tolist())

        for (width, drawn), odds in exact_law(program).items():
            found[drawn] += odds
            widths.add(width)
            expected = successive(renormalised(target, automaton, (4,))(()), width, False)
        assert distance(found, expected) < CLOSE
    assert widths == {1, 2}


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize(("beams", "steps"), [(1, 3), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_sampling_as_transformers_does_it(constraint, beams, steps):
    """A ban takes odds away, and the draws are from what is left over all beams: nothing is renormalised row by row."""
    automaton, target, draft = CONSTRAINTS[constraint], random_table(1, 3), random_table(2, 3)
    expected = hf_beam_sampling_law(renormalised(target, automaton, END, normalise=False), beams, steps, END)
    for method in (
        sb.beam_sampling(beams, semantics="hf"),
        sb.dsbd(beams, beams + 1, 2, "fixed", semantics="hf"),
    ):
        parts = replace(method.parts(TableLM(target), TableLM(draft)), rule=SearchRule(beams, "dice"))

        def program(dice, parts=parts):
            session = session_of(
                sb.Method("", "", beams, lambda *_: parts),
                None,
                dice,
                steps,
                END,
                warp=warp_of(automaton, END, search=True),
            )
            run(session, TableLM(target))
            score = session.limits.normalised
            return tuple(max(session.hypotheses(), key=lambda one: score(one.loglik, len(one.tokens))).tokens)

        assert distance(exact_law(program), expected) < CLOSE

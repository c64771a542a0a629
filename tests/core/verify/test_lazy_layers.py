"""Layers that are decided without the rows of live beams that cannot win: what is drawn never depends on it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specbeam as sb
from specbeam.core.beams import Beams
from specbeam.core.control.width import FixedWidth, NucleusWidth, SureWidth, nucleus_width
from specbeam.core.laws.joint import drawn_pairs, joint_law
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.ranked import whole_rows
from specbeam.core.verify import beams as judge_steps
from specbeam.core.verify import search as search_rule
from specbeam.core.verify.beams import BeamRule, SearchSpec, SharedSpec, most_value
from specbeam.models.table import TableLM
from tests.support.exact import beam_sampling_law, distance, exact_law, successive
from tests.support.programs import random_table, run, session_of, texts
from tests.support.quick import first_quick
from tests.support.steps import source_of, source_of_steps

STOP = Limits(max_new_tokens=9).stop


def random_beams(rng, count):
    numbers = np.arange(count)
    keys = rng.integers(0, 2**63, count, dtype=np.uint64)
    return Beams(numbers, numbers, -rng.exponential(5, count), np.ones(count, dtype=np.int64), keys)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    beams=st.integers(1, 4),
    temperature=st.sampled_from([1.0, 0.7, 0.1]),
    sharpness=st.sampled_from([0.1, 3.0, 30.0]),
    noisy=st.booleans(),
    by_row=st.booleans(),
)
def test_no_pair_of_a_beam_exceeds_what_is_known_before_its_row(seed, beams, temperature, sharpness, noisy, by_row):
    """Also for rows with nearly all odds on one token, where the bound is reached up to rounding."""
    rng = np.random.default_rng(seed)
    live = random_beams(rng, beams)
    temperature = temperature if noisy else 1.0
    cut = Truncation(temperature, by_row=by_row)
    if by_row:
        cut = cut._replace(top_k=5, top_p=0.9)
    rows = rng.normal(0, sharpness, (beams, 60)).astype(np.float32)
    law = joint_law(whole_rows(rows), live.scores, live.counts, cut)
    keys = live.keys if noisy else live.keys[:0]
    spec = SearchSpec(noisy, False, 2, cut, STOP, True) if by_row else SharedSpec(noisy, 2, cut, STOP, True)
    for beam in range(beams):
        among = np.arange(beams) == beam
        _, values = drawn_pairs(law, keys, among, 3)
        assert values[0] <= most_value(spec, live.pick(among))
    every = np.ones(beams, dtype=bool)
    _, values = drawn_pairs(law, keys, every, 3)
    assert (np.diff(values) <= 0).all()


def test_values_from_the_top_down_are_draws_without_replacement():
    """Counted on 20,000 keys: the first two pairs of two beams, against the law of two draws."""
    rows = np.log(np.array([[0.5, 0.3, 0.2], [0.7, 0.1, 0.2]]))
    scores = np.log([0.6, 0.3])
    law = joint_law(whole_rows(rows), scores, np.ones(2, dtype=np.int64), Truncation())
    odds = np.exp(rows + scores[:, None]).ravel()
    expected = {}
    for first in range(6):
        for second in range(6):
            if first != second:
                expected[first, second] = odds[first] / odds.sum() * odds[second] / (odds.sum() - odds[first])
    keys = np.random.default_rng(0).integers(0, 2**63, (20_000, 2), dtype=np.uint64)
    every = np.ones(2, dtype=bool)
    counts = dict.fromkeys(expected, 0)
    for pair in keys:
        counts[tuple(drawn_pairs(law, pair, every, 2)[0].tolist())] += 1
    surprise = sum((counts[one] - len(keys) * p) ** 2 / (len(keys) * p) for one, p in expected.items())
    assert surprise < 63  # chi-squared with 29 degrees of freedom: above this once in 4,000 seeds


@pytest.mark.parametrize("cut", first_quick([Truncation(0.6), Truncation()]), ids=["temperature 0.6", "temperature 1"])
@pytest.mark.parametrize("draft_beams", first_quick([6, 4, 3]))
@pytest.mark.parametrize("width", ["fixed", "auto"])
def test_lazy_turns_draw_what_eager_turns_draw_and_end_later(cut, draft_beams, width, monkeypatch):
    """Seed by seed, with ends inside of turns, and drafts that know little."""
    passes = {}
    for lazy in (True, False):
        found = []
        total = 0
        with monkeypatch.context() as patch:
            patch.setattr(judge_steps, "can_be_lazy", lambda warp, lazy=lazy: lazy)
            for case in range(40):
                target, draft = TableLM(random_table(case, 8)), TableLM(random_table(500 + case, 8))
                method = sb.dsbd(3, draft_beams, 3, width)
                session = session_of(method, draft, steps=8, eos=(0,), key=case, warp=Warp(truncation=cut))
                run(session, target)
                found.append(texts(session))
                total += session.count.target_passes
        passes[lazy] = found, total
    assert passes[True][0] == passes[False][0]
    assert passes[True][1] < passes[False][1]


# Transformers' beam modes do not normalise rows again after processors.


def processor(kind, *given):
    import transformers

    return getattr(transformers, kind)(*given)


BOUNDED = {
    "bad words": lambda: [processor("NoBadWordsLogitsProcessor", [[1], [2, 3]], [0])],
    "no repeats": lambda: [processor("NoRepeatNGramLogitsProcessor", 2)],
    "penalty": lambda: [processor("RepetitionPenaltyLogitsProcessor", 1.3)],
    "ends": lambda: [
        processor("MinNewTokensLengthLogitsProcessor", 1, 3, [0]),
        processor("ForcedEOSTokenLogitsProcessor", 9, [0]),
    ],
    "suppressed": lambda: [
        processor("SuppressTokensAtBeginLogitsProcessor", [4], 1),
        processor("SuppressTokensLogitsProcessor", [5]),
        processor("LogitNormalization"),
    ],
}
UNBOUNDED = {
    "reward": lambda: [processor("RepetitionPenaltyLogitsProcessor", 0.7)],
    "two forced ends": lambda: [processor("ForcedEOSTokenLogitsProcessor", 9, [0, 1])],
    "bias": lambda: [processor("SequenceBiasLogitsProcessor", {(1,): 3.0})],
    "the user's": lambda: [lambda tokens, scores: scores],
}


def peaked(*seeds):
    """Odds of the next token after every path: the product of random ones, sharpened."""
    tables = [random_table(seed, 8) for seed in seeds]

    def table(path):
        odds = np.prod([one(path) for one in tables], axis=0) ** 3
        return odds / odds.sum()

    return table


def searched(warp, case):
    """The beams and scores of a search with drafts that know half of what the target does, and its passes."""
    draft = TableLM(peaked(case, 500 + case))
    session = session_of(sb.speculative_beam_search(3, 4, 3), draft, steps=8, eos=(0,), key=case, warp=warp)
    run(session, TableLM(peaked(case)))
    scores = [(one.tokens, one.loglik) for one in session.hypotheses()]
    return scores, session.count.target_passes


@pytest.mark.parametrize("kind", BOUNDED)
def test_searches_whose_processors_raise_nothing_are_lazy_and_find_the_same_beams(kind, monkeypatch):
    passes = {}
    for lazy in (True, False):
        found = []
        with monkeypatch.context() as patch:
            if not lazy:
                patch.setattr(search_rule, "can_be_lazy", lambda warp: False)
            for case in range(15):
                found.append(searched(Warp(BOUNDED[kind](), greedy=True, search=True), case))
        passes[lazy] = found
    assert [beams for beams, _ in passes[True]] == [beams for beams, _ in passes[False]]
    assert sum(count for _, count in passes[True]) < sum(count for _, count in passes[False])


def test_a_search_is_lazy_only_if_no_processor_can_raise_a_row():
    for made in BOUNDED.values():
        assert Warp(made(), search=True).is_bounded
    for made in UNBOUNDED.values():
        assert not Warp(made(), search=True).is_bounded
        assert Warp(made()).is_bounded  # where rows are normalised again
    assert not Warp([*BOUNDED["penalty"](), *UNBOUNDED["bias"]()], search=True).is_bounded


def test_a_lazy_search_whose_processor_raises_scores_finds_other_beams(monkeypatch):
    """The bound would be wrong: a bias of 3 lifts pairs above their beam's score."""
    right = [searched(Warp(UNBOUNDED["bias"](), greedy=True, search=True), case)[0] for case in range(15)]
    monkeypatch.setattr(search_rule, "can_be_lazy", lambda warp: True)
    assert [searched(Warp(UNBOUNDED["bias"](), greedy=True, search=True), case)[0] for case in range(15)] != right


@pytest.mark.parametrize("kind", BOUNDED)
def test_rows_after_processors_that_raise_nothing_sum_to_one_at_most(kind):
    rng = np.random.default_rng(0)
    for length in range(1, 10):
        rows = torch.from_numpy(rng.normal(0, 3, (20, 8))).log_softmax(-1)
        paths = torch.from_numpy(rng.integers(0, 8, (20, length)))
        for one in BOUNDED[kind]():
            rows = one(paths, rows)
            assert (rows.exp().sum(-1) < 1 + 1e-12).all()


def law_if(is_decided, monkeypatch):
    """The law of two steps of beam sampling whose turns end where `is_decided` says, counted on 1,500 keys."""
    target = random_table(7, 3)
    counts = {}
    monkeypatch.setattr(judge_steps, "most_value", is_decided)
    keys = 1500
    with source_of_steps():
        for key in range(keys):
            session = session_of(sb.dsbd(2, 2, 2, "fixed"), TableLM([0.2, 0.6, 0.2]), steps=3, eos=(), key=key)
            run(session, TableLM(target))
            drawn = texts(session)
            counts[drawn] = counts.get(drawn, 0) + 1 / keys
    return distance(counts, beam_sampling_law(target, 2, 3, False))


def test_a_layer_that_is_decided_without_looking_at_the_bound_has_another_law(monkeypatch):
    right = law_if(source_of(most_value), monkeypatch)
    wrong = law_if(lambda spec, beams: -np.inf, monkeypatch)
    assert wrong > 2 * right


def widths_of(case, method):
    session = session_of(method, TableLM(random_table(500 + case, 8)), steps=8, eos=(0,), key=case)
    with source_of_steps():
        run(session, TableLM(random_table(case, 8)))
    return session.count.widths


def test_a_lazy_width_that_leaves_out_beams_without_rows_is_another(monkeypatch):
    """The nucleus of the known beams alone is not that of all live beams."""
    settings = {"width": "auto", "min_beams": 1, "mass": 0.7}
    plain = [widths_of(case, sb.beam_sampling(4, **settings)) for case in range(30)]
    drafted = sb.dsbd(4, 4, 3, **settings)
    assert [widths_of(case, drafted) for case in range(30)] == plain
    monkeypatch.setattr(judge_steps, "width_of_known", lambda widths, law, unknown: nucleus_width(widths, law))
    assert [widths_of(case, drafted) for case in range(30)] != plain


# The leak. Which beams are known may depend on the noise of the layer, if beams of little hope are not scored. A width that
# looks at which are known then looks at the noise.

SCORES = np.array([0.5, 0.5])
ROWS = np.array([[0.6, 0.4], [0.1, 0.9]])


def layer_scored_by_hope(narrows):
    """A layer of which the first beam is scored only if its largest value is above that of the second one."""

    def program(dice):
        top = dice.pick(SCORES)
        is_known = top == 0
        width = 1 if narrows and not is_known else 2
        first = (top, dice.pick(ROWS[top]))
        left = SCORES[:, None] * ROWS
        left[first] = 0.0
        drawn = [first]
        if width == 2:
            drawn.append(divmod(dice.pick(left.ravel()), 2))
        return width, tuple(drawn)

    return exact_law(program)


def given_width(law, width):
    """The law of what was drawn, given the width."""
    drawn = {one: odds for (own, one), odds in law.items() if own == width}
    total = math.fsum(drawn.values())
    return {one: odds / total for one, odds in drawn.items()}


def test_a_width_that_looks_at_which_beams_are_known_leaks_the_noise():
    joint = (SCORES[:, None] * ROWS).ravel()
    expected = {tuple(divmod(place, 2) for place in order): odds for order, odds in successive(joint, 2, False).items()}
    assert distance(given_width(layer_scored_by_hope(narrows=False), 2), expected) < 1e-12
    assert distance(given_width(layer_scored_by_hope(narrows=True), 2), expected) > 0.4


def test_layers_whose_width_looks_at_drafts_are_never_lazy():
    """Nor are those that are drawn by dice, or cut, or warped by a temperature above 1."""
    lm = TableLM([0.5, 0.5])
    session = session_of(sb.dsbd(2, 2, 2, "fixed"), lm, steps=3, eos=())

    def is_lazy(rule, warp=None):
        session.warp = warp or Warp(truncation=Truncation())
        return judge_steps.is_lazy(rule.judge_spec(session))

    fixed = BeamRule(FixedWidth(2))
    assert is_lazy(fixed)
    assert is_lazy(BeamRule(NucleusWidth(2)))
    assert not is_lazy(BeamRule(SureWidth(2)))
    assert not is_lazy(BeamRule(FixedWidth(2), "rejection"))
    assert not is_lazy(fixed, Warp(truncation=Truncation(top_p=0.9)))
    assert not is_lazy(fixed, Warp(truncation=Truncation(1.3)))
    assert is_lazy(BeamRule(SureWidth(2)), Warp(greedy=True))

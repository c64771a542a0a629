"""The theory of rejections: its formulas on laws known by hand, and its figures on runs of tables."""

import dataclasses
import json

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.control.pace import DraftsIfFaster
from specbeam.core.decode import decode
from specbeam.core.forest import CHOSEN, DISTINCT, INDEPENDENT, LOST, siblings
from specbeam.errors import BadPrompt, NotSupported
from specbeam.lab.evaluate.theory import (
    RELAXED,
    Context,
    Runs,
    Sums,
    TurnFacts,
    _rejection_rows,
    as_markdown,
    best_acceptance,
    chain_odds,
    figure,
    plot,
    rejection_of_batch,
    relaxed,
    theory,
    total_variation,
    turn_facts,
    verifiers,
)
from specbeam.models.table import TableLM
from tests.support import words
from tests.support.exact import exact_law, successive
from tests.support.programs import session_of

P = np.array([3, 4, 3]) / 10
Q = np.array([6, 3, 1]) / 10
# a first-order pair: the law of the next token after each token, -1 for none
FIRST_ORDER_P = {-1: P, 0: [0.5, 0.25, 0.25], 1: [0.2, 0.2, 0.6], 2: [0.7, 0.2, 0.1]}
FIRST_ORDER_Q = {-1: Q, 0: [0.25, 0.5, 0.25], 1: [0.4, 0.4, 0.2], 2: [0.5, 0.1, 0.4]}


def drawn(kind, tokens, law):
    return siblings(kind, [0], tokens, [-1] * len(tokens), law=(np.arange(0), np.asarray(law)), vocab=len(law))


def chosen(tokens):
    return siblings(CHOSEN, [0], tokens, [-1] * len(tokens))


def test_figures_that_are_known_by_hand():
    """The three-token pair of the notes; the optima are those of a general solver of linear programmes."""
    assert total_variation(P, Q) == pytest.approx(3 / 10)
    batches = [rejection_of_batch(P, Q, count) for count in (1, 2, 3, 4)]
    assert batches == pytest.approx([0.3, 0.18, 0.152, 0.1368])
    assert rejection_of_batch(P, P, 2) == 0
    best = [best_acceptance(P, [drawn(INDEPENDENT, [0] * count, Q)]) for count in (1, 2, 3)]
    assert best == pytest.approx([7 / 10, 89 / 100, 971 / 1000])
    assert best_acceptance(P, [drawn(DISTINCT, [0, 1], Q)]) == pytest.approx(139 / 140)
    one = drawn(DISTINCT, [1], [0, 3 / 4, 1 / 4])
    assert best_acceptance(P, [one, chosen([0])]) == pytest.approx(19 / 20)
    assert best_acceptance(P, [chosen([0, 1])]) == pytest.approx(7 / 10)
    assert best_acceptance(P, [drawn(DISTINCT, [0], Q), drawn(DISTINCT, [0], Q)]) == pytest.approx(89 / 100)


def test_where_no_formula_is_known_none_is_claimed():
    other = drawn(DISTINCT, [0], [0.2, 0.2, 0.6])
    assert best_acceptance(P, [drawn(DISTINCT, [0], Q), other]) is None
    assert best_acceptance(P, [drawn(DISTINCT, [0, 1, 2], Q)]) is None
    assert best_acceptance(P, [siblings(LOST, [0], [0], [-1])]) is None


def test_the_optimum_is_the_least_cut_over_all_sets_of_tokens():
    rng = np.random.default_rng(0)
    for _ in range(60):
        p, q = rng.dirichlet(np.full(5, 0.5), 2)
        sets = [np.array(mask) for mask in np.ndindex(*[2] * 5)]
        for kind in (INDEPENDENT, DISTINCT):
            pairs = successive(q, 2, kind == INDEPENDENT)
            cuts = []
            for inside in sets:
                both = sum(odds for pair, odds in pairs.items() if all(inside[list(pair)]))
                cuts.append(float(p @ inside) + 1 - both)
            assert best_acceptance(p, [drawn(kind, [0, 1], q)]) == pytest.approx(min(cuts), abs=1e-9)


def test_a_chain_keeps_a_prefix_with_the_product_of_its_odds_and_blocks_keep_more():
    expected = {2: (119 / 100, 5 / 4), 3: (1.533, 213 / 125), 4: (1.7731, 2.0887)}
    for length, figures in expected.items():
        mean = np.zeros(2)
        for path in np.ndindex(*[3] * length):
            odds = np.prod(Q[list(path)])
            mean += odds * np.array(chain_odds((P[list(path)] / Q[list(path)]).tolist()))
        assert mean == pytest.approx(figures)


def test_relaxed_acceptance_trades_rejections_for_distance_one_for_one():
    for more, rejected, distance in ((0.1, 6 / 25, 3 / 50), (0.25, 3 / 20, 3 / 20), (5.0, 0, 3 / 10)):
        odds, excess = relaxed(P, Q, more)
        assert 1 - float(Q @ odds) == pytest.approx(rejected)
        assert excess == pytest.approx(distance)


def by_check(rows):
    return {(row.check, row.method): row for row in rows if row.bucket == "all"}


@pytest.fixture(scope="module")
def rows():
    """Two random models, which often disagree."""
    return theory(
        words.pair(), ["abc", "Hello", "no", "yes", "so it is", "A b"] * 2, seed=3, depth=3, max_new_tokens=16
    )


def test_each_figure_is_within_its_interval_of_what_was_counted(rows):
    found = by_check(rows)
    checks = {row.check for row in rows}
    assert {"acceptance", "rejections", "rejections of other texts", "accepted tokens", "relaxed", "batch"} <= checks
    for (check, method), row in found.items():
        assert row.low <= row.measured <= row.high
        if not check.startswith("optimum"):
            assert abs(row.gap) <= row.gap_high - row.gap_low, (check, method, row)  # four standard errors


@pytest.mark.parametrize("accepted", [2, 0])
def test_a_bucket_where_all_or_none_were_accepted_has_an_interval(accepted):
    """Its resamples are all equal; the prediction 0.9 of five prompts agrees with five times both of two."""
    row = figure("acceptance", "sampling", "0 to 0.2", [Sums(accepted, 1.8, 2)] * 5)
    assert (row.low, row.high) == pytest.approx((0.5655, 1) if accepted else (0, 0.4345), abs=1e-4)
    assert (row.gap_low < 0 < row.gap_high) == (accepted == 2)
    tokens = figure("accepted tokens", "sampling", "all", [Sums(6, 6, 2), Sums(6, 6, 2)])
    assert (tokens.low, tokens.high) == (3, 3)  # a mean above 1 is no share


def test_no_rejection_in_any_text_has_an_interval_too():
    """Four texts without a rejection, as with a draft model that is the target: the rate may be 0.49."""
    turn = TurnFacts([Context(True, 0.0, True, None, (), np.nan)], 1, 2, np.nan, np.nan)
    same = Runs("sampling", [[turn]] * 4)
    own, others = _rejection_rows(same, same)
    assert (own.check, others.check) == ("rejections", "rejections of other texts")
    for row in (own, others):
        assert (row.measured, row.low, row.high) == pytest.approx((0, 0, 0.4899), abs=1e-4)
        assert (row.gap_low, row.gap_high) == pytest.approx((0, 0.4899), abs=1e-4)


def test_no_rule_beats_the_best_one(rows):
    found = by_check(rows)
    optimum = {method: row for (check, method), row in found.items() if check == "optimum"}
    assert set(optimum) == set(verifiers())
    for method, row in optimum.items():
        assert row.gap <= row.gap_high - row.gap_low + 0.02, method  # four standard errors, of a few prompts


def first_turn(method, steps, figures):
    """The exact odds of `figures` of the first turn's facts, by enumeration on the first-order pair."""

    def table(rows):
        return TableLM(lambda path: rows[path[-1] if path else -1])

    def program(dice):
        session = session_of(method, table(FIRST_ORDER_Q), dice, steps=steps)
        turns = next(decode(table(FIRST_ORDER_P), [session]))
        return figures(turn_facts(turns[0][1], session.warp))

    return exact_law(program)


@pytest.mark.parametrize("by_blocks", [False, True])
def test_accepted_tokens_of_a_turn_are_the_sum_of_their_odds(by_blocks):
    """47/40 accepted tokens of chains of two, 5/4 by blocks: of the counts and of the odds, by enumeration."""
    method = sb.block_verification(2) if by_blocks else sb.speculative_sampling(2)
    law = first_turn(method, 3, lambda turn: (turn.accepted, turn.by_block if by_blocks else turn.by_token))
    expected = 5 / 4 if by_blocks else 47 / 40
    assert sum(odds * accepted for (accepted, _), odds in law.items()) == pytest.approx(expected, abs=1e-12)
    assert sum(odds * own for (_, own), odds in law.items()) == pytest.approx(expected, abs=1e-12)


OPTIMA = {
    "specinfer": (sb.specinfer((2,)), 41 / 50, 89 / 100),
    "rsd_c": (sb.rsd_c((2,)), 7 / 8, 139 / 140),
    "spechub": (sb.spechub(1), 19 / 20, 19 / 20),
}


@pytest.mark.parametrize("name", OPTIMA)
def test_spechub_reaches_the_optimum_of_its_drafts_and_trials_one_by_one_do_not(name):
    method, reached, best = OPTIMA[name]
    law = first_turn(method, 2, lambda turn: (turn.contexts[0].accepted, turn.contexts[0].best))
    assert sum(odds for (accepted, _), odds in law.items() if accepted) == pytest.approx(reached, abs=1e-12)
    assert {round(found, 9) for _, found in law} == {round(best, 9)}


def test_a_wrong_prediction_is_found_out():
    """A negative control: drafts without replacement, compared as if they were independent."""
    rng = np.random.default_rng(0)
    wrong = [Sums(float(rng.random() < 7 / 8), 0.7, 1) for _ in range(200)]
    row = figure("optimum", "rsd_c", "all", wrong)
    assert row.gap_low > 0
    assert row.gap == pytest.approx(row.measured - row.predicted)


def test_the_table_and_the_plot(rows, tmp_path):
    assert len(as_markdown(rows).splitlines()) == len(rows) + 2
    plot(rows, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert json.dumps([dataclasses.asdict(row) for row in rows])
    assert len([row for row in rows if row.check == "relaxed"]) == len(RELAXED)


def test_what_cannot_be_compared_is_refused():
    pair = words.pair()
    with pytest.raises(NotSupported, match="temperature 0"):
        theory(pair, ["abc"], temperature=0.0, max_new_tokens=2)
    with pytest.raises(NotSupported, match="penalties"):
        theory(pair, ["abc"], repetition_penalty=1.2, max_new_tokens=2)
    with pytest.raises(BadPrompt, match="no prompt"):
        theory(pair, [])
    with pytest.raises(sb.SpecbeamError, match="depth"):
        theory(pair, ["abc"], depth=0)


def test_drafts_have_the_shape_that_is_compared_whatever_they_cost():
    pair = words.pair()
    for name, method in verifiers().items():
        assert not isinstance(method.parts(pair.target, pair.draft).controller, DraftsIfFaster), name

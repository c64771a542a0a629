"""The kernel: its law, its oracle, its worked numbers, and the mistakes that the same test must catch."""

import numpy as np
import pytest

from specbeam.core.dice import Dice, Uniforms
from specbeam.core.laws.evidence import no_evidence
from specbeam.core.verify import trials
from specbeam.core.verify.trials import law_on_trial, refuse, residual
from tests.oracles import draws as oracle
from tests.oracles.draws import Candidate, Taken
from tests.support.exact import distance, exact_law, successive
from tests.support.steps import source_of_steps
from tests.support.trials import drawn, sure, tried

CLOSE = 1e-12


def by_kernel(tokens, rho, p, want, dice, distinct, replacement):
    """Draws from p by the source of the kernel, for drafts from rho: tokens from len(p) on hang under dead parents."""
    return tried(drawn(tokens, rho, len(p), distinct), p, want, dice, replacement)


def by_oracle(tokens, rho, p, want, dice, distinct, replacement):
    """The same, line by line as the lemma says it."""
    return oracle.draws(oracle.drawn(tokens, rho, len(p), not distinct), p, want, dice, replacement)


WAYS = {"kernel": by_kernel, "oracle": by_oracle}


def random_law(rng, size, zeros=0):
    p = rng.dirichlet(np.ones(size) * 0.7)
    p[rng.choice(size, zeros, replace=False)] = 0
    return p / p.sum()


def cases(count=12, size=4):
    """Pairs (p, rho) with zeros, nearly equal, disjoint, and with rho partly on dead pairs (index `size` and up)."""
    rng = np.random.default_rng(5)
    for number in range(count):
        p = random_law(rng, size, zeros=number % 3)
        rho = random_law(rng, size + 2 * (number % 2), zeros=number % 2)
        if number == 3:
            p, rho = np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.5, 0.5])
        if number == 5:
            rho = p.copy()
        if number == 7:  # all mass but a crumb on one token
            p, rho = np.array([1.0, 9e-21, 1e-21, 0]), np.array([0.5, 0.05, 0.45, 0])
        yield p, rho


def drafted(dice, rho, drafts, distinct):
    """Draft draws in draw order."""
    left = rho.copy()
    tokens = []
    for _ in range(drafts):
        if left.sum() == 0:
            break
        tokens.append(dice.pick(left))
        if distinct:
            left[tokens[-1]] = 0
    return tokens


def tokens_of(taken):
    return tuple(one.token for one in taken)


def layer(way, dice, p, rho, drafts, want, distinct, replacement):
    """Draft from rho, whose pairs behind p's are dead, and verify. The outcome is the ordered draws."""
    return tokens_of(way(drafted(dice, rho, drafts, distinct), rho, p, want, dice, distinct, replacement))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("distinct", [False, True])
def test_a_layer_has_the_target_law(way, distinct, replacement):
    for p, rho in cases():
        for drafts, want in ((0, 2), (1, 1), (2, 2), (3, 2), (3, 1)):
            found = exact_law(lambda dice: layer(WAYS[way], dice, p, rho, drafts, want, distinct, replacement))  # noqa: B023
            assert distance(found, successive(p, want, replacement)) < CLOSE


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rest", [1e-6, 1e-13, 1e-15, 3e-16, 1e-17, 1e-30])
def test_a_draft_that_is_nearly_sure_still_has_its_law(way, rest):
    """The law of the second draw is what is left of the first, however little that is; by subtraction it was noise."""
    p, rho = np.array([0.1, 0.6, 0.3]), np.array([1.0 - rest, 0.7 * rest, 0.3 * rest])
    for want in (1, 2):
        found = exact_law(lambda dice: layer(WAYS[way], dice, p, rho, 2, want, True, False))  # noqa: B023
        assert distance(found, successive(p, want, False)) < CLOSE


@pytest.mark.parametrize("way", WAYS)
def test_dead_drafts_may_also_be_dropped_if_rho_is_renormalised(way):
    """The two exact treatments of dead parents give the same law."""
    for p, rho in cases():
        live = rho[: len(p)] / max(rho[: len(p)].sum(), 1e-300)

        def filtered(dice, p=p, rho=rho, live=live):
            tokens = [token for token in drafted(dice, rho, 3, False) if token < len(p)]
            return tokens_of(WAYS[way](tokens, live, p, 2, dice, False, True))

        assert distance(exact_law(filtered), successive(p, 2, True)) < CLOSE


@pytest.mark.parametrize("way", WAYS)
def test_equal_laws_accept_everything(way):
    p = random_law(np.random.default_rng(0), 6)

    def program(dice):
        taken = WAYS[way](drafted(dice, p, 3, True), p, p, 3, dice, True, False)
        return all(one.draft >= 0 for one in taken)

    assert exact_law(program).get(False, 0.0) < CLOSE


@pytest.mark.parametrize("way", WAYS)
def test_the_worked_refusals_without_replacement(way):
    """Acceptance odds 1/4 and 0, then a residual that is sure."""
    p, rho = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
    asked = []

    class Watching(Dice):
        def flip(self, odds):
            asked.append(odds)
            return False

        def pick(self, law):
            asked.append((law / law.sum()).round(12).tolist())
            return 0

    assert WAYS[way]([3, 2], rho, p, 1, Watching(), True, False) == [Taken(0, -1)]
    assert [one for one in asked if one != 0] == [pytest.approx(0.25), [1, 0, 0, 0]]


def long_chains():
    """Random laws and drafts: (number, p, rho, tokens, distinct, replacement)."""
    rng = np.random.default_rng(9)
    for number in range(300):
        size = 12
        p, rho = random_law(rng, size, zeros=number % 4), random_law(rng, size + 3)
        distinct, replacement = not number % 2, bool(number // 2 % 2)
        tokens = rng.choice(size + 3, 6, replace=not distinct, p=rho).tolist()
        yield number, p, rho, tokens, distinct, replacement


def test_kernel_and_oracle_agree_on_long_random_chains():
    for number, p, rho, tokens, distinct, replacement in long_chains():
        logs = []
        for way in WAYS.values():
            coins = np.random.default_rng(number)
            log = []

            class Logging(Dice):
                def flip(self, odds):
                    log.append(odds)  # noqa: B023
                    return coins.random() < odds  # noqa: B023

                def pick(self, law):
                    log.append(law / law.sum())  # noqa: B023
                    return int(np.searchsorted(np.cumsum(law), coins.random() * law.sum()))  # noqa: B023

            way(tokens, rho, p, 3, Logging(), distinct, replacement)
            logs.append([one for one in log if np.ndim(one) or one > 0])
        assert len(logs[0]) == len(logs[1])
        for first, second in zip(*logs, strict=True):
            np.testing.assert_allclose(first, second, atol=1e-9)


def audited_draws(tokens, p, rho, is_audited, values, distinct, replacement):
    """Three draws by the kernel, compiled or not, and the evidence that it notes."""
    dice = Uniforms(values, np.zeros(1, dtype=np.int64))
    evidence = no_evidence(is_audited)
    drafts = drawn(tokens, rho, len(p), distinct)
    taken, looked = trials.take_draws(p, drafts, 3, replacement, dice, evidence)
    return (taken.tolist(), int(looked), int(dice.used[0])), evidence.numbers


def test_the_compiled_kernel_is_its_source():
    """Equal draws of equal uniforms, as many drafts looked at, and the same evidence, where somebody audits."""
    for number, p, rho, tokens, distinct, replacement in long_chains():
        values = np.random.default_rng(number).random(20)
        for is_audited in (True, False):
            given = (tokens, p, rho, is_audited, values, distinct, replacement)
            found, evidence = audited_draws(*given)
            with source_of_steps():
                expected, same_evidence = audited_draws(*given)
            assert found == expected
            np.testing.assert_allclose(evidence, same_evidence, atol=1e-12)


def test_a_refusal_takes_the_law_of_the_draft_off_what_is_wanted():
    rng = np.random.default_rng(2)
    for _ in range(20):
        p, rho = random_law(rng, 5, zeros=1), random_law(rng, 7)
        struck = rho.copy()
        struck[rng.choice(7)] = 0
        for drafts in (drawn([1], rho, 5, False), drawn([1], struck, 5, True), sure([1], 5), sure([-1], 5)):
            place = int(drafts.places[0])
            mass = drafts.own.sum() if drafts.distinct else 1.0
            law = law_on_trial(drafts, place, mass, 5)
            rest = p.copy()
            refuse(rest, drafts, place, mass)
            np.testing.assert_allclose(rest, oracle.residual(p, law), atol=1e-12)
            np.testing.assert_allclose(residual(p, law), oracle.residual(p, law), atol=1e-12)


def test_a_refusal_that_had_no_odds_takes_nothing():
    p = np.array([0.4, 0.6, 0.0])
    for drafts in (drawn([2], p.copy(), 3, False), drawn([2], p * 0.3, 3, True)):
        rest = p.copy()
        refuse(rest, drafts, 2, drafts.own.sum())
        assert rest.tolist() == p.tolist()
    sure_of_one = np.array([0.0, 1.0, 0.0])
    refuse(sure_of_one, sure([1], 3), 1, 1.0)
    assert sure_of_one.tolist() == [0, 1, 0]


# What must fail: each is found in a public implementation or a tempting shortcut.


def upside_down(dice, p, rho, want):
    rest, taken = p, []
    for token in drafted(dice, rho, 3, False):
        if len(taken) == want:
            break
        if dice.flip(min(1.0, rho[token] / rest[token]) if rest[token] > 0 else 1.0):
            taken.append(token)
            rest = p
        else:
            rest = np.maximum(rest - rho, 0) / max(np.maximum(rest - rho, 0).sum(), 1e-300)
    while len(taken) < want:
        taken.append(dice.pick(rest if rest.sum() > 0 else p))
        rest = p
    return tuple(taken)


def marginal_test_of_struck_drafts(dice, p, rho, want):
    return tokens_of(by_kernel(drafted(dice, rho, 3, True), rho, p, want, dice, False, True))


def fill_may_repeat(dice, p, rho, want):
    taken = by_kernel(drafted(dice, rho, 3, True), rho, p, want, dice, True, False)
    kept = [one.token for one in taken if one.draft >= 0]
    return tuple(kept + [dice.pick(p) for _ in range(want - len(kept))])


def sorted_drafts(dice, p, rho, want, replacement):
    tokens = sorted(drafted(dice, rho, 3, not replacement), key=lambda token: -rho[token])
    return tokens_of(by_kernel(tokens, rho, p, want, dice, not replacement, replacement))


def without_duplicates(dice, p, rho, want):
    tokens = list(dict.fromkeys(drafted(dice, rho, 3, False)))
    return tokens_of(by_kernel(tokens, rho, p, want, dice, False, True))


def best_tokens_as_draws(dice, p, rho, want):
    tokens = np.argsort(-rho)[:3].tolist()
    return tokens_of(by_kernel(tokens, rho, p, want, dice, False, True))


def small_odds_replaced(dice, p, rho, want):
    def pick():
        token = dice.pick(p)
        return token if p[token] >= 1e-3 else int(np.argmax(p))

    return tuple(pick() for _ in range(want))


def dead_drafts_dropped(dice, p, rho, want):
    """rho is left as it is although the drafts on dead pairs (here the last pair of rho) are dropped."""
    tokens = [token for token in drafted(dice, rho, 3, False) if token < len(p)]
    return tokens_of(by_kernel(tokens, rho, p, want, dice, False, True))


def dead_drafts_burnt(dice, p, rho, want):
    """rho is renormalised on live pairs, and yet each dead draft counts as a refusal."""
    live = rho[: len(p)] / rho[: len(p)].sum()
    return tokens_of(by_kernel(drafted(dice, rho, 3, False), live, p, want, dice, False, True))


P, RHO = np.array([0.45, 0.3, 0.2495, 0.0005]), np.array([0.15, 0.25, 0.2, 0.4])
DEAD = np.array([0.15, 0.25, 0.1, 0.1, 0.4])


@pytest.mark.parametrize(
    ("mistake", "rho", "replacement", "least"),
    [
        (upside_down, RHO, True, 1e-2),
        (marginal_test_of_struck_drafts, RHO, True, 1e-2),
        (marginal_test_of_struck_drafts, RHO, False, 1e-2),
        (fill_may_repeat, RHO, False, 1e-2),
        (lambda *a: sorted_drafts(*a, True), RHO, True, 1e-2),
        (lambda *a: sorted_drafts(*a, False), RHO, False, 1e-2),
        (without_duplicates, RHO, True, 1e-2),
        (best_tokens_as_draws, RHO, True, 1e-2),
        (small_odds_replaced, RHO, True, 4e-4),
        (dead_drafts_dropped, DEAD, True, 1e-3),
        (dead_drafts_burnt, DEAD, True, 1e-3),
    ],
)
def test_mistakes_are_caught(mistake, rho, replacement, least):
    found = exact_law(lambda dice: mistake(dice, P, rho, 2))
    assert distance(found, successive(P, 2, replacement)) > least


def layers_by_width(program):
    """The law of a layer's draws given its width, and the odds of each width."""
    by_width = {}
    for (width, outcome), odds in exact_law(program).items():
        law = by_width.setdefault(width, {})
        law[outcome] = law.get(outcome, 0.0) + odds
    return {
        width: {outcome: odds / sum(law.values()) for outcome, odds in law.items()} for width, law in by_width.items()
    }


def worst_given_width(program):
    return max(distance(law, successive(P, width, True)) for width, law in layers_by_width(program).items())


def test_the_width_may_depend_on_anything_known_before_the_drafts():
    def fair(dice):
        width = 1 + dice.pick(np.array([0.3, 0.7]))
        return width, layer(by_kernel, dice, P, DEAD, 2, width, False, True)

    assert worst_given_width(fair) < CLOSE


def as_many_as_were_accepted(dice):
    taken = by_kernel(drafted(dice, RHO, 3, False), RHO, P, 3, dice, False, True)
    kept = max(1, sum(one.draft >= 0 for one in taken))
    return kept, tokens_of(taken[:kept])


def as_many_as_have_live_parents(dice):
    tokens = drafted(dice, DEAD, 2, False)
    width = max(1, sum(token < len(P) for token in tokens))
    return width, tokens_of(by_kernel(tokens, DEAD, P, width, dice, False, True))


def wider_after_a_failure(dice):
    taken = by_kernel(drafted(dice, RHO, 2, False), RHO, P, 3, dice, False, True)
    passed = sum(one.draft >= 0 for one in taken[:1]) == 1
    width = 1 if passed else 3
    return width, tokens_of(taken[:width])


@pytest.mark.parametrize("mistake", [as_many_as_were_accepted, as_many_as_have_live_parents, wider_after_a_failure])
def test_widths_that_look_at_the_drafts_are_caught(mistake):
    assert worst_given_width(mistake) > 1e-2


@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("nudge", [0.0, 1e-9, -1e-9])
def test_what_a_trial_takes_of_the_dice_does_not_hang_on_rounding(nudge, distinct):
    """Where a draft's law is the wanted one up to rounding, nothing or next to nothing is left of it after a refusal."""
    wanted = np.array([0.05, 0.30, 0.20, 0.45])
    own = np.array([0.35, 0.30 + nudge, 0.20, 0.15 - nudge])
    dice = Uniforms(np.full(8, 0.9), np.zeros(1, dtype=np.int64))
    with source_of_steps():
        found = trials.try_drafts(wanted, drawn([0, 1, 2], own, 4, distinct), 0, dice, no_evidence(False))
    assert found == 3
    assert dice.used[0] == 3


def first_accepted(groups, p, dice):
    """The token of one draw, for which groups of drafts of different laws are tried, one after the other."""
    rest = p.copy()
    for drafts in groups:
        found = trials.try_drafts(rest, drafts, 0, dice, no_evidence(False))
        if found < len(drafts.places):
            return int(drafts.places[found])
    return dice.pick(rest)


def test_candidates_of_mixed_laws():
    """Several draft models, a restricted draw, sure guesses: each is tried against its own law."""
    rng = np.random.default_rng(3)
    for _ in range(10):
        p, first, second = (random_law(rng, 4) for _ in range(3))
        top = int(np.argmax(first))
        rest = first.copy()
        rest[top] = 0
        rest /= rest.sum()
        best_two = np.argsort(-first)[:2].tolist()

        def two_models(dice, p=p, first=first, second=second):
            groups = [drawn([dice.pick(law)], law, 4, False) for law in (first, second)]
            return first_accepted(groups, p, dice)

        def greedy_and_one(dice, p=p, rest=rest, top=top):
            return first_accepted([drawn([dice.pick(rest)], rest, 4, False), sure([top], 4)], p, dice)

        def top_two(dice, p=p, best_two=best_two):
            return first_accepted([sure(best_two, 4)], p, dice)

        def two_models_by_oracle(dice, p=p, first=first, second=second):
            candidates = [Candidate(dice.pick(law), law) for law in (first, second)]
            return oracle.draws(candidates, p, 1, dice)[0].token

        def greedy_and_one_by_oracle(dice, p=p, rest=rest, top=top):
            candidates = [Candidate(dice.pick(rest), rest), *oracle.sure([top], 4)]
            return oracle.draws(candidates, p, 1, dice)[0].token

        def top_two_by_oracle(dice, p=p, best_two=best_two):
            return oracle.draws(oracle.sure(best_two, 4), p, 1, dice)[0].token

        programs = (two_models, greedy_and_one, top_two)
        for program in (*programs, two_models_by_oracle, greedy_and_one_by_oracle, top_two_by_oracle):
            found = exact_law(program)
            assert distance(found, {token: float(odds) for token, odds in enumerate(p)}) < CLOSE

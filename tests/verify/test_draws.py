"""The kernel: its law, its twin, its worked numbers, and the mistakes that the same test must catch."""

import numpy as np
import pytest
from specbeam.forest import masses_left
from specbeam.verify.draws import Candidate, Taken, drawn, sure
from specbeam.verify.draws import draws as kernel_draws
from specbeam.verify.draws_fast import draws_fast

from specbeam.core.dice import Dice
from tests.support.exact import distance, exact_law, successive

CLOSE = 1e-12


def draws(proposals, masses, q, p, want, dice, drafted_with_replacement, replacement):
    """The plain kernel with the arguments of its twin."""
    return kernel_draws(drawn(proposals, masses, q, drafted_with_replacement), p, want, dice, replacement)


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


def drafted(dice, rho, drafts, replacement):
    """Draft draws in draw order."""
    left, drawn = rho.copy(), []
    for _ in range(drafts):
        if left.sum() == 0:
            break
        drawn.append(dice.pick(left))
        if not replacement:
            left[drawn[-1]] = 0
    return drawn


def masses_of(rho, drawn, replacement):
    return [1.0] * len(drawn) if replacement else masses_left(rho, np.array(drawn, dtype=int)).tolist()


def layer(kernel, dice, p, rho, drafts, want, drafted_with, with_replacement):
    """Draft from rho, whose pairs behind p's are dead, and verify. The outcome is the ordered draws."""
    drawn = drafted(dice, rho, drafts, drafted_with)
    proposals = [token if token < len(p) else -1 for token in drawn]
    masses = masses_of(rho, drawn, drafted_with)
    taken = kernel(proposals, masses, rho[: len(p)], p, want, dice, drafted_with, with_replacement)
    return tuple(one.token for one in taken)


@pytest.mark.parametrize("kernel", [draws, draws_fast])
@pytest.mark.parametrize("with_replacement", [True, False])
@pytest.mark.parametrize("drafted_with", [True, False])
def test_a_layer_has_the_target_law(kernel, drafted_with, with_replacement):
    for p, rho in cases():
        for drafts, want in ((0, 2), (1, 1), (2, 2), (3, 2), (3, 1)):
            found = exact_law(lambda dice: layer(kernel, dice, p, rho, drafts, want, drafted_with, with_replacement))  # noqa: B023
            assert distance(found, successive(p, want, with_replacement)) < CLOSE


@pytest.mark.parametrize("kernel", [draws, draws_fast])
@pytest.mark.parametrize("rest", [1e-6, 1e-13, 1e-15, 3e-16, 1e-17, 1e-30])
def test_a_draft_that_is_nearly_sure_still_has_its_law(kernel, rest):
    """The law of the second draw is what is left of the first, however little that is; by subtraction it was noise."""
    p, rho = np.array([0.1, 0.6, 0.3]), np.array([1.0 - rest, 0.7 * rest, 0.3 * rest])
    for want in (1, 2):
        found = exact_law(lambda dice: layer(kernel, dice, p, rho, 2, want, False, False))  # noqa: B023
        assert distance(found, successive(p, want, False)) < CLOSE


def test_dead_drafts_may_also_be_dropped_if_rho_is_renormalised():
    """The two exact treatments of dead parents give the same law."""
    for p, rho in cases():
        live = rho[: len(p)] / max(rho[: len(p)].sum(), 1e-300)

        def filtered(dice, p=p, rho=rho, live=live):
            drawn = [token for token in drafted(dice, rho, 3, True) if token < len(p)]
            return tuple(one.token for one in draws(drawn, [1.0] * len(drawn), live, p, 2, dice, True, True))

        assert distance(exact_law(filtered), successive(p, 2, True)) < CLOSE


def test_equal_laws_accept_everything():
    rng = np.random.default_rng(0)
    p = random_law(rng, 6)
    for kernel in (draws, draws_fast):
        law = exact_law(
            lambda dice, kernel=kernel: all(
                one.draft >= 0 for one in kernel(*_all_of(dice, p, 3), p, p, 3, dice, False, False)
            )
        )
        assert law.get(False, 0.0) < CLOSE


def _all_of(dice, rho, drafts):
    drawn = drafted(dice, rho, drafts, False)
    return drawn, masses_of(rho, drawn, False)


def test_the_worked_refusals_without_replacement():
    """Acceptance odds 1/4 and 0, then a residual that is sure."""
    p, rho = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
    for kernel in (draws, draws_fast):
        asked = []

        class Watching(Dice):
            def flip(self, odds):
                asked.append(odds)  # noqa: B023
                return False

            def pick(self, law):
                asked.append((law / law.sum()).round(12).tolist())  # noqa: B023
                return 0

        taken = kernel([3, 2], masses_of(rho, [3, 2], False), rho, p, 1, Watching(), False, False)
        assert taken == [Taken(0, -1)]
        assert [one for one in asked if one != 0] == [pytest.approx(0.25), [1, 0, 0, 0]]


def test_the_twins_agree_on_long_random_chains():
    rng = np.random.default_rng(9)
    for number in range(300):
        size, drafts, want = 12, 6, 3
        p, rho = random_law(rng, size, zeros=number % 4), random_law(rng, size + 3)
        with_draft, with_target = bool(number % 2), bool(number // 2 % 2)
        drawn = rng.choice(size + 3, drafts, replace=with_draft, p=rho).tolist()
        proposals = [token if token < size else -1 for token in drawn]
        masses = masses_of(rho, drawn, with_draft)
        logs = []
        for kernel in (draws, draws_fast):
            coins = np.random.default_rng(number)
            log = []

            class Logging(Dice):
                def flip(self, odds):
                    log.append(odds)  # noqa: B023
                    return coins.random() < odds  # noqa: B023

                def pick(self, law):
                    log.append(law / law.sum())  # noqa: B023
                    return int(np.searchsorted(np.cumsum(law), coins.random() * law.sum()))  # noqa: B023

            kernel(proposals, masses, rho[:size], p, want, Logging(), with_draft, with_target)
            logs.append([one for one in log if np.ndim(one) or one > 0])
        assert len(logs[0]) == len(logs[1])
        for first, second in zip(*logs, strict=True):
            np.testing.assert_allclose(first, second, atol=1e-9)


# What must fail: each is found in a public implementation or a tempting shortcut.


def upside_down(dice, p, rho, want):
    rest, taken = p, []
    for token in drafted(dice, rho, 3, True):
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
    drawn = drafted(dice, rho, 3, False)
    masses = [1.0] * len(drawn)
    return tuple(one.token for one in draws(drawn, masses, rho, p, want, dice, True, True))


def fill_may_repeat(dice, p, rho, want):
    drawn = drafted(dice, rho, 3, False)
    taken = draws(drawn, [float(rho[token]) for token in drawn], rho, p, want, dice, False, False)
    kept = [one.token for one in taken if one.draft >= 0]
    return tuple(kept + [dice.pick(p) for _ in range(want - len(kept))])


def sorted_drafts(dice, p, rho, want, replacement):
    drawn = sorted(drafted(dice, rho, 3, replacement), key=lambda token: -rho[token])
    masses = masses_of(rho, drawn, replacement)
    return tuple(one.token for one in draws(drawn, masses, rho, p, want, dice, replacement, replacement))


def without_duplicates(dice, p, rho, want):
    drawn = list(dict.fromkeys(drafted(dice, rho, 3, True)))
    return tuple(one.token for one in draws(drawn, [float(rho[t]) for t in drawn], rho, p, want, dice, True, True))


def best_tokens_as_draws(dice, p, rho, want):
    drawn = np.argsort(-rho)[:3].tolist()
    return tuple(one.token for one in draws(drawn, [float(rho[t]) for t in drawn], rho, p, want, dice, True, True))


def small_odds_replaced(dice, p, rho, want):
    def pick():
        token = dice.pick(p)
        return token if p[token] >= 1e-3 else int(np.argmax(p))

    return tuple(pick() for _ in range(want))


def dead_drafts_dropped(dice, p, rho, want):
    """rho is left as it is although the drafts on dead pairs (here the last pair of rho) are dropped."""
    drawn = [token for token in drafted(dice, rho, 3, True) if token < len(p)]
    return tuple(
        one.token for one in draws(drawn, [float(rho[t]) for t in drawn], rho[: len(p)], p, want, dice, True, True)
    )


def dead_drafts_burnt(dice, p, rho, want):
    """rho is renormalised on live pairs, and yet each dead draft counts as a refusal."""
    live = rho[: len(p)] / rho[: len(p)].sum()
    drawn = [token if token < len(p) else -1 for token in drafted(dice, rho, 3, True)]
    return tuple(one.token for one in draws(drawn, [1.0] * len(drawn), live, p, want, dice, True, True))


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
        return width, layer(draws, dice, P, DEAD, 2, width, True, True)

    assert worst_given_width(fair) < CLOSE


def as_many_as_were_accepted(dice):
    drawn = drafted(dice, RHO, 3, True)
    taken = draws(drawn, [float(RHO[token]) for token in drawn], RHO, P, 3, dice, True, True)
    kept = max(1, sum(one.draft >= 0 for one in taken))
    return kept, tuple(one.token for one in taken[:kept])


def as_many_as_have_live_parents(dice):
    drawn = drafted(dice, DEAD, 2, True)
    width = max(1, sum(token < len(P) for token in drawn))
    proposals = [token if token < len(P) else -1 for token in drawn]
    taken = draws(proposals, [float(DEAD[t]) for t in drawn], DEAD[: len(P)], P, width, dice, True, True)
    return width, tuple(one.token for one in taken)


def wider_after_a_failure(dice):
    drawn = drafted(dice, RHO, 2, True)
    taken = draws(drawn, [float(RHO[token]) for token in drawn], RHO, P, 3, dice, True, True)
    passed = sum(one.draft >= 0 for one in taken[:1]) == 1
    width = 1 if passed else 3
    return width, tuple(one.token for one in taken[:width])


@pytest.mark.parametrize("mistake", [as_many_as_were_accepted, as_many_as_have_live_parents, wider_after_a_failure])
def test_widths_that_look_at_the_drafts_are_caught(mistake):
    assert worst_given_width(mistake) > 1e-2


def test_candidates_of_mixed_laws():
    """Several draft models, a restricted draw, sure guesses: each is tried against its own law."""
    rng = np.random.default_rng(3)
    for _ in range(10):
        p, first, second = (random_law(rng, 4) for _ in range(3))
        top = int(np.argmax(first))
        rest = first.copy()
        rest[top] = 0
        rest /= rest.sum()

        def two_models(dice, p=p, first=first, second=second):
            candidates = [Candidate(dice.pick(first), first), Candidate(dice.pick(second), second)]
            return kernel_draws(candidates, p, 1, dice)[0].token

        def greedy_and_one(dice, p=p, rest=rest, top=top):
            return kernel_draws([Candidate(dice.pick(rest), rest), *sure([top], 4)], p, 1, dice)[0].token

        def top_two(dice, p=p, first=first):
            return kernel_draws(sure(np.argsort(-first)[:2].tolist(), 4), p, 1, dice)[0].token

        for program in (two_models, greedy_and_one, top_two):
            found = exact_law(program)
            assert distance(found, {token: float(odds) for token, odds in enumerate(p)}) < CLOSE

"""The mistakes N1 to N9 on EX3: each has the wrong law that it is known to have, so the exactness test can see it."""

import itertools

import numpy as np
import pytest

from specbeam.verify.trials import residual, try_drafts, watch_for
from tests.support.exact import distance, exact_law
from tests.support.trials import drawn, sure, token_of

P, Q = np.array([0.3, 0.4, 0.3]), np.array([0.6, 0.3, 0.1])


def struck(dice, count):
    left, tokens = Q.copy(), []
    for _ in range(count):
        tokens.append(dice.pick(left))
        left[tokens[-1]] = 0
    return tokens


def tried(drafts, dice):
    return token_of(drafts, P, dice)


def resample_from_p(dice):  # N1
    token = dice.pick(Q)
    return token if dice.flip(min(1, P[token] / Q[token])) else dice.pick(P)


def duplicates_removed(count):  # N2, N2'
    def program(dice):
        tokens = list(dict.fromkeys(dice.pick(Q) for _ in range(count)))
        return tried(drawn(tokens, Q, 3, distinct=False), dice)

    return program


def in_random_order(dice):  # N3
    tokens = struck(dice, 2)
    if dice.flip(0.5):
        tokens = tokens[::-1]
    return tried(drawn(tokens, Q, 3, distinct=True), dice)


def sorted_by_q(dice):  # N4
    tokens = sorted(struck(dice, 2), key=lambda token: -Q[token])
    return tried(drawn(tokens, Q, 3, distinct=True), dice)


def law_not_struck(dice):  # N5
    tokens = struck(dice, 2)
    return tried(drawn(tokens, Q, 3, distinct=False), dice)


def best_as_if_drawn(dice):  # N6
    return tried(drawn([0, 1], Q, 3, distinct=False), dice)


def best_as_if_drawn_without_replacement(dice):  # N7
    return tried(drawn([0, 1], Q, 3, distinct=True), dice)


def residual_forgotten(dice):  # N8
    for _ in range(2):
        token = dice.pick(Q)
        if dice.flip(min(1, P[token] / Q[token])):
            return token
    return dice.pick(residual(P, Q))


def pruned_by_content(dice):  # N9
    tokens = [token for token in struck(dice, 2) if Q[token] >= 0.2]
    return tried(drawn(tokens, Q, 3, distinct=True), dice)


CONTROLS = {
    "N1": (resample_from_p, (0.390, 0.420, 0.190)),
    "N2": (duplicates_removed(2), (0.300, 0.450, 0.250)),
    "N2'": (duplicates_removed(3), (0.300, 0.480, 0.220)),
    "N3": (in_random_order, (0.230952, 0.470238, 0.298810)),
    "N4": (sorted_by_q, (0.461905, 0.233333, 0.304762)),
    "N5": (law_not_struck, (0.300, 0.525, 0.175)),
    "N6": (best_as_if_drawn, (0.500, 0.500, 0.000)),
    "N7": (best_as_if_drawn_without_replacement, (0.500, 0.222222, 0.277778)),
    "N8": (residual_forgotten, (0.390, 0.420, 0.190)),
    "N9": (pruned_by_content, (0.333333, 0.469444, 0.197222)),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_each_mistake_has_its_known_wrong_law(name):
    program, wrong = CONTROLS[name]
    found = exact_law(program)
    for token, odds in enumerate(wrong):
        assert found.get(token, 0.0) == pytest.approx(odds, abs=1e-6)
    assert distance(found, dict(enumerate(P.tolist()))) > 0.02


def test_no_way_of_trying_sure_guesses_is_wrong():
    """What N6 and N7 do is right when the guesses are declared as what they are."""
    for count, order in itertools.product((1, 2, 3), (1, -1)):
        tokens = [0, 1, 2][:count][::order]
        assert distance(exact_law(lambda dice: tried(sure(tokens, 3), dice)), dict(enumerate(P.tolist()))) < 1e-12  # noqa: B023


def test_two_models_in_either_order():
    """q and (1/5, 1/5, 3/5), one draw each: 47/50 in this order, 89/100 in the other; both exact."""
    other = np.array([0.2, 0.2, 0.6])
    for laws, accepted in (((Q, other), 47 / 50), ((other, Q), 89 / 100)):

        def program(dice, laws=laws):
            """One group of drafts after the other, as a walk tries those of a node."""
            rest = P.copy()
            for law in laws:
                draft = drawn([dice.pick(law)], law, 3, distinct=False)
                if try_drafts(rest, draft, 0, dice, watch_for(0, 0)) == 0:
                    return int(draft.places[0]), True
            return dice.pick(rest), False

        found = exact_law(program)
        assert sum(odds for (_, hit), odds in found.items() if hit) == pytest.approx(accepted, abs=1e-12)
        law = {token: found.get((token, True), 0) + found.get((token, False), 0) for token in range(3)}
        assert distance(law, dict(enumerate(P.tolist()))) < 1e-12

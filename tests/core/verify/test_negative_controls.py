"""Mistakes that have a wrong law, so that the exactness test can see them: N1 to N9 on EX3, and the published layer."""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest

from specbeam.core.laws.evidence import no_evidence
from specbeam.core.verify.trials import residual, try_drafts
from tests.support.exact import distance, exact_law, successive
from tests.support.trials import drawn, sure, token_of
from tests.support.trials import tried as layer_of

P, Q = np.array([0.3, 0.4, 0.3]), np.array([0.6, 0.3, 0.1])


def struck(dice, count, law=Q):
    left, tokens = law.copy(), []
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
                if try_drafts(rest, draft, 0, dice, no_evidence(False)) == 0:
                    return int(draft.places[0]), True
            return dice.pick(rest), False

        found = exact_law(program)
        assert sum(odds for (_, hit), odds in found.items() if hit) == pytest.approx(accepted, abs=1e-12)
        law = {token: found.get((token, True), 0) + found.get((token, False), 0) for token in range(3)}
        assert distance(law, dict(enumerate(P.tolist()))) < 1e-12


# The layer of the authors' code (arXiv 2409.16560, speculative_sampling.py), as a whole and with one key-value cache.

MOST, WIDTH = 3, 2  # beams of the draft, and of a layer that passes


def pairs_that_agree(noise, count=20):
    """Laws on four tokens whose logits differ by this much noise."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        logits = rng.normal(0, 1.5, 4)
        p, q = np.exp(logits), np.exp(logits + rng.normal(0, noise, 4))
        yield p / p.sum(), q / q.sum()


def published_trials(p, q, dice):
    """Drafts without replacement, tested with their marginal law; after each acceptance all of p is wanted again.

    Returns the accepted tokens, and the law that is wanted then.
    """
    rest, kept = p, []
    for token in struck(dice, MOST, q):
        if len(kept) == WIDTH:
            break
        if dice.flip(min(1.0, rest[token] / q[token])):
            kept.append(token)
            rest = p
        else:
            rest = residual(rest, q)
    return kept, rest


def published_layer(p, q, dice):
    """A layer that fails is filled to the width of the draft: the residual's draw, then the tail of other draws from p."""
    kept, rest = published_trials(p, q, dice)
    if len(kept) == WIDTH:
        return tuple(kept)
    filled = struck(dice, MOST, p)
    filled[: len(kept)] = kept
    filled[len(kept)] = dice.pick(rest)
    return tuple(filled)


def filled_to_one_width(p, q, dice):
    """The same, if a layer that fails is as wide as one that passes."""
    return published_layer(p, q, dice)[:WIDTH]


def shipped_layer(p, q, dice):
    """The draws of the kernel."""
    tokens = struck(dice, MOST, q)
    return tuple(one.token for one in layer_of(drawn(tokens, q, 4, distinct=True), p, WIDTH, dice, False))


def off_given_widths(layer, p, q, replacement):
    """The distance of the law of a layer from that of beam sampling which takes the same widths with the same odds."""
    law = exact_law(lambda dice: layer(p, q, dice))
    lengths = defaultdict(float)
    for tokens, odds in law.items():
        lengths[len(tokens)] += odds
    expected = {
        tokens: odds * chance
        for width, chance in lengths.items()
        for tokens, odds in successive(p, width, replacement).items()
    }
    return distance(law, expected)


@pytest.mark.parametrize(
    ("noise", "layer", "replacement", "mean"),
    [
        (0.5, published_layer, False, 0.186),
        (1.0, published_layer, False, 0.299),
        (0.5, published_layer, True, 0.461),
        (1.0, published_layer, True, 0.516),
        (0.5, filled_to_one_width, False, 0.127),
        (1.0, filled_to_one_width, False, 0.202),
    ],
)
def test_the_published_layer_as_a_whole_has_a_wrong_law(noise, layer, replacement, mean):
    """Against draws without and with replacement, of the very widths that it had; nor is it enough to mend the width."""
    off = [off_given_widths(layer, p, q, replacement) for p, q in pairs_that_agree(noise)]
    assert min(off) > 5e-3
    assert np.mean(off) == pytest.approx(mean, abs=1e-3)


def test_beams_of_the_published_layer_repeat_though_they_are_drawn_without_replacement():
    for noise, share in ((0.5, 0.085), (1.0, 0.135)):
        twice = []
        for p, q in pairs_that_agree(noise):
            law = exact_law(lambda dice: published_layer(p, q, dice))  # noqa: B023
            twice.append(math.fsum(odds for tokens, odds in law.items() if len({*tokens}) < len(tokens)))
        assert np.mean(twice) == pytest.approx(share, abs=1e-3)


def test_the_shipped_layer_on_the_same_pairs_is_exact():
    for noise in (0.5, 1.0):
        for p, q in pairs_that_agree(noise):
            assert off_given_widths(shipped_layer, p, q, False) < 1e-12


def published_beam(p, q, dice):
    """With one key-value cache a layer that fails leaves the residual's draw alone; of one that passes the best goes on."""
    kept, rest = published_trials(p, q, dice)
    return (max(kept, key=lambda token: p[token]), True) if len(kept) == WIDTH else (dice.pick(rest), False)


def shipped_beam(p, q, dice):
    """The best of the kernel's draws, whether they were drafts or not: `collapse`."""
    return max(shipped_layer(p, q, dice), key=lambda token: p[token]), True


def law_of_best(p):
    """The law of the likeliest of the draws of a layer."""
    law = defaultdict(float)
    for tokens, odds in successive(p, WIDTH, False).items():
        law[max(tokens, key=lambda token: p[token])] += odds
    return law


def beams_of(beam, p, q):
    """The law of the only beam that is left, and the same given that the layer failed."""
    whole, failed = defaultdict(float), defaultdict(float)
    for (token, passed), odds in exact_law(lambda dice: beam(p, q, dice)).items():
        whole[token] += odds
        if not passed:
            failed[token] += odds
    chance = math.fsum(failed.values())
    return whole, {token: odds / chance for token, odds in failed.items()}


@pytest.mark.parametrize(("noise", "given_failure", "of_best"), [(0.5, 0.374, 0.042), (1.0, 0.269, 0.076)])
def test_the_published_beam_of_one_cache_has_a_wrong_law(noise, given_failure, of_best):
    """It is neither a draw from p, nor the best of the draws of the layer."""
    failed, best = [], []
    for p, q in pairs_that_agree(noise):
        whole, of_failure = beams_of(published_beam, p, q)
        failed.append(distance(of_failure, dict(enumerate(p))))
        best.append(distance(whole, law_of_best(p)))
        assert distance(beams_of(shipped_beam, p, q)[0], law_of_best(p)) < 1e-12
    assert min(failed) > 0.03
    assert np.mean(failed) == pytest.approx(given_failure, abs=1e-3)
    assert np.mean(best) == pytest.approx(of_best, abs=1e-3)

"""The width recurrence against its worked examples, against simulation, and against the published double update."""

from functools import partial

import numpy as np
import pytest

from specbeam import kernels
from specbeam.control.accepted import (
    ENTRANTS,
    SAMPLES,
    _noise,
    accepted_pmf,
    odds_by_drafts,
    odds_of_rejection,
)
from specbeam.control.width import Outlook, SureWidth, ValuedWidth
from specbeam.verify.draws import drawn, draws
from tests.support.exact import exact_law

P = np.array([0.4, 0.3, 0.2, 0.1])
A, B = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.3, 0.1, 0.2, 0.1])
WORKED = {  # hand-checked tables
    "A": (A, {1: [0.4, 0.6], 2: [0.28, 0.36, 0.36], 3: [0.232, 0.264, 0.288, 0.216],
              4: [0.2088, 0.2152, 0.2304, 0.216, 0.1296]}),
    "B": (B, {1: [0.3, 0.7], 2: [0.18, 0.33, 0.49], 3: [0.152, 0.19, 0.315, 0.343],
              4: [0.1368, 0.1516, 0.1922, 0.2793, 0.2401]}),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKED)
def test_the_worked_examples(name):
    q, expected = WORKED[name]
    for drafts, pmf in expected.items():
        np.testing.assert_allclose(accepted_pmf(P, q, drafts), pmf, atol=1e-12)


def by_nobody(*given):
    raise AssertionError("nobody should ask")


@pytest.mark.parametrize(
    ("q", "widths"),
    [(A, {0.9: 0, 0.8: 0, 0.7: 1, 0.5: 2, 0.4: 2, 0.2: 3}), (B, {0.9: 0, 0.8: 1, 0.7: 2, 0.5: 3, 0.4: 3, 0.2: 4})],
)
def test_the_worked_widths(q, widths):
    for threshold, width in widths.items():
        odds = Outlook(partial(odds_of_rejection, P, q, 4), by_nobody, 4, 1, {})
        assert SureWidth(most=4, least=1, threshold=threshold).choose(odds) == max(width, 1)
        assert SureWidth(most=2, least=1, threshold=threshold).choose(odds) == min(max(width, 1), 2)


@pytest.mark.parametrize("drafts", range(1, 5))
def test_the_pmf_is_that_of_the_kernel(drafts):
    rng = np.random.default_rng(drafts)
    for _ in range(3):
        p, q = rng.dirichlet(np.ones(3)), rng.dirichlet(np.ones(4))

        def accepted(dice, p=p, q=q):
            tokens = [dice.pick(q) for _ in range(drafts)]
            proposals = [token if token < 3 else -1 for token in tokens]
            candidates = drawn(proposals, [1.0] * len(tokens), q[:3], replacement=True)
            taken = draws(candidates, p, drafts, dice)
            return sum(one.draft >= 0 for one in taken)

        found = exact_law(accepted)
        expected = accepted_pmf(p, q[:3], drafts)
        np.testing.assert_allclose([found.get(k, 0) for k in range(drafts + 1)], expected, atol=1e-12)


def test_the_pmf_sums_to_one_and_its_tail_falls():
    rng = np.random.default_rng(0)
    for _ in range(50):
        pmf = accepted_pmf(rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(8)) * rng.random(), 8)
        assert pmf.sum() == pytest.approx(1, abs=1e-12)
        assert (pmf >= -1e-15).all()


def doubly_updated(p, q, drafts):
    """The published function: the residual moves on twice per refusal, alpha_i = 1 - S_{2i-1} / S_{2i-2}."""
    left, reach = [1.0], 0.0
    for _ in range(2 * drafts):
        reach += left[-1]
        left.append(float(np.maximum(p - reach * q, 0).sum()))
    alpha = [1 - left[2 * i + 1] / left[2 * i] for i in range(drafts)]
    none = np.cumprod([1.0] + [1 - a for a in alpha])
    first = -np.diff(none)
    pmf = [np.array([1.0])]
    for n in range(1, drafts + 1):
        row = np.zeros(n + 1)
        row[0] = none[n]
        for i in range(1, n + 1):
            row[1 : n - i + 2] += first[i - 1] * pmf[n - i]
        pmf.append(row)
    return pmf[drafts]


@pytest.mark.parametrize(
    ("q", "published"),
    [(A, [0.2685, 0.2448, 0.1967, 0.1605, 0.1296]), (B, [0.2052, 0.2018, 0.1814, 0.1715, 0.2401])],
)
def test_the_published_double_update_is_something_else(q, published):
    """Reproduces the numbers of the authors' code and shows that ours are not they."""
    np.testing.assert_allclose(doubly_updated(P, q, 4), published, atol=6e-5)
    assert np.abs(accepted_pmf(P, q, 4) - published).max() > 0.01


def odds_of_noise(p, q, drafts, most, place=None):
    """For one number of drafts."""
    return odds_by_drafts(p, q, drafts, most, place)[:, drafts]


def raced(p, q, drafts, most, halo, seed, races=4000):
    """How often draws of shared noise are drafts, by running the two races as `dice` and the drafter do."""
    rng = np.random.default_rng(seed)
    found = np.zeros((races, most), dtype=bool)
    for one in found:
        gumbel = rng.gumbel(size=len(p))
        with np.errstate(divide="ignore"):
            target, draft = np.argsort(-(np.log(p) + gumbel))[:most], np.argsort(-(np.log(q) + gumbel))
        draft = draft[: np.count_nonzero(q)]
        nodes = [*draft[:drafts]] if halo is None else [*draft[:most]]
        if halo is not None:
            nodes += [pair for pair in halo if pair not in nodes][: drafts - len(nodes)]
        one[:] = np.logical_and.accumulate(np.isin(target, nodes))
    return np.concatenate([[1.0], found.mean(0)])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cut", [False, True])
def test_odds_under_shared_noise_are_those_of_the_race(seed, cut):
    """The estimate is good to some standard errors of its own few races."""
    rng = np.random.default_rng(seed)
    p, whole = rng.dirichlet(np.full(30, 0.5)), rng.dirichlet(np.full(30, 0.5))
    whole = 0.5 * p + 0.5 * whole
    q, halo, place = whole, None, None
    if cut:
        halo = np.argsort(-whole)
        place = np.empty(30, dtype=np.int64)
        place[halo] = np.arange(30)
        q = np.where(place < 5, whole, 0.0)
        q /= q.sum()
    found = odds_of_noise(p, q, 6, 4, place)
    expected = raced(p, q, 6, 4, halo, seed)
    assert np.abs(found - expected).max() < 4 * 0.5 / np.sqrt(SAMPLES)
    assert (np.diff(found) <= 0).all()


@pytest.mark.skipif(not kernels.AVAILABLE, reason="numba is not installed")
@pytest.mark.parametrize("cut", [False, True])
def test_compiled_races_are_those_of_array_code(cut):
    rng = np.random.default_rng(7)
    for size in (1, 2, 5, 30, 64, 200):
        for drafts, most in ((1, 1), (3, 4), (6, 4), (10, 8), (40, 5)):
            p, q = rng.dirichlet(np.full(size, 0.3)), rng.dirichlet(np.full(size, 0.3)) * rng.choice([1.0, 0.7])
            p[rng.random(size) < 0.3] = 0
            q[rng.random(size) < 0.3] = 0
            p = p / p.sum() if p.any() else np.full(size, 1 / size)
            place = rng.permutation(size) if cut else None
            fast, plain = (odds_by_drafts(p, q, drafts, most, place, compiled) for compiled in (True, False))
            assert fast == pytest.approx(plain, abs=1e-12)


@pytest.mark.parametrize("cut", [False, True])
def test_more_drafts_and_fewer_draws_have_better_odds(cut):
    rng = np.random.default_rng(7)
    for size, most in ((5, 2), (30, 4), (64, 5), (200, 4)):
        p, q = rng.dirichlet(np.full(size, 0.3)), 0.9 * rng.dirichlet(np.full(size, 0.3))
        q[rng.random(size) < 0.3] = 0
        place = rng.permutation(size) if cut else None
        found = odds_by_drafts(p, q, 9, most, place)
        for drafts in range(10):
            assert found[:, drafts] == pytest.approx(odds_of_noise(p, q, drafts, most, place), abs=1e-12)
        assert (np.diff(found, axis=0) <= 0).all()
        assert (np.diff(found, axis=1) >= 0).all()


def test_fewer_drafts_than_beams_are_the_first_to_arrive():
    """A race that is cut: with one draft, the pair that arrives first at the draft model."""
    rng = np.random.default_rng(3)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    noise = _noise()[:, :6]
    same = ((noise / p).argmin(1) == (noise / q).argmin(1)).mean()
    found = odds_by_drafts(p, q, 6, 4, np.argsort(np.argsort(-q)))
    assert found[:, 1] == pytest.approx([1, same, 0, 0, 0])
    assert found[0].tolist() == [1.0] * 7
    assert found[:, 6].tolist() == [1.0] * 5


def chosen(odds, left, width, drafts=3):
    """By a policy whose layers behind are worth 2 for each that is left."""
    policy, memory = ValuedWidth(2, 1, width, 3), {}
    values = policy.values(memory)
    values.sums[:] = 2.0 * np.arange(1, len(values.sums) + 1)[:, None] * values.count[0]
    by_drafts = np.array([np.ones(4), *(np.full(4, one) for one in odds)])
    return policy.choose(Outlook(by_nobody, lambda most: by_drafts, drafts, left, memory)), values


def test_a_layer_is_as_wide_as_it_pays():
    """Two beams for one cost worth 1 where they gain 1 layer: V(k - 1) times the odds that are lost, against the gain."""
    assert chosen([0.9, 0.5], 1, 1.0)[0] == 2  # 1 + 1 + 0.5 * 2 against 1 + 0.9 * 2
    assert chosen([0.9, 0.5], 2, 1.0)[0] == 1  # 1 + 1 + 0.5 * 4 against 1 + 0.9 * 4
    assert chosen([0.9, 0.5], 2, 2.0)[0] == 2
    assert chosen([0.9, 0.9], 8, 0.0)[0] == 2  # nothing is lost
    assert chosen([0.9, 0.0], 1, 0.0)[0] == 1


def test_values_are_means_over_the_layers_seen():
    _, values = chosen([0.9, 0.5], 1, 1.0)
    means = values.sums / values.count[0]
    first = [2.0, 2 * 2.0, 3 * 2.0]  # WEIGHT layers of the guess
    seen = [2.0, max(1 + 0.9 * 2, 2 + 0.5 * 2), max(1 + 0.9 * 4, 2 + 0.5 * 4)]
    assert means[:3, 3] == pytest.approx([(3 * before + now) / 4 for before, now in zip(first, seen, strict=True)])


def test_a_draft_that_is_the_target_is_always_accepted():
    p = np.random.default_rng(0).dirichlet(np.ones(20))
    assert odds_of_noise(p, p, 4, 4).tolist() == [1.0] * 5
    assert odds_of_noise(p, p, 4, 4, np.arange(20)).tolist() == [1.0] * 5


def test_pairs_that_are_never_drafted_count():
    """Mass of the draft that lies elsewhere takes nodes; a law beyond what is looked at is cut to its likeliest pairs."""
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.ones(20))
    odds = [odds_of_noise(p, share * p, 4, 4)[4] for share in (1.0, 0.5, 0.1, 0.0)]
    assert odds[0] == 1
    assert sorted(odds, reverse=True) == odds
    assert odds[-1] == 0
    many = rng.dirichlet(np.full(10 * ENTRANTS, 0.05))
    assert odds_of_noise(many, many, 6, 4)[4] > 0.9
    assert odds_of_noise(np.array([1.0]), np.array([1.0]), 4, 4).tolist() == [1.0, 1.0]

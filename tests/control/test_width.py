"""The width recurrence against its worked examples, against simulation, and against the published double update."""

from dataclasses import dataclass

import numpy as np
import pytest

from specbeam.control import races
from specbeam.control.races import ENTRANTS, RACE_NOISE, RACES, accepted_pmf, odds_of_rejection
from specbeam.control.values import Values, choose_most_valued
from specbeam.control.width import (
    FixedWidth,
    SureWidth,
    ValuedWidth,
    WidthContext,
    asked_width,
    choose_width,
    odds_when_shared,
    odds_when_tried,
    widest,
    width_spec,
)
from specbeam.core.beams import Beams
from specbeam.core.forest import INDEPENDENT, SHARED, Forest, Fronts, siblings
from specbeam.laws.joint import joint_law
from specbeam.laws.ranking import NO_TRUNCATION, Truncation
from tests.oracles import widths as oracle
from tests.support.exact import exact_law
from tests.support.steps import source_of, source_of_steps
from tests.support.trials import drawn, tried

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


@dataclass(frozen=True)
class Layer:
    """One live beam with a law of the target, and a layer of drafts under it that were drawn from a law of the draft."""

    p: np.ndarray
    q: np.ndarray
    drafts: int = 4
    truncation: Truncation = NO_TRUNCATION

    @property
    def law(self):
        return joint_law(rows_of(self.p), np.zeros(1), np.ones(1, dtype=np.int64), self.truncation)

    def drawn(self, kind):
        """The forest of drafts that are tried, or share their noise with the target."""
        draws = np.arange(self.drafts) % len(self.q)
        law = (np.zeros(0, dtype=np.int64), np.zeros(0))
        fronts = Forest.rooted([0]).fronts
        if kind == INDEPENDENT:
            law = (np.arange(len(self.q)), self.q)
        else:
            one = np.ones(1, dtype=np.int64)
            fronts = Fronts(np.zeros(1, dtype=np.int64), np.zeros(1), one, np.array([1]), rows_of(self.q))
        group = siblings(kind, [0], draws, np.arange(1, self.drafts + 1), law=law, vocab=len(self.q))
        forest = Forest.rooted([0]).grown(draws, np.zeros(self.drafts, dtype=np.int64), groups=[group])
        return forest._replace(fronts=fronts)


def rows_of(odds):
    """Logits of one row, as models give them."""
    with np.errstate(divide="ignore"):
        return np.log(odds)[None].astype(np.float32)


LIVE = Beams.start(0, 1)


@pytest.mark.parametrize(
    ("q", "widths"),
    [(A, {0.9: 0, 0.8: 0, 0.7: 1, 0.5: 2, 0.4: 2, 0.2: 3}), (B, {0.9: 0, 0.8: 1, 0.7: 2, 0.5: 3, 0.4: 3, 0.2: 4})],
)
def test_the_worked_widths(q, widths):
    layer = Layer(P, q)
    for threshold, width in widths.items():
        for most in (4, 2):
            policy = SureWidth(most=most, least=1, threshold=threshold)
            expected = min(max(width, 1), most)
            assert widest(odds_of_rejection(P, q, 4), threshold, 1, most) == expected
            with source_of_steps():
                spec = width_spec(policy, {}, by_noise=False)
                assert choose_width(spec, layer.law, LIVE, layer.drawn(INDEPENDENT), 0, 1) == expected


@pytest.mark.parametrize("q", [A, B])
def test_the_odds_of_a_layer_that_is_tried_are_those_of_its_laws(q):
    layer = Layer(P, q)
    with source_of_steps():
        found = odds_when_tried(layer.law, LIVE, layer.drawn(INDEPENDENT), 0)
    np.testing.assert_allclose(found, odds_of_rejection(P, q, 4), atol=1e-6)


def test_a_policy_decides_by_the_odds_of_shared_noise():
    """In Python, where somebody derives from it, as steps do."""
    layer = Layer(P, A, truncation=Truncation(top_k=3))
    forest = layer.drawn(SHARED)
    for policy in (SureWidth(4, 1, 0.7), SureWidth(4, 2, 0.99), SureWidth(4, 1, 0.2), ValuedWidth(4), FixedWidth(3)):
        with source_of_steps():
            context = WidthContext(layer.law, LIVE, forest, 0, 3)
            assert (context.drafted, context.left) == (4, 3)
            by_steps = asked_width(width_spec(policy, {}, by_noise=True), layer.law, LIVE, forest, 0, 3)
            assert policy.choose(context) == by_steps


def test_a_policy_of_ones_own_is_asked_in_python():
    class ByLeft:
        most = 5

        def choose(self, layer):
            return layer.left

    policy = ByLeft()
    assert width_spec(policy, {}, by_noise=True) is policy
    layer = Layer(P, A)
    with source_of_steps():
        assert asked_width(policy, layer.law, LIVE, layer.drawn(SHARED), 0, 4) == 4


@pytest.mark.parametrize("drafts", range(1, 5))
def test_the_pmf_is_that_of_the_kernel(drafts):
    rng = np.random.default_rng(drafts)
    for _ in range(3):
        p, q = rng.dirichlet(np.ones(3)), rng.dirichlet(np.ones(4))

        def accepted(dice, p=p, q=q):
            tokens = [dice.pick(q) for _ in range(drafts)]
            taken = tried(drawn(tokens, q, 3, distinct=False), p, drafts, dice, replacement=True)
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


ALL_RACE = np.zeros(0, dtype=np.int64)


def odds_by_drafts(p, q, drafts, most, likeliest=ALL_RACE):
    """What the step estimates; the rest of the draft's mass lies on pairs that are not here."""
    return races.odds_by_drafts(p, q, drafts, most, max(1.0 - float(q.sum()), 0.0), likeliest, RACE_NOISE)


def odds_of_noise(p, q, drafts, most, likeliest=ALL_RACE):
    """For one number of drafts."""
    return odds_by_drafts(p, q, drafts, most, likeliest)[:, drafts]


def raced(p, q, drafts, most, halo, seed, repeats=4000):
    """How often draws of shared noise are drafts, by running the two races as the target and the drafter do."""
    rng = np.random.default_rng(seed)
    found = np.zeros((repeats, most), dtype=bool)
    for one in found:
        gumbel = rng.gumbel(size=len(p))
        with np.errstate(divide="ignore"):
            target, draft = np.argsort(-(np.log(p) + gumbel))[:most], np.argsort(-(np.log(q) + gumbel))
        draft = draft[: np.count_nonzero(q)]
        nodes = [*draft[:most]] if len(halo) else [*draft[:drafts]]
        if len(halo):
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
    q, halo = whole, ALL_RACE
    if cut:
        halo = np.argsort(-whole)
        q = np.zeros(30)
        q[halo[:5]] = whole[halo[:5]]
        q /= q.sum()
    found = odds_of_noise(p, q, 6, 4, halo)
    expected = raced(p, q, 6, 4, halo, seed)
    assert np.abs(found - expected).max() < 4 * 0.5 / np.sqrt(RACES)
    assert (np.diff(found) <= 0).all()


def some_odds(rng, size):
    """Odds of the same pairs at target and draft; some pairs have none."""
    p, q = rng.dirichlet(np.full(size, 0.3)), rng.dirichlet(np.full(size, 0.3)) * rng.choice([1.0, 0.7])
    p[rng.random(size) < 0.3] = 0
    q[rng.random(size) < 0.3] = 0
    return p / p.sum() if p.any() else np.full(size, 1 / size), q


@pytest.mark.parametrize("cut", [False, True])
def test_races_are_those_of_array_code(cut):
    rng = np.random.default_rng(7)
    for size in (1, 2, 5, 30, ENTRANTS):
        for drafts, most in ((1, 1), (3, 4), (6, 4), (10, 8), (40, 5)):
            p, q = some_odds(rng, size)
            order = rng.permutation(size) if cut else np.arange(size)
            found = odds_by_drafts(p, q, drafts, most, order if cut else ALL_RACE)
            rest = max(1.0 - q.sum(), 0.0)
            expected = oracle.odds_by_drafts(p[order], q[order], drafts, most, rest, cut, RACE_NOISE[:, order])
            assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("size", "drafts", "most"), [(2, 1, 1), (30, 6, 4), (ENTRANTS, 10, 8)])
def test_compiled_steps_are_their_source(size, drafts, most):
    rng = np.random.default_rng(size)
    p, q = some_odds(rng, size)
    for likeliest in (rng.permutation(size), ALL_RACE):
        found = odds_by_drafts(p, q, drafts, most, likeliest)
        with source_of_steps():
            assert (found == odds_by_drafts(p, q, drafts, most, likeliest)).all()
    found = accepted_pmf(p, q, drafts)
    with source_of_steps():
        assert found == pytest.approx(source_of(accepted_pmf)(p, q, drafts), abs=1e-12)


@pytest.mark.parametrize("cut", [False, True])
def test_more_drafts_and_fewer_draws_have_better_odds(cut):
    rng = np.random.default_rng(7)
    for size, most in ((5, 2), (30, 4), (ENTRANTS, 5), (ENTRANTS, 4)):
        p, q = rng.dirichlet(np.full(size, 0.3)), 0.9 * rng.dirichlet(np.full(size, 0.3))
        q[rng.random(size) < 0.3] = 0
        likeliest = rng.permutation(size) if cut else ALL_RACE
        found = odds_by_drafts(p, q, 9, most, likeliest)
        for drafts in range(10):
            assert found[:, drafts] == pytest.approx(odds_of_noise(p, q, drafts, most, likeliest), abs=1e-12)
        assert (np.diff(found, axis=0) <= 0).all()
        assert (np.diff(found, axis=1) >= 0).all()


def test_fewer_drafts_than_beams_are_the_first_to_arrive():
    """A race that is cut: with one draft, the pair that arrives first at the draft model."""
    rng = np.random.default_rng(3)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    noise = RACE_NOISE[:, :6]
    same = ((noise / p).argmin(1) == (noise / q).argmin(1)).mean()
    found = odds_by_drafts(p, q, 6, 4, np.argsort(-q))
    assert found[:, 1] == pytest.approx([1, same, 0, 0, 0])
    assert found[0].tolist() == [1.0] * 7
    assert found[:, 6].tolist() == [1.0] * 5


def chosen(odds, left, width, drafts=3):
    """By a policy whose layers behind are worth 2 for each that is left."""
    policy, memory = ValuedWidth(2, 1, width, 3), {}
    values = policy.values(memory)
    values.sums[:] = 2.0 * np.arange(1, len(values.sums) + 1)[:, None] * values.count[0]
    by_drafts = np.array([np.ones(4), *(np.full(4, one) for one in odds)])
    return choose_most_valued(values, by_drafts, drafts, left, policy.least), values


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


def test_the_compiled_choice_is_its_source():
    rng = np.random.default_rng(0)
    policy = ValuedWidth(5, 2, 1.5, 6)
    values = policy.values({})
    same = Values(values.sums.copy(), values.count.copy(), values.utility)
    for _ in range(50):
        odds = np.sort(rng.random((6, 7)), axis=0)[::-1].copy()
        given = odds, int(rng.integers(0, 9)), int(rng.integers(1, 10)), 2
        assert choose_most_valued(values, *given) == choose_from_source(same, *given)
    np.testing.assert_allclose(values.sums, same.sums, rtol=1e-12)
    assert values.count == same.count == 53


def choose_from_source(*given):
    with source_of_steps():
        return source_of(choose_most_valued)(*given)


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
    layer = Layer(many, many)
    assert odds_when_shared(layer.law, LIVE, layer.drawn(SHARED), 0, 6, 4, RACE_NOISE)[4, 6] > 0.9
    assert odds_of_noise(np.array([1.0]), np.array([1.0]), 4, 4).tolist() == [1.0, 1.0]

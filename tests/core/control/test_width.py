"""The width recurrence against its worked examples, against simulation, and against the published double update."""

from dataclasses import dataclass

import numpy as np
import pytest

from specbeam.core.beams import Beams
from specbeam.core.control import races
from specbeam.core.control.races import ENTRANTS, RACE_NOISE, RACES, accepted_pmf, odds_of_rejection
from specbeam.core.control.width import (
    UNKNOWN_WIDTH,
    FixedWidth,
    FixedWidths,
    NucleusWidth,
    NucleusWidths,
    SureWidth,
    SureWidths,
    WidthContext,
    asked_width,
    ignores_drafts,
    nucleus_width,
    nucleus_width_of_known,
    odds_when_shared,
    odds_when_tried,
    sure_width,
    widest,
    width_by_draft,
    width_of_known,
    width_spec,
)
from specbeam.core.forest import INDEPENDENT, SHARED, Forest, FrontierRows, siblings
from specbeam.core.laws.joint import joint_law
from specbeam.core.laws.ranking import NO_TRUNCATION, Truncation
from specbeam.core.ranked import whole_rows
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
        return joint_law(whole_rows(rows_of(self.p)), np.zeros(1), np.ones(1, dtype=np.int64), self.truncation)

    def drawn(self, kind):
        """The forest of drafts that are tried, or share their noise with the target."""
        draws = np.arange(self.drafts) % len(self.q)
        law = (np.zeros(0, dtype=np.int64), np.zeros(0))
        frontier_rows = Forest.rooted([0]).frontier_rows
        if kind == INDEPENDENT:
            law = (np.arange(len(self.q)), self.q)
        else:
            one = np.ones(1, dtype=np.int64)
            frontier_rows = FrontierRows(
                np.zeros(1, dtype=np.int64), np.zeros(1), one, np.array([1]), whole_rows(rows_of(self.q))
            )
        group = siblings(kind, [0], draws, np.arange(1, self.drafts + 1), law=law, vocab=len(self.q))
        forest = Forest.rooted([0]).grown(draws, np.zeros(self.drafts, dtype=np.int64), groups=[group])
        return forest._replace(frontier_rows=frontier_rows)


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
                widths = width_spec(policy, by_noise=False)
                assert sure_width(widths, layer.law, LIVE, layer.drawn(INDEPENDENT), 0) == expected


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
    for policy in (SureWidth(4, 1, 0.7), SureWidth(4, 2, 0.99), SureWidth(4, 1, 0.2), NucleusWidth(4), FixedWidth(3)):
        with source_of_steps():
            context = WidthContext(layer.law, LIVE, forest, 0)
            assert context.drafted == 4
            by_steps = asked_width(width_spec(policy, by_noise=True), layer.law, LIVE, forest, 0)
            assert policy.choose(context) == by_steps


def test_a_policy_of_ones_own_is_asked_in_python():
    class ByDrafts:
        most = 5

        def choose(self, layer):
            return layer.drafted

    class OfTarget(ByDrafts):
        ignores_drafts = True

        def choose(self, layer):
            return len(layer.live.nodes)

    class Derived(NucleusWidth):
        """Says nothing of drafts, so it may look at them."""

    assert ignores_drafts(NucleusWidth(3))
    assert not ignores_drafts(Derived(3))
    policy = ByDrafts()
    assert width_spec(policy, by_noise=True) is policy
    layer = Layer(P, A)
    with source_of_steps():
        assert asked_width(policy, layer.law, LIVE, layer.drawn(SHARED), 0) == 4
        assert asked_width(policy, layer.law, LIVE, layer.drawn(SHARED), 1) == 5  # a layer that was not drafted
        assert asked_width(OfTarget(), layer.law, LIVE, layer.drawn(SHARED), 1) == 1


# Widths by the nucleus of the joint law.


def joint(rows, odds, cut=NO_TRUNCATION, counts=None):
    """The joint law of beams of these odds, with these laws of the next token."""
    beams = len(odds)
    with np.errstate(divide="ignore"):
        logits = np.log(np.asarray(rows, dtype=float)).astype(np.float32)
        scores = np.log(np.asarray(odds, dtype=float))
    return joint_law(whole_rows(logits), scores, np.ones(beams, dtype=np.int64) if counts is None else counts, cut)


@pytest.mark.parametrize(
    ("mass", "bounds", "expected"),
    [
        (0.3, (1, 4), 1), (0.41, (1, 4), 2), (0.69, (1, 4), 2), (0.71, (1, 4), 3), (0.91, (1, 4), 4), (1.0, (1, 9), 4),
        (0.0, (1, 4), 1), (0.0, (3, 4), 3), (1.0, (1, 2), 2),
    ],
)  # fmt: skip
def test_a_nucleus_is_the_fewest_pairs_that_hold_its_mass(mass, bounds, expected):
    """Of one beam with the odds 0.4, 0.3, 0.2, 0.1."""
    least, most = bounds
    assert nucleus_width(NucleusWidths(most, least, mass), joint([P], [1.0])) == expected


def test_a_nucleus_is_one_of_pairs_and_not_of_beams():
    """Two beams of odds 0.8 and 0.2: pairs of 0.72, 0.1, 0.08, 0.1; twice the second beam: of 0.6, 0.2 / 1.2, ..."""
    rows = [[0.9, 0.1], [0.5, 0.5]]
    law = joint(rows, [0.8, 0.2])
    assert [nucleus_width(NucleusWidths(9, 1, mass), law) for mass in (0.7, 0.8, 0.9, 0.99)] == [1, 2, 3, 4]
    twice = joint(rows, [0.8, 0.2], counts=np.array([1, 2]))
    assert [nucleus_width(NucleusWidths(9, 1, mass), twice) for mass in (0.59, 0.61, 0.78)] == [1, 2, 3]


def test_a_nucleus_is_one_of_what_a_truncation_keeps():
    law = joint([P], [1.0], Truncation(top_k=2))
    assert [nucleus_width(NucleusWidths(9, 1, mass), law) for mass in (0.57, 0.58, 1.0)] == [1, 2, 2]
    warm = joint([P], [1.0], Truncation(temperature=0.5))
    assert nucleus_width(NucleusWidths(9, 1, 0.83), warm) == 2  # 0.16, 0.09, ... of 0.3


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.3])
@pytest.mark.parametrize("mass", [0.5, 0.8, 0.9, 0.99])
def test_a_width_without_all_rows_is_that_with_them_or_undecided(mass, temperature):
    """Whatever the laws of the others: also where a beam has no way on at all, so that it has no weight."""
    rng = np.random.default_rng(int(100 * mass))
    cut = Truncation(temperature)
    decided = alone_differs = 0
    for _ in range(300):
        beams = int(rng.integers(2, 6))
        odds = np.sort(rng.dirichlet(np.full(beams, 0.3)))[::-1] + 1e-9
        rows = rng.dirichlet(np.full(9, rng.choice([0.1, 1.0])), beams) + 1e-12
        if rng.random() < 0.2:
            rows[-1] = 0.0
        if rng.random() < 0.3:
            rows[:, rng.integers(1, 5) :] = 0.0  # few ways on, fewer than the most draws
        known = np.arange(beams) < rng.integers(1, beams)
        widths = NucleusWidths(5, int(rng.integers(1, 4)), mass)
        keys = np.zeros(beams, dtype=np.uint64)
        live = Beams(np.arange(beams), np.arange(beams), np.log(odds), np.ones(beams, dtype=np.int64), keys)
        whole = nucleus_width(widths, joint(rows, odds, cut))
        part = joint(rows[known], odds[known], cut)
        found = nucleus_width_of_known(widths, part, live.pick(~known))
        decided += found != UNKNOWN_WIDTH
        alone_differs += nucleus_width(widths, part) != whole
        assert found in (UNKNOWN_WIDTH, whole)
    assert decided > 5
    assert alone_differs > 5  # by the known beams alone, widths would be others


def test_known_beams_with_few_pairs_leave_room_for_those_of_others():
    """As under a grammar: a known beam with two ways on holds 0.3, an unknown one 0.7 on many."""
    known = np.array([[0.5, 0.5, *[0.0] * 18]])
    both = np.concatenate([known, np.full((1, 20), 0.05)])
    widths = NucleusWidths(6, 2, 0.9)
    keys = np.zeros(1, dtype=np.uint64)
    other = Beams(
        np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.log([0.7]), np.ones(1, dtype=np.int64), keys
    )
    assert nucleus_width(widths, joint(both, [0.3, 0.7])) == 6
    assert nucleus_width_of_known(widths, joint(known, [0.3]), other) in (UNKNOWN_WIDTH, 6)


def test_widths_that_look_at_drafts_are_never_decided_without_all_rows():
    law = joint([P], [1.0])
    sure = SureWidths(4, 1, 0.7, True, RACE_NOISE)
    nobody = Beams.start(0, 1).pick(np.zeros(0, dtype=np.int64))
    with source_of_steps():
        assert width_of_known(sure, law, nobody) == UNKNOWN_WIDTH
        assert width_of_known(FixedWidths(3), law, nobody) == 3
        assert (width_by_draft(sure, law), width_by_draft(FixedWidths(3), law)) == (4, 3)
        assert width_by_draft(NucleusWidths(9, 1, 0.69), law) == 2


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

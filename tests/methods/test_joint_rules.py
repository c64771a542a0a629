"""The rule of joint likelihood on tables: worked examples, properties, known mistakes. No model, no cache."""

import math
from dataclasses import replace

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.dice import Dice
from specbeam.core.draft.children import Distinct, Independent
from specbeam.core.draft.tree import Branching
from specbeam.core.forest import Forest
from specbeam.errors import BadSetting, LostLaw, NotSupported
from specbeam.models.table import TableLM
from specbeam.recipes.joint.beam_drafter import JointBeams
from specbeam.recipes.joint.beam_rule import JointRule, judged_paths
from specbeam.recipes.joint.paths import Paths, deepest_in_chains, deepest_in_tree, passing
from tests.support.exact import exact_law
from tests.support.joint import (
    SLOT_P,
    SLOT_Q,
    P,
    Q,
    chain,
    drafted,
    first_turn,
    letters,
    odds_of,
    random_paths,
    seated,
    text_of,
)
from tests.support.programs import random_table, run

TAUS = (0.1, 0.3, 0.5, 0.7, 0.9)
SEARCH, DRAWN = {"draft": "search"}, {"draft": "sample", "replacement": True}


def length(paths, threshold, prefix="longest"):
    return int(paths.depths[deepest_in_chains(paths, threshold, 1, prefix)])


# (target conditionals, draft conditionals, lengths by threshold, and by the test that stops at the first failure)
VECTORS = {
    "recovers": ((0.30, 0.80, 0.90), (0.60, 0.40, 0.75), [3, 3, 3, 3, 3], [3, 3, 0, 0, 0]),
    "dips": ((0.6, 0.1, 0.9, 0.8), (0.5, 0.5, 0.3, 0.8), [4, 4, 4, 4, 1], [4, 1, 1, 1, 1]),
    "zero": ((0.5, 0.0, 0.9), (0.5, 0.4, 0.3), [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
    "better": ((0.9, 0.9, 0.9), (0.3, 0.3, 0.3), [3, 3, 3, 3, 3], [3, 3, 3, 3, 3]),
    "falls": ((0.6, 0.6, 0.6), (1.0, 1.0, 1.0), [3, 2, 1, 0, 0], [3, 2, 1, 0, 0]),
}


@pytest.mark.parametrize("name", VECTORS)
def test_worked_vectors(name):
    p, q, longest, first_failure = VECTORS[name]
    assert [length(chain(p, q), tau) for tau in TAUS] == longest
    assert [length(chain(p, q), tau, "first_failure") for tau in TAUS] == first_failure


def test_ratios_of_the_worked_vectors():
    for (p, q), ratios in (
        (VECTORS["recovers"][:2], (0.5, 1.0, 1.2)),
        (VECTORS["dips"][:2], (1.2, 0.24, 0.72, 0.72)),
        (VECTORS["zero"][:2], (1, 0, 0)),
        (VECTORS["better"][:2], (3, 9, 27)),
        (VECTORS["falls"][:2], (0.6, 0.36, 0.216)),
    ):
        paths = chain(p, q)
        assert np.exp(paths.logp - paths.logq)[1:] == pytest.approx(ratios)


def test_the_joint_test_is_not_the_token_test():
    """Every token passes 0.5 by itself; the path does not."""
    p, q = VECTORS["falls"][:2]
    assert all(one / other > 0.5 for one, other in zip(p, q, strict=True))
    assert length(chain(p, q), 0.5) == 1


def test_the_test_is_strict_and_capped():
    """r_1 is exactly .5; a ratio above 1 does not pass a threshold of 1, for nothing does."""
    assert not passing(chain((0.25,), (0.5,)), np.log([1, 0.5]), 0.5)[1]
    assert length(chain((0.9, 0.9), (0.3, 0.3)), 1.0) == 0


def test_threshold_zero_takes_all_that_the_target_can_say():
    assert length(chain((1e-9, 0.5, 1e-12), (0.9, 0.9, 0.9)), 0.0) == 3
    assert length(chain((0.5, 0.0, 0.9), (0.1, 0.1, 0.1)), 0.0) == 1


@pytest.mark.parametrize("threshold", [-0.1, 1.1])
def test_thresholds_outside_of_zero_to_one_are_refused(threshold):
    for make in (sb.mtad, sb.mmtad, sb.mjsd):
        with pytest.raises(BadSetting, match=r"threshold is .* in \[0, 1\]"):
            make(threshold=threshold)


def test_longest_is_not_below_first_failure_and_falls_with_the_threshold():
    rng = np.random.default_rng(0)
    for _ in range(500):
        paths = chain(*rng.random((2, 5)))
        lengths = [length(paths, tau) for tau in np.linspace(0, 1, 21)]
        assert lengths == sorted(lengths, reverse=True)
        for tau in TAUS:
            assert length(paths, tau) >= length(paths, tau, "first_failure")


def test_equal_models_pass_as_a_whole_below_one():
    rng = np.random.default_rng(1)
    for width in (1, 2, 4):
        paths = random_paths(rng, 4, width)
        same = Paths(paths.parents, paths.logq, paths.logq, paths.chains)
        for tau in (0.0, 0.5, 0.999):
            assert same.depths[deepest_in_chains(same, tau)] == 4
            for theta in ("chain", "max", "own"):
                assert same.depths[deepest_in_tree(same, tau, theta)] == 4
            assert deepest_in_tree(same, tau, "chain") == same.chains[0]


def test_a_zero_of_the_target_caps_the_length():
    rng = np.random.default_rng(2)
    for _ in range(200):
        p, q = rng.random((2, 6))
        zero = int(rng.integers(6))
        p[zero] = 0.0
        q *= 0.1  # what lies behind could make up for anything but a zero
        assert length(chain(p, q), float(rng.random())) <= zero


def forest_of(target, draft, growth, depth, width):
    forest, session = drafted(growth, draft, depth, width)
    return judged_paths(session, forest, TableLM(target).extend([session], [forest])[0].logits), forest


def test_the_worked_tree():
    """Three beams of the draft, three tokens deep; all thresholds pick its best beam."""
    paths, forest = forest_of(P, Q, JointBeams("search"), 3, 3)
    assert [letters(forest.path(node)) for node in range(1, 10)] == [
        "b",
        "a",
        "c",
        "ba",
        "aa",
        "ab",
        "baa",
        "bab",
        "bac",
    ]
    assert np.exp(paths.logq[1:]) == pytest.approx([0.45, 0.35, 0.2, 0.315, 0.14, 0.105, 0.126, 0.0945, 0.0945])
    assert np.exp(paths.logp[1:]) == pytest.approx([0.4, 0.5, 0.1, 0.36, 0.17, 0.165, 0.1224, 0.1188, 0.1188])
    assert forest.parents.tolist() == [-1, 0, 0, 0, 1, 2, 2, 4, 4, 4]
    for theta in ("chain", "max"):
        expected = np.array([0.45, 0.315, 0.126])[paths.depths[1:] - 1]
        assert np.exp(paths.theta(theta)[1:]) == pytest.approx(expected)
    for tau in TAUS:
        for theta in ("chain", "max"):
            assert letters(forest.path(deepest_in_tree(paths, tau, theta))) == "baa"


def test_the_threshold_of_a_depth_is_that_of_the_ancestor_not_of_the_slot():
    """The best final beam (ba) sits in slot 0 of layer 2, its parent (b) in slot 1 of layer 1: taking slot 0 of layer 1
    compares b with a, and loses a node that passes.
    """
    paths, forest = forest_of(SLOT_P, SLOT_Q, JointBeams("search"), 2, 2)
    assert [letters(forest.path(node)) for node in range(1, 5)] == ["a", "b", "ba", "aa"]
    assert np.exp(paths.logq[1:]) == pytest.approx([0.6, 0.4, 0.36, 0.204])
    assert np.exp(paths.logp[1:]) == pytest.approx([0.15, 0.25, 0.025, 0.03])
    assert np.exp(paths.theta("chain")[1:]) == pytest.approx([0.4, 0.4, 0.36, 0.36])
    assert np.exp(paths.theta("max")[1:]) == pytest.approx([0.6, 0.6, 0.36, 0.36])

    def found(theta, tau):
        return letters(forest.path(deepest_in_tree(paths, tau, theta)))

    assert [found(theta, 0.5) for theta in ("chain", "own", "max")] == ["b", "b", ""]
    assert [found(theta, 0.1) for theta in ("chain", "own", "max")] == ["b", "aa", "b"]
    assert [found(theta, 0.3) for theta in ("chain", "own", "max")] == ["b", "b", "b"]
    assert {found(theta, tau) for theta in ("chain", "own", "max") for tau in (0.7, 0.9)} == {""}


@pytest.mark.parametrize("ends", [0.0, 0.3])
def test_the_tree_accepts_at_least_what_its_chain_does(ends):
    rng = np.random.default_rng(3)
    more = 0
    for _ in range(400):
        paths = random_paths(rng, 3, 3, zeros=True, ends=ends)
        assert (paths.theta("max") >= paths.theta("chain")).all()
        for tau in (0.05, 0.3, 0.6, 0.9):
            alone, tree = deepest_in_chains(paths, tau), deepest_in_tree(paths, tau, "chain")
            assert paths.depths[tree] >= paths.depths[alone]
            if paths.depths[tree] == paths.depths[alone]:
                assert paths.logp[tree] >= paths.logp[alone]
            more += paths.depths[tree] > paths.depths[alone]
            best = paths.path(paths.chains[0])
            assert paths.theta("chain")[best] == pytest.approx(paths.logq[best])
    assert more > 50
    lone = random_paths(rng, 4, 1)
    assert all(deepest_in_chains(lone, tau) == deepest_in_tree(lone, tau, "chain") for tau in TAUS)


def test_several_chains_take_the_first_of_the_longest():
    #       0 -> 1 -> 2   the best chain: passes up to node 1
    #       0 -> 3 -> 4   the second: passes as a whole; a third would too, and is not looked at
    parents, q = np.array([-1, 0, 1, 0, 3, 3]), np.array([1, 0.5, 0.4, 0.3, 0.25, 0.2])
    p = np.array([1, 0.5, 0.01, 0.3, 0.25, 0.3])
    paths = Paths(parents, np.log(p), np.log(q), np.array([2, 4, 5]))
    assert [deepest_in_chains(paths, 0.5, count) for count in (1, 2, 3)] == [1, 4, 4]
    p[4] = 0.01
    paths = Paths(parents, np.log(p), np.log(q), np.array([2, 4]))
    assert deepest_in_chains(paths, 0.5, 2) == 1  # node 3 is no longer than node 1


def test_an_ended_beam_is_verified_at_its_own_length():
    """Its end is at depth 1; the other beam is longer but less likely. The threshold behind the end is that of the end, and
    of two paths that pass the deeper one is taken.
    """
    parents, q, p = np.array([-1, 0, 0, 2]), np.array([1, 0.5, 0.4, 0.3]), np.array([1, 0.6, 0.3, 0.3])
    paths = Paths(parents, np.log(p), np.log(q), np.array([1, 3]))
    assert np.exp(paths.theta("chain"))[1:] == pytest.approx([0.5, 0.5, 0.5])
    assert np.exp(paths.theta("max"))[1:] == pytest.approx([0.5, 0.5, 0.5])
    assert deepest_in_chains(paths, 0.5) == 1
    assert deepest_in_tree(paths, 0.5) == 3
    assert deepest_in_tree(paths, 0.7) == 1


def test_a_short_ended_chain_does_not_end_the_search():
    #       0 -> 1 -> 2 -> 3   the best chain: passes up to node 2
    #       0 -> 4             the second has ended, and passes as a whole
    #       0 -> 5 -> 6 -> 7   the third passes as a whole, and is the longest
    parents = np.array([-1, 0, 1, 2, 0, 0, 5, 6])
    q = np.array([1, 0.5, 0.45, 0.4, 0.35, 0.3, 0.3, 0.3])
    p = np.array([1, 0.5, 0.45, 0.01, 0.35, 0.3, 0.3, 0.3])
    paths = Paths(parents, np.log(p), np.log(q), np.array([3, 4, 7]))
    assert [deepest_in_chains(paths, 0.5, count) for count in (1, 2, 3)] == [2, 2, 7]


@pytest.mark.parametrize("theta", ["own", "chain", "max"])
def test_paths_of_no_draft_odds_never_pass(theta):
    """A draft of log q = -inf has an infinite ratio, and proves nothing."""
    parents, p = np.array([-1, 0, 1]), np.array([1, 0.5, 0.25])
    paths = Paths(parents, np.log(p), np.array([0, -np.inf, -np.inf]), np.array([2]))
    for threshold in (0.0, 0.5):
        assert deepest_in_tree(paths, threshold, theta) == 0
        assert deepest_in_chains(paths, threshold) == 0


# What is promised of accepted blocks.


def test_accepted_blocks_keep_their_certificate():
    """log p > floor for every block, on chains and trees; no block of its length beats it by more than the gap."""
    rng = np.random.default_rng(4)
    blocks = 0
    for case in range(60):
        target, draft = random_table(case, 3), random_table(case + 500, 3)
        tau = float(rng.choice([0.2, 0.5, 0.9]))
        method = [sb.mtad, sb.mjsd, sb.mmtad][case % 3](beams=3, depth=3, threshold=tau)
        session, lm = seated(method, target, draft, steps=4, key=case)
        verdict, _ = first_turn(session, lm)
        accepted = [int(step.beams.tokens[0]) for step in verdict.steps[: verdict.accepted]]
        seen = verdict.certificate
        assert (seen is None) == (not accepted)
        if seen is not None:
            blocks += 1
            logp = sum(math.log(target(tuple(accepted[:place]))[token]) for place, token in enumerate(accepted))
            assert (seen.blocks, seen.tokens, seen.logp) == (1, len(accepted), pytest.approx(logp))
            assert seen.logp > seen.floor
            assert seen.perplexity < seen.most_perplexity
            assert best_block(target, len(accepted)) - logp <= seen.gap + 1e-9
    assert blocks > 30


def best_block(target, size):
    """Log-likelihood of the most probable block."""
    found = {(): 0.0}
    for _ in range(size):
        found = {(*path, t): lp + math.log(x) for path, lp in found.items() for t, x in enumerate(target(path)) if x}
    return max(found.values())


def test_the_certificate_bounds_the_perplexity_of_a_chain():
    """Per token: at most the draft perplexity times tau^(-1/L)."""
    session, lm = seated(sb.mtad(3, 3, 0.5, draft="search"), P, Q)
    verdict, _ = first_turn(session, lm)
    seen = verdict.certificate
    assert seen.perplexity == pytest.approx(0.1224 ** (-1 / 3))
    assert seen.most_perplexity == pytest.approx(0.126 ** (-1 / 3) * 0.5 ** (-1 / 3))


def test_nothing_is_certified_at_threshold_zero():
    session, lm = seated(sb.mtad(3, 3, 0.0), P, Q)
    assert first_turn(session, lm)[0].certificate is None


@pytest.mark.parametrize(("tau", "bound"), [(0.1, 3.00588), (0.5, 1.39645), (0.9, 0.80866)])
def test_the_worked_bound(tau, bound):
    """x = baa is accepted; the target's best block is aba: log p(aba) - log p(x) < log(1/tau) + log p(aba)/q(aba)."""
    session, lm = seated(sb.mtad(3, 3, tau, draft="search"), P, Q)
    verdict, _ = first_turn(session, lm)
    assert letters(int(step.beams.tokens[0]) for step in verdict.steps[:3]) == "baa"
    best, other = seated(sb.mtjd("argmax", 3), P, steps=3)
    run(best, other)
    assert letters(text_of(best)) == "aba"
    whole, forest = forest_of(P, Q, JointBeams("search"), 3, 27)
    (node,) = [node for node in range(forest.size) if letters(forest.path(node)) == "aba"]
    gap = whole.logp[node] - verdict.certificate.logp
    assert gap == pytest.approx(0.19329, abs=1e-5)
    assert gap < verdict.certificate.gap
    assert whole.logp[node] - (whole.logq[node] + math.log(tau)) == pytest.approx(bound, abs=1e-5)
    assert gap < bound


@pytest.mark.parametrize(("prefix", "lengths"), [("longest", [3, 3, 3, 3, 3]), ("first_failure", [3, 3, 3, 3, 0])])
def test_the_worked_chain_by_both_rules(prefix, lengths):
    """r = (.8889, 1.1429, .9714)."""
    for tau, expected in zip(TAUS, lengths, strict=True):
        session, lm = seated(sb.mtad(3, 3, tau, draft="search", prefix=prefix), P, Q)
        verdict, _ = first_turn(session, lm)
        assert verdict.accepted == expected
        assert (verdict.certificate is None) == (expected == 0)


@pytest.mark.parametrize(("tau", "accepted", "row"), [(0.5, (1, 0, 0), (0.34, 0.33, 0.33)), (1.0, (), (0.5, 0.4, 0.1))])
def test_the_bonus_has_the_targets_law_after_what_was_accepted(tau, accepted, row):
    """No residual of p and q, whether all was accepted or nothing."""

    def program(dice):
        forest, session = drafted(JointBeams("search", chains=1), Q, 3, 3, dice)
        verdict = JointRule(tau, 1, coupling="dice").verify(
            session, forest, TableLM(P).extend([session], [forest])[0].logits
        )
        return tuple(int(step.beams.tokens[0]) for step in verdict.steps)

    assert exact_law(program) == pytest.approx({(*accepted, token): odds for token, odds in enumerate(row)})


@pytest.mark.parametrize("theta", ["own", "chain", "max"])
def test_every_theta_certifies_what_it_compared(theta):
    """The floor is the threshold that the block has passed; it was the node's own only for "own"."""
    blocks, floors = 0, set()
    for key in range(40):
        target, draft = random_table(key, 3), random_table(key + 500, 3)
        session, lm = seated(sb.mmtad(3, 3, 0.5, draft="search", theta=theta), target, draft, steps=9, key=key)
        verdict, forest = first_turn(session, lm)
        seen = verdict.certificate
        if seen is None:
            continue
        tokens = [int(step.beams.tokens[0]) for step in verdict.steps[: verdict.accepted]]
        deep = [node for node in range(forest.size) if len(forest.path(node)) == len(tokens)]
        chain = forest.path(forest.beams[0])[: len(tokens)]
        compared = {
            "own": math.log(odds_of(draft, tokens)),
            "chain": math.log(odds_of(draft, chain)),
            "max": max(forest.logq[deep]),
        }
        assert seen.floor == pytest.approx(compared[theta] + math.log(0.5))
        assert seen.logp == pytest.approx(math.log(odds_of(target, tokens)))
        assert seen.logp > seen.floor
        assert best_block(target, len(tokens)) - seen.logp <= seen.gap + 1e-9
        blocks += 1
        floors.add(tuple(name for name, value in compared.items() if abs(value - compared[theta]) > 1e-9))
    assert blocks > 15
    assert len(floors) > 1


def test_the_bound_on_ten_thousand_random_tables():
    """Blocks of an exact draft argmax: for every y, log p(y) - log p(x) < log 1/tau + log p(y)/q(y), also of a prefix."""
    rng = np.random.default_rng(5)
    depth, vocab, accepted = 2, 3, 0
    for _ in range(10_000):
        p1, q1 = rng.dirichlet(np.ones(vocab), 2)
        p2, q2 = rng.dirichlet(np.ones(vocab), (2, vocab))
        p, q = p1[:, None] * p2, q1[:, None] * q2
        a, b = np.unravel_index(q.argmax(), q.shape)
        paths, tau = chain((p1[a], p2[a, b]), (q1[a], q2[a, b])), float(rng.uniform(0.02, 0.98))
        found = length(paths, tau)
        if found:
            accepted += found == depth
            gaps = np.log(p) - paths.logp[found]
            assert (gaps < math.log(1 / tau) + np.log(p) - np.log(q)).all()
    assert accepted > 2500


# Any drafter whose forest knows the likelihood of its paths.


@pytest.mark.parametrize(
    "make",
    [
        lambda: Branching((1, 1, 1), Independent()),
        lambda: Branching((2, 2), Distinct()),
        lambda: Branching((2, 1), Independent()),
        lambda: sb.rsd_s(3, 3).build(None, TableLM(Q)).drafter.growth,
        lambda: sb.dyspec(6, 3, 0.01).build(None, TableLM(Q)).drafter.growth,
        lambda: sb.opt_tree(6, 3, 3).build(None, TableLM(Q)).drafter.growth,
    ],
    ids=["chain", "distinct", "independent", "rsd_s", "dyspec", "opt_tree"],
)
def test_every_growth_knows_the_likelihood_of_its_paths(make):
    """The score of a node is the teacher-forced sum over its path."""
    for key in range(5):
        forest, _ = drafted(make(), Q, 3, 6, key=key)
        for node in range(1, forest.size):
            path = forest.path(node)
            expected = sum(math.log(Q(tuple(path[:place]))[token]) for place, token in enumerate(path))
            assert forest.logq[node] == pytest.approx(expected)
    session, lm = seated(sb.mmtad(depth=3, threshold=0.1, draft=make()), P, Q, steps=12)
    run(session, lm)
    assert session.length == 12
    assert session.count.accepted > 0


def test_drafts_without_likelihoods_are_refused():
    session, lm = seated(sb.mtad(), P, Q)
    retrieved = Forest.rooted([0]).grown([1, 0], [0, 1])
    impossible = Forest.rooted([0]).grown([1, 0], [0, 1], np.array([-1.0, -np.inf]))
    for forest in (retrieved, impossible):
        session.state.clear()
        with pytest.raises(LostLaw, match="MatchRule"):
            session.parts.rule.verify(session, forest, lm.extend([session], [forest])[0].logits)


def test_more_is_accepted_from_all_beams_than_from_the_best_one():
    """On drafts with ends, searched, or drawn with replacement by the same dice: the same draft for both methods."""
    deeper = 0
    for key in range(24):
        for tau, options in ((0.05, SEARCH), (0.3, SEARCH), (0.7, SEARCH), (0.2, DRAWN), (0.5, DRAWN)):
            lengths = []
            for make in (sb.mtad, sb.mmtad):
                session, lm = seated(make(3, 3, tau, **options), random_table(key, 4), random_table(key + 5000, 4),
                                     eos=(3,), key=key)  # fmt: skip
                lengths.append(first_turn(session, lm)[0].accepted)
            assert lengths[1] >= lengths[0], (key, tau)
            deeper += lengths[1] > lengths[0]
    assert deeper > 5


def test_exact_rules_may_take_searched_beams_and_refuse_drawn_ones():
    """Chosen and not drawn: sure guesses. Drawn over several beams at once: a law that PathRule cannot try."""
    searched, _ = drafted("search", Q, 3, 3)
    sampled, _ = drafted("sample", Q, 3, 3)
    assert searched.siblings.have_laws
    assert not sampled.siblings.have_laws


def test_verification_draws_nothing():
    """Only the bonus is drawn: with bonus 'none' and an accepted draft the dice stay where they were."""

    def next_after_a_turn(bonus):
        session, lm = seated(sb.mtad(3, 3, 0.5, draft="search", bonus=bonus), P, Q, Dice(1))
        session.parts = replace(session.parts, rule=replace(session.parts.rule, coupling="dice"))
        verdict, _ = first_turn(session, lm)
        tokens = [int(step.beams.tokens[0]) for step in verdict.steps]
        return tokens, session.dice.uniform((1,)).tolist()

    stream = Dice(1).uniform((2,)).tolist()
    assert next_after_a_turn("none") == ([1, 0, 0], stream[:1])
    tokens, after = next_after_a_turn("sample")
    assert tokens[:3] == [1, 0, 0]
    assert after == stream[1:]


def test_audits_are_refused():
    session, lm = seated(sb.mtad(), P, Q)
    session.audited = True
    with pytest.raises(NotSupported, match="joint decoding changes it on purpose"):
        first_turn(session, lm)

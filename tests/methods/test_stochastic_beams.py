"""RSD-S: its noise on the worked numbers; the law of what follows each tree by enumeration, averaged over many trees."""

from contextlib import nullcontext

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.draft.stochastic import StochasticBeam, perturbed
from specbeam.core.draft.tree import TreeDrafter
from specbeam.core.forest import Forest, joined
from specbeam.core.records import Shape
from specbeam.models.table import TableLM
from tests.support.exact import exact_law
from tests.support.examples import PAIRS, completed
from tests.support.programs import random_table, session_of
from tests.support.quick import first_quick
from tests.support.steps import source_of, source_of_steps


def uniforms_of(g):
    """The uniforms behind Gumbel values."""
    return np.exp(-np.exp(-np.asarray(g)))


def test_the_worked_vector():
    logp = np.log([0.25, 0.5, 0.25])
    phi = np.log(0.6) + logp
    noise = np.array([0.1, -0.3, 0.8])
    assert phi == pytest.approx([-1.897120, -1.203973, -1.897120], abs=1e-6)
    assert phi + noise == pytest.approx([-1.797120, -1.503973, -1.097120], abs=1e-6)
    places, found = perturbed(logp, np.log(0.6), -0.25, uniforms_of(noise), 3)
    assert places.tolist() == [0, 1, 2]
    assert found == pytest.approx([-1.463429, -1.025335, -0.250000], abs=1e-6)
    places, found = perturbed(logp, np.log(0.6), -0.25, uniforms_of(noise), 2)
    assert places.tolist() == [1, 2]
    assert found == pytest.approx([-1.025335, -0.250000], abs=1e-6)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_stable_form_is_the_plain_one(compiled):
    """Of the largest values alone too, and never of a token without odds."""
    draw = perturbed if compiled else source_of(perturbed)
    rng = np.random.default_rng(0)
    with source_of_steps() if not compiled else nullcontext():
        for number in range(200):
            p = rng.dirichlet(np.ones(7))
            p[: number % 3] = 0.0
            with np.errstate(divide="ignore"):
                logp = np.log(p)
            u = rng.random(7)
            path, top = -float(rng.exponential()), float(rng.gumbel())
            g = path + logp - np.log(-np.log(u))
            with np.errstate(divide="ignore"):
                plain = -np.log(np.exp(-top) - np.exp(-g.max()) + np.exp(-g))
            for count in (1, 3, 7):
                expected = np.sort(np.argsort(-g, kind="stable")[: min(count, 7 - number % 3)])
                places, found = draw(logp, path, top, u, count)
                assert places.tolist() == expected.tolist()
                assert found == pytest.approx(plain[expected], abs=1e-9)
                assert found.max() == top


class Noises:
    """Dice whose uniforms give these Gumbel values, row by row."""

    key = 1

    def __init__(self, *rows):
        self.rows = list(rows)

    def ready(self, count):
        return self

    def uniform(self, shape):
        row = np.array(self.rows.pop(0))
        assert row.shape == shape
        return uniforms_of(row)


def test_the_worked_trace():
    """Of b and a in the first layer the second keeps bc and ba; a is a leaf, and c stands before a under b."""
    dice = Noises([-0.2, 0.9, 0.4], [0.3, -0.5, 1.1], [0.2, 0.6, -0.1])
    session = session_of(sb.rsd_s(2, 2), TableLM(PAIRS["EX3M"][1]), dice, steps=9)
    with source_of_steps():
        (tree,) = session.parts.drafter.draft([session], [Shape(2, 2)])
    assert [tree.path(node) for node in range(1, 5)] == [[1], [0], [1, 2], [1, 0]]
    first, second = tree.siblings.groups()
    assert first.tokens.tolist() == [1, 0]
    assert (second.parents.tolist(), second.tokens.tolist()) == ([1], [2, 0])
    assert tree.siblings.have_laws


def trees(draft, width, depth, count, seed):
    """Random trees, each with how often it came."""
    drafter = TreeDrafter(TableLM(draft), StochasticBeam())
    found: dict[tuple, tuple[Forest, int]] = {}
    for number in range(count):
        session = session_of(sb.rsd_s(width, depth), TableLM(draft), steps=9, key=seed + number * 7919)
        with source_of_steps():
            (forest,) = drafter.draft([session], [Shape(depth, width)])
        drafter.close(session)
        groups = forest.siblings.groups()
        key = tuple((tuple(forest.path(int(group.parents[0]))), tuple(group.tokens.tolist())) for group in groups)
        found[key] = (forest, found.get(key, (forest, 0))[1] + 1)
    return list(found.values())


def after(forest, method, target, draft, length):
    """The law of the next tokens given a tree, and the mean number of accepted drafts."""
    lm = TableLM(target)

    def program(dice):
        judge = session_of(method, TableLM(draft), dice, 9)
        (scored,) = lm.extend([judge], [forest])
        lm.close(judge)
        verdict = judge.parts.rule.verify(judge, forest, scored.logits)
        return tuple(int(step.beams.tokens[0]) for step in verdict.steps), verdict.accepted

    law, mean = {}, 0.0
    for (tokens, accepted), odds in exact_law(program).items():
        mean += odds * accepted
        for text, rest in completed(target, tokens[:length], length).items():
            law[text] = law.get(text, 0.0) + odds * rest
    return law, mean


def check(pair, width, depth, rule, count, accepted=None, seed=5):
    """Each cell of the joint law, and the mean, within four and a half standard errors."""
    target, draft = pair
    truth = completed(target, (), depth + 1)
    laws, weights = [], []
    for forest, times in trees(draft, width, depth, count, seed):
        assert all((forest.depths() == layer).sum() == width for layer in range(2, depth + 1))
        laws.append(after(forest, sb.rsd_s(width, depth, rule), target, draft, depth + 1))
        weights.append(times / count)
    weights = np.array(weights)
    means = {text: np.array([law.get(text, 0.0) for law, _ in laws]) for text in truth}
    known = truth.items() if accepted is None else [*truth.items(), ("accepted", accepted)]
    means["accepted"] = np.array([mean for _, mean in laws])
    for text, value in known:
        found = float(weights @ means[text])
        error = (float(weights @ (means[text] - found) ** 2) / count) ** 0.5
        assert abs(found - value) < 4.5 * error + 6e-5, (text, found, value)


@pytest.mark.parametrize(("rule", "accepted"), first_quick([("traversal", 1.5100), ("path", 1.4346)]))
def test_trees_of_two_by_two(rule, accepted):
    check(PAIRS["EX3M"], 2, 2, rule, 1200, accepted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "depth", "rule", "accepted"),
    [
        (2, 2, "path", 1.4346),
        (2, 2, "traversal", 1.5100),
        (2, 3, "path", 1.8188),
        (2, 3, "traversal", 2.0356),
        (3, 2, "path", 1.6334),
        (3, 2, "traversal", 1.7020),
    ],
)
def test_the_published_means(width, depth, rule, accepted):
    check(PAIRS["EX3M"], width, depth, rule, 12_000, accepted)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["path", "traversal"])
def test_parents_of_sharply_different_certainty(rule):
    """What is cut early depends on how sure each parent is; were it the tokens that decide, the law would show it."""
    sure = {0: (0.9, 0.05, 0.05), 1: (0.34, 0.33, 0.33), 2: (0.02, 0.96, 0.02)}
    draft = lambda path: np.array(sure[path[-1]] if path else (0.5, 0.3, 0.2))  # noqa: E731
    check((random_table(4, 3), draft), 2, 2, rule, 12_000)


@pytest.mark.slow
def test_siblings_out_of_order_are_seen():
    """The same trees verified in the order of their tokens have another law: (0.462, 0.233, 0.305) for the first token."""
    target, draft = PAIRS["EX3M"]
    law = np.zeros(3)
    for forest, times in trees(draft, 2, 2, 8_000, 5):
        groups = []
        for group in forest.siblings.groups():
            order = np.argsort(group.tokens)
            fields = {name: getattr(group, name)[order] for name in ("rows", "tokens", "nodes")}
            groups.append(group._replace(**fields))
        wrong, _ = after(forest._replace(siblings=joined(groups)), sb.rsd_s(2, 2), target, draft, 1)
        law += [wrong.get((token,), 0.0) * times / 8_000 for token in range(3)]
    assert law == pytest.approx([0.462, 0.233, 0.305], abs=0.01)

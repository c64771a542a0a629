"""Chance that is no coin, enumerated: noise that draft and target share, the races of RSD-S, and what ProPD prunes.

The order in which things arrive in a race is drawn place after place, so dice can walk through all orders with their exact
odds. The times of arrival are then anything that goes with the order, and the shipped steps run on these.
"""

import math

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.control.cost import CostCurve
from specbeam.core.control.fixed import FixedShape
from specbeam.core.control.needs import NodesByNeed
from specbeam.core.draft import stochastic
from specbeam.core.draft.best_first import BestFirst
from specbeam.core.draft.merged import Pruned
from specbeam.core.draft.stochastic import perturbed
from specbeam.core.draft.tree import TreeDrafter
from specbeam.core.forest import joined
from specbeam.core.laws import joint, ranking
from specbeam.core.noise import ALL_TOKENS, child_key
from specbeam.core.session import Parts
from specbeam.core.verify.traversal import TraversalRule
from specbeam.core.verify.walk import MatchRule, PathRule
from specbeam.models.table import TableLM
from tests.support.exact import WalkingDice, beam_sampling_law, distance, exact_law
from tests.support.examples import PAIRS, completed, law_and_mean, one_turn
from tests.support.programs import random_table, run, session_of, texts
from tests.support.quick import first_quick
from tests.support.steps import source_of

CLOSE = 1e-12


def first_places(dice, odds, count):
    """The places that arrive first in a race at these rates, in order: draws without replacement."""
    left, order = np.array(odds, dtype=float), []
    while len(order) < min(count, np.count_nonzero(odds)):
        order.append(dice.pick(left))
        left[order[-1]] = 0.0
    return order


class NoiseByRank:
    """Noise of (path, token) under which the target's pairs stand in a given order; elsewhere it is anything."""

    def __init__(self, root, seed):
        self.root, self.seed, self.known = int(root), seed, {}

    def key_of(self, path):
        """The name of a path."""
        key = np.uint64(self.root)
        for token in path:
            key = source_of(child_key)(key, token)
        return int(key)

    def rank(self, pairs, odds, order):
        """Let the values of pairs be largest at the places in `order`, and then fall in any order at the others.

        Values are drawn from the top down: the noise of a whole path gives the largest one. Before they are fitted to it,
        all values of a path are lower by any amount.
        """
        rng = np.random.default_rng([self.seed, len(self.known)])
        behind = [place for place in rng.permutation(len(pairs)).tolist() if place not in order and odds[place] > 0]
        values = np.sort(rng.gumbel(size=len(order) + len(behind)))[::-1]
        by_path = {}
        for value, place in zip(values, [*order, *behind], strict=True):
            path, token = pairs[place]
            by_path.setdefault(path, []).append((float(value), token, float(odds[place])))
        for path, ranked in by_path.items():
            key = self.key_of(path)
            top = ranked[0][0]
            free = top - float(rng.exponential())
            self.known[key, ALL_TOKENS] = top - math.log(math.fsum(own for _, _, own in ranked))
            for value, token, own in ranked:
                before = free - math.log1p(math.expm1(top - value) * math.exp(free - top))
                self.known[key, token] = before - math.log(own)

    def gumbel(self, key, token):
        """Stands in for the step of this name."""
        if (int(key), int(token)) not in self.known:
            return float(np.random.default_rng([self.seed, int(key), int(token)]).gumbel())
        return self.known[int(key), int(token)]

    @staticmethod
    def bound(key, first, bounds):
        """Stands in for `bound_noise`: nothing is above this."""
        bounds[:] = 1e6


def likelihood(table, path):
    return math.prod(float(table(path[:place])[token]) for place, token in enumerate(path))


def nucleus(mass, least, most):
    """The width that `width="auto"` gives a layer of these odds: a second implementation, by sorting."""

    def width(odds):
        held = np.cumsum(np.sort(odds)[::-1]) / odds.sum()
        return min(max(1 + int((held < mass - 1e-9).sum()), least), most)

    return width


def drawn_by_order(dice, noise, target, width_of, steps, eos):
    """Rank the noise so that beam sampling draws what the dice say. Returns its (ended texts, live texts).

    Args:
        width_of: the number of draws of a layer, from the odds of its pairs.
    """
    ended, live = (), [()]
    for _ in range(steps):
        if not live:
            break
        pairs = [(path, token) for path in live for token in range(len(target(())))]
        odds = np.array([likelihood(target, (*path, token)) for path, token in pairs])
        order = first_places(dice, odds, width_of(odds))
        noise.rank(pairs, odds, order)
        drawn = [(*pairs[place][0], pairs[place][1]) for place in order]
        ended += tuple(text for text in drawn if text[-1] in eos)
        live = [text for text in drawn if text[-1] not in eos]
    return ended, tuple(live)


def law_under_noise(method, target, drafts, width_of, steps, eos, patch):
    """The law of (ended texts, live texts), which is asked for with each draft; and how many layers passed, at most."""
    most_passed = [0]

    def program(dice):
        asked = [session_of(method, TableLM(draft), WalkingDice([]), steps, eos, key=77) for draft in drafts]
        noise = NoiseByRank(asked[0].beams.keys[0], 5)
        expected = drawn_by_order(dice, noise, target, width_of, steps, eos)
        with patch.context() as here:
            for room in (ranking, joint):
                here.setattr(room, "gumbel", noise.gumbel)
            here.setattr(ranking, "bound_noise", noise.bound)
            for session in asked:
                run(session, TableLM(target))
                assert session.dice.taken == []  # the noise is all the chance there is
                assert texts(session) == expected
                most_passed[0] = max(most_passed[0], session.count.accepted)
        return expected

    return exact_law(program), most_passed[0]


@pytest.mark.parametrize(
    ("beams", "vocab", "steps", "depth", "eos"),
    [(2, 2, 3, 2, ()), (2, 3, 2, 1, (1,)), (2, 2, 3, 2, (0,)), (1, 3, 4, 3, ()), (3, 2, 2, 1, ())],
)
def test_under_shared_noise_beams_are_the_best_pairs_for_every_order_of_the_noise(
    beams, vocab, steps, depth, eos, monkeypatch
):
    """Whatever the draft, its beams, and the noise elsewhere; so the law is that of beam sampling."""
    target = random_table(1, vocab, zeros=vocab > 2)
    drafts = [target, random_table(2, vocab), random_table(3, vocab, zeros=True)]
    method = sb.dsbd(beams, beams + 1, depth, "fixed")
    law, passed = law_under_noise(method, target, drafts, lambda odds: beams, steps, eos, monkeypatch)
    assert distance(law, beam_sampling_law(target, beams, steps, False, eos)) < CLOSE
    assert passed >= depth  # with the target as its own draft


def test_drafts_that_are_cut_by_the_same_noise_change_no_law(monkeypatch):
    """Odds of drafts look at the noise that the target draws by; what it draws does not look at drafts."""
    target = random_table(1, 2)
    rows = CostCurve((1, 20), (1.0, 5.0))
    controller = NodesByNeed(rows, CostCurve((1,), (0.1,)), 2, 4, 3)
    method = sb.dsbd(2, 4, 2, "fixed").with_parts(controller=controller)
    law, _ = law_under_noise(method, target, [random_table(2, 2)], lambda odds: 2, 3, (0,), monkeypatch)
    assert distance(law, beam_sampling_law(target, 2, 3, False, (0,))) < CLOSE


@pytest.mark.parametrize(("mass", "least"), [(0.5, 1), (0.7, 1), (0.6, 2)])
@pytest.mark.parametrize("eos", [(), (0,)])
@pytest.mark.parametrize("depth", [None, 2, "auto"])
def test_layers_of_the_width_of_a_nucleus_are_its_best_pairs_for_every_order_of_the_noise(
    mass, least, eos, depth, monkeypatch
):
    """Without a draft, with layers that are scored whole, and with drafts that the same noise has cut."""
    target = random_table(1, 2)
    settings = {"width": "auto", "min_beams": least, "mass": mass}
    method = sb.beam_sampling(3, **settings)
    if depth == 2:
        method = sb.dsbd(3, 4, depth, **settings)
    if depth == "auto":
        controller = NodesByNeed(CostCurve((1, 20), (1.0, 5.0)), CostCurve((1,), (0.1,)), 3, 4, 3)
        method = sb.dsbd(3, 4, 2, **settings).with_parts(controller=controller)
    drafts = [target, random_table(2, 2)]
    _, passed = law_under_noise(method, target, drafts, nucleus(mass, least, 3), 3, eos, monkeypatch)
    assert (passed > 0) == (depth is not None)


def pruned(early, top, rule):
    """ProPD on tables: the likeliest drafts, of which those stay that an early look finds hopeful."""
    return lambda lm: sb.Method(
        "propd",
        "",
        1,
        lambda *_: Parts(Pruned(TreeDrafter(lm, BestFirst(2, 2)), TableLM(early), top), rule, FixedShape(2, 4), ""),
    )


MATCHED = {
    "opt_tree": lambda lm: sb.opt_tree(4, 2, 3),
    "propd": pruned((0.2, 0.5, 0.3), 2, MatchRule()),
}


@pytest.mark.parametrize("name", MATCHED)
def test_a_matched_text_is_the_best_of_the_noise_for_every_order(name, monkeypatch):
    target, draft = PAIRS["EX3M"]
    law, passed = law_under_noise(MATCHED[name](TableLM(draft)), target, [draft], lambda odds: 1, 3, (), monkeypatch)
    assert distance(law, beam_sampling_law(target, 1, 3, False)) < CLOSE
    assert passed > 0


@pytest.mark.parametrize("rule", [MatchRule("dice"), PathRule(), TraversalRule()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("top", [1, 2, 3])
@pytest.mark.parametrize("pair", PAIRS)
def test_pruning_by_an_early_look_keeps_the_law(pair, top, rule):
    """Best drafts were not drawn, so they may be tried too; what was dropped counts as not drafted."""
    target, draft = PAIRS[pair]
    early = random_table(5, 3)
    law, accepted = law_and_mean(one_turn(pruned(early, top, rule), target, draft), target, 3)
    assert distance(law, completed(target, (), 3)) < CLOSE
    _, most = law_and_mean(one_turn(pruned(early, 3, rule), target, draft), target, 3)
    assert accepted <= most + CLOSE
    assert top == 3 or accepted < most


# RSD-S. In a race at rates p the k-th to arrive does so after the one before by an exponential time over the rates that are
# left, and these exponentials do not depend on the order. So the law must be exact for any values of them.


def race(dice, logp, waits):
    """Uniforms whose race has an order that the dice draw, with these unit exponentials between arrivals."""
    p = np.exp(logp)
    u = np.full(len(p), 1e-300)  # tokens of no odds never arrive
    time, left = 0.0, p.sum()
    for place, wait in zip(first_places(dice, p, len(p)), waits, strict=False):
        time += wait / max(left, 1e-12)
        left -= p[place]
        u[place] = math.exp(-time * p[place])
    return u


def racing(method, target, draft, seed, patch):
    """A program of one turn of RSD-S for given times between arrivals."""

    def program(dice):
        races = [0]

        def by_order(logp, path, top, u, count):
            races[0] += 1
            waits = np.random.default_rng([seed, races[0]]).exponential(size=len(logp))
            return source_of(perturbed)(logp, path, top, race(dice, logp, waits), count)

        dice.uniform = lambda shape: np.full(shape, 0.5)
        with patch.context() as here:
            here.setattr(stochastic, "perturbed", by_order)
            return one_turn(method, target, draft)(dice)

    return program


@pytest.mark.parametrize("rule", ["path", "traversal"])
@pytest.mark.parametrize(
    ("pair", "width", "depth"),
    [
        *first_quick([("sharp", 2, 2), ("EX3M", 2, 2), ("EX3", 2, 2), ("EX3M", 3, 2)]),
    ],
)
def test_trees_of_races_have_the_target_law_for_any_times_between_arrivals(pair, width, depth, rule, monkeypatch):
    target, draft = SHARP if pair == "sharp" else PAIRS[pair]
    method = lambda lm: sb.rsd_s(width, depth, rule)  # noqa: E731
    means = set()
    for seed in range(2):
        law, mean = law_and_mean(racing(method, target, draft, seed, monkeypatch), target, depth + 1)
        assert distance(law, completed(target, (), depth + 1)) < CLOSE
        means.add(round(mean, 9))
    assert len(means) > 1  # trees of other shapes


SURE = {0: (0.9, 0.05, 0.05), 1: (0.34, 0.33, 0.33), 2: (0.02, 0.96, 0.02)}
SHARP = random_table(4, 3), lambda path: np.array(SURE[path[-1]] if path else (0.5, 0.3, 0.2))


def test_siblings_of_a_race_that_stand_in_another_order_are_seen(monkeypatch):
    """Trees that were verified in the order of their tokens have another law."""
    target, draft = PAIRS["EX3M"]
    right = TreeDrafter.draft

    def by_token(self, sessions, shapes):
        found = []
        for forest in right(self, sessions, shapes):
            groups = []
            for group in forest.siblings.groups():
                order = np.argsort(group.tokens)
                fields = {name: getattr(group, name)[order] for name in ("rows", "tokens", "nodes")}
                groups.append(group._replace(**fields))
            found.append(forest._replace(siblings=joined(groups)))
        return found

    monkeypatch.setattr(TreeDrafter, "draft", by_token)
    program = racing(lambda lm: sb.rsd_s(2, 2), target, draft, 0, monkeypatch)
    law, _ = law_and_mean(program, target, 3)
    assert distance(law, completed(target, (), 3)) > 0.05

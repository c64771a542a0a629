"""The trajectory theorem, layer by layer: given all that came before and its width, a layer is draws from the joint law.

Whole decodings of the shipped steps are enumerated; of every layer of every turn the conditional law is compared.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.control.cost import CostCurve
from specbeam.core.control.depth import DepthByCost
from specbeam.core.control.fixed import FixedShape
from specbeam.core.control.width import NucleusWidth, SureWidth
from specbeam.core.draft.beams import BeamDrafter
from specbeam.core.session import Parts
from specbeam.core.verify.beams import BeamRule
from specbeam.models.table import TableLM
from tests.support.exact import distance, exact_law, successive
from tests.support.programs import random_table, run, session_of

CLOSE = 1e-12


class Decided(NamedTuple):
    """What is known of one layer after it was judged."""

    place: int  # in its turn
    roots: tuple  # paths that lived before it, each with how often it was drawn
    width: int
    drawn: tuple  # paths that it drew, in order of their first coming, each with how often
    drafts: tuple  # its draft draws, in draw order


def decided_layers(session, turns):
    """Every layer of a decoding, in order."""
    found = []
    settled = ((),)
    roots = (((), 1),)
    for turn in turns:
        forest = turn.forest
        for number, layer in enumerate(turn.verdict.steps):
            paths = [_path(settled, forest, *pair) for pair in zip(layer.parents, layer.beams.tokens, strict=True)]
            drawn = tuple(zip(paths, layer.beams.counts.tolist(), strict=True))
            drafts = ()
            if number < forest.siblings.size:
                group = forest.siblings.group(number)
                pairs = zip(group.draw_parents, group.tokens, strict=True)
                drafts = tuple(_path(settled, forest, *pair) for pair in pairs)
            found.append(Decided(number, roots, layer.width, drawn, drafts))
            live = ~layer.ended
            roots = tuple(one for one, goes_on in zip(drawn, live, strict=True) if goes_on)
        settled = tuple(path for path, _ in roots)
    return tuple(found)


def _path(settled, forest, parent, token):
    root = int(forest.root_of(np.array([parent]))[0])
    return (*settled[root], *forest.path(int(parent)), int(token))


def layers_by_past(method, target, draft, steps, eos=()):
    """For each (what was decided before, roots, width): the law of what a layer drew."""

    def program(dice):
        session = session_of(method, TableLM(draft), dice, steps, eos)
        return decided_layers(session, run(session, TableLM(target)))

    found = defaultdict(lambda: defaultdict(float))
    for layers, odds in exact_law(program).items():
        for number, layer in enumerate(layers):
            found[layers[:number], layer.place, layer.roots, layer.width][layer.drawn] += odds
    return found


def draws_from_joint(target, roots, width, replacement):
    """The law of so many draws from the joint law of the pairs that prolong these paths."""
    vocab = len(target(()))
    pairs = [(*path, token) for path, _ in roots for token in range(vocab)]
    counts = np.repeat([count for _, count in roots], vocab)
    odds = np.array([math.prod(target(pair[:at])[pair[at]] for at in range(len(pair))) for pair in pairs]) * counts
    law = defaultdict(float)
    for drawn, chance in successive(odds / odds.sum(), width, replacement).items():
        paths = [pairs[one] for one in drawn]
        law[tuple((path, paths.count(path)) for path in dict.fromkeys(paths))] += chance
    return law


def worst_layer(found, target, replacement):
    """The largest distance of a layer's conditional law from what it should be, later layers of turns by themselves."""
    worst = {False: 0.0, True: 0.0}
    for (_, place, roots, width), law in found.items():
        total = math.fsum(law.values())
        given = {drawn: odds / total for drawn, odds in law.items()}
        off = distance(given, draws_from_joint(target, roots, width, replacement))
        worst[place > 0] = max(worst[place > 0], off)
    return worst


def method_of(width, depth, replacement=False, controller=None):
    rule = BeamRule(width, "rejection", replacement)
    drafter = lambda lm: BeamDrafter(lm, 2, "rejection", replacement)  # noqa: E731
    controller = controller or FixedShape(depth, 2)
    return sb.Method("dynamic", "", 2, lambda _, lm: Parts(drafter(lm), rule, controller, ""))


CASES = [(8, 0.6, ()), (12, 0.5, ()), (14, 0.5, (1,)), (26, 0.4, ())]  # seed, threshold, end tokens


@pytest.mark.parametrize("replacement", [False, True])
def test_a_later_dynamic_layer_has_its_law_given_the_first_one_and_its_width(replacement):
    seen = set()
    for seed, threshold, eos in CASES:
        target, draft = random_table(seed, 2), random_table(seed + 1, 2)
        method = method_of(SureWidth(2, 1, threshold), 2, replacement)
        found = layers_by_past(method, target, draft, 3, eos)
        worst = worst_layer(found, target, replacement)
        assert max(worst.values()) < CLOSE
        seen |= {(place, width) for _, place, _, width in found}
    assert seen >= {(0, 1), (0, 2), (1, 1), (1, 2), (2, 2)}  # drafted layers of either width, and one after the drafts


@pytest.mark.parametrize("replacement", [False, True])
def test_layers_whose_depth_follows_the_acceptance_of_earlier_turns_have_their_law(replacement):
    """A draft that is dear: after a layer that failed, the next one is drawn at full width, without drafts."""
    dear = DepthByCost(CostCurve((1, 8), (1.0, 1.2)), CostCurve((1,), (0.45,)), 2, (2,), 2, alone=True)
    seen = set()
    for seed, threshold, eos in CASES:
        target, draft = random_table(seed, 2), random_table(seed + 1, 2)
        method = method_of(SureWidth(2, 1, threshold), 2, replacement, dear)
        found = layers_by_past(method, target, draft, 3, eos)
        assert max(worst_layer(found, target, replacement).values()) < CLOSE
        for past, place, _, width in found:
            seen.add((len(past), place, width))
    assert {(0, 0, 1), (2, 0, 2)} <= seen  # drafted and narrow; later without a draft


@pytest.mark.parametrize("replacement", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_layer_of_the_width_of_a_nucleus_has_its_law_given_the_past(replacement):
    """Also the width of the layer after the drafts is the target's own choice."""
    seen = set()
    for seed, mass, eos in [(8, 0.6, ()), (12, 0.8, ()), (14, 0.7, (1,)), (26, 0.5, ())]:
        target, draft = random_table(seed, 2), random_table(seed + 1, 2)
        method = method_of(NucleusWidth(2, 1, mass), 2, replacement)
        found = layers_by_past(method, target, draft, 3, eos)
        assert max(worst_layer(found, target, replacement).values()) < CLOSE
        widths = defaultdict(set)
        for _, place, roots, width in found:
            widths[roots].add(width)
            seen.add((place, width))
        assert all(len(one) == 1 for one in widths.values())
    assert seen >= {(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)}


@dataclass(frozen=True)
class Peeking:
    """Draws two beams in a later layer if its first draft prolongs by token 0, one in all others."""

    most: int = 2

    def choose(self, layer):
        """Return the number of draws."""
        first = layer.forest.siblings.group(layer.number).tokens[0]
        return 2 if layer.number == 1 and first == 0 else 1


@dataclass(frozen=True)
class Counting:
    """Draws as many beams in a later layer as it has drafts with a live parent, but one at least."""

    most: int = 2

    def choose(self, layer):
        """Return the number of draws."""
        group = layer.forest.siblings.group(layer.number)
        alive = np.isin(group.draw_parents, layer.live.nodes).sum()
        return max(int(alive), 1) if layer.number == 1 else 1


@pytest.mark.parametrize("width", [Peeking(), Counting()], ids=lambda one: type(one).__name__)
def test_a_width_that_looks_at_the_drafts_of_a_later_layer_is_caught(width):
    target, draft = random_table(8, 2), random_table(9, 2)
    worst = worst_layer(layers_by_past(method_of(width, 2), target, draft, 3), target, False)
    assert worst[False] < CLOSE
    assert worst[True] > 0.01

"""Drafts that are unmasked in several steps: exact where they are matched, in one step and from left to right; wrong where the
law at the time of unmasking is taken for their law.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.draft.unmask import ORDERS, Unmasking
from specbeam.core.records import Shape
from specbeam.core.session import Parts
from specbeam.core.verify.traversal import TraversalRule
from specbeam.core.verify.walk import MatchRule, PathRule
from specbeam.models.table import TableLM
from tests.support.constraints import Automaton, renormalised, warp_of
from tests.support.exact import distance, exact_law
from tests.support.examples import completed, law_and_mean, one_turn
from tests.support.programs import random_table, session_of

CLOSE = 1e-12


class TableDenoiser(TableLM):
    """A denoiser whose law of a mask is given by the text, the drafts that are known, and the place of the mask.

    Args:
        law: called with the text, the known drafts (-1 for masks) and the place.
    """

    def __init__(self, law, vocab, depth):
        super().__init__([1.0] * vocab)
        self.law = law
        self.block_depth = depth
        self.passes = 0

    def denoised(self, sessions, forests, known):
        self.passes += 1
        answers = []
        for session, forest, drafts in zip(sessions, forests, known, strict=True):
            rows = np.zeros((*drafts.shape, self.vocab))
            for root, given in enumerate(drafts.tolist()):
                text = tuple(session.new_tokens(forest, np.array([root]))[0].tolist())
                rows[root] = [self.law(text, tuple(given), place) for place in range(len(given))]
            with np.errstate(divide="ignore"):
                answers.append(torch.from_numpy(np.log(rows)))
        return answers


def random_denoiser(seed, vocab, depth, zeros=False):
    """A denoiser with a random law for each text, each pattern of known drafts, and each mask."""
    table = random_table(seed, vocab, zeros=zeros)
    return TableDenoiser(lambda text, given, place: table((*text, *given, 7 + place)), vocab, depth)


def law_of_turn(drafter, rule, target, depth, length=3, eos=()):
    """The law of texts that begin with a turn of this drafter and rule, completed by the target."""
    controller = sb.speculative_sampling(depth).parts(None, drafter.lm).controller

    def make(lm):
        return sb.Method("", "", 1, lambda *_: Parts(drafter, rule, controller, rule.law))

    return law_and_mean(one_turn(make, target, target, eos=eos), target, length, eos)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("drawn", [True, False])
def test_matched_drafts_have_the_law_of_sampling(order, steps, drawn):
    """DF-1, R1: for every order and every number of steps, tokens drawn or the best ones; also with an end token."""
    target = random_table(3, 2)
    for eos in ((), (1,)):
        drafter = Unmasking(random_denoiser(4, 2, 3), steps, order, drawn)
        law, mean = law_of_turn(drafter, MatchRule("dice"), target, 3, eos=eos)
        assert distance(law, completed(target, (), 3, eos)) < CLOSE
        assert mean > 0


LAWFUL = [(1, "confidence"), (1, "random"), (2, "left to right"), (3, "left to right")]


@pytest.mark.parametrize(("steps", "order"), LAWFUL)
@pytest.mark.parametrize("rule", [PathRule(), TraversalRule()])
@pytest.mark.parametrize("zeros", [False, True])
def test_one_step_and_steps_from_left_to_right_can_be_tried(steps, order, rule, zeros):
    """R3 and R2: each token was drawn from its law given the tokens to its left; also where laws have no common token."""
    target = random_table(5, 3, zeros=zeros)
    for eos in ((), (1,)):
        drafter = Unmasking(random_denoiser(6, 3, 3, zeros), steps, order)
        law, mean = law_of_turn(drafter, rule, target, 3, eos=eos)
        assert distance(law, completed(target, (), 3, eos)) < CLOSE
        assert mean > 0


@pytest.mark.parametrize(("order", "rule"), [("left to right", PathRule()), ("random", MatchRule("dice"))])
def test_drafts_that_a_constraint_bans_stay_on_trial(order, rule):
    """A banned draft has no node. Left out of the trial, it would change the law: its odds belong to the others (T4)."""
    automaton = Automaton({0: {0: 1}, 1: {0: 0, 1: 1}}, {1}, 3)  # ends, by token 2, in its second state alone
    eos = (2,)
    table = random_table(5, 3)
    allowed = renormalised(table, automaton, eos)
    controller = sb.speculative_sampling(2).parts(None, TableLM(table)).controller
    drafter = Unmasking(random_denoiser(6, 3, 2), 2, order)

    def make(lm):
        return sb.Method("", "", 1, lambda *_: Parts(drafter, rule, controller, rule.law))

    law = {}
    for (tokens, _), odds in exact_law(one_turn(make, table, table, eos, warp=lambda: warp_of(automaton, eos))).items():
        for text, rest in completed(allowed, tokens, 3, eos).items():
            law[text] = law.get(text, 0.0) + odds * rest
    assert distance(law, completed(allowed, (), 3, eos)) < CLOSE


@pytest.mark.parametrize("order", ORDERS)
def test_the_best_tokens_are_a_sure_guess_for_rules_that_try(order):
    target = random_table(5, 3)
    drafter = Unmasking(random_denoiser(6, 3, 3), 2, order, drawn=False)
    for rule in (PathRule(), TraversalRule()):
        law, _ = law_of_turn(drafter, rule, target, 3)
        assert distance(law, completed(target, (), 3)) < CLOSE


@dataclass(frozen=True)
class Naive(Unmasking):
    """The mistake: the law at the time of unmasking is stated as that of the draft, whatever the order (trap T7)."""

    no_law_reason = ""

    def _group(self, session, parent, token, node, law):
        stated = replace(self, order="left to right")
        return Unmasking._group(stated, session, parent, token, node, law)


def second_first(text, given, place):
    """Two drafts of four tokens: the second is unmasked first, for it is surer, and the first one follows it."""
    if place == 1:
        return np.array([0.7, 0.1, 0.1, 0.1])
    follows = np.array([[0.6, 0.2, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1], [0.1, 0.1, 0.6, 0.2], [0.2, 0.1, 0.1, 0.6]])
    return follows[given[1]] if given[1] >= 0 else np.full(4, 0.25)


TARGET = np.array([0.1, 0.2, 0.3, 0.4])


def test_the_ratio_at_the_time_of_unmasking_is_wrong():
    """DF-3: the second token was drawn first. That the first one was then drafted and accepted says something about it.

    By hand: its law, given that the first token is x, is m(y) min(c(x | y), p(x)) up to a factor, and not m(y).
    """
    target = lambda path: TARGET  # noqa: E731
    denoiser = TableDenoiser(second_first, 4, 2)
    right = completed(target, (), 2)
    law, _ = law_of_turn(Naive(denoiser, 2), PathRule(), target, 2, length=2)
    assert distance(law, right) > 0.01
    first, second = second_first((), (-1, -1), 1), np.array([second_first((), (-1, y), 0) for y in range(4)])
    by_hand = {}
    for x in range(4):
        joint = first * np.minimum(second[:, x], TARGET[x])  # drafted y, then x, and x accepted
        refused = TARGET[x] - joint.sum()  # x came from the residual of some other draft
        kept = np.minimum(1, TARGET / first)
        rest = np.maximum(TARGET - first, 0) / np.maximum(TARGET - first, 0).sum()
        after = joint * kept + (joint * (1 - kept)).sum() * rest
        for y in range(4):
            by_hand[x, y] = after[y] + refused * TARGET[y]
    assert distance(law, by_hand) < CLOSE
    law, _ = law_of_turn(Unmasking(denoiser, 2), MatchRule("dice"), target, 2, length=2)
    assert distance(law, right) < CLOSE


def test_the_example_of_the_page():
    """docs/methods/specdiff.md: two drafts of two tokens, the first of which follows the second."""

    def law(text, given, place):
        if place == 1:
            return np.array([0.75, 0.25])
        return np.full(2, 0.5) if given[1] < 0 else np.array([[0.75, 0.25], [0.25, 0.75]])[given[1]]

    found, _ = law_of_turn(Naive(TableDenoiser(law, 2, 2), 2), PathRule(), lambda path: np.full(2, 0.5), 2, length=2)
    assert found[0, 0] == pytest.approx(9 / 32, abs=CLOSE)
    assert found[0, 1] == pytest.approx(7 / 32, abs=CLOSE)


@pytest.mark.parametrize("order", ["confidence", "random"])
def test_the_naive_ratio_is_wrong_on_random_laws_too(order):
    target = random_table(5, 2)
    law, _ = law_of_turn(Naive(random_denoiser(8, 2, 3), 3, order), PathRule(), target, 3)
    assert distance(law, completed(target, (), 3)) > 0.005


def test_best_tokens_with_their_soft_law_are_wrong():
    """Trap T1: a token that was chosen was not drawn."""

    class Soft(Unmasking):
        def _group(self, session, parent, token, node, law):
            return Unmasking._group(replace(self, drawn=True), session, parent, token, node, law)

    target = random_table(5, 3)
    law, _ = law_of_turn(Soft(random_denoiser(6, 3, 2), 1, drawn=False), PathRule(), target, 2)
    assert distance(law, completed(target, (), 3)) > 0.05


def draft_of(drafter, depth, **options):
    session = session_of(sb.sampling(), None, steps=20, **options)
    (forest,) = drafter.draft([session], [Shape(depth, 1)])
    return session, forest


@pytest.mark.parametrize(("steps", "passes"), [(1, 1), (2, 2), (5, 5), (9, 5)])
def test_each_step_is_a_pass_and_no_more_than_there_are_tokens(steps, passes):
    for order in ORDERS:
        denoiser = random_denoiser(4, 3, 5)
        session, forest = draft_of(Unmasking(denoiser, steps, order), 5)
        assert denoiser.passes == session.count.draft_passes == passes
        assert forest.tokens[1:].tolist() == forest.siblings.tokens.tolist()
        assert forest.size == 6


def test_steps_share_the_tokens_and_the_surest_come_first():
    """Five tokens in three steps: two, two, one. Laws that know more are surer here, and the later places at first."""
    seen = []

    def law(text, given, place):
        seen.append(given)
        most = 0.4 + 0.1 * place
        return np.array([most, 1 - most])

    _, forest = draft_of(Unmasking(TableDenoiser(law, 2, 5), 3, "confidence", drawn=False), 5)
    assert list(dict.fromkeys(seen)) == [(-1,) * 5, (-1, -1, -1, 0, 0), (1, -1, 0, 0, 0)]
    assert forest.tokens[1:].tolist() == [1, 0, 0, 0, 0]


def test_drafts_are_as_deep_as_asked_and_as_blocks_are():
    for asked, found in ((0, 0), (2, 2), (9, 4)):
        denoiser = random_denoiser(4, 3, 4)
        _, forest = draft_of(Unmasking(denoiser, 2), asked)
        assert forest.size - 1 == found
        assert (denoiser.passes > 0) == (asked > 0)


def test_nothing_follows_an_end_token():
    """It has no node, and is still a draft that can be accepted."""
    ends = 0
    for key in range(20):
        _, forest = draft_of(Unmasking(random_denoiser(4, 3, 4), 2, "random"), 4, key=key, eos=(2,))
        assert 2 not in forest.tokens.tolist()
        drafted = forest.siblings.tokens.tolist()
        assert 2 not in drafted[:-1]
        ends += drafted[-1:] == [2]
    assert ends > 5


def test_a_group_that_states_its_law_states_the_one_that_was_drawn_from():
    denoiser = random_denoiser(4, 3, 2)
    _, forest = draft_of(Unmasking(denoiser, 2, "left to right"), 2)
    first = forest.siblings.group(0)
    second = forest.siblings.group(1)
    token = int(first.tokens[0])
    np.testing.assert_allclose(first.law_odds, denoiser.law((), (-1, -1), 0), atol=CLOSE)
    np.testing.assert_allclose(second.law_odds, denoiser.law((), (token, -1), 1), atol=CLOSE)

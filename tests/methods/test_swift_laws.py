"""The laws of drafts by a target without some sublayers: chains with siblings, enumerated on tables and on a real model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.control.confidence import SureDraft
from specbeam.core.decode import decode
from specbeam.core.draft.caterpillar import OF_BEST, Caterpillar
from specbeam.core.draft.tree import TreeDrafter
from specbeam.core.forest import Forest
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.records import Scored
from specbeam.core.session import Parts, Session
from specbeam.core.verify.traversal import TraversalRule
from specbeam.core.verify.walk import MatchRule, PathRule
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.skipping import skipping_model
from specbeam.models.table import TableLM
from tests.support.exact import distance, exact_law
from tests.support.examples import PAIRS, completed
from tests.support.programs import random_table, run, texts
from tests.support.seats import seat
from tests.support.steps import needs_numba, source_of_steps
from tests.support.tiny_models import tiny
from tests.test_laws_on_models import softened

RULES = {"path": PathRule(), "traversal": TraversalRule()}  # "match" draws by noise, as plain sampling does
TABLES = {"random": (random_table(3, 3), random_table(8, 3, zeros=True)), "EX3M": PAIRS["EX3M"]}
GROWTHS = {
    "by odds": Caterpillar(of_drawn=((0.6, 1), (0.35, 2), (0.0, 3))),
    "always two": Caterpillar(of_drawn=((0.0, 2),)),
}


def parts_of(rule, growth, sure=0.45, most=2):
    """What makes the parts of a method that drafts by a table."""
    return lambda lm: Parts(TreeDrafter(lm, growth), rule, SureDraft(sure, most=most), rule.law)


def law_of_texts(parts, target, length):
    """The law of whole texts, the sessions' parts made by a function."""

    def program(dice):
        session = Session([0], parts(), Warp(), Limits(length, (), keep=99), 1)
        session.dice = dice
        run(session, target)
        return texts(session)

    law = {}
    for (ended, live), odds in exact_law(program).items():
        (text,) = ended or live
        law[text] = law.get(text, 0.0) + odds
    return law


@pytest.mark.parametrize("name", GROWTHS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tables", TABLES)
def test_a_whole_text_has_the_law_of_sampling(rule, name, tables):
    """With a draft that ends after a token of low odds, and as many siblings as the odds of the first one say."""
    target, draft = TABLES[tables]
    make = parts_of(RULES[rule], GROWTHS[name])
    found = law_of_texts(lambda: make(TableLM(draft)), TableLM(target), 2)
    assert distance(found, completed(target, (), 2)) < 1e-12


SKIPS = {
    "a set": {"skip": "a1 m2"},
    "early exit": {"skip": "exit", "layers": 2},
    "clasp": {"skip": "clasp", "every": 1},
}


@needs_numba
@pytest.mark.parametrize(("kind", "rule"), [("a set", "path"), ("early exit", "traversal"), ("clasp", "path")])
def test_texts_of_a_real_target_that_drafts_for_itself_have_its_law(kind, rule):
    """Four layers in float32, drafts by the compiled forward on the live cache. The target's rows are those of plain passes,
    as the order of the sums over slots changes the last bits of a row."""
    model = softened(tiny("llama", seed=3, vocab_size=3, num_hidden_layers=4))
    lm = HuggingFaceLM(model, engine="compiled", share_from=None)
    method = sb.swift(**SKIPS[kind], depth=2, sure=0.4, rule=rule)
    own = method.parts(lm)
    drafted = replace(own, drafter=replace(own.drafter, growth=GROWTHS["always two"]))
    first = Session(PROMPT, drafted, Warp(), Limits(2, (), keep=99), 1)
    list(decode(OfPaths(lm), [first]))  # compiles the steps that the engine calls
    assert first.failure is None
    with source_of_steps(("specbeam.engines.cpu", "specbeam.kernels")):
        target = OfPaths(lm)
        law = law_of_texts_of(target, drafted)
        expected = plain_law(target)
    assert distance(law, expected) < 1e-12
    (draft,) = lm.skipping.values()
    assert draft is skipping_model(lm, draft.settings)
    assert draft.rows > 0


PROMPT = [1, 2, 0]


class OfPaths:
    """A target that decodes as it does, with the rows of its plain passes over the paths."""

    def __init__(self, lm):
        self.lm, self.vocab, self.max_positions, self.rows = lm, lm.vocab, lm.max_positions, {}
        self.settle, self.peak, self.close = lm.settle, lm.peak, lm.close

    def row(self, path):
        if path not in self.rows:
            one = seat(path)
            (scored,) = self.lm.extend([one], [Forest.rooted(one.prompt[-1:])])
            self.lm.close(one)
            self.rows[path] = scored.logits[0]
        return self.rows[path]

    def extend(self, sessions, forests, needs=None):
        found = []
        for session, forest, scored in zip(sessions, forests, self.lm.extend(sessions, forests), strict=True):
            paths = [tuple(session.paths(forest, np.array([node]))[0].tolist()) for node in range(forest.size)]
            rows = torch.stack([self.row(path) for path in paths])
            torch.testing.assert_close(scored.logits, rows, atol=1e-5, rtol=1e-5)
            found.append(Scored(rows.double()))  # laws are then made in float64, too
        return found


def law_of_texts_of(target, parts):
    """The law of texts of two tokens that these parts decode."""

    def program(dice):
        session = Session(PROMPT, parts, Warp(), Limits(2, (), keep=99), 1)
        session.dice = dice
        list(decode(target, [session]))
        assert session.failure is None
        return texts(session)[1][0]

    return exact_law(program)


def plain_law(target):
    """The law of texts of two tokens by the target's rows, one token after the other."""
    law = {}
    for first, odds in enumerate(target.row(tuple(PROMPT)).double().softmax(-1).tolist()):
        for token, chance in enumerate(target.row((*PROMPT, first)).double().softmax(-1).tolist()):
            law[first, token] = odds * chance
    return law


def test_the_numbers_of_siblings_are_those_of_the_release():
    """And the draft model scores none of them."""
    scored = []

    class Counting(TableLM):
        def extend(self, sessions, forests, needs=None):
            scored.extend(forest.size for forest in forests)
            return super().extend(sessions, forests, needs)

    law = np.array([0.85, *[0.01] * 15])
    session = Session(
        [0], parts_of(MatchRule(), Caterpillar(), 0.8, 3)(Counting(lambda path: law)), Warp(), Limits(9), 1
    )
    forest = session.parts.drafter.draft([session], [session.parts.controller.plan(session)])[0]
    counts = np.diff(forest.siblings.draw_ends, prepend=0).tolist()
    firsts = forest.siblings.tokens[np.append(0, forest.siblings.draw_ends[:-1])].tolist()
    assert counts == [3 if token == 0 else 10 for token in firsts]
    assert scored == [*range(1, len(counts) + 1)]
    greedy = Session([0], session.parts, replace(Warp(), greedy=True), Limits(9), 1)
    forest = greedy.parts.drafter.draft([greedy], [greedy.parts.controller.plan(greedy)])[0]
    assert np.diff(forest.siblings.draw_ends, prepend=0).tolist() == [5, 5, 5]
    assert OF_BEST[1] == (0.8, 5)


# What must fail.

TARGET, DRAFT = PAIRS["EX3M"]


def tried(dice, p, q, tokens, without=True):
    """Try draws one after the other; with `without`, what is left of q has lost those that were refused."""
    p, q = np.array(p), np.array(q)
    for token in tokens:
        if q[token] > 0 and dice.flip(min(1.0, p[token] / q[token])):
            return token
        p = np.maximum(p - q, 0)
        p /= p.sum()
        if without:
            q[token] = 0
            q /= max(q.sum(), 1e-300)
    return dice.pick(p)


def drawn(dice, q, count):
    left, tokens = np.array(q), []
    while len(tokens) < count and left.sum() > 0:
        tokens.append(dice.pick(left))
        left[tokens[-1]] = 0
    return tokens


def right(dice):
    tokens = drawn(dice, DRAFT(()), 1)
    more = 2 if DRAFT(())[tokens[0]] < 0.5 else 0
    left = np.array(DRAFT(()))
    left[tokens] = 0
    return tried(dice, TARGET(()), DRAFT(()), tokens + (drawn(dice, left, more) if more else []))


def best_tokens_by_their_odds(dice):
    """T1: the likeliest tokens, tried as if they were drawn."""
    return tried(dice, TARGET(()), DRAFT(()), np.argsort(DRAFT(()))[::-1][:2].tolist())


def no_residual(dice):
    """T2: after a refusal a token is drawn from p itself."""
    (token,) = drawn(dice, DRAFT(()), 1)
    p, q = TARGET(()), DRAFT(())
    return token if dice.flip(min(1.0, p[token] / q[token])) else dice.pick(p)


def unlikely_siblings_dropped(dice):
    """T4: siblings that were drawn are dropped because their own odds are low."""
    tokens = drawn(dice, DRAFT(()), 2)
    return tried(dice, TARGET(()), DRAFT(()), [token for token in tokens if DRAFT(())[token] >= 0.2])


def unwarped_at_the_end(dice):
    """T6: the token after a draft that was accepted in full is drawn before the warpers, here a temperature of 0.5."""
    p = np.array(TARGET(())) ** 2
    p /= p.sum()
    (token,) = drawn(dice, DRAFT(()), 1)
    first = tried(dice, p, DRAFT(()), [token])
    if first != token:
        return first, dice.pick(np.array(TARGET((first,))) ** 2)
    return first, dice.pick(TARGET((first,)))


def test_the_mistakes_of_released_code_are_detected():
    expected = dict(enumerate(np.array(TARGET(())).tolist()))
    assert distance(exact_law(right), expected) < 1e-12
    for wrong in (best_tokens_by_their_odds, no_residual, unlikely_siblings_dropped):
        assert distance(exact_law(wrong), expected) > 0.01, wrong.__name__
    law = {}
    for first, p in enumerate(np.array(TARGET(())) ** 2):
        after = np.array(TARGET((first,))) ** 2
        for token, odds in enumerate(after / after.sum()):
            law[first, token] = p / (np.array(TARGET(())) ** 2).sum() * odds
    assert distance(exact_law(unwarped_at_the_end), law) > 0.01

"""A rule of a user whose verdict does not fit the forest ends its own text, with a sentence, and no process."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.audit import ALARM, Audit
from specbeam.core.audits import evidence_of
from specbeam.core.beams import no_layers
from specbeam.core.dice import Dice
from specbeam.core.draft.lookup import RETRIEVED, retrieved_chains
from specbeam.core.laws.evidence import TILTS
from specbeam.core.records import Shape
from specbeam.core.session import Controller, Drafter, Rule, lacking
from specbeam.errors import AuditWarning, BadForest, BrokenLaw, BrokenPart, SomeFailed
from tests.support import words


@pytest.fixture(scope="module")
def pair():
    return words.pair(check=False)


class Broken:
    """Matches drafts, and changes the layers of one prompt's verdicts."""

    law = "exact: plain sampling"

    def __init__(self, change, prompt):
        self.change = change
        self.prompt = prompt

    def verify(self, session, forest, scored):
        verdict = sb.verify.MatchRule().verify(session, forest, scored)
        if session.number != self.prompt:
            return verdict
        return self.change(verdict)


def with_layers(**fields):
    return lambda verdict: replace(
        verdict, layers=verdict.layers._replace(**{k: f(verdict.layers) for k, f in fields.items()})
    )


def with_beams(**fields):
    def change(layers):
        return layers.beams._replace(**{name: make(layers.beams) for name, make in fields.items()})

    return with_layers(beams=change)


CHANGES = {
    "nothing": (lambda verdict: None, "returned NoneType; expected a Verdict"),
    "parents beyond": (with_layers(parents=lambda layers: layers.parents + 50), "returned parent 50; expected 0 to"),
    "parents before": (with_layers(parents=lambda layers: layers.parents - 1), "returned parent -1"),
    "parents of another layer": (with_layers(parents=lambda layers: layers.parents + 1), "whose depth is 1"),
    "tokens beyond": (with_beams(tokens=lambda beams: beams.tokens + 100_000), "returned token 100"),
    "tokens before": (with_beams(tokens=lambda beams: beams.tokens - 1000), "returned token -"),
    "nodes beyond": (with_beams(nodes=lambda beams: beams.nodes + 900), "returned node"),
    "nodes of other tokens": (with_beams(nodes=lambda beams: np.zeros_like(beams.nodes)), "returned node 0 for token"),
    "fewer draws": (with_layers(parents=lambda layers: layers.parents[:-1]), "arrays have different lengths"),
    "ends": (with_layers(draw_ends=lambda layers: layers.draw_ends + 1), "expected one or more that ascend to"),
    "no layers": (
        lambda verdict: replace(verdict, layers=no_layers(0, 0)),
        "returned draw_ends []; expected one or more",
    ),
    "fewer edges": (with_layers(edges=lambda layers: layers.edges[:-1]), "arrays have different lengths"),
    "counts": (with_beams(counts=lambda beams: beams.counts - 5), "returned count -4; expected 1 to"),
    "collapsed": (lambda verdict: replace(verdict, collapsed=500), "returned collapsed=500; expected None"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_verdict_that_does_not_fit_ends_its_own_text(pair, name):
    change, said = CHANGES[name]
    method = sb.speculative_sampling(2, rule=Broken(change, 1))
    prompts = ["abc", "Hello", "no"]
    with pytest.raises(SomeFailed) as found:
        sb.generate(pair, prompts, method, seed=1, max_new_tokens=6)
    (failure,) = found.value.failures
    assert isinstance(failure, BrokenPart)
    assert str(failure).startswith("prompt 1, step 0: the rule Broken returned ")
    assert said in str(failure)
    alone = sb.generate(pair, prompts, sb.speculative_sampling(2, rule="match"), seed=1, max_new_tokens=6)
    kept = found.value.generations
    assert [one and one.tokens for one in kept] == [alone[0].tokens, None, alone[2].tokens]


class TooDeep:
    """Drafts a chain far beyond what the text may still have."""

    def draft(self, sessions, shapes):
        return [
            session.undrafted.grown(np.full(400, 5), np.arange(-1, 399) + session.undrafted.size)
            for session in sessions
        ]

    def settle(self, session, turn):
        pass


def test_a_draft_beyond_the_end_of_the_text_is_refused(pair):
    law = "exact: plain sampling"
    parts = sb.Parts(TooDeep(), sb.verify.MatchRule(), sb.control.FixedShape(2, 1), law)
    method = sb.Method("deep", law, 1, lambda *_: parts)
    with pytest.raises(BadForest, match="returned 400 layers of drafts; expected at most 6"):
        sb.generate(pair, "abc", method, seed=1, max_new_tokens=6)


class Stating:
    """Children that are drawn from the draft law, and state another one."""

    def __init__(self, law, tokens=None):
        self.law = law
        self.tokens = tokens

    def draw(self, q, count, dice):
        return [sb.draft.Draws(self.tokens or [dice.pick(q)], self.law(q), replacement=True) for _ in range(count)]


def stating(law, tokens=None):
    def build(target, draft):
        drafter = sb.draft.TreeDrafter(draft, sb.draft.Branching((2,), Stating(law, tokens)))
        return sb.Parts(drafter, sb.verify.TraversalRule(), sb.control.FixedShape(1, 0), "exact: plain sampling")

    return sb.Method("stating", "exact: plain sampling", 1, build, needs_draft=True)


@pytest.mark.parametrize(
    ("law", "tokens", "said"),
    [
        (lambda q: 2 * q, None, "the law of draws sums to 2, its least number is 0"),
        (lambda q: q * np.nan, None, "the law of draws sums to nan"),
        (
            lambda q: 2 * np.eye(len(q))[3] - np.eye(len(q))[4],
            [3],
            "sums to 1, its least number is -1; expected a law",
        ),
        (lambda q: np.eye(len(q))[3], [4], "4 was drawn, which has probability 0"),
        (lambda q: np.ones(5) / 5, [3], "a law of 5 numbers; expected indices into the draft law"),
        (lambda q: None, [10_000], r"Stating.draw returned tokens \[10000\]"),
    ],
)
def test_draws_that_do_not_fit_their_law_are_refused(pair, law, tokens, said):
    with pytest.raises(BadForest, match=said):
        sb.generate(pair, "abc", stating(law, tokens), seed=1, max_new_tokens=4)


class Raising:
    """Children whose draw raises an error."""

    def draw(self, q, count, dice):
        return {}["no"]


def test_an_error_of_own_children_names_them(pair):
    def build(target, draft):
        drafter = sb.draft.TreeDrafter(draft, sb.draft.Branching((2,), Raising()))
        return sb.Parts(drafter, sb.verify.TraversalRule(), sb.control.FixedShape(1, 0), "exact: plain sampling")

    method = sb.Method("raising", "exact: plain sampling", 1, build, needs_draft=True)
    with pytest.raises(BrokenPart, match="draw raised KeyError: 'no'"):
        sb.generate(pair, "abc", method, seed=1, max_new_tokens=4)


def untyped_shape(depth, width):
    """A plan as a program without checks of types makes it."""
    shape = object.__new__(Shape)
    shape.__dict__.update(depth=depth, width=width)
    return shape


class Planning:
    """Plans what a function says."""

    def __init__(self, plan, settle=lambda session, turn: None):
        self.plan = plan
        self.settle = settle


@pytest.mark.parametrize("method", [sb.speculative_sampling(), sb.dsbd(3)], ids=lambda method: method.name)
@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (None, "the controller Planning planned None; expected a Shape"),
        ((2, 2), r"planned \(2, 2\); expected a Shape"),
        (Shape(-1, 2), "planned depth -1; expected an int from 0 to"),
        (Shape(2, -2), "planned width -2; expected an int from 0 to"),
        (Shape(2, 10**6), "planned width 1000000; expected an int from 0 to 65536"),
        (untyped_shape(2.5, 2), "planned depth 2.5; expected an int"),
        (untyped_shape("2", 2), "planned depth '2'; expected an int"),
    ],
    ids=str,
)
def test_plans_that_no_draft_can_have_are_refused(pair, method, shape, said):
    with pytest.raises(BrokenPart, match=said):
        sb.generate(pair, "abc", method.with_parts(controller=Planning(lambda _: shape)), seed=1, max_new_tokens=4)


def test_an_error_of_an_own_part_says_in_what(pair):
    def fails(*given):
        raise ValueError("no")

    for said, part in {
        "step 0: Planning.plan raised ValueError: no": {"controller": Planning(fails)},
        "step 0: Planning.settle raised ValueError: no": {"controller": Planning(lambda _: Shape(1, 1), fails)},
        "step 0: SimpleNamespace.verify raised ValueError: no": {"rule": SimpleNamespace(verify=fails)},
    }.items():
        with pytest.raises(BrokenPart, match=said):
            sb.generate(pair, "abc", sb.speculative_sampling(2).with_parts(**part), seed=1, max_new_tokens=4)


class Cutting:
    """Matches drafts by other rows than it was given."""

    law = "exact: plain sampling"

    def __init__(self, cut):
        self.cut = cut

    def verify(self, session, forest, scored):
        return sb.verify.MatchRule().verify(session, forest, self.cut(scored))


@pytest.mark.parametrize("options", [{}, {"stop_strings": ["zz"]}, {"repetition_penalty": 1.5}], ids=str)
@pytest.mark.parametrize(
    "cut", [lambda s: s[:1], lambda s: s[:0], lambda s: s[:, :3]], ids=["1 row", "none", "3 words"]
)
def test_rules_of_ours_refuse_rows_of_another_shape(pair, cut, options):
    with pytest.raises(BrokenPart, match=r"logits of shape .*; expected a row for each of the 3 new nodes"):
        sb.generate(pair, "abc", sb.speculative_sampling(2, rule=Cutting(cut)), seed=1, max_new_tokens=6, **options)


@pytest.mark.parametrize("size", [8, 2000])
@pytest.mark.parametrize("number", [0.0, -1.0, np.nan, np.inf])
def test_dice_pick_by_no_law_without_a_positive_entry(size, number):
    with pytest.raises(BrokenLaw, match=r"dice\.pick was given a law that sums to"):
        Dice(1).pick(np.full(size, number))


class Drafting:
    """Returns what a function makes of the sessions."""

    no_law_reason = RETRIEVED

    def __init__(self, draft):
        self.make = draft

    def draft(self, sessions, shapes):
        return self.make(sessions)

    def settle(self, session, turn):
        pass


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        (lambda sessions: [], r"the drafter Drafting returned \[\]; expected 1 Forest"),
        (lambda sessions: [None], r"returned \[None\]; expected 1 Forest"),
        (lambda sessions: None, "Drafting returned None; expected 1 Forest"),
        (lambda sessions: [retrieved_chains(sessions[0], [])], "0 chains for 1 live beams"),
        (lambda sessions: [retrieved_chains(sessions[0], [[3], [4]])], "2 chains for 1 live beams"),
    ],
)
def test_drafts_that_are_no_forests_are_refused(pair, draft, said):
    def build(target, model):
        return sb.Parts(Drafting(draft), sb.verify.MatchRule(), sb.control.FixedShape(2, 1), "exact: plain sampling")

    with pytest.raises((BrokenPart, BadForest), match=said):
        sb.generate(pair, "abc", sb.Method("own", "exact: plain sampling", 1, build), seed=1, max_new_tokens=4)


def test_what_a_part_lacks_is_said():
    for kind, said in {Drafter: "draft and no settle", Rule: "verify", Controller: "plan and no settle"}.items():
        assert lacking(object(), kind).endswith(f"has no {said} (docs/write_a_method.md)")
    assert lacking(sb.verify.MatchRule, Rule) == "no part: MatchRule is a class; give an object, such as MatchRule()"


class Silent:
    """Matches drafts, and notes nothing for an audit."""

    law = "exact: plain sampling"

    def verify(self, session, forest, scored):
        return replace(sb.verify.MatchRule().verify(session, forest, scored), audit=None)


def test_an_audit_that_tests_nothing_says_so(pair):
    method = sb.speculative_sampling(2, rule=Silent())
    with pytest.warns(AuditWarning, match="the audit tested nothing: Silent notes neither draws nor trials"):
        sb.generate(pair, "abc", method, seed=1, max_new_tokens=6, audit=True)


def test_one_text_far_off_is_seen_among_many():
    fine = Audit(draws=9, draw_gains=(-2.0,) * len(TILTS))
    wrong = Audit(draws=9, draw_gains=(20.0,) * len(TILTS))
    assert sum([fine] * 99, wrong).evidence < ALARM
    assert evidence_of([*[fine] * 99, wrong]) > ALARM
    assert evidence_of([fine] * 100) < 1
    assert evidence_of([]) == 0.5  # no text: no bets


def test_evidence_that_is_no_number_is_an_alarm():
    assert Audit(draws=1, draw_gains=(float("nan"),) * len(TILTS)).suspicious

"""Parts of somebody's own in place of a recipe's: each kind, in every recipe, with the law that follows from it."""

import warnings

import pytest

import specbeam as sb
from specbeam.core.forest import Forest
from specbeam.core.laws.named import EXACT, UNKNOWN
from specbeam.core.records import Shape
from specbeam.core.verify.traversal import TraversalRule
from specbeam.core.verify.walk import MatchRule, PathRule
from specbeam.errors import BadSetting, LostLaw
from specbeam.models.table import TableLM
from specbeam.recipes.catalogue import RECIPES
from specbeam.recipes.joint.beam_rule import JointRule
from specbeam.recipes.joint.block_rule import BlockRule
from tests.support.checking import refused
from tests.support.tiny_models import tiny

PROMPTS = [[1, 7, 3], [5, 6, 7]]
MADE = {make.__name__: make for make in RECIPES if make.__name__ != "auto"}


class Matching:
    """A rule that has all that a rule needs, and nothing else."""

    def verify(self, session, forest, scored):
        return MatchRule().verify(session, forest, scored)


class Stated(Matching):
    law = "exact: plain sampling"


class Trying(Matching):
    tries = True


class Same:
    """A drafter that guesses one token, and forgets nothing as it remembers nothing."""

    no_law_reason = "guesses without odds"

    def draft(self, sessions, shapes):
        return [Forest.rooted(one.beams.tokens).grown([4], [0]) for one in sessions]

    def settle(self, session, turn):
        pass


class OneLayer:
    def plan(self, session):
        return Shape(1, 1)

    def settle(self, session, turn):
        pass


@pytest.fixture(scope="module")
def pair():
    return sb.load(tiny("llama", seed=1), tiny("llama", seed=2))


@pytest.mark.parametrize("name", MADE)
def test_every_recipe_takes_parts_of_ones_own(name):
    own = {"drafter": Same(), "rule": Matching(), "controller": OneLayer()}
    method = MADE[name]().with_parts(**own)
    assert method.law == UNKNOWN
    assert not method.exact
    if name in {"propd", "multi_draft", "swift"}:  # they want transformers models
        return
    parts = method.parts(TableLM([0.5, 0.5]), TableLM([0.5, 0.5]))
    assert {"drafter": parts.drafter, "rule": parts.rule, "controller": parts.controller} == own
    assert parts.law == UNKNOWN


def test_a_rule_can_stand_where_its_name_could(pair):
    """The one that matches by noise has the text of plain sampling; it says itself what law it has."""
    options = {"seed": 3, "max_new_tokens": 8}
    expected = sb.generate(pair, PROMPTS, sb.sampling(), **options)
    for rule, law in ((Matching(), UNKNOWN), (Stated(), Stated.law)):
        method = sb.speculative_sampling(3, rule=rule)
        found = sb.generate(pair, PROMPTS, method, **options)
        assert method.law == law
        assert {one.report.law for one in found} == {law}
        assert [one.tokens for one in found] == [one.tokens for one in expected]


def test_a_law_is_said_the_same_way_wherever_a_rule_is_given():
    class Derived(MatchRule):
        """May verify in another way, so it has to say its law itself."""

    for rule, law in ((MatchRule(), EXACT), (PathRule(), EXACT), (Derived(), UNKNOWN), (Matching(), UNKNOWN)):
        assert sb.speculative_sampling(2, rule=rule).law == law
        assert sb.prompt_lookup().with_parts(rule=rule).law == law


def test_a_part_that_is_empty_is_a_part():
    class Empty(Same):
        def __len__(self):
            return 0

    drafter = Empty()
    parts = sb.prompt_lookup().with_parts(drafter=drafter).parts(TableLM([0.5, 0.5]))
    assert parts.drafter is drafter


def test_a_drafter_need_not_close(pair):
    method = sb.speculative_sampling(1, rule="match").with_parts(drafter=Same())
    pair = sb.load(pair.target_model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sb.generate(pair, PROMPTS, method, seed=3, max_new_tokens=8)
    expected = sb.generate(pair, PROMPTS, sb.sampling(), seed=3, max_new_tokens=8)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert not method.needs_draft


def test_drafts_without_a_law_are_not_tried(pair):
    with pytest.raises(LostLaw, match="prompt_lookup"):
        sb.prompt_lookup(rule=Trying())
    with pytest.raises(LostLaw, match="guesses without odds"):
        sb.generate(pair, PROMPTS, sb.speculative_sampling(1).with_parts(drafter=Same()))


@pytest.mark.parametrize("wrong", ["path", MatchRule, 3])
def test_what_is_no_part_is_refused(wrong):
    with refused("must be a part"):
        sb.sampling().with_parts(rule=wrong)


@pytest.mark.parametrize("rule", [PathRule(), MatchRule(), TraversalRule(), BlockRule(), JointRule(0.5)])
@pytest.mark.parametrize("recipe", [sb.dsbd, sb.beam_sampling, sb.beam_search, sb.speculative_beam_search])
def test_a_rule_for_one_sequence_is_refused_with_beams(recipe, rule):
    """Or one beam would come back in silence."""
    name = type(rule).__name__
    expected = f"{name} judges one sequence, and {recipe.__name__} keeps 3 beams; make the method with beams=1"
    with pytest.raises(BadSetting, match=expected):
        recipe(beams=3, rule=rule)
    with pytest.raises(BadSetting, match=expected):
        recipe(beams=3).with_parts(rule=rule)
    assert recipe(beams=1, rule=rule).beams == 1


def test_recipes_for_beams_take_parts_of_ones_own_directly(pair):
    controller = OneLayer()
    for method in (sb.dsbd(2, controller=controller), sb.beam_sampling(2, controller=controller)):
        assert method.parts(pair.target, pair.draft).controller is controller
    expected = sb.generate(pair, PROMPTS, sb.beam_sampling(2), seed=3, max_new_tokens=6)
    found = sb.generate(pair, PROMPTS, sb.dsbd(2, controller=controller), seed=3, max_new_tokens=6)
    assert [one.tokens for one in found] == [one.tokens for one in expected]

"""Any drafter x any controller x any rule that its law permits; the wrong combination is refused with the reason."""

import inspect

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.control.confidence import SureDraft
from specbeam.core.control.cost import CostCurve
from specbeam.core.control.depth import DepthByCost
from specbeam.core.control.fixed import FixedShape
from specbeam.core.control.size import SizeByLatency
from specbeam.core.control.thompson import Thompson
from specbeam.core.control.width import FixedWidth
from specbeam.core.draft.children import Distinct
from specbeam.core.draft.lookup import PromptLookup
from specbeam.core.draft.merged import Graph, ManyDrafters, Pruned
from specbeam.core.draft.recycle import Successors, TokenRecycling
from specbeam.core.draft.tree import Branching, TreeDrafter
from specbeam.core.laws.warp import Warp
from specbeam.core.session import Parts
from specbeam.core.verify.beams import BeamRule
from specbeam.core.verify.search import SearchRule
from specbeam.core.verify.traversal import TraversalRule
from specbeam.core.verify.walk import MatchRule, PathRule
from specbeam.errors import BadSetting, LostLaw
from specbeam.models.table import TableLM
from specbeam.recipes.catalogue import RECIPES
from tests.support import words
from tests.support.checking import refused
from tests.support.exact import distance, exact_law
from tests.support.examples import PAIRS, completed
from tests.support.programs import outcome_of, random_table, run, session_of, texts
from tests.support.tiny_models import tiny

RULES = ("path", "traversal", "match")
CONTROLLERS = ("fixed", "confidence", "tracked", "thompson", "calibrated", "survival", "cost", "latency")
CONTROLLERS += ("beta_ts", "calibration_ts")
BETWEEN = {"confidence", "tracked", "calibrated", "survival", "beta_ts", "calibration_ts"}
LAWLESS = {"gsd", "prompt_lookup", "suffix_match", "token_recycling"}
AT_ONCE = {"prompt_lookup", "suffix_match", "token_recycling", "multi_draft"}
BUDGET = {"opt_tree", "dyspec", "propd"}
UNPRICED = {"swift"}
OWN_RULE = {"block_verification", "traversal"}  # the name is the rule
# Methods of several beams, whose rules and controllers are parts of their own and have no names.
OF_BEAMS = ("beam_search", "speculative_beam_search", "beam_sampling", "dsbd", "mtad", "mjsd", "mmtad")
DRAFTING = {
    make.__name__: make
    for make in RECIPES
    if {"rule", "controller"} & set(inspect.signature(make).parameters) and make.__name__ not in OF_BEAMS
}


def reason(name, rule, controller):
    """What a combination is refused with; None if it works."""
    if rule != "match" and name in LAWLESS:
        return LostLaw, "they were drawn from, and .* (merges|retrieves) its drafts"
    if controller in BETWEEN and name in AT_ONCE:
        return BadSetting, f"controller '{controller}' ends a draft between its layers"
    if controller == "latency" and name not in BUDGET:
        return BadSetting, "chooses the size of the whole tree"
    if controller == "cost" and name in UNPRICED:
        return BadSetting, "needs the sizes of layers"
    return None


def combinations():
    """All; of those that work, each method meets each controller under one of its rules among the quick ones."""
    for name in DRAFTING:
        rules = (None,) if name in OWN_RULE else RULES
        for place, rule in enumerate(rules):
            for number, controller in enumerate(CONTROLLERS):
                is_quick = number % len(rules) == place or reason(name, rule, controller) is not None
                yield pytest.param(name, rule, controller, marks=() if is_quick else pytest.mark.slow)


def made(name, rule, controller):
    more = {} if rule is None else {"rule": rule}
    if name == "swift":  # a search has nothing to leave out of two layers
        more["skip"] = "m1"
    return DRAFTING[name](controller=controller, **more)


def test_every_method_of_the_family_takes_a_controller_and_a_rule():
    assert len(DRAFTING) == 17
    for name, make in DRAFTING.items():
        known = inspect.signature(make).parameters
        assert "controller" in known, name
        assert ("rule" in known) == (name not in OWN_RULE), name


@pytest.fixture(scope="module")
def pair():
    return words.pair()


@pytest.fixture(scope="module")
def greedy(pair):
    return sb.generate(pair, "abcab", "greedy", max_new_tokens=9)[0].tokens


@pytest.mark.parametrize(("name", "rule", "controller"), [*combinations()])
def test_a_combination_works_or_is_refused_with_the_reason(pair, greedy, turn_by_turn, name, rule, controller):
    expected = reason(name, rule, controller)
    if expected is not None:
        with pytest.raises(expected[0], match=expected[1]):
            made(name, rule, controller)
        return
    method = made(name, rule, controller)
    assert method.lossless
    one = sb.generate(pair, "abcab", method, temperature=0, max_new_tokens=9)[0]
    assert one.tokens == greedy
    sb.generate(pair, "abcab", method, seed=1, max_new_tokens=9, audit=True)


def test_parts_of_ones_own_are_judged_like_names():
    sb.specinfer((2, 1), controller=SureDraft(0.3, most=2))
    sb.prompt_lookup(controller=Thompson())
    with pytest.raises(BadSetting, match="SureDraft ends a draft between its layers"):
        sb.prompt_lookup(controller=SureDraft())
    with pytest.raises(BadSetting, match="Thompson ends a draft between its layers"):
        sb.prompt_lookup(controller=Thompson(mode="round"))
    with pytest.raises(BadSetting, match="SizeByLatency chooses the size of the whole tree"):
        sb.rsd_c(controller=SizeByLatency())
    with refused("controller is 'x'; it must be one of auto, fixed, confidence"):
        sb.sequoia(controller="x")


def lawless_drafters():
    lm = TableLM([0.5, 0.5])
    return [PromptLookup(), TokenRecycling(Successors.empty(2)), TreeDrafter(lm, Graph())]


@pytest.mark.parametrize("drafter", lawless_drafters(), ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    "rule", [PathRule(), TraversalRule(), BeamRule(FixedWidth(2), "rejection")], ids=lambda one: type(one).__name__
)
def test_drafts_without_a_law_never_meet_a_rule_that_tries(drafter, rule):
    with pytest.raises(LostLaw, match=f"{type(rule).__name__} tries drafts .* can only be matched"):
        Parts(drafter, rule, FixedShape(2, 2), "")


@pytest.mark.parametrize("drafter", lawless_drafters(), ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    "rule", [MatchRule(), SearchRule(2), BeamRule(FixedWidth(2), "noise")], ids=lambda one: type(one).__name__
)
def test_drafts_without_a_law_are_matched(drafter, rule):
    Parts(drafter, rule, FixedShape(2, 2), "")


def test_the_cost_controller_knows_the_layers():
    layers = {
        "specinfer": (sb.specinfer((3, 2, 1), controller="cost"), (3, 6, 6)),
        "rsd_s": (sb.rsd_s(4, 3, controller="cost"), (4,)),
        "sequoia": (sb.sequoia(4, 3, (0.7, 0.2), controller="cost"), (2, 1, 1)),
        "chain": (sb.speculative_sampling(5, controller="cost"), (1,)),
    }
    for name, (method, expected) in layers.items():
        control = method.parts(None, TableLM([1.0])).controller
        assert isinstance(control, DepthByCost), name
        assert control.layers == expected, name
        assert control.draft.pass_s(1) > 0
    found = sb.token_recycling(2, nodes=9, controller="cost").parts(TableLM([1.0])).controller
    assert found.layers == (3, 3, 2, 1)
    assert found.draft.pass_s(9) == 0  # found, not computed


@pytest.mark.parametrize("rule", ["path", "match"])
def test_the_text_of_a_seed_does_not_depend_on_the_batch(pair, rule):
    prompts = ["abc", "Hello you", "x", "The end.", "no no", "yes"]
    method = sb.speculative_sampling(6, rule, controller="cost")
    together = sb.generate(pair, prompts * 3, method, seed=4, max_new_tokens=20)
    for prompt, one in zip(prompts, together, strict=False):
        assert sb.generate(pair, prompt, method, seed=4, max_new_tokens=20)[0].tokens == one.tokens


BY_REJECTION = {
    "chain": sb.speculative_sampling(6),
    "tree": sb.rsd_c((3, 2, 1)),
    "beams of dynamic width": sb.dsbd(3, width="dynamic"),
    "beams": sb.dsbd(3, coupling="rejection"),
}


@pytest.mark.parametrize("name", BY_REJECTION)
def test_the_default_plans_alike_in_batches_and_engines_and_turn_by_turn(name):
    """A draft that hardly agrees, which is left out and tried again: texts by rejection show every depth."""
    target = tiny("llama", seed=1, vocab_size=64, initializer_range=0.5)
    draft = tiny("llama", seed=5, vocab_size=64, initializer_range=0.5)
    plain = sb.load(target, draft, engine="plain", check=False)
    compiled = sb.load(target, draft, engine="compiled", check=False)
    prompts = [[3, 1, 4], [1, 5], [9], [2, 6, 5, 3]]
    options = {"seed": 4, "max_new_tokens": 40, "eos_token_id": []}
    method = BY_REJECTION[name]
    together = [one.tokens for one in sb.generate(compiled, prompts, method, **options)]
    alone = [sb.generate(compiled, prompt, method, **options)[0].tokens for prompt in prompts]
    assert together == alone
    assert [one.tokens for one in sb.generate(plain, prompts, method, **options)] == together
    shapes = [turn.shape.depth for turn in sb.turns_of(compiled, prompts[0], method, **options)]
    assert 0 in shapes
    assert max(shapes[shapes.index(0) :]) > 0


@pytest.mark.parametrize("part", [Thompson(most=4), SureDraft(0.0, most=4)], ids=lambda one: type(one).__name__)
def test_a_part_that_says_nothing_of_the_width_gets_that_of_the_method(part):
    for method, width in ((sb.opt_tree(12, 4, controller=part), 12), (sb.rsd_s(3, 4, controller=part), 3)):
        session = session_of(method, TableLM(random_table(1, 6)), steps=20)
        assert session.parts.controller.plan(session).width == width


def test_a_draft_of_a_twin_is_worth_all_its_depth_and_one_of_a_stranger_less():
    depths = {}
    for name, seed in (("twin", 1), ("stranger", 2)):
        method = sb.speculative_sampling(6, controller="cost")
        session = session_of(method, TableLM(random_table(seed, 6)), steps=120)
        depths[name] = np.mean([turn.shape.depth for turn in run(session, TableLM(random_table(1, 6)))[-12:-2]])
    assert depths["twin"] > 5.5
    assert depths["stranger"] < 4


def whole_text_law(method, target, draft, length, eos=()):
    """The law of whole texts, by every way that the dice can fall in all turns."""
    found = {}
    for (ended, live), odds in exact_law(outcome_of(method, target, draft, length, eos)).items():
        (text,) = ended or live
        found[text] = found.get(text, 0.0) + odds
    return found


SMALL = {
    "chain": lambda rule, controller: sb.speculative_sampling(2, rule, controller),
    "rsd_c": lambda rule, controller: sb.rsd_c((2, 1), rule, controller),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("rule", ["path", "traversal"])
@pytest.mark.parametrize(
    "controller",
    ["auto", "confidence", "tracked", "thompson", "calibrated", "survival", "cost", "beta_ts", "calibration_ts"],
)
def test_no_controller_changes_the_law_of_a_whole_text(name, rule, controller):
    """Plans are made, drafts are stopped between layers, and what was learnt in a turn counts in the next ones."""
    target, draft = random_table(3, 2), random_table(8, 2)
    method = SMALL[name](rule, controller)
    assert distance(whole_text_law(method, target, draft, 3), completed(target, (), 3)) < 1e-12
    assert distance(whole_text_law(method, target, draft, 3, (1,)), completed(target, (), 3, (1,))) < 1e-12


@pytest.mark.parametrize("rule", ["path", "traversal"])
def test_drafts_that_are_left_out_and_tried_again_have_the_law_of_whole_texts(rule, monkeypatch):
    """Dear drafts: some texts draft nothing after a failure, and one layer again a turn later."""
    monkeypatch.setattr("specbeam.core.control.depth.FIRST_WAIT", 1.0)
    target, draft = random_table(3, 2), random_table(8, 2)
    dear = DepthByCost(CostCurve((1, 8), (1.0, 1.2)), CostCurve((1,), (0.5,)), 1, (1,), 2, alone=True)
    method = sb.speculative_sampling(2, rule, dear)
    depths = set()

    def program(dice):
        session = session_of(method, TableLM(draft), dice, 5)
        depths.add(tuple(turn.shape.depth for turn in run(session, TableLM(target))))
        return texts(session)[1]

    found = {text: odds for (text,), odds in exact_law(program).items()}
    assert any(0 in turns and turns[turns.index(0) :].count(1) for turns in depths)
    assert distance(found, completed(target, (), 5)) < 1e-12


@pytest.mark.parametrize("threshold", [0.45, 0.55])
@pytest.mark.parametrize("rule", ["path", "traversal"])
def test_what_a_stop_tells_of_later_siblings_does_not_matter(threshold, rule):
    """The largest draft odds of the whole layer decide whether the first sibling gets a child; the second may have been it."""
    target, draft = PAIRS["EX3M"]
    method = sb.rsd_c((2, 1), rule, SureDraft(threshold, most=2))
    assert distance(whole_text_law(method, target, draft, 2), completed(target, (), 2)) < 1e-12


def two_trees(lm):
    one = TreeDrafter(lm, Branching((1, 1), Distinct()))
    return ManyDrafters((one, TreeDrafter(TableLM(random_table(21, 2)), one.growth)))


def pruned(lm):
    chosen = sb.opt_tree(4, 2, 2).parts(None, lm).drafter
    return Pruned(chosen, TableLM((0.6, 0.4)), 1)


@pytest.mark.parametrize("drafter_of", [two_trees, pruned])
@pytest.mark.parametrize("rule", [PathRule(), TraversalRule(), MatchRule("dice")], ids=lambda one: type(one).__name__)
def test_trees_of_trees_have_the_law_of_whole_texts(drafter_of, rule):
    target, draft = random_table(3, 2), random_table(8, 2)
    method = sb.Method("", "", 1, lambda _, lm: Parts(drafter_of(lm), rule, FixedShape(2, 4), ""))
    assert distance(whole_text_law(method, target, draft, 3), completed(target, (), 3)) < 1e-12


@pytest.mark.parametrize("rule", ["path", "traversal", "match"])
@pytest.mark.parametrize("within_layer", [False, True])
def test_chosen_trees_are_lawful_under_every_rule(rule, within_layer):
    """Nothing is drawn, so each guess stands for all the mass of its law; texts at temperature 0 are greedy anyway."""
    target, draft = PAIRS["EX3M"]
    method = sb.opt_tree(4, 2, 3, within_layer, rule)
    if rule == "match":  # by noise, which cannot be enumerated: the text of plain sampling
        for key in range(30):
            plain = session_of(sb.sampling(), None, steps=4, key=key)
            run(plain, TableLM(target))
            session = session_of(method, TableLM(draft), steps=4, key=key)
            run(session, TableLM(target))
            assert session.settled == plain.settled
        return
    assert distance(whole_text_law(method, target, draft, 3), completed(target, (), 3)) < 1e-12
    session = session_of(method, TableLM(draft), steps=6, warp=Warp(greedy=True))
    run(session, TableLM(target))
    assert session.settled[0] == int(np.argmax(target(())))

"""Trees: the law of the children of a node by every way of drawing them, their structure, and the steps that grow them."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

import specbeam as sb
from specbeam.core.control.confidence import SureDraft
from specbeam.core.control.fixed import FixedShape
from specbeam.core.dice import Dice, Uniforms
from specbeam.core.draft import by_steps
from specbeam.core.draft import tree as tree_steps
from specbeam.core.draft.best_first import BestFirst, BestFirstDraws
from specbeam.core.draft.caterpillar import Caterpillar
from specbeam.core.draft.children import Best, BestAndOne, Distinct, Draws, Independent
from specbeam.core.draft.tree import Branching, FixedTree, TreeDrafter, grow_layer, grow_tree, start_tree
from specbeam.core.draft.turns import DraftTask, nodes_of
from specbeam.core.forest import CHOSEN, DISTINCT, INDEPENDENT, Forest
from specbeam.core.laws.edits import NO_EDITS
from specbeam.core.laws.ranking import NO_TRUNCATION, Truncation
from specbeam.core.laws.reduce import BROKEN, SOUND
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.ranked import WHOLE, whole_rows
from specbeam.core.records import Shape
from specbeam.core.session import Parts, Session
from specbeam.core.verify.walk import MatchRule
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.models import huggingface
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.table import TableLM
from tests.oracles import children as oracle
from tests.oracles.laws import log_softmax, warped
from tests.support.exact import exact_law
from tests.support.forests import assert_same_forests, passes_that_give, recorded_rows
from tests.support.growths import GROWTHS
from tests.support.loops import OPTIONS, assert_same, layer_by_layer, pair
from tests.support.steps import needs_numba, source_of_steps
from tests.support.tiny_models import tiny

__all__ = ["pair"]  # a fixture

WAYS = {
    "independent": (Independent(), oracle.independent),
    "distinct": (Distinct(), oracle.distinct),
    "distinct, then any": (Distinct(fallback=True), oracle.distinct_then_any),
    "likeliest": (Best(), oracle.likeliest),
    "likeliest and one": (BestAndOne(), oracle.likeliest_and_one),
}
CUTS = {
    "whole": NO_TRUNCATION,
    "top-k": Truncation(top_k=2),
    "warm and top-p": Truncation(temperature=1.5, top_p=0.8),
    "cold and min-p": Truncation(temperature=0.5, min_p=0.2),
}
LAWS = {
    "spread": np.array([0.15, 0.4, 0.05, 0.4]),
    "zeros": np.array([0.0, 0.7, 0.0, 0.3]),
    "sure": np.array([0.0, 0.0, 1.0, 0.0]),
}
NO_ENDS = np.zeros(0, dtype=np.int64)


def logits_of(*laws):
    """Rows of logits with these laws."""
    with np.errstate(divide="ignore"):
        return np.log(np.array(laws))


def groups_of(siblings):
    """Each group as the oracle tells it."""
    found = []
    for group in siblings.groups():
        law = ()
        if len(group.law_odds):
            odds = np.zeros(group.vocab)
            odds[group.law_pairs] = group.law_odds
            law = oracle.stated(odds)
        found.append(oracle.Group(int(group.kinds[0]), tuple(group.tokens.tolist()), law))
    return tuple(found)


def spec_of(growth, truncation=NO_TRUNCATION, eos=(), greedy=False):
    return growth.spec(truncation, np.array(eos, dtype=np.int64), greedy, False)


# The law of the children of one node.


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("way", WAYS)
def test_children_have_the_law_of_their_way_and_state_it(way, cut, law):
    """Every outcome of one, two and three draws, with the group of each draw and the law that the group states."""
    children, expected_law = WAYS[way]
    truncation = CUTS[cut]
    rows = logits_of(LAWS[law])
    left = warped(log_softmax(rows)[0], truncation)
    q = np.exp(left - np.logaddexp.reduce(left))
    for count in (1, 2, 3):
        spec = spec_of(Branching((count,), children), truncation)

        def program(dice, spec=spec):
            draft, condition = grow_layer(start_tree(Forest.rooted([0]), 8), whole_rows(rows), spec, dice)
            assert condition == SOUND
            return groups_of(draft.forest.siblings)

        assert exact_law(program) == pytest.approx(expected_law(q, count), abs=1e-12)


def test_at_temperature_zero_children_are_the_likeliest():
    for children, _ in WAYS.values():
        spec = spec_of(Branching((3,), children), greedy=True)
        (outcome,) = exact_law(
            lambda dice, spec=spec: groups_of(
                grow_layer(start_tree(Forest.rooted([0]), 8), whole_rows(logits_of(LAWS["spread"])), spec, dice)[
                    0
                ].forest.siblings
            )
        )
        assert outcome == (oracle.Group(CHOSEN, (1, 3, 0), ()),)


def test_a_constraint_takes_the_fallback_away():
    """Beyond the law's support nearly all is banned."""
    growth = FixedTree(((), ()), Distinct(fallback=True))
    free, bound = (growth.spec(NO_TRUNCATION, NO_ENDS, False, constrained) for constrained in (False, True))
    counts = []
    for spec in (free, bound):
        draft, _ = grow_layer(
            start_tree(Forest.rooted([0]), 8), whole_rows(logits_of(LAWS["sure"])), spec, Dice(1).ready(9)
        )
        counts.append(len(draft.forest.siblings.tokens))
    assert counts == [2, 1]


# Structure.


def scripted(*values):
    """Uniforms that come in this order."""
    return Uniforms(np.array(values), np.zeros(1, dtype=np.int64))


def test_repeated_draws_share_a_node():
    """Odds (.5, .3, .2), uniforms .6, .6, .1: the second token twice, then the first."""
    spec = spec_of(Branching((3,), Independent()))
    dice = scripted(0.6, 0.6, 0.1)
    draft, _ = grow_layer(start_tree(Forest.rooted([7]), 8), whole_rows(logits_of([0.5, 0.3, 0.2])), spec, dice)
    forest = draft.forest
    assert forest.tokens.tolist() == [7, 1, 0]
    assert forest.parents.tolist() == [-1, 0, 0]
    assert forest.siblings.tokens.tolist() == [1, 1, 0]
    assert forest.siblings.nodes.tolist() == [1, 1, 2]
    assert forest.siblings.kinds.tolist() == [INDEPENDENT]
    assert np.exp(forest.logq) == pytest.approx([1, 0.3, 0.5])
    assert draft.frontier.tolist() == [1, 2]
    assert dice.used[0] == 3


def test_children_take_the_places_of_their_topology_in_draw_order():
    """The root has three children, with two, one and no children of their own. Token 2 is an end: it has no node, and its
    subtree is not grown.
    """
    topology = (((), ()), ((),), ())
    spec = spec_of(FixedTree(topology, Distinct()), eos=(2,))
    dice = scripted(0.6, 0.8, 0.3, 0.1, 0.9)
    draft, _ = grow_layer(start_tree(Forest.rooted([7]), 8), whole_rows(logits_of([0.5, 0.3, 0.2])), spec, dice)
    assert draft.forest.siblings.tokens.tolist() == [1, 2, 0]  # .6 of 1; .8 of .7; what is left
    assert draft.forest.siblings.nodes.tolist() == [1, -1, 2]
    assert draft.frontier.tolist() == [1, 2]
    draft, _ = grow_layer(draft, whole_rows(logits_of([0.5, 0.3, 0.2], [0.5, 0.3, 0.2])), spec, dice)
    forest = draft.forest
    assert [forest.path(node) for node in range(1, forest.size)] == [[1], [0], [1, 0]]
    assert forest.siblings.tokens.tolist() == [1, 2, 0, 0, 2]
    assert forest.siblings.parents.tolist() == [0, 1]
    assert forest.siblings.kinds.tolist() == [DISTINCT, DISTINCT]
    assert np.exp(forest.logq[1:]) == pytest.approx([0.3, 0.5, 0.3 * 0.5])
    assert dice.used[0] == 5


def test_what_a_law_cannot_supply_has_no_draft_odds():
    spec = spec_of(Branching((3,), Distinct(fallback=True)))
    draft, _ = grow_layer(
        start_tree(Forest.rooted([7]), 8), whole_rows(logits_of([1.0, 0.0, 0.0])), spec, scripted(0.5, 0.7, 0.2)
    )
    forest = draft.forest
    assert forest.tokens.tolist() == [7, 0, 2, 1]
    assert forest.siblings.draw_ends.tolist() == [1, 3]
    assert forest.logq.tolist() == [0, 0, -np.inf, -np.inf]


def test_the_drawn_one_is_tried_first_and_takes_the_first_place():
    spec = spec_of(FixedTree(((), ((),), ()), BestAndOne()))
    draft, _ = grow_layer(
        start_tree(Forest.rooted([7]), 8), whole_rows(logits_of([0.5, 0.3, 0.2])), spec, scripted(0.5)
    )
    assert draft.forest.siblings.tokens.tolist() == [2, 0, 1]
    assert draft.forest.siblings.kinds.tolist() == [DISTINCT, CHOSEN]
    draft, _ = grow_layer(draft, whole_rows(logits_of(*[[0.5, 0.3, 0.2]] * 3)), spec, scripted(0.5))
    assert [draft.forest.path(node) for node in (4,)] == [[0, 1]]  # the second drawn: the likeliest


def test_nodes_after_which_all_is_banned_are_leaves():
    spec = spec_of(Branching((2,), Distinct()))
    draft = start_tree(Forest.rooted([7, 8]), 8)
    draft, condition = grow_layer(
        draft, whole_rows(logits_of([0.0, 0.0, 0.0], [0.5, 0.3, 0.2])), spec, Dice(1).ready(9)
    )
    assert condition == SOUND
    assert draft.forest.siblings.parents.tolist() == [1]
    assert draft.forest.parents[2:].tolist() == [1, 1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_none_leaves_the_tree_as_it_was(value):
    spec = spec_of(Branching((2,), Distinct()))
    draft = start_tree(Forest.rooted([7, 8]), 8)
    rows = np.zeros((2, 5), dtype=np.float32)
    rows[1, 3] = value
    found, condition = grow_layer(draft, whole_rows(rows), spec, Dice(1).ready(9))
    assert condition == BROKEN
    assert_same_forests(found.forest, draft.forest)


# The compiled steps against their source.


@needs_numba
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", GROWTHS)
def test_the_compiled_layer_is_its_source(name, cut):
    """Three layers under two beams, with ends, banned tokens, a row from which all is banned, and too little room."""
    rng = np.random.default_rng(len(name) + len(cut))
    spec = spec_of(GROWTHS[name], CUTS[cut], eos=(3, 11))
    for key in range(8):
        found = expected = start_tree(Forest.rooted([5, 6]), 4)
        dice, other = Dice(key), Dice(key)
        for layer in range(3):
            rows = rng.normal(0, 2, (len(found.frontier), 13)).astype(np.float32)
            rows[rng.random(rows.shape) < 0.2] = -np.inf
            if layer == 1 and key % 2:
                rows[:1] = -np.inf  # no row is left where all draws ended
            count = int(spec.counts[found.places].sum())
            found, condition = grow_layer(found, whole_rows(rows), spec, dice.ready(count))
            with source_of_steps():
                expected, same = grow_layer(expected, whole_rows(rows), spec, other.ready(count))
            assert condition == same == SOUND
            assert_same_forests(found.forest, expected.forest, near=1e-5)
            assert found.frontier.tolist() == expected.frontier.tolist()
            assert found.places.tolist() == expected.places.tolist()
        assert dice.uniform((3,)).tolist() == other.uniform((3,)).tolist()


def begun(pair, options, seed=0, method=None, **more):
    settings = Settings(max_new_tokens=9, eos_token_id=[9, 30], **options)
    method = method or sb.speculative_sampling(3)
    return Request.of(pair, [[1, 7, 3]], method, settings.changed(**more), seed).sessions[0]


@needs_numba
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", GROWTHS)
def test_a_tree_in_one_loop_is_the_tree_layer_by_layer_and_that_of_the_source(pair, name, options):
    drafter = TreeDrafter(pair.draft, GROWTHS[name])
    grown = []
    uniforms = []
    with recorded_rows(pair.draft) as rows:
        for one in (drafter, layer_by_layer(drafter)):
            session = begun(pair, options)
            grown += one.draft([session], [Shape(3, 1)])
            uniforms.append(session.dice.uniform((3,)).tolist())  # what comes next shows how many were used
            pair.draft.close(session)
    assert len(rows) == session.count.draft_passes  # the loop makes its passes itself
    session = begun(pair, options)
    spec = drafter.spec(session)
    dice = session.dice.ready(nodes_of(spec, 1, 3, 0))
    spent = np.zeros(2, dtype=np.int64)
    roots = Forest.rooted([3])
    task = DraftTask(roots, session.beams, session.texts, 3, 1, NO_EDITS, WHOLE)
    with source_of_steps(), passes_that_give(tree_steps, rows):
        draft, condition = grow_tree(None, start_tree(roots, 16), task, spec, dice, spent)
    uniforms.append(session.dice.uniform((3,)).tolist())
    assert condition == SOUND
    assert spent[0] == len(rows)
    assert_same_forests(grown[0], grown[1])
    assert_same_forests(draft.forest, grown[0], near=1e-5)
    assert uniforms[0] == uniforms[1] == uniforms[2]
    assert (grown[0].siblings.kinds == CHOSEN).all() == (options.get("temperature") == 0 or name == "likeliest")


METHODS = [
    sb.speculative_sampling(4), sb.specinfer((3, 2, 1)), sb.rsd_c((2, 2, 1)), sb.block_verification(3),
    sb.rsd_c((2, 1), rule="traversal"), sb.speculative_sampling(4, controller="thompson"),
]  # fmt: skip


@needs_numba
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("method", METHODS, ids=lambda one: one.name)
def test_texts_and_reports_are_the_same(pair, method, options):
    assert_same(pair, method, "drafter", options)


def test_draws_have_the_odds_of_their_law(pair):
    """The loop's own draws, 20,000 of them, against the law that it states."""
    counts = Counter()
    for seed in range(50):
        session = begun(pair, {"top_k": 6}, seed)
        (forest,) = TreeDrafter(pair.draft, Branching((400,), Independent())).draft([session], [Shape(1, 1)])
        pair.draft.close(session)
        counts.update(forest.siblings.tokens.tolist())
    assert sum(counts.values()) == 20_000
    assert len(forest.siblings.law_odds) == 6
    hoped = 20_000 * forest.siblings.law_odds
    assert chisquare([counts[token] for token in forest.siblings.law_pairs.tolist()], hoped).pvalue > 1e-3


def test_a_flat_law_is_ranked_as_far_as_top_p_needs_it():
    """Far more tokens than are ranked at first."""
    flat = tiny("llama", seed=1, vocab_size=2048)
    flat.lm_head.weight.data.mul_(0.01)
    own = sb.load(flat, flat)
    drafter = TreeDrafter(own.draft, Branching((2, 1), Distinct()))
    session = begun(own, {"top_p": 0.9})
    before = own.draft.passes
    (forest,) = drafter.draft([session], [Shape(2, 1)])
    assert session.count.draft_passes == own.draft.passes - before == 2
    own.draft.close(session)
    other = begun(own, {"top_p": 0.9})
    with recorded_rows(own.draft) as rows:
        (expected,) = layer_by_layer(drafter).draft([other], [Shape(2, 1)])
    own.draft.close(other)
    assert_same_forests(forest, expected)
    assert forest.siblings.size == 3
    left = warped(log_softmax(rows[0])[0], Truncation(top_p=0.9))
    root = forest.siblings.group(0)
    assert root.law_pairs.tolist() == np.flatnonzero(left > -np.inf).tolist()
    assert len(root.law_pairs) > 1500
    assert np.log(root.law_odds) == pytest.approx(
        left[root.law_pairs] - np.logaddexp.reduce(left[root.law_pairs]), abs=1e-4
    )


@pytest.mark.parametrize("method", METHODS[:4], ids=lambda one: one.name)
def test_equals_of_the_last_one_are_kept_however_many(method):
    """Twice forty words with the same odds: top-k keeps all forty."""
    model = tiny("llama", seed=1, vocab_size=80, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[::40].repeat_interleave(40, 0) * 0.3)
    equal = sb.load(model, model)
    for top_k in (1, 2, 5):
        session = begun(equal, {"top_k": top_k})
        (forest,) = TreeDrafter(equal.draft, Branching((2,), Distinct())).draft([session], [Shape(1, 1)])
        equal.draft.close(session)
        assert len(forest.siblings.law_odds) == 40
        assert_same(equal, method, "drafter", {"top_k": top_k, "eos_token_id": []}, [[3, 4, 5]])


class OwnStop(SureDraft):
    """A controller that decides in its own way."""

    def more(self, session, depth, confidence):
        return depth < 2


class OwnChildren:
    """Somebody's own way of drawing children."""

    def draw(self, q, count, dice):
        return [Draws([dice.pick(q) for _ in range(count)], q, replacement=True)]


GROWN = {**GROWTHS, "caterpillar": Caterpillar(), "best first": BestFirst(3, 2), "best draws": BestFirstDraws()}


@pytest.mark.parametrize("name", GROWN)
def test_a_tree_grows_under_the_laws_of_a_warper_of_ones_own(name):
    """One that changes nothing leaves the tree as it is."""
    drafter = TreeDrafter(TableLM((0.4, 0.3, 0.2, 0.1)), GROWN[name])
    forests = []
    for others in ((), (lambda tokens, scores: scores,)):
        parts = Parts(drafter, MatchRule(), FixedShape(2, 4), "")
        session = Session([0], parts, Warp(others=others), Limits(9, (3,)), 7)
        forests += drafter.draft([session], [Shape(2, 4)])
        assert session.failure is None
    plain, other = forests
    assert plain.size > 2
    assert_same_forests(other, plain, near=1e-6)


@needs_numba
def test_when_trees_are_grown_in_one_loop(pair, monkeypatch):
    """Where Python has to look at rows or at layers, or cannot hand on the model, each layer is a pass of its own."""
    made = []
    loop = by_steps.draft_turn
    monkeypatch.setattr(by_steps, "draft_turn", lambda *given: (made.append(1), loop(*given))[1])
    plain = Branching((2, 1), Distinct())
    deep = Shape(2, 4)
    cases = {
        "ordinary": (pair.draft, plain, begun(pair, {}), deep, 1),
        "temperature 0": (pair.draft, plain, begun(pair, {"temperature": 0}), deep, 1),
        "processors": (pair.draft, plain, begun(pair, {}, repetition_penalty=1.3), deep, 0),
        "nothing to draft": (pair.draft, plain, begun(pair, {}), Shape(0, 4), 0),
        "another engine": (HuggingFaceLM(pair.draft_model, engine="plain"), plain, begun(pair, {}), deep, 0),
        "too much at once": (
            HuggingFaceLM(pair.draft_model), Branching((2, 9), Distinct()), begun(pair, {}), deep, 0,
        ),
        "a controller that stops": (
            pair.draft, plain, begun(pair, {}, method=sb.speculative_sampling(3, controller="confidence")), deep, 1,
        ),
        "a controller of one's own that stops": (
            pair.draft, plain, begun(pair, {}, method=sb.speculative_sampling(3, controller=OwnStop())), deep, 0,
        ),
        "children of one's own": (pair.draft, Branching((2, 1), OwnChildren()), begun(pair, {}), deep, 0),
        "a growth that goes by Python": (
            pair.draft, sb.gsd(3, 2).build(None, pair.draft).drafter.growth, begun(pair, {}), deep, 0,
        ),
    }  # fmt: skip
    for name, (lm, growth, session, shape, loops) in cases.items():
        made.clear()
        with monkeypatch.context() as patch:
            if name == "too much at once":
                patch.setattr(huggingface, "MOST_ROWS_IN_STEPS", 8)
            (forest,) = TreeDrafter(lm, growth).draft([session], [shape])
        lm.close(session)
        assert len(made) == loops, name
        assert (forest.size > 1) == (shape.depth > 0), name
    session = begun(pair, {})
    other = begun(pair, {})
    sessions = [session, other]
    made.clear()
    assert len(TreeDrafter(pair.draft, plain).draft(sessions, [deep] * 2)) == 2
    assert not made
    for one in sessions:
        pair.draft.close(one)


def test_dice_give_the_same_stream_however_they_are_asked():
    plain = np.random.Generator(np.random.Philox(key=7)).random(400).tolist()
    dice = Dice(7)
    found = []
    for count in (3, 70, 1, 64, 200):
        values, used = dice.ready(count + 5)
        taken = values[used[0] : used[0] + count // 2].tolist()
        used[0] += count // 2
        found += taken
        found += dice.uniform((count - count // 2,)).tolist()
        values, used = dice.ready(1)
        found.append(float(values[used[0]]))
        used[0] += 1
    assert found == plain[: len(found)]

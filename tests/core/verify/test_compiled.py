"""The compiled steps that judge drafts, against the source that they are compiled from."""

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core import compiling
from specbeam.core.beams import BEST_LIVE_MAY_WIN, FIRST_ENOUGH, Beams, Finished, Stop
from specbeam.core.control.needs import NO_BUDGET
from specbeam.core.control.races import RACE_NOISE
from specbeam.core.control.width import FixedWidths, NucleusWidths, SureWidths
from specbeam.core.decode import turns
from specbeam.core.dice import Dice, Uniforms
from specbeam.core.draft import beams as draft_steps
from specbeam.core.draft.beams import DrawnLayers, LayersSpec, SearchedLayers, SharedLayers, start_draft
from specbeam.core.draft.tree import grow_layer, start_tree
from specbeam.core.forest import Forest, KnownRows, no_frontier_rows, scored_rows_of, turn_rows, unknown_nodes
from specbeam.core.laws import joint
from specbeam.core.laws.evidence import no_evidence
from specbeam.core.laws.listing import listed_rows
from specbeam.core.laws.ranking import NO_TRUNCATION, Truncation
from specbeam.core.laws.reduce import BROKEN, DEAD, SOUND, UNDECIDED
from specbeam.core.ranked import Listing, whole_rows
from specbeam.core.turn_steps import keys_in
from specbeam.core.verify import beams as judge_steps
from specbeam.core.verify import traversal, walk
from specbeam.core.verify.beams import SearchSpec, SharedSpec, TriedSpec
from specbeam.core.verify.traversal import ClimbSpec
from specbeam.core.verify.turns import ScoredTurn
from specbeam.core.verify.walk import MATCH_BY_DICE, MATCH_BY_NOISE, ONE_SEQUENCE, TRY, WalkSpec
from tests.core.draft.test_tree import begun
from tests.support.forests import assert_same_forests
from tests.support.growths import GROWTHS
from tests.support.loops import OPTIONS, assert_same, pair
from tests.support.quick import first_quick
from tests.support.steps import source_of_steps
from tests.support.tiny_models import tiny

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

__all__ = ["pair"]  # a fixture
VOCAB = 13
ENDS = np.array([3, 11])
CUTS = {
    "whole": NO_TRUNCATION,
    "cold": Truncation(temperature=0.5),
    "top-k": Truncation(top_k=4),
    "warm and top-p": Truncation(temperature=1.5, top_p=0.8),
    "min-p": Truncation(min_p=0.1),
}
NEAR = 1e-5  # compiled sums over float32 rows may be made in another order


def random_rows(rng, count):
    """Logits of so many nodes, float32[count, VOCAB], of which some ban tokens."""
    rows = rng.normal(0, 1.5, (count, VOCAB)).astype(np.float32)
    rows[rng.random(rows.shape) < 0.15] = -np.inf
    return rows


def near(rng, rows):
    """Other logits that are like these, so that drafts pass often."""
    return (rows + rng.normal(0, 0.5, rows.shape)).astype(np.float32)


def random_beams(rng, count):
    """Live beams at the first `count` nodes."""
    return Beams(
        nodes=np.arange(count),
        tokens=rng.integers(0, VOCAB, count),
        scores=rng.normal(-5, 1, count),
        counts=rng.integers(1, 3, count),
        keys=rng.integers(0, 2**60, count, dtype=np.uint64),
    )


def stop_of(early=BEST_LIVE_MAY_WIN, most=40, keep=99, eos=ENDS):
    return Stop(most, keep, early, 1.0, eos)


def both(step_of, *given):
    """What a step and its source make of the same, each with its own copies of arrays that it writes into.

    Args:
        step_of: returns the step, which is its source where steps are.
        given: functions that make the arguments.
    """
    outcomes = []
    arguments = [make() for make in given]
    outcomes.append((step_of()(*arguments), arguments))
    with source_of_steps():
        arguments = [make() for make in given]
        outcomes.append((step_of()(*arguments), arguments))
    return outcomes


def assert_same_numbers(found, expected):
    """Check nested tuples of arrays: whole numbers are equal, others are near."""
    if isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_numbers(one, other)
        return
    one, other = np.asarray(found), np.asarray(expected)
    assert one.dtype == other.dtype
    if one.dtype.kind == "f":
        np.testing.assert_allclose(one, other, rtol=NEAR, atol=NEAR)
    else:
        np.testing.assert_array_equal(one, other)


class Inputs:
    """What a turn is judged by: makers of arguments, so that the step and its source each write into their own."""

    def __init__(self, rows, forest, live, spec, widths=lambda: ONE_SEQUENCE, is_audited=True):
        uniforms = np.random.default_rng(len(forest.tokens)).random(400)
        length = 5

        def turn():
            finished = Finished(np.zeros(200), np.zeros(1, dtype=np.int64))
            return ScoredTurn(rows, forest, live, widths(), length, finished)

        self.makers = (
            lambda: spec,
            turn,
            lambda: Uniforms(uniforms, np.zeros(1, dtype=np.int64)),
            lambda: no_evidence(is_audited),
            lambda: None,
        )


TURN, DICE, EVIDENCE = 1, 2, 3  # places of what steps write into


def judged_alike(step_of, inputs):
    """Check that a step does as its source. Returns the layers, the condition and how many uniforms were used."""
    (found, given), (expected, others) = both(step_of, *inputs.makers)
    assert found[1] == expected[1]
    assert_same_numbers(tuple(found[0]), tuple(expected[0]))
    assert_same_numbers(tuple(given[TURN].finished), tuple(others[TURN].finished))
    for place in (DICE, EVIDENCE):
        assert_same_numbers(tuple(given[place]), tuple(others[place]))
    return found[0], found[1], int(given[DICE].used[0])


# One sequence: `walk_down` and `climb` on trees.

LAYERS = 3


def random_tree(rng, growth, truncation, greedy=False):
    """A tree that was drafted by logits like the target's, the target's logits of its nodes, and the live beam."""
    spec = growth.spec(truncation, ENDS, greedy, False)
    rows = random_rows(rng, 1)
    draft = start_tree(Forest.rooted([5]), 4)
    for _ in range(LAYERS):
        if len(draft.frontier) == 0:
            break
        count = int(spec.counts[draft.places].sum())
        dice = Dice(int(rng.integers(2**60))).ready(count)
        draft, condition = grow_layer(draft, whole_rows(near(rng, rows[draft.frontier])), spec, dice)
        assert condition == SOUND
        rows = np.concatenate((rows, random_rows(rng, len(draft.forest.tokens) - len(rows))))
    return rows, draft.forest, random_beams(rng, 1)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", GROWTHS)
def test_walks_and_climbs_are_those_of_the_source(name, cut):
    """Drafts tried at each node and from the leaves, or tokens drawn by noise and by dice; with ends, and a limit of length."""
    rng = np.random.default_rng(len(name) + 10 * len(cut))
    passed = ended = tossed = 0
    for turn in range(12):
        rows, forest, live = random_tree(rng, GROWTHS[name], CUTS[cut])
        stop = stop_of(most=7 if turn % 4 == 3 else 40)
        is_audited = turn % 3 != 2
        specs = [
            (lambda: walk.walk_down, WalkSpec(way, False, CUTS[cut], stop))
            for way in (TRY, MATCH_BY_NOISE, MATCH_BY_DICE)
        ]
        specs.append((lambda: traversal.climb, ClimbSpec(False, CUTS[cut], stop)))
        for step_of, spec in specs:
            layers, condition, used = judged_alike(
                step_of, Inputs(scored_rows_of(forest, rows), forest, live, spec, is_audited=is_audited)
            )
            assert condition == SOUND
            assert 1 <= layers.size <= LAYERS + 1
            passed += int(layers.passed.sum())
            ended += int(layers.ended.sum())
            tossed += used
    assert min(passed, ended, tossed) > 0


@pytest.mark.parametrize("name", ["chain", "distinct"])
def test_nothing_is_drawn_at_temperature_zero(name):
    rng = np.random.default_rng(len(name))
    for _ in range(12):
        rows, forest, live = random_tree(rng, GROWTHS[name], NO_TRUNCATION, greedy=True)
        for way in (TRY, MATCH_BY_NOISE):
            spec = WalkSpec(way, True, NO_TRUNCATION, stop_of())
            layers, _, used = judged_alike(
                lambda: walk.walk_down, Inputs(scored_rows_of(forest, rows), forest, live, spec)
            )
            assert used == 0
            nodes = layers.parents.tolist()
            assert layers.beams.tokens.tolist() == [int(rows[node].argmax()) for node in nodes]
        spec = ClimbSpec(True, NO_TRUNCATION, stop_of())
        climbed, _, _ = judged_alike(lambda: traversal.climb, Inputs(scored_rows_of(forest, rows), forest, live, spec))
        assert climbed.beams.tokens.tolist() == layers.beams.tokens.tolist()


@pytest.mark.parametrize(("value", "expected"), [(-np.inf, DEAD), (np.nan, BROKEN), (np.inf, BROKEN)])
def test_rows_without_a_law_stop_a_walk_where_it_stands(value, expected):
    """At the root nothing was emitted before; below it, what was emitted stands."""
    rng = np.random.default_rng(0)
    conditions = []
    for _ in range(20):
        rows, forest, live = random_tree(rng, GROWTHS["independent"], NO_TRUNCATION)
        for place in (slice(0, 1), slice(1, None)):
            broken = rows.copy()
            broken[place] = value
            steps = [
                (lambda: walk.walk_down, WalkSpec(TRY, False, NO_TRUNCATION, stop_of())),
                (lambda: walk.walk_down, WalkSpec(MATCH_BY_NOISE, False, NO_TRUNCATION, stop_of())),
                (lambda: traversal.climb, ClimbSpec(False, NO_TRUNCATION, stop_of())),
            ]
            for step_of, spec in steps:
                layers, condition, _ = judged_alike(step_of, Inputs(scored_rows_of(forest, broken), forest, live, spec))
                conditions.append(condition)
                if place == slice(0, 1):
                    assert (condition, layers.size) == (expected, 0)
    assert {SOUND, expected} == set(conditions)


@pytest.mark.parametrize("name", first_quick(["chain", "distinct"]))
@pytest.mark.parametrize("cut", first_quick(["warm and top-p", "whole", "cold", "top-k", "min-p"], 2))
def test_walks_by_lists_are_those_by_whole_rows_or_undecided(name, cut):
    """Short lists leave some turns undecided; long ones decide all turns whose rule asks for this kind of list."""
    rng = np.random.default_rng(3 * len(name) + len(cut))
    seen = set()
    for _ in range(20):
        rows, forest, live = random_tree(rng, GROWTHS[name], CUTS[cut])
        keys = keys_in(forest, live)
        for by_noise in (False, True):
            for way in (TRY, MATCH_BY_NOISE, MATCH_BY_DICE, "climb", "greedy"):
                step_of, spec = judge_of(way, CUTS[cut])
                whole = Inputs(scored_rows_of(forest, rows), forest, live, spec, is_audited=False)
                expected, _, _ = judged_alike(step_of, whole)
                for count in (1, 3, VOCAB):
                    lists = listed_rows(rows, keys, Listing(count, by_noise, CUTS[cut].temperature))
                    turn = turn_rows(lists, forest.size, forest.known)
                    found = Inputs(turn, forest, live, spec, is_audited=False)
                    layers, condition, _ = judged_alike(step_of, found)
                    seen.add((by_noise, way, count, condition))
                    if condition == SOUND:
                        assert_same_numbers(tuple(layers), tuple(expected))
    untruncated = not CUTS[cut].cuts
    for way in (TRY, MATCH_BY_NOISE, MATCH_BY_DICE, "climb", "greedy"):
        by_noise = untruncated and way == MATCH_BY_NOISE
        is_of_list = by_noise or way == "greedy" or not untruncated
        outcomes = {condition for noise, one, count, condition in seen if (noise, one, count) == (by_noise, way, VOCAB)}
        assert outcomes == ({SOUND} if is_of_list else {UNDECIDED})
    assert {condition for *_, count, condition in seen if count == 3} == {SOUND, UNDECIDED}


def judge_of(way, truncation):
    """Return a function that gives the step of a rule for one sequence, and the rule's spec."""
    if way == "climb":
        return lambda: traversal.climb, ClimbSpec(False, truncation, stop_of())
    if way == "greedy":
        return lambda: walk.walk_down, WalkSpec(TRY, True, truncation, stop_of())
    return lambda: walk.walk_down, WalkSpec(way, False, truncation, stop_of())


# Beams: `judge` on layers.

CORE = 3  # beams that go on


def draft_specs(truncation):
    """How layers are drafted, and how they are judged, by name."""
    stop = stop_of()
    by_row = truncation._replace(by_row=True, least=max(2, 1 + len(ENDS)))
    return {
        "shared noise": (
            LayersSpec(True, truncation, NO_BUDGET, True, SharedLayers(FixedWidths(CORE), ENDS, False)),
            SharedSpec(True, CORE, truncation, stop, not truncation.cuts),
        ),
        "the best": (
            LayersSpec(False, NO_TRUNCATION, NO_BUDGET, False, SharedLayers(FixedWidths(CORE), ENDS, True)),
            SharedSpec(False, CORE, NO_TRUNCATION, stop, True),
        ),
        "distinct draws": (
            LayersSpec(True, truncation, NO_BUDGET, False, DrawnLayers(False, ENDS)),
            TriedSpec(False, CORE, truncation, stop),
        ),
        "independent draws": (
            LayersSpec(True, truncation, NO_BUDGET, False, DrawnLayers(True, ENDS)),
            TriedSpec(True, CORE, truncation, stop),
        ),
        "search": (
            LayersSpec(True, by_row, NO_BUDGET, False, SearchedLayers(CORE, ENDS)),
            SearchSpec(True, False, CORE, by_row, stop, True),
        ),
        "search by dice": (
            LayersSpec(True, by_row, NO_BUDGET, False, SearchedLayers(CORE, ENDS)),
            SearchSpec(True, True, CORE, by_row, stop, False),
        ),
        "search for the best": (
            LayersSpec(False, by_row, NO_BUDGET, False, SearchedLayers(CORE, ENDS)),
            SearchSpec(False, False, CORE, by_row, stop, True),
        ),
    }


def drafted_alike(rng, spec, layers, width):
    """Layers of draft beams by logits like the target's, grown by compiled steps and by their source, which must agree.

    Some nodes are there from the start, and their rows are known.

    Returns the target's logits, the forest and the live beams.
    """
    live = random_beams(rng, int(rng.integers(1, 4)))
    beams = len(live.tokens)
    kept = int(rng.integers(0, 6))
    above = rng.integers(0, beams, kept)
    later = rng.integers(0, kept, 2) + beams if kept else above
    tokens = np.concatenate((live.tokens, rng.integers(0, VOCAB, len(above) + len(later))))
    parents = np.concatenate((np.full(beams, -1), above, later))
    rows = random_rows(rng, len(tokens))
    is_known = np.arange(len(tokens)) >= beams
    is_known[:beams] = rng.random(beams) < 0.5 * (kept > 0)
    known = KnownRows(np.flatnonzero(is_known), whole_rows(rows[is_known]))
    roots = Forest(tokens, parents, frontier_rows=no_frontier_rows(3 + layers * (width + 9), VOCAB), known=known)
    found = expected = start_draft(live, roots, spec)
    for number in range(layers):
        if len(found.frontier.tokens) == 0:
            break
        front_rows = near(rng, rows[found.frontier.nodes])
        values = np.random.default_rng(number).random(width)
        dice, other = (Uniforms(values, np.zeros(1, dtype=np.int64)) for _ in range(2))
        front = found.frontier
        law = joint.joint_law(whole_rows(front_rows), front.scores, front.counts, spec.truncation)
        found = draft_steps.draft_layer(spec, found, law, width, dice)
        with source_of_steps():
            law = joint.joint_law(
                whole_rows(front_rows), expected.frontier.scores, expected.frontier.counts, spec.truncation
            )
            expected = draft_steps.draft_layer(spec, expected, law, width, other)
        assert_same_forests(found.forest, expected.forest, near=NEAR)
        assert_same_numbers(tuple(found.frontier), tuple(expected.frontier))
        assert found.core.tolist() == expected.core.tolist()
        assert dice.used[0] == other.used[0]
        rows = np.concatenate((rows, random_rows(rng, len(found.forest.tokens) - len(rows))))
    return rows, found.forest, live


def known_and_fresh(rows, forest):
    """The rows of all nodes as a rule for beams takes them."""
    fresh = unknown_nodes(0, forest.size, forest.known.nodes)
    known = forest.known._replace(rows=whole_rows(rows[forest.known.nodes]))
    return turn_rows(whole_rows(rows[fresh]), forest.size, known)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", draft_specs(NO_TRUNCATION))
def test_layers_of_beams_are_those_of_the_source(name, cut):
    """Drafted and judged, with ends, several live beams, beams that occur twice, and nothing drafted at all."""
    rng = np.random.default_rng(len(name) + 10 * len(cut))
    drafts, spec = draft_specs(CUTS[cut])[name]
    passed = ended = 0
    for turn in range(8):
        rows, forest, live = drafted_alike(rng, drafts, turn % 4, 5)
        most = 7 if turn % 4 == 3 else 40
        keep = 2 if turn == 6 else 99
        judging = spec._replace(stop=stop_of((BEST_LIVE_MAY_WIN, FIRST_ENOUGH)[turn % 2], most, keep))
        is_audited = turn % 3 != 2
        inputs = Inputs(
            known_and_fresh(rows, forest), forest, live, judging, lambda: FixedWidths(CORE), is_audited=is_audited
        )
        layers, condition, _ = judged_alike(lambda: judge_steps.judge, inputs)
        assert condition == SOUND
        assert layers.size >= 1
        passed += int(layers.passed.sum())
        ended += int(layers.ended.sum())
    assert min(passed, ended) > 0


CHOSEN = {
    "sure of all, by noise": lambda: SureWidths(CORE, 1, 0.6, True, RACE_NOISE),
    "sure of all, by trials": lambda: SureWidths(CORE, 1, 0.6, False, RACE_NOISE),
    "nucleus": lambda: NucleusWidths(CORE, 1, 0.5),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CHOSEN)
def test_widths_are_chosen_as_by_the_source(name, cut):
    rng = np.random.default_rng(len(name) + 10 * len(cut))
    way = "distinct draws" if name == "sure of all, by trials" else "shared noise"
    drafts, spec = draft_specs(CUTS[cut])[way]
    widths = set()
    for _ in range(8):
        rows, forest, live = drafted_alike(rng, drafts, 3, 5)
        inputs = Inputs(known_and_fresh(rows, forest), forest, live, spec, CHOSEN[name])
        layers, _, _ = judged_alike(lambda: judge_steps.judge, inputs)
        widths |= {*layers.widths.tolist()}
    assert len(widths) > 1


@pytest.mark.parametrize(("value", "expected"), [(-np.inf, DEAD), (np.nan, BROKEN), (np.inf, BROKEN)])
@pytest.mark.parametrize("name", ["shared noise", "distinct draws", "search"])
def test_rows_without_a_law_stop_a_judgement(name, value, expected):
    rng = np.random.default_rng(1)
    drafts, spec = draft_specs(NO_TRUNCATION)[name]
    conditions = []
    for turn in range(8):
        rows, forest, live = drafted_alike(rng, drafts, 3, 5)
        first = turn % 2 == 0
        rows[: len(live.tokens) if first else 0] = value
        rows[len(live.tokens) :] = rows[len(live.tokens) :] if first else value
        inputs = Inputs(known_and_fresh(rows, forest), forest, live, spec, lambda: FixedWidths(CORE))
        layers, condition, _ = judged_alike(lambda: judge_steps.judge, inputs)
        conditions.append(condition)
        if first:
            assert (condition, layers.size) == (expected, 0)
    assert expected in conditions


# Whole texts, with a rule that runs as Python.

METHODS = [
    sb.speculative_sampling(4), sb.specinfer((3, 2)), sb.rsd_c((3, 2)), sb.rsd_s(3, 3), sb.dyspec(6, 3), sb.sequoia(6, 3),
    sb.spechub(2), sb.traversal((2, 2)),
    sb.dsbd(3, 5, 4, "fixed"), sb.dsbd(1, 3, 5, "fixed"), sb.beam_sampling(4), sb.sampling(), sb.dsbd(4, 4, 2, "dynamic"),
    sb.dsbd(2, 4, 3, "fixed", collapse=True),
]  # fmt: skip
STOPS = [
    {}, {"early_stopping": True}, {"early_stopping": "never", "length_penalty": 2.0}, {"num_return_sequences": 2},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("method", METHODS, ids=lambda one: f"{one.name} {one.beams}")
def test_texts_and_reports_are_the_same(pair, method, options):
    assert_same(pair, method, "rule", options)


@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_ends_come_where_they_came(pair, stops):
    """Beams end often, and each of them may be enough."""
    for method in (sb.dsbd(3, 5, 4, "fixed"), sb.beam_sampling(3)):
        assert_same(pair, method, "rule", {"top_k": 12, **stops, "eos_token_id": list(range(0, 60, 6))})


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 3}], ids=str)
def test_of_equals_the_first_is_best(options):
    """Twice forty words with the same odds."""
    model = tiny("llama", seed=1, vocab_size=80, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[::40].repeat_interleave(40, 0))
    equal = sb.load(model, model)
    for method in METHODS[:8]:
        assert_same(equal, method, "rule", {**options, "eos_token_id": []}, [[3, 4, 5]])


def noted(step, calls):
    """A step that notes whether it or its source was called."""

    class Noted:
        def __call__(self, *given):
            calls.append("compiled")
            return step(*given)

        def py_func(self, *given):
            calls.append("source")
            return step.py_func(*given)

    return Noted()


@pytest.mark.parametrize(
    ("module", "name", "method"),
    [
        (walk, "walk_down", sb.rsd_c((3, 2))),
        (traversal, "climb", sb.traversal((2, 2))),
        (judge_steps, "judge", sb.dsbd(3, 5, 4, "fixed")),
    ],
    ids=["walk_down", "climb", "judge"],
)
def test_the_source_runs_only_where_python_has_to_look(pair, module, name, method, monkeypatch):
    calls = []
    monkeypatch.setattr(module, name, noted(getattr(module, name), calls))
    cases = {
        "ordinary": ({}, False, "compiled"),
        "temperature 0": ({"temperature": 0}, False, "compiled"),
        "top-k": ({"top_k": 6}, False, "compiled"),
        "min-p": ({"min_p": 0.1}, False, "compiled"),
        "processors": ({"repetition_penalty": 1.3}, False, "source"),
        "audits": ({}, True, "compiled"),
    }
    for case, (options, audited, expected) in cases.items():
        calls.clear()
        session = begun(pair, options, method=method)
        session.audited = audited
        ((_, turn),) = turns(pair.target, [session])
        for lm in (pair.target, pair.draft):
            lm.close(session)
        assert turn.verdict.steps
        assert calls == [expected], case


@pytest.mark.parametrize("method", [sb.dsbd(3, 5, 4, "fixed"), sb.rsd_c((3, 2))], ids=lambda one: one.name)
def test_what_is_watched_runs_from_source_and_is_the_same(pair, method):
    """Audits see every layer, and change no text. For that they decide no layer without the rows of all live beams."""
    plain, audited = (
        sb.generate(pair, [1, 7, 3], method, seed=4, max_new_tokens=12, audit=audit)[0] for audit in (False, True)
    )
    assert audited.tokens == plain.tokens
    assert audited.report.audit.draws == len(audited.report.widths)

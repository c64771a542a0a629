"""Every recipe for one sequence on tables: exact laws by enumeration; the same text as plain sampling where noise is shared."""

from dataclasses import dataclass

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.beams import room_for_texts
from specbeam.core.draft import suffixes
from specbeam.core.draft.indexes import add_token, find_after, gram_index
from specbeam.core.draft.recycle import Successors, template
from specbeam.core.draft.tree import Complete
from specbeam.core.laws.warp import Warp
from specbeam.core.records import Shape
from specbeam.core.verify.walk import MatchRule
from specbeam.models.table import TableLM
from tests.support.checking import refused
from tests.support.exact import distance
from tests.support.examples import PAIRS, completed, law_and_mean, one_turn
from tests.support.programs import random_table, run, session_of
from tests.support.steps import source_of_steps

CLOSE = 1e-12
NO_NEW_TOKENS = room_for_texts(None, 1, 1)
DRAWN = {
    "chain": lambda: sb.speculative_sampling(2),
    "chain, traversal": lambda: sb.speculative_sampling(2, rule="traversal"),
    "block": lambda: sb.block_verification(2),
    "specinfer": lambda: sb.specinfer((2, 1)),
    "rsd_c": lambda: sb.rsd_c((2, 1)),
    "sequoia": lambda: sb.sequoia(3, 2),
    "dyspec": lambda: sb.dyspec(3, 2, 0.2),
    "dyspec, traversal": lambda: sb.dyspec(3, 2, 0.2, rule="traversal"),
    "spechub": lambda: sb.spechub(2),
    "traversal": lambda: sb.traversal((2, 1)),
    "multi_draft": lambda: sb.multi_draft(counts=(1, 1)),
}
MATCHED = {
    "opt_tree": lambda: sb.opt_tree(4, 2, 3),
    "eagle-2": lambda: sb.opt_tree(4, 2, 3, within_layer=True),
    "gsd": lambda: sb.gsd(2, 2, nodes=8),
    "specinfer matched": lambda: sb.specinfer((2, 1), rule="match"),
    "prompt_lookup": lambda: sb.prompt_lookup(3),
    "suffix_match": lambda: sb.suffix_match(4),
    "token_recycling": lambda: sb.token_recycling(3),
}
TABLES = PAIRS | {
    "zeros": (random_table(1, 3, zeros=True), random_table(2, 3, zeros=True)),
    "apart": (lambda path: np.array([0.5, 0.5, 0.0]), lambda path: np.array([0.0, 0.0, 1.0])),
}


def parts_on(method, target):
    def make(lm):
        twin = TableLM(lm._law)  # multi_draft needs a second model
        made = method() if method is not DRAWN["multi_draft"] else sb.multi_draft([twin], (1, 1))
        return sb.Method(made.name, made.law, 1, lambda _, draft: made.build(TableLM(target), lm))

    return make


@pytest.mark.parametrize("pair", TABLES)
@pytest.mark.parametrize("eos", [(), (1,)])
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_trees_have_the_target_law(name, pair, eos):
    target, draft = TABLES[pair]
    law, _ = law_and_mean(one_turn(parts_on(DRAWN[name], target), target, draft, eos=eos), target, 3, eos)
    assert distance(law, completed(target, (), 3, eos)) < CLOSE


def test_dyspec_keeps_to_its_budget():
    draft = TableLM(random_table(3, 6))
    sizes = set()
    for nodes in (1, 3, 7):
        for key in range(20):
            session = session_of(sb.dyspec(nodes, 4, 0.01), draft, steps=9, key=key)
            with source_of_steps():
                (forest,) = session.parts.drafter.draft([session], [session.parts.controller.plan(session)])
            assert forest.size - 1 <= nodes
            sizes.add(forest.size - 1)
    assert {1, 3, 7} <= sizes


def test_gsd_keeps_to_its_budget():
    draft = TableLM(random_table(3, 4))
    for nodes in (1, 5, 9):
        session = session_of(sb.gsd(4, 3, nodes=nodes), draft, steps=20)
        (forest,) = session.parts.drafter.draft([session], [session.parts.controller.plan(session)])
        assert forest.size - 1 == nodes


def test_recycling_drafts_no_end_and_no_token_twice_and_learns_from_the_deepest():
    memory = Successors(np.array([[1, 1, 2, 3], [0, 2, 2, 2], [3, 3, 3, 1], [0, 0, 0, 0]], dtype=np.int32))
    parts = sb.token_recycling(1, memory).parts(TableLM(random_table(1, 4)))
    session = session_of(sb.Method("", "", 1, lambda *_: parts), None, steps=9, eos=(3,))
    (forest,) = parts.drafter.draft([session], [Shape(1, 0)])  # from the prompt's token 0
    assert forest.tokens[1:].tolist() == [1, 2]  # 1 once, in the order of ranks; 3 would end
    memory.learn(np.array([2, 0, 2]), np.array([[0, 1], [2, 3], [3, 0]], dtype=np.int32))
    assert memory.table[2, :2].tolist() == [3, 0]  # of two rows the later, which is the deeper one


@pytest.mark.parametrize("name", [*DRAWN, *MATCHED])
def test_at_temperature_zero_all_are_greedy(name):
    for case in range(4):
        target, draft = random_table(case, 5), random_table(case + 9, 5)
        plain, path = [], ()
        for _ in range(9):
            path = (*path, int(np.argmax(target(path))))
            plain.append(path[-1])
        method = parts_on({**DRAWN, **MATCHED}[name], target)(TableLM(draft))
        session = session_of(method, TableLM(draft), steps=9, warp=Warp(greedy=True))
        run(session, TableLM(target))
        assert [*session.settled, *session.tails[0].tolist()] == plain


@pytest.mark.parametrize("name", MATCHED)
def test_matched_trees_give_the_text_of_plain_sampling(name):
    """The next token is drawn by the noise of its place, so drafts cannot change it."""
    accepted = 0
    for case in range(6):
        target, draft = random_table(case, 4), random_table(case + 9, 4)
        plain = session_of(sb.sampling(), None, steps=14, key=case, eos=(3,))
        run(plain, TableLM(target))
        session = session_of(
            parts_on(MATCHED[name], target)(TableLM(draft)), TableLM(draft), steps=14, key=case, eos=(3,)
        )
        run(session, TableLM(target))
        assert [one.tokens for one in session.hypotheses()] == [one.tokens for one in plain.hypotheses()]
        accepted += session.count.accepted
    assert accepted > 0


@pytest.mark.parametrize("name", MATCHED)
def test_matching_has_the_target_law(name):
    target, draft = PAIRS["EX3M"]

    def make(lm):
        made = parts_on(MATCHED[name], target)(lm)
        parts = made.parts(None, lm)
        return sb.Method("", "", 1, lambda *_: type(parts)(parts.drafter, MatchRule("dice"), parts.controller, ""))

    law, _ = law_and_mean(one_turn(make, target, draft), target, 3)
    assert distance(law, completed(target, (), 3)) < CLOSE


@pytest.mark.parametrize("match", ["last", "first"])
def test_gram_index_is_brute_force(match):
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = rng.integers(0, 3, int(rng.integers(1, 25))).tolist()
        index = gram_index(3, match == "first", len(text))
        with source_of_steps():
            for token in text:
                add_token(index, token)
            start, stop = find_after(index, len(text), NO_NEW_TOKENS, 0, 4)
        expected = []
        for size in range(min(3, len(text)), 0, -1):
            places = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
            if places:
                place = places[-1] if match == "last" else places[0]
                expected = text[place : place + 4]
                break
        assert index.text[start:stop].tolist() == expected


def test_suffix_automaton_knows_the_longest_earlier_suffix():
    """The clone rule matters on small alphabets: without it the match is lost in many insertions."""
    rng = np.random.default_rng(1)
    with source_of_steps():
        for case in range(400):
            text = []
            index = suffixes.suffix_index(9.0, 30)
            for token in rng.integers(0, 2 + case % 3, 30).tolist():
                text.append(token)
                add_token(index, token)
                longest = 0
                for size in range(1, len(text)):
                    if any(text[end - size : end] == text[-size:] for end in range(size, len(text))):
                        longest = size
                assert index.numbers[suffixes.MATCHED] == longest
                if longest:
                    start, stop = find_after(index, len(text), NO_NEW_TOKENS, 0, 3)
                    drafted = index.text[start:stop].tolist()
                    places = [end for end in range(longest, len(text)) if text[end - longest : end] == text[-longest:]]
                    assert any(text[end : end + 3] == drafted for end in places)


def test_the_published_recycling_template():
    paths = template()
    assert [sum(len(path) == depth for path in paths) for depth in range(1, 7)] == [8, 21, 25, 15, 8, 3]
    assert all(path[:-1] in {(), *paths} for path in paths)


def test_recycling_learns_saves_and_loads(tmp_path):
    """A text of first order: once every token was seen, whole drafts are accepted."""
    following = {0: 1, 1: 2, 2: 3, 3: 0}

    def law(path):
        sure = np.eye(4)[following[path[-1] if path else 0]]
        return 0.97 * sure + 0.01 * (1 - sure)

    memory = Successors.empty(4, 2)
    for _ in range(2):
        parts = sb.token_recycling(4, memory, controller="fixed").parts(TableLM(law))
        session = session_of(sb.Method("", "", 1, lambda *_, p=parts: p), None, steps=24, warp=Warp(greedy=True))
        turns = run(session, TableLM(law))
    assert len(turns) <= 6
    memory.save(tmp_path / "memory.npy")
    np.testing.assert_array_equal(Successors.load(tmp_path / "memory.npy").table, memory.table)
    with pytest.raises(sb.SpecbeamError, match="no file"):
        Successors.load(tmp_path / "nothing.npy")


def test_gsd_on_its_worked_example():
    """Two candidates, two layers: four drafted nodes instead of six, two merge edges, eight nodes unrolled, three deep."""
    from specbeam.core.draft.merged import Graph
    from specbeam.core.draft.tree import GrowingTree
    from specbeam.core.laws.rows import RowLaw

    every = np.zeros(0, dtype=np.int64)
    draft = PAIRS["EX3M"][1]
    session = session_of(sb.sampling(), None, steps=9)
    growing = GrowingTree.start(session, Shape(2, 0))
    growth = Graph(2, 0, 0.0, 0.0, 100)
    for layer in range(2):
        paths = [tuple(growing.forest.path(node)) for node in growing.frontier]
        growth.grow(growing, layer, [RowLaw(every, np.log(draft(path)), 3) for path in paths])
    edges = growing.memory["edges"]
    assert growing.forest.size == 5
    assert sum(map(len, edges.values())) - 4 == 2
    growth.finish(growing)
    tree = growing.forest.selected(growing.kept)
    assert (tree.size - 1, tree.depths().max()) == (8, 3)
    assert not tree.siblings.have_laws


@pytest.mark.parametrize(("context", "drafted", "unrolled"), [(0, 6, 24), (1, 9, 30), (-1, 14, 14)])
def test_gsd_three_layers_deep(context, drafted, unrolled):
    """The more must agree before two runs are one, the more is drafted."""
    from specbeam.core.draft.merged import Graph
    from specbeam.core.draft.tree import TreeDrafter

    draft = PAIRS["EX3M"][1]
    session, sizes = session_of(sb.sampling(), None, steps=20), []
    session.prompt = [9]  # none of the three tokens, or it would be a repeat itself
    growth = Graph(2, context, 0.0, 0.0, 100)

    @dataclass(frozen=True)
    class Watched(Complete):
        def grow(self, growing, layer, laws):
            growth.grow(growing, layer, laws)
            sizes.append(growing.forest.size - 1)

        def finish(self, growing):
            growth.finish(growing)

    (tree,) = TreeDrafter(TableLM(draft), Watched()).draft([session], [Shape(3, 0)])
    assert (sizes[-1], tree.size - 1) == (drafted, unrolled)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sb.propd(controller="fats"), "controller is 'fats'; it must be one of auto, fixed, confidence"),
        (lambda: sb.traversal(children="x"), "children is 'x'"),
        (lambda: sb.prompt_lookup(match="x"), "match is 'x'"),
        (lambda: sb.gsd(context=-5), "context is -5"),
        (lambda: sb.dyspec(least=2.0), "least is 2.0"),
        (lambda: sb.suffix_match(per_match=-1), "per_match is -1"),
        (lambda: sb.token_recycling(nodes=500), "the published tree has 80"),
        (lambda: sb.speculative_sampling(rule="x"), "rule is 'x'"),
        (lambda: sb.speculative_sampling(controller="x"), "controller is 'x'"),
    ],
)
def test_settings_that_make_no_sense_are_named(make, message):
    with refused(message):
        make()


def test_a_table_of_another_vocabulary_is_refused():
    method = sb.token_recycling(3, memory=Successors.empty(9))
    with pytest.raises(sb.SpecbeamError, match="memory holds 9 tokens, but the target's vocabulary has 5"):
        method.parts(TableLM(random_table(1, 5)))
    method = sb.token_recycling(3)  # one method, two models
    for vocab in (5, 9):
        session = session_of(
            sb.Method("", "", 1, lambda *_, v=vocab: method.parts(TableLM(random_table(1, v)))), None, steps=6
        )
        run(session, TableLM(random_table(1, vocab)))

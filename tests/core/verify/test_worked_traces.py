"""What the papers' small examples say of single runs: coins, masks, rejections, and biases that must be seen."""

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.control.fixed import FixedShape
from specbeam.core.draft import merged
from specbeam.core.draft.children import Distinct
from specbeam.core.draft.merged import Graph
from specbeam.core.draft.tree import Branching, GrowingTree, TreeDrafter
from specbeam.core.forest import Forest
from specbeam.core.laws.rows import RowLaw
from specbeam.core.records import Shape
from specbeam.core.session import Parts
from specbeam.core.verify.walk import PathRule
from specbeam.engines.kv.trie import KVTrie
from specbeam.models.table import TableLM
from tests.support.exact import exact_law
from tests.support.examples import PAIRS, completed, law_and_mean, one_turn
from tests.support.programs import run, session_of
from tests.support.quick import first_quick
from tests.support.thinned import Thinned
from tests.support.trials import drawn, tried

P = np.array([0.3, 0.4, 0.3])
Q = np.array([0.6, 0.3, 0.1])


class Coins:
    """Dice that toss these uniforms and note what they are asked to pick from."""

    def __init__(self, *coins):
        self.coins = list(coins)
        self.laws = []

    def flip(self, odds):
        return self.coins.pop(0) < odds

    def pick(self, law):
        self.laws.append((law / law.sum()).tolist())
        return int(law.argmax())


def test_a_refused_draft_is_replaced_from_the_residual():
    """Draft a, coin 0.7: 0.7 * 0.6 >= 0.3, so the token comes from (0, 1/3, 2/3)."""
    dice = Coins(0.7)
    (taken,) = tried(drawn([0], Q, 3, distinct=False), P, 1, dice, True)
    assert taken.draft == -1
    assert dice.laws == [pytest.approx([0, 1 / 3, 2 / 3])]


@pytest.mark.parametrize(("coin", "token", "draft"), [(0.3, 1, 1), (0.6, 2, -1)])
def test_siblings_without_replacement(coin, token, draft):
    """Draws (a, b): a fails at 0.7; b of law (0, 3/4, 1/4) is tried against (0, 1/3, 2/3); if it fails, c is sure."""
    dice = Coins(0.7, coin)
    (taken,) = tried(drawn([0, 1], Q, 3, distinct=True), P, 1, dice, True)
    if coin == 0.6:  # 0.6 * 3/4 >= 1/3
        assert dice.laws == [pytest.approx([0, 0, 1])]
    assert (taken.token, taken.draft) == (token, draft)


def test_each_node_sees_its_ancestors_and_itself():
    """The expansion <2, 2, 1>, breadth first: the child of node 4 sees {0, 1, 4, 8}, node 5 sees {0, 2, 5}."""
    forest = Forest.rooted([7]).grown([1, 2, 1, 2, 1, 2, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 3, 4, 5, 6])
    trie = KVTrie([7])
    trie.enter(forest)
    feed = trie.feed(trie.pending)
    node_at = {slot: node for node, slot in enumerate(feed.slots.tolist())}
    seen = [{node_at[slot] for slot in np.flatnonzero(row).tolist()} for row in feed.seen]
    assert seen[8] == {0, 1, 4, 8}
    assert seen[5] == {0, 2, 5}
    assert feed.positions.tolist() == [0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]


REJECTIONS = [  # (pair, rule, tokens, mean number of rejections), arXiv 2411.00841
    ("EX3", "path", 2, 6 / 10), ("EX3M", "path", 1, 3 / 10), ("EX3M", "path", 2, 5 / 8), ("EX3", "traversal", 2, 27 / 50),
    pytest.param("EX3M", "path", 3, 1849 / 2000, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("pair", "rule", "tokens", "expected"), REJECTIONS)
def test_rejections_of_drafts_that_reach_the_end(pair, rule, tokens, expected):
    """The sum of total variations over contexts of the target; judged from the end, blocks are rejected less often."""
    target, draft = PAIRS[pair]

    def program(dice):
        session = session_of(sb.speculative_sampling(9, rule), TableLM(draft), dice, tokens + 1)
        return sum(turn.verdict.accepted < turn.forest.layers for turn in run(session, TableLM(target)))

    found = exact_law(program)
    assert sum(count * odds for count, odds in found.items()) == pytest.approx(expected)


@pytest.mark.parametrize(("pair", "error"), first_quick([("EX3", 0.023), ("EX3M", 0.036)]))
def test_trying_what_was_pruned_by_content_is_biased(pair, error):
    target, draft = PAIRS[pair]

    def method(lm):
        drafter = Thinned(TreeDrafter(lm, Branching((2, 2), Distinct())), draft, claims=True)
        return sb.Method("", "", 1, lambda *_: Parts(drafter, PathRule(), FixedShape(2, 0), ""))

    law, _ = law_and_mean(one_turn(method, target, draft), target, 2)
    true = completed(target, (), 2)
    assert max(abs(law.get(text, 0.0) - odds) for text, odds in true.items()) > error / 2


def test_without_its_check_a_graph_has_a_cycle_that_fills_the_cap(monkeypatch):
    draft = PAIRS["EX3M"][1]
    monkeypatch.setattr(merged, "_reaches", lambda *_: False)
    session = session_of(sb.sampling(), None, steps=99)
    session.prompt = [9]
    growth = Graph(2, 0, 0.0, 0.0, 40)
    tree = GrowingTree.start(session, Shape(2, 0))
    for layer in range(2):
        paths = [tuple(tree.forest.path(node)) for node in tree.frontier]
        growth.grow(tree, layer, [whole_law(draft(path)) for path in paths])
    growth.finish(tree)
    assert tree.forest.selected(tree.kept).size - 1 == 39


def whole_law(odds):
    """A law on the whole vocabulary."""
    return RowLaw(np.zeros(0, dtype=np.int64), np.log(odds), len(odds))

"""Rules for one sequence on every lawful tree: exact laws, and the accepted tokens of the worked examples."""

import numpy as np
import pytest

import specbeam as sb
from specbeam.control.fixed import FixedShape
from specbeam.draft.children import Best, BestAndOne, Distinct, Independent
from specbeam.draft.merged import Pruned
from specbeam.draft.tree import Branching, TreeDrafter
from specbeam.errors import LostLaw
from specbeam.lm.table import TableLM
from specbeam.session import Parts
from specbeam.verify.match import MatchRule
from specbeam.verify.path import PathRule
from specbeam.verify.traversal import TraversalRule
from tests.support.exact import distance
from tests.support.examples import PAIRS, completed, law_and_mean, one_turn
from tests.support.programs import random_table

CLOSE = 1e-12
RULES = {"path": PathRule(), "traversal": TraversalRule(), "match": MatchRule("dice")}


def method_of(counts, children, rule):
    return lambda lm: sb.Method(
        "tree",
        "",
        1,
        lambda *_: Parts(TreeDrafter(lm, Branching(counts, children)), rule, FixedShape(len(counts), 0), ""),
    )


def check(pair, counts, children, rule, eos=()):
    target, draft = pair
    program = one_turn(method_of(counts, children, rule), target, draft, len(counts), eos=eos)
    length = len(counts) + 1
    law, mean = law_and_mean(program, target, length, eos)
    assert distance(law, completed(target, (), length, eos)) < CLOSE
    return mean


# (pair, counts, children, rule): mean number of accepted drafts
W, R, G, K = Independent(), Distinct(), BestAndOne(), Best()
WORKED = [
    ("EX3", (1, 1), W, "path", 119 / 100), ("EX3M", (1, 1), W, "path", 47 / 40),
    ("EX3M", (1, 1, 1), W, "path", 6009 / 4000), ("EX3", (1, 1, 1, 1), W, "path", 1.7731),
    ("EX3", (1, 1), W, "traversal", 5 / 4), ("EX3M", (1, 1), W, "traversal", 5 / 4),
    ("EX3", (1, 1, 1), W, "traversal", 213 / 125), ("EX3M", (1, 1, 1), W, "traversal", 429 / 250),
    ("EX3", (1, 1, 1, 1), W, "traversal", 20887 / 10000), ("EX3M", (1, 1, 1, 1), W, "traversal", 4201 / 2000),
    ("EX3", (1,), W, "path", 7 / 10), ("EX3", (2,), W, "path", 41 / 50), ("EX3", (3,), W, "path", 106 / 125),
    ("EX3", (1,), W, "match", 0.33), ("EX3", (2,), W, "match", 0.513), ("EX3", (3,), W, "match", 0.6249),
    ("EX3M", (2, 2), W, "path", 1.44335), ("EX3", (2, 2), W, "traversal", 1.5464), ("EX3M", (2, 2), W, "traversal", 1.4996),
    ("EX3", (2,), R, "path", 7 / 8), ("EX3", (3,), R, "path", 1.0),
    ("EX3", (2, 1), R, "path", 119 / 80), ("EX3M", (2, 1), R, "path", 117 / 80),
    ("EX3", (2, 2), R, "path", 105 / 64), ("EX3M", (2, 2), R, "path", 3833 / 2400),
    ("EX3", (2, 1), R, "traversal", 1.57), ("EX3M", (2, 1), R, "traversal", 1.5625),
    ("EX3", (2, 2), R, "traversal", 541 / 320), ("EX3M", (2, 2), R, "traversal", 1329 / 800),
    ("EX3", (2,), G, "path", 19 / 20), ("EX3", (3,), G, "path", 1.0),
    ("EX3", (2, 2), G, "path", 1.8525), ("EX3M", (2, 2), G, "path", 1.793333333333),
    ("EX3", (2, 2), G, "traversal", 1.885), ("EX3M", (2, 2), G, "traversal", 1.9),
    ("EX3", (2, 2), K, "path", 1.19), ("EX3M", (2, 2), K, "path", 1.085),
    ("EX3", (2, 2), K, "traversal", 1.19), ("EX3M", (2, 2), K, "traversal", 1.085),
    ("EX3", (2, 2), K, "match", 1.19), ("EX3M", (2, 2), K, "match", 1.085),
]  # fmt: skip
LONG = [
    ("EX3", (3, 2), R, "path", 15 / 8), ("EX3M", (3, 2), R, "path", 2209 / 1200),
    ("EX3", (2, 1, 1), R, "path", 1533 / 800), ("EX3M", (2, 1, 1), R, "path", 14949 / 8000),
    ("EX3", (3, 2), R, "traversal", 77 / 40), ("EX3M", (3, 2), R, "traversal", 381 / 200),
    ("EX3", (2, 1, 1), R, "traversal", 2.14575), ("EX3M", (2, 1, 1), R, "traversal", 2.140125),
    ("EX3", (2, 1, 1), G, "path", 2.0805), ("EX3M", (2, 1, 1), G, "path", 2.034),
    ("EX3", (2, 1, 1), G, "traversal", 2.3365), ("EX3M", (2, 1, 1), G, "traversal", 2.261875),
]  # fmt: skip


def name_of(case):
    pair, counts, children, rule, _ = case
    return f"{pair}-{counts}-{type(children).__name__}-{rule}"


@pytest.mark.parametrize("case", WORKED, ids=name_of)
def test_worked_examples(case):
    pair, counts, children, rule, accepted = case
    assert check(PAIRS[pair], counts, children, RULES[rule]) == pytest.approx(accepted, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG, ids=name_of)
def test_long_worked_examples(case):
    pair, counts, children, rule, accepted = case
    assert check(PAIRS[pair], counts, children, RULES[rule]) == pytest.approx(accepted, abs=1e-9)


def disjoint(path):
    return np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.0, 1.0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("children", [W, R, Distinct(fallback=True), G, K], ids=lambda one: repr(one))
def test_random_tables_with_zeros_duplicates_disjoint_supports_and_ends(rule, children):
    for seed in range(3):
        pair = random_table(seed, 3, zeros=True), random_table(seed + 50, 3, zeros=seed != 1)
        check(pair, (2, 1), children, RULES[rule])
        check(pair, (2, 1), children, RULES[rule], eos=(1,))
    apart = (lambda path: disjoint(path)[0]), (lambda path: disjoint(path)[1])
    assert check(apart, (2,), children, RULES[rule]) in (
        0.0,
        pytest.approx(0.5),
        pytest.approx(0.75),
        pytest.approx(1.0),
    )
    same = random_table(7, 3), random_table(7, 3)
    if rule != "match" and children in (W, R):
        assert check(same, (2, 1), children, RULES[rule]) == pytest.approx(2.0)


def test_traversal_never_accepts_less():
    for seed in range(12):
        pair = random_table(seed, 2), random_table(seed + 90, 2)
        for children in (W, R):
            by_path = check(pair, (2, 1), children, PathRule())
            assert check(pair, (2, 1), children, TraversalRule()) >= by_path - 1e-12


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("counts", "children"), [((1, 1), Independent()), ((2,), Distinct()), ((2,), Independent())])
@pytest.mark.parametrize("top", [1, 2])
def test_a_tree_that_was_pruned_by_content_is_matched_and_not_tried(pair, counts, children, top):
    """Whatever was dropped: nothing, one sibling, or all of them, of which nothing is left to see."""
    target, draft = PAIRS[pair]

    def pruned(rule):
        def method(lm):
            drafter = Pruned(TreeDrafter(lm, Branching(counts, children)), TableLM((0.5, 0.3, 0.2)), top)
            return sb.Method("pruned", "", 1, lambda *_: Parts(drafter, rule, FixedShape(len(counts), 0), ""))

        return method

    law, _ = law_and_mean(one_turn(pruned(RULES["match"]), target, draft, len(counts)), target, len(counts) + 1)
    assert distance(law, completed(target, (), len(counts) + 1)) < CLOSE
    for name in ("path", "traversal"):
        with pytest.raises(LostLaw, match="pruned by content"):
            law_and_mean(one_turn(pruned(RULES[name]), target, draft, len(counts)), target, len(counts) + 1)

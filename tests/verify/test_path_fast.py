"""Drafts tried in one loop against the same, token by token."""

import pytest

import specbeam as sb
from specbeam import kernels
from specbeam.forest import Forest, Group
from specbeam.verify.path_fast import _drawn, walk_at_once
from specbeam.verify.single import Walk
from tests.draft.test_tree_fast import begun
from tests.support.loops import OPTIONS, assert_same, pair

if not kernels.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

__all__ = ["pair"]  # a fixture
METHODS = [
    sb.speculative_sampling(4), sb.specinfer((3, 2)), sb.rsd_c((3, 2)), sb.rsd_s(3, 3), sb.dyspec(6, 3), sb.sequoia(6, 3),
    sb.spechub(2),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("method", METHODS, ids=lambda one: one.name)
def test_texts_and_reports_are_the_same(pair, method, options):
    assert_same(pair, method, "rule", options)


def turn(pair, options, method):
    session = begun(pair, options)
    (forest,) = method.build(pair.target, pair.draft).drafter.draft([session], [session.parts.controller.plan(session)])
    (scored,) = pair.target.extend([session], [forest])
    for lm in (pair.target, pair.draft):
        lm.close(session)
    return session, forest, scored


@pytest.mark.parametrize(
    "method", [sb.speculative_sampling(3), sb.rsd_c((2, 2)), sb.dyspec(5, 2)], ids=lambda one: one.name
)
def test_the_loop_walks_to_the_end(pair, method):
    session, forest, scored = turn(pair, {"top_k": 6}, method)
    walk = Walk(session, forest, scored)
    assert walk_at_once(session, forest, walk)
    assert walk.verdict().steps


def test_what_the_loop_leaves_alone(pair):
    for options, method in [({}, sb.speculative_sampling(3)), ({"temperature": 0}, sb.speculative_sampling(3)),
                            ({"top_k": 6}, sb.spechub(2))]:  # fmt: skip
        session, forest, scored = turn(pair, options, method)
        walk = Walk(session, forest, scored)
        assert not walk_at_once(session, forest, walk)
        assert walk.node == 0
    session, forest, scored = turn(pair, {"top_k": 6}, sb.speculative_sampling(3))
    assert _drawn(forest) is not None
    first: Group = forest.groups[0]
    assert _drawn(Forest(forest.tokens, forest.parents, (first, first))) is None
    assert _drawn(forest.lost()) is None
    session.audited = True
    assert not walk_at_once(session, forest, Walk(session, forest, scored))

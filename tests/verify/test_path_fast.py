"""Drafts tried in one loop against the same, token by token."""

import pytest
import torch
from specbeam.forest import Forest, Group
from specbeam.verify.path_fast import _drawn, walk_at_once
from specbeam.verify.single import Walk

import specbeam as sb
from specbeam import kernels
from tests.draft.test_tree_fast import begun
from tests.support.loops import OPTIONS, assert_same, pair
from tests.support.tiny_models import tiny

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


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 6}], ids=str)
@pytest.mark.parametrize(
    "method", [sb.speculative_sampling(3), sb.rsd_c((2, 2)), sb.dyspec(5, 2)], ids=lambda one: one.name
)
def test_the_loop_walks_to_the_end(pair, method, options):
    session, forest, scored = turn(pair, options, method)
    walk = Walk(session, forest, scored)
    assert walk_at_once(session, forest, walk)
    assert walk.verdict().steps


def test_what_the_loop_leaves_alone(pair):
    for options, method in [({"repetition_penalty": 1.3}, sb.speculative_sampling(3)),
                            ({"min_p": 0.1}, sb.speculative_sampling(3)), ({"top_k": 6}, sb.spechub(2))]:  # fmt: skip
        session, forest, scored = turn(pair, options, method)
        walk = Walk(session, forest, scored)
        assert not walk_at_once(session, forest, walk)
        assert walk.node == 0
    session, forest, scored = turn(pair, {"top_k": 6}, sb.speculative_sampling(3))
    assert _drawn(forest, forest.groups[0].law.vocab) is not None
    first: Group = forest.groups[0]
    assert _drawn(Forest(forest.tokens, forest.parents, (first, first)), first.law.vocab) is None
    assert _drawn(forest, first.law.vocab + 1) is None
    assert _drawn(forest.lost(), first.law.vocab) is None
    assert _drawn(forest, first.law.vocab, greedy=True) is None
    session.audited = True
    assert not walk_at_once(session, forest, Walk(session, forest, scored))


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 3}], ids=str)
def test_of_equals_the_first_is_best(options):
    """Twice forty words with the same odds."""
    model = tiny("llama", seed=1, vocab_size=80, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[::40].repeat_interleave(40, 0))
    equal = sb.load(model, model)
    for method in METHODS:
        assert_same(equal, method, "rule", {**options, "eos_token_id": []}, [[3, 4, 5]])

"""A draft as one loop against the same draft layer by layer."""

from dataclasses import replace

import numpy as np
import pytest

import specbeam as sb
from specbeam import kernels
from specbeam.draft.beams import BeamDrafter
from specbeam.draft.model_fast import draft_at_once
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.records import Shape
from specbeam.request import Request
from specbeam.settings import Settings
from tests.support.loops import OPTIONS, assert_same, pair, step_by_step
from tests.support.tiny_models import tiny

if not kernels.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

__all__ = ["pair"]  # a fixture


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("method", [sb.dsbd(3, 5, 4, "fixed"), sb.dsbd(4, 4, 2), sb.dsbd(1, 3, 5, "fixed")])
def test_texts_and_reports_are_the_same(pair, method, options):
    assert pair.draft.engine == "compiled"
    assert_same(pair, method, "drafter", options)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_the_model_counts_the_passes_that_ran_its_layers(pair, temperature):
    """Behind a turn that collapsed the first logits may be known: no layer runs for them."""
    counts = []
    for method in (sb.dsbd(3, 5, 3, collapse=True), step_by_step(sb.dsbd(3, 5, 3, collapse=True), "drafter")):
        before = pair.draft.passes
        for seed in range(8):
            sb.generate(pair, [1, 7, 3], method, seed=seed, max_new_tokens=20, temperature=temperature, eos_token_id=[])
        counts.append(pair.draft.passes - before)
    assert counts[0] == counts[1]


def begun(pair, options, **more):
    settings = Settings(max_new_tokens=9, **options)
    return Request(pair, [[1, 7, 3]], sb.dsbd(3, 6, 3, "fixed"), replace(settings, **more), seed=0).sessions[0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forests_are_the_same(pair, options):
    forests = []
    for at_once in (True, False):
        session = begun(pair, options)
        forests += BeamDrafter(pair.draft, 3, at_once=at_once).draft([session], [Shape(3, 6)])
        assert session.count.draft_passes == 3
        pair.draft.close(session)
    for name in ("tokens", "parents"):
        assert getattr(forests[0], name).tolist() == getattr(forests[1], name).tolist()
    for found, expected in zip(forests[0].groups, forests[1].groups, strict=True):
        for name in ("parents", "draw_parents", "draw_tokens", "draw_nodes"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
        assert (found.law is None) == (expected.law is None) == (options.get("temperature") == 0)
        if found.law is not None:
            np.testing.assert_array_equal(found.law.logp, expected.law.logp)


def test_what_the_loop_cannot_decide_goes_on_layer_by_layer(pair):
    """Behind a flat row, top-p keeps more than the loop looks at: its row is handed on, and no pass is made twice."""
    flat = tiny("llama", seed=1, vocab_size=512)
    flat.lm_head.weight.data.mul_(0.01)
    wide = sb.load(flat, tiny("llama", seed=2, vocab_size=512))
    own = sb.load(wide.target_model, wide.target_model)
    session = begun(own, {"top_p": 0.9})
    draft = draft_at_once(own.draft, session, Shape(3, 6), 3)
    assert draft.layers == 0
    assert draft.passes == 1
    assert draft.undecided.shape == (1, 512)
    own.draft.close(session)
    before = own.draft.passes
    (forest,) = BeamDrafter(own.draft, 3).draft([session], [Shape(3, 6)])
    assert len(forest.groups) == session.count.draft_passes == own.draft.passes - before == 3
    own.draft.close(session)


def test_when_the_loop_does_not_begin(pair):
    for options, more in [({"top_p": 0.9, "temperature": 0.5}, {}), ({}, {"repetition_penalty": 1.3})]:
        session = begun(pair, options, **more)
        assert draft_at_once(pair.draft, session, Shape(3, 6), 3) is None
    session = begun(pair, {})
    assert draft_at_once(pair.draft, session, Shape(0, 6), 3) is None
    assert draft_at_once(HuggingFaceLM(pair.draft_model, engine="lean"), session, Shape(3, 6), 3) is None
    assert draft_at_once(HuggingFaceLM(pair.draft_model, chunk=8), session, Shape(3, 6), 3) is None


def test_positions_beyond_the_model_are_an_error(pair):
    session = begun(pair, {})
    lm = HuggingFaceLM(tiny("llama", vocab_size=pair.draft.vocab, max_position_embeddings=4))
    with pytest.raises(IndexError, match="position"):
        draft_at_once(lm, session, Shape(3, 6), 3)

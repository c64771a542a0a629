"""A tree as one loop against the same tree layer by layer."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

import specbeam as sb
from specbeam import kernels
from specbeam.core.dice import Dice
from specbeam.draft import tree_fast
from specbeam.draft.children import BestAndOne, Distinct, Independent
from specbeam.draft.tree import Branching, TreeDrafter
from specbeam.draft.tree_fast import tree_at_once
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.records import Shape
from specbeam.request import Request
from specbeam.settings import Settings
from tests.support.loops import OPTIONS, assert_same, pair
from tests.support.tiny_models import tiny

if not kernels.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

__all__ = ["pair"]  # a fixture
METHODS = [
    sb.speculative_sampling(4), sb.specinfer((3, 2, 1)), sb.rsd_c((2, 2, 1)), sb.block_verification(3),
    sb.rsd_c((2, 1), rule="traversal"), sb.speculative_sampling(4, controller="thompson"),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("method", METHODS, ids=lambda one: one.name)
def test_texts_and_reports_are_the_same(pair, method, options):
    assert_same(pair, method, "drafter", options)


def begun(pair, options, seed=0, **more):
    settings = Settings(max_new_tokens=9, eos_token_id=[9, 30], **options)
    return Request(pair, [[1, 7, 3]], sb.speculative_sampling(3), replace(settings, **more), seed).sessions[0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("growth", [Branching((1,), Independent()), Branching((4, 2), Independent()),
                                    Branching((3, 2), Distinct())], ids=str)  # fmt: skip
def test_forests_are_the_same(pair, growth, options):
    grown, uniforms = [], []
    for at_once in (True, False):
        session = begun(pair, options)
        grown += TreeDrafter(pair.draft, growth, at_once=at_once).draft([session], [Shape(3, 1)])
        uniforms.append(session.dice.uniform((3,)).tolist())  # what comes next shows how many were used
        pair.draft.close(session)
    assert uniforms[0] == uniforms[1]
    for name in ("tokens", "parents", "logq"):
        np.testing.assert_array_equal(getattr(grown[0], name), getattr(grown[1], name))
    for found, expected in zip(grown[0].groups, grown[1].groups, strict=True):
        for name in ("parents", "draw_parents", "draw_tokens", "draw_nodes"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
        assert (found.replacement, found.sure) == (expected.replacement, expected.sure)
        assert (found.law is None) == (expected.law is None) == (options.get("temperature") == 0)
        if found.law is not None:
            np.testing.assert_array_equal(found.law.spread().logp, expected.law.spread().logp)


def test_draws_have_the_odds_of_their_law(pair):
    """The loop's own draws, 20,000 of them, against the law that it states."""
    counts = Counter()
    for seed in range(50):
        session = begun(pair, {"top_k": 6}, seed)
        tree = tree_at_once(pair.draft, session, [400], distinct=False)
        pair.draft.close(session)
        (group,) = tree.forest.groups
        counts.update(group.draw_tokens.tolist())
    assert sum(counts.values()) == 20_000
    assert len(group.law) == 6
    hoped = 20_000 * group.law.p
    assert chisquare([counts[token] for token in group.law.tokens.tolist()], hoped).pvalue > 1e-3


def test_what_the_loop_cannot_say_goes_on_layer_by_layer(pair):
    """Behind a flat row, top-p keeps more than is ranked one by one: the row is handed on, and no pass is made twice."""
    flat = tiny("llama", seed=1, vocab_size=2048)
    flat.lm_head.weight.data.mul_(0.01)
    own = sb.load(flat, flat)
    session = begun(own, {"top_p": 0.9})
    tree = tree_at_once(own.draft, session, [2, 1], distinct=True)
    assert tree.undecided.shape == (1, 2048)
    assert tree.passes == len(tree.forest) == 1
    own.draft.close(session)
    before = own.draft.passes
    (forest,) = TreeDrafter(own.draft, Branching((2, 1), Distinct())).draft([session], [Shape(2, 1)])
    assert len(forest.groups) == 3
    assert session.count.draft_passes == own.draft.passes - before == 2
    own.draft.close(session)


@pytest.mark.parametrize("method", METHODS[:4], ids=lambda one: one.name)
def test_equals_of_the_last_one_are_kept_however_many(method):
    """Twice forty words with the same odds: top-k keeps all forty, and the loop has room for k."""
    model = tiny("llama", seed=1, vocab_size=80, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[::40].repeat_interleave(40, 0) * 0.3)
    equal = sb.load(model, model)
    for top_k in (1, 2, 5):
        assert_same(equal, method, "drafter", {"top_k": top_k, "eos_token_id": []}, [[3, 4, 5]])


class Loaded(Dice):
    """Somebody's own dice."""


def test_when_the_loop_does_not_begin(pair, monkeypatch):
    ordinary = pair.draft, begun(pair, {}), [2, 1], True
    cases = {
        "processors": (pair.draft, begun(pair, {}, repetition_penalty=1.3), [2, 1], True),
        "nothing to draft": (pair.draft, begun(pair, {}), [], True),
        "several children at temperature 0": (pair.draft, begun(pair, {"temperature": 0}), [2], True),
        "another engine": (HuggingFaceLM(pair.draft_model, engine="lean"), begun(pair, {}), [2, 1], True),
        "too much at once": (HuggingFaceLM(pair.draft_model, chunk=8), begun(pair, {}), [2, 9], True),
    }
    for name, case in cases.items():
        assert tree_at_once(*case) is None, name
    session = begun(pair, {})
    session.dice = Loaded(0)
    assert tree_at_once(pair.draft, session, [2, 1], distinct=True) is None
    monkeypatch.setattr(tree_fast, "LARGEST", 10)
    assert tree_at_once(*ordinary) is None
    assert not Branching((2,), Distinct(fallback=True)).loops
    assert not Branching((2,), BestAndOne()).loops


def test_dice_give_the_same_stream_however_they_are_asked():
    plain = np.random.Generator(np.random.Philox(key=7)).random(400).tolist()
    dice, found = Dice(7), []
    for count in (3, 70, 1, 64, 200):
        ahead = dice.ahead(count + 5)[:count].tolist()
        dice.use(count // 2)
        found += ahead[: count // 2]
        found += dice.uniform((count - count // 2,)).tolist()
        found.append(dice._next())
    assert found == plain[: len(found)]

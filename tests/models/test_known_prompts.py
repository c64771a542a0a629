"""Beginnings of prompts that are kept: their tree, what it costs to follow a long prompt in it, and the end of keeping them."""

import numpy as np
import pytest

from specbeam.core.forest import Forest
from specbeam.engines.kv.prefix import Beginning, KnownPrompts
from specbeam.engines.kv.store import PanelStore
from specbeam.models.heads.exit import ExitHead
from specbeam.models.huggingface import HuggingFaceLM
from tests.support.seats import seat
from tests.support.tiny_models import tiny

CHUNK = 4


def chunk_of(size=8):
    return [np.zeros(size, dtype=np.uint8)]


def stored(known, prompt, namespace=""):
    """Store a prompt chunk by chunk, and return how far its end is followed."""
    beginning = Beginning(namespace, prompt)
    for start in range(0, len(prompt) - CHUNK, CHUNK):
        if not known.find(beginning, start):
            known.keep(beginning, start, chunk_of())
    return beginning


def test_a_chunk_that_can_never_fit_leaves_no_trace():
    known = KnownPrompts(CHUNK, 8)
    known.keep(Beginning("somebody", [*range(9)]), 0, chunk_of(9))
    assert len(known) == 0
    assert known._spaces == {}


@pytest.mark.parametrize("most", [10**6, 80], ids=["room for all", "room for ten chunks"])
def test_a_long_prompt_is_named_once_and_not_from_its_beginning_for_each_chunk(most, monkeypatch):
    known = KnownPrompts(CHUNK, most)
    named = []
    name = np.ndarray.tobytes
    monkeypatch.setattr("specbeam.engines.kv.prefix._name", lambda tokens: named.append(1) or name(np.asarray(tokens)))
    stored(known, [*range(50 * CHUNK + 1)])
    assert len(known) == min(50, most // 8)
    assert len(named) <= 2 * 50
    known = KnownPrompts(CHUNK, most)
    beginning = Beginning("", [*range(50 * CHUNK + 1)])
    known.keep(beginning, 0, chunk_of())
    other = KnownPrompts(CHUNK, most)  # of a tree that is another by now nothing is known
    assert other.find(beginning, CHUNK) == []
    other.keep(beginning, CHUNK, chunk_of())
    assert len(other) == 0


def test_keeping_prompts_has_an_end():
    lm = HuggingFaceLM(tiny("llama"), chunk=32, engine="plain", share_from=5)
    lm.forget_prompts()
    assert (lm.chunk, lm.share_from) == (32, 5)
    lm.remember_prompts(16, 0)
    lm.remember_prompts(8, 10**6)
    assert (lm.chunk, lm.share_from, lm.known_prompts.chunk) == (8, None, 8)
    lm.forget_prompts()
    assert (lm.chunk, lm.share_from, lm.known_prompts) == (32, 5, None)


def test_of_a_prompt_the_layers_of_the_model_are_kept_and_no_exit_layer():
    lm = HuggingFaceLM(tiny("llama"), engine="layers", share_from=None)
    model_layers = lm.model.config.num_hidden_layers
    head = ExitHead(lm.model, 1)
    lm.runner.exit_layer(head.layer, head.norm, head.after)
    lm.remember_prompts(CHUNK, 10**6)
    prompt = [1 + place % 7 for place in range(3 * CHUNK)]
    found = []
    for _ in range(2):
        one = seat(prompt)
        one.namespace = ""
        one.recalled = {}
        (scored,) = lm.extend([one], [Forest.rooted(prompt[-1:])])
        found.append(scored.logits.clone())
        assert len(lm.runner.store.take(0, np.array([1]))) == 2 * model_layers
        lm.close(one)
    assert (found[0] == found[1]).all()
    assert one.recalled[lm] == 2 * CHUNK


@pytest.mark.parametrize("slots", [range(1, 40), range(16, 32), [5], [3, 4, 9, 2, 40], [9, 8, 7]], ids=str)
def test_panels_are_taken_and_put_slot_by_slot_or_in_slices_alike(slots):
    """What is put elsewhere than it was taken from, by either way, is what the slots hold one by one."""
    chance = np.random.default_rng(0)
    store = PanelStore(3, 2, 6, 16)
    store.reserve(2, 128)
    store.keys_by_panel[:] = chance.random(store.keys_by_panel.shape)
    store.values_by_slot[:] = chance.random(store.values_by_slot.shape)
    source = np.array(slots)
    before = store.keys_by_panel.copy(), store.values_by_slot.copy()
    for goal in (np.arange(50, 50 + len(source)), 127 - 2 * np.arange(len(source))):
        store.put(1, goal, store.take(0, source))
        for one, other in zip(source.tolist(), goal.tolist(), strict=True):
            key = store.keys_by_panel[:, 1, :, other // 16, :, other % 16]
            assert (key == before[0][:, 0, :, one // 16, :, one % 16]).all()
            assert (store.values_by_slot[:, 1, :, other] == before[1][:, 0, :, one]).all()
        untouched = np.setdiff1d(np.arange(128), goal).astype(np.int64)
        assert (store.values_by_slot[:, 1, :, untouched] == before[1][:, 1, :, untouched]).all()
        panels, columns = divmod(untouched, 16)
        assert (store.keys_by_panel[:, 1, :, panels, :, columns] == before[0][:, 1, :, panels, :, columns]).all()
        store.keys_by_panel[:], store.values_by_slot[:] = before

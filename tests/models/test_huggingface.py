"""Logits of a node equal those of a plain forward on its path, whatever happened before."""

import ctypes
import math
import mmap
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specbeam.core import compiling
from specbeam.core.forest import Forest, KnownRows
from specbeam.core.ranked import whole_rows
from specbeam.core.records import Verdict
from specbeam.errors import UnsupportedModel
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.checks import check_scores_forests
from specbeam.models.loading.language_models import language_model
from tests.support.seats import check_rows_and_settle, moved, node_paths, plain_logits, random_forest, random_turn, seat
from tests.support.steps import needs_numba
from tests.support.tiny_models import FAMILIES, NO_SDPA, tiny


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        (family, attention)
        for family in FAMILIES
        for attention in ("sdpa", "eager")
        if family not in NO_SDPA or attention == "eager"
    ],
)
def test_a_node_has_the_logits_of_its_path(family, attention):
    model = tiny(family, attention)
    check_random_turns(HuggingFaceLM(model, chunk=5, engine="plain"), model)


def check_random_turns(lm, model, off=2e-4, turns=6):
    """Requests of different length come and go; random forests, verdicts and compactions; each row against its path."""
    rng = np.random.default_rng(1)
    seats = [seat(rng.integers(0, lm.vocab, length).tolist(), keeps=length != 4) for length in (1, 4, 17)]
    for turn_number in range(turns):
        nodes = rng.integers(0, 9, len(seats)).tolist()
        check_rows_and_settle(lm, model, rng, seats, nodes, off)
        if turn_number % 2:
            for one in seats:
                lm.compact(one)
        if turn_number == 3:  # a request leaves, another comes
            lm.close(seats.pop(0))
            seats.append(seat(rng.integers(0, lm.vocab, 7).tolist(), keeps=True))


@pytest.mark.parametrize("engine", ["plain", *(["compiled"] if compiling.AVAILABLE else [])])
@pytest.mark.parametrize("length", range(1, 14))
def test_turns_that_did_not_ask_leave_more_to_catch_up_with(engine, length):
    """As of a draft model that starts late: its first chunks end before the roots, whose logits are asked for."""
    model, rng = tiny("llama"), np.random.default_rng(length)
    lm, one = HuggingFaceLM(model, chunk=5, engine=engine), seat(rng.integers(0, 61, length).tolist())
    for asks in (False, True, False, False, True, True):
        forest = random_forest(rng, [text[-1] for text in one.texts], lm.vocab, 4 if asks else 0)
        if asks:
            found = lm.extend([one], [forest])[0].logits
            expected = plain_logits(model, node_paths(one.texts, forest))
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        turn = random_turn(rng, forest, lm.vocab, most=4)
        lm.settle(one, turn)
        one.texts = moved(one.texts, forest, turn)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafting_layer_by_layer_gives_the_rows_of_the_new_nodes(family):
    model = tiny(family)
    lm, rng = HuggingFaceLM(model), np.random.default_rng(2)
    one = seat([5, 6, 7])
    for _ in range(4):
        forest = random_forest(rng, [text[-1] for text in one.texts], lm.vocab, 0)
        rows = lm.extend([one], [forest])[0].logits
        for _ in range(3):
            grown = forest.grown(rng.integers(0, lm.vocab, 2), rng.integers(max(0, forest.size - 2), forest.size, 2))
            fresh = lm.extend([one], [grown])[0].logits
            assert len(fresh) == grown.size - forest.size
            rows, forest = torch.cat([rows, fresh]), grown
        forest = forest.grown(rng.integers(0, lm.vocab, 2), [forest.size - 1] * 2)  # a last layer that is never scored
        expected = plain_logits(model, node_paths(one.texts, forest)[: len(rows)])
        torch.testing.assert_close(rows, expected, atol=2e-4, rtol=2e-4)
        turn = random_turn(rng, forest, lm.vocab)
        lm.settle(one, turn)
        one.texts = moved(one.texts, forest, turn)


def test_shared_pending_tokens_are_stored_once():
    lm = HuggingFaceLM(tiny("llama"))
    one = seat([3, 4, 5])
    forest = random_forest(np.random.default_rng(0), [5], lm.vocab, 0).grown([7], [0])
    lm.extend([one], [forest.grown([], [])])
    rng = np.random.default_rng(0)
    turn = random_turn(rng, forest, lm.vocab, most=4)
    lm.settle(one, turn)
    grown = random_forest(rng, turn.verdict.beams.tokens, lm.vocab, 0)
    lm.extend([one], [grown])
    distinct = {tuple(path[:depth]) for path in moved([[3, 4, 5]], forest, turn) for depth in range(1, len(path) + 1)}
    assert lm.held(one) == len(distinct)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        pytest.param("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "apply_residual_connection_post_layernorm": True}, "ALiBi.*normed states", marks=needs_numba),
        pytest.param("falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61, "alibi": True, "activation": "relu2"}, "ALiBi.*'relu2'", marks=needs_numba),
        ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 61}, "ALiBi"),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 61, "state_size": 4}, "recurrent"),
    ],
)  # fmt: skip
def test_families_that_cannot_work_are_refused_at_load(kind, settings, reason):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    with pytest.raises(UnsupportedModel, match=reason):
        language_model(model)


def test_a_model_that_ignores_positions_is_refused_by_the_check():
    model = tiny("llama")
    plain_forward = model.model.forward

    def forgetful(*args, position_ids=None, **kwargs):
        return plain_forward(
            *args, position_ids=torch.zeros_like(position_ids) if position_ids is not None else None, **kwargs
        )

    model.model.forward = forgetful
    with pytest.raises(UnsupportedModel, match="ignores the given masks or positions"):
        check_scores_forests(HuggingFaceLM(model))


def test_a_prompt_of_8192_tokens_is_prefilled_in_chunks():
    model = tiny("llama", max_position_embeddings=9000)
    lm, rng = HuggingFaceLM(model), np.random.default_rng(0)
    prompt = rng.integers(0, lm.vocab, 8192).tolist()
    one = seat(prompt)
    forest = random_forest(rng, [prompt[-1]], lm.vocab, 3)
    widest = 0
    forward = model.forward

    def watched(*args, **kwargs):
        nonlocal widest
        widest = max(widest, kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    model.forward = watched
    lm._keeps_rows = True
    found = lm.extend([one], [forest])[0].logits
    model.forward = forward
    assert widest <= lm.chunk + 3
    assert lm.held(one) == 8192 + 3
    torch.testing.assert_close(found, plain_logits(model, node_paths([prompt], forest)), atol=1e-3, rtol=1e-3)


def test_a_few_caches_of_many_are_scored_without_the_others():
    model = tiny("llama")
    lm = HuggingFaceLM(model, engine="plain")
    seats = [SimpleNamespace(prompt=[3, 4, 5 + place], state={}) for place in range(9)]
    roots = [Forest.rooted([seat.prompt[-1]]) for seat in seats]
    lm.extend(seats, roots)
    chosen = [0, 7]
    forests = [roots[place].grown([6, 7], [0, 1]) for place in chosen]
    for place, forest, rows in zip(
        chosen, forests, lm.extend([seats[place] for place in chosen], forests), strict=True
    ):
        for node, row in zip((1, 2), rows.logits, strict=True):
            plain = model(torch.tensor([seats[place].prompt + forest.path(node)])).logits[0, -1]
            torch.testing.assert_close(row, plain, atol=1e-4, rtol=1e-4)
    assert not isinstance(lm.runner.store.place.caches, slice)


def test_logits_of_roots_are_found_in_whatever_order_they_stand():
    """Beams are in the order of their scores: some roots were scored before, others are new, and neither ascend."""
    model, rng = tiny("llama"), np.random.default_rng(0)
    lm, one = HuggingFaceLM(model), seat([3, 4, 5])
    for _ in range(12):
        forest = random_forest(rng, [text[-1] for text in one.texts], lm.vocab, 6)
        known = forest.selected(np.arange(forest.size - 3))  # the last ones are never scored
        expected = plain_logits(model, node_paths(one.texts, known))
        torch.testing.assert_close(lm.extend([one], [known])[0].logits, expected, atol=2e-4, rtol=2e-4)
        turn = random_turn(rng, forest, lm.vocab, most=6)
        lm.settle(one, turn)
        one.texts = moved(one.texts, forest, turn)


@pytest.mark.parametrize("engine", ["plain", pytest.param("compiled", marks=needs_numba)])
def test_a_pass_may_store_nodes_and_need_no_row(engine):
    """The row of the root was scored a turn before, and the target knows that of the node below it."""
    model = tiny("llama")
    lm, one = HuggingFaceLM(model, engine=engine), seat([3, 4, 5])
    drafted = Forest.rooted([5]).grown([8], [0])
    lm.extend([one], [drafted])
    lm.settle(one, turn_to(drafted, node=1))
    grown = Forest.rooted([8]).grown([9], [0])
    rows = plain_logits(model, node_paths([[3, 4, 5, 8]], grown.grown([10], [1])))
    grown = grown._replace(known=KnownRows(np.array([1]), whole_rows(rows[1:2].numpy())))
    found = lm.extend([one], [grown])[0].logits
    torch.testing.assert_close(found, rows[:1], atol=2e-4, rtol=2e-4)
    deeper = grown.grown([10], [1])
    found = lm.extend([one], [deeper])[0].logits
    torch.testing.assert_close(found, rows[2:], atol=2e-4, rtol=2e-4)
    lm.settle(one, turn_to(deeper, node=2))
    found = lm.extend([one], [Forest.rooted([10])])[0].logits
    torch.testing.assert_close(found, rows[2:], atol=2e-4, rtol=2e-4)


def turn_to(forest, node):
    """A turn that a beam on one node of the forest survives."""
    turn = random_turn(np.random.default_rng(0), forest, vocab=64, most=1)
    layers = turn.verdict.layers
    beams = layers.beams._replace(nodes=np.array([node]), tokens=forest.tokens[[node]])
    return replace(turn, verdict=Verdict(layers._replace(parents=forest.parents[[node]], beams=beams)))


def pages_in_memory(buffer):
    """Which whole pages of an array the system keeps in memory, bool[pages]."""
    size = mmap.PAGESIZE
    first = -(-buffer.ctypes.data // size) * size
    count = (buffer.ctypes.data + buffer.nbytes - first) // size
    kept = np.empty(count, np.uint8)
    system = ctypes.CDLL(None, use_errno=True)
    failed = system.mincore(ctypes.c_void_p(first), ctypes.c_size_t(count * size), kept.ctypes.data_as(ctypes.c_char_p))
    assert not failed, os.strerror(ctypes.get_errno())
    return kept & 1 == 1


def zeros_on_new_pages(shape, dtype=float):
    """Zeros on pages that the process never had: numpy may return pages that were freed, which are in memory."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype).reshape(shape)


@pytest.mark.skipif(not compiling.AVAILABLE, reason="needs numba")
@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell which pages are in memory")
def test_room_that_is_reserved_is_taken_at_once_and_keeps_what_is_stored(monkeypatch):
    """A server's memory then shows when it starts; otherwise the system gives pages when they are first written."""

    def share_in_memory():
        """The share of the store's pages that the system has given; what else the process holds does not count."""
        pages = [pages_in_memory(buffer) for buffer in (store.keys_by_panel, store.values_by_slot)]
        return np.concatenate(pages).mean()

    lm = HuggingFaceLM(tiny("llama"), engine="compiled", share_from=None)
    store = lm.runner.store
    for buffer in (store.keys_by_panel, store.values_by_slot):
        buffer[...] = np.arange(buffer.size, dtype=np.float32).reshape(buffer.shape)
    kept = [buffer.copy() for buffer in (store.keys_by_panel, store.values_by_slot)]
    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", zeros_on_new_pages)
        store.reserve(40, 8192)
    smallest = min(store.keys_by_panel.nbytes, store.values_by_slot.nbytes)
    assert share_in_memory() < 0.5
    store.touch()
    assert share_in_memory() == 1
    for old, new in zip(kept, (store.keys_by_panel, store.values_by_slot), strict=True):
        assert np.array_equal(new[: len(old), : old.shape[1], :, : old.shape[3]], old)
    lm.reserve(41, 8192)  # which makes twice the rows
    assert min(store.keys_by_panel.nbytes, store.values_by_slot.nbytes) == 2 * smallest
    assert share_in_memory() == 1


@pytest.mark.skipif(not compiling.AVAILABLE, reason="needs numba")
@pytest.mark.parametrize("engine", ["auto", "int8", "int4"])
@pytest.mark.parametrize("off_by", [0.06, 1.0])
def test_the_check_bears_what_rounding_does_to_a_tree_and_no_more(engine, off_by, monkeypatch):
    """Sums over trees have an order of their own, and a rounded number may go to its other neighbour; a lost mask is more."""
    lm = HuggingFaceLM(tiny("llama", hidden_size=64, intermediate_size=64), engine=engine)
    extend = HuggingFaceLM.extend

    def off(self, owners, forests):
        (scored,) = extend(self, owners, forests)
        if len(set(forests[0].parents.tolist())) == forests[0].size:
            return [scored]  # a path
        logits = scored.logits.float()
        return [replace(scored, logits=logits + off_by * logits[0].std())]

    monkeypatch.setattr(HuggingFaceLM, "extend", off)
    if off_by == 0.06 and engine != "auto":
        check_scores_forests(lm)
        assert lm.runner.store.keys_by_panel.shape[1] == 1  # one text at a time, and no room for two
        return
    with pytest.raises(UnsupportedModel, match="ignores the given masks or positions"):
        check_scores_forests(lm)


@needs_numba
@pytest.mark.parametrize("engine", ["int8", "int4"])
def test_a_rounded_row_may_be_off_in_some_logits_and_tokens_that_it_does_not_see_must_not_change_it(
    engine, monkeypatch
):
    """One entry of a row that rounds to its neighbour moved some logits of a published model by 0.8 of their spread."""
    lm = HuggingFaceLM(tiny("llama", hidden_size=64, intermediate_size=64), engine=engine)
    extend = HuggingFaceLM.extend

    def off(self, owners, forests):
        (scored,) = extend(self, owners, forests)
        logits = scored.logits.float().clone()
        logits[-1, ::10] += 0.9 * logits[-1].std()
        return [replace(scored, logits=logits)]

    def without_masks(self, owners, forests):
        (scored,) = extend(self, owners, forests)
        beside = 1e-2 * float(forests[0].tokens[forests[0].size // 2])
        return [replace(scored, logits=scored.logits + beside)]

    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceLM, "extend", off)
        check_scores_forests(lm)
    monkeypatch.setattr(HuggingFaceLM, "extend", without_masks)
    with pytest.raises(UnsupportedModel, match="tokens that are not on a node's path change them by"):
        check_scores_forests(lm)

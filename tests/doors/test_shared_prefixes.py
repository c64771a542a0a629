"""Sessions whose prompts begin with the same tokens compute these once."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.decode import Decoder, decode
from specbeam.core.forest import Forest
from specbeam.core.records import Needs, Shape
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.live_layers import LiveLayers
from specbeam.models.pair import Pair
from tests.support.checking import refused
from tests.support.seats import check_rows_and_settle, seat
from tests.support.tiny_models import tiny

SYSTEM = [(5 * place + 3) % 60 for place in range(40)]
ENGINES = ["plain", "compiled"]


def pair_of(engine, chunk=16, share_from=8, family="llama"):
    target, draft = (tiny(family, seed=seed, vocab_size=64) for seed in (1, 2))
    models = [HuggingFaceLM(model, chunk, engine, share_from) for model in (target, draft)]
    return Pair(target, draft, None, *models)


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize(
    ("engine", "family"),
    [("plain", "llama"), ("plain", "mistral"), ("plain", "gpt2"), ("compiled", "qwen2-window")],
)
def test_rows_of_sessions_that_share_are_those_of_their_paths(engine, family, chunk):
    """Requests come and go, each with its own forest and verdicts."""
    model = tiny(family)
    lm = HuggingFaceLM(model, chunk, engine, share_from=4)
    rng = np.random.default_rng(1)
    seats = [seat([*SYSTEM[:length], *rng.integers(0, 61, 3).tolist()]) for length in (12, 12, 20, 9)]
    seats.append(seat(rng.integers(0, 61, 7).tolist()))
    for turn_number in range(8):
        some = [one for one in seats if rng.random() < 0.8] or seats
        check_rows_and_settle(lm, model, rng, some, [5] * len(some), 2e-4)
        if turn_number % 2:
            for one in some:
                lm.compact(one)
        if turn_number in (2, 4):  # one leaves, another comes
            lm.close(seats.pop(0))
            seats.append(seat([*SYSTEM[:15], 7]))
    for one in seats:
        lm.close(one)
    assert lm.caches == []


def test_samples_of_a_prompt_compute_it_once():
    lm = pair_of("plain").target
    rows = []
    forward = lm.model.forward

    def counted(*args, input_ids=None, **given):
        rows.append(input_ids.numel())
        return forward(*args, input_ids=input_ids, **given)

    lm.runner.call = counted
    lm.extend([seat(SYSTEM) for _ in range(5)], [Forest.rooted(SYSTEM[-1:])] * 5)
    assert sum(rows) == len(SYSTEM) - 1 + 5


def test_samples_of_a_prompt_compute_it_once_in_pieces(monkeypatch):
    lm = pair_of("compiled").target
    prefilled = []
    prefill = lm.runner.prefill

    def counted(caches, counts):
        prefilled.extend(counts)
        return prefill(caches, counts)

    monkeypatch.setattr(lm.runner, "prefill", counted)
    seats = [seat(SYSTEM) for _ in range(5)]
    found = lm.extend(seats, [Forest.rooted(SYSTEM[-1:])] * 5)
    assert sum(prefilled) == len(SYSTEM) - 1 + 5
    alone = pair_of("compiled", share_from=None).target.extend([seat(SYSTEM)], [Forest.rooted(SYSTEM[-1:])])
    for one in found:
        assert torch.equal(one.logits, alone[0].logits)


METHODS = [sb.sampling(), sb.beam_search(3), sb.dsbd(3, 4, 2, width="dynamic"), sb.speculative_sampling(3)]


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one.name)
@pytest.mark.parametrize("engine", ["plain", "compiled"])
def test_texts_are_those_of_sessions_that_share_nothing(engine, method):
    def texts(pair):
        many = {"num_return_sequences": 3} if method.beams == 1 else {}
        prompts = [[*SYSTEM, 4, 5], [*SYSTEM, 9], [3, 4], [*SYSTEM, 4, 5]]
        found = sb.generate(pair, prompts, method, seed=3, max_new_tokens=10, **many)
        assert pair.target.caches == pair.draft.caches == []
        return [[beam.tokens for beam in one.beams] for one in found]

    assert texts(pair_of(engine)) == texts(pair_of(engine, share_from=None))


def sessions_of(pair, method, count, prompt=SYSTEM, tokens=10):
    settings = Settings.given({"max_new_tokens": tokens, "eos_token_id": [], "num_return_sequences": count}, None)
    return Request.of(pair, [prompt], method, settings, 3).sessions


@pytest.mark.parametrize("engine", ["plain", "compiled"])
def test_who_comes_later_takes_over_what_is_stored(engine):
    pair = pair_of(engine)
    first, second = sessions_of(pair, sb.speculative_sampling(3), 2)
    decoder = Decoder(pair.target)
    decoder.add(first)
    while first.length == 0:
        decoder.step()
    before = pair.target.passes, pair.draft.passes
    decoder.add(second)
    decoder.step()
    assert pair.target.passes - before[0] == 1
    assert second.length > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_who_waits_for_a_session_that_is_cancelled_goes_on_alone(engine):
    pair = pair_of(engine)
    sessions = sessions_of(pair, sb.sampling(), 3)
    alone = sessions_of(pair_of(engine, share_from=None), sb.sampling(), 3)
    decoder = Decoder(pair.target)
    for session in sessions:
        decoder.add(session)
    decoder.step()  # a chunk of the first is stored, the others wait for it
    decoder.cancel(sessions[0])
    while decoder.busy:
        decoder.step()
    list(decode(pair.target, [alone[1]]))
    list(decode(pair.target, [alone[2]]))
    assert [one.settled for one in sessions[1:]] == [one.settled for one in alone[1:]]
    assert pair.target.caches == []


def test_compiled_runs_take_turns_of_sessions_that_have_copied_a_beginning():
    pair = pair_of("compiled", chunk=64)
    sessions = sessions_of(pair, sb.dsbd(1, 2, 2, "fixed"), 2, tokens=40)
    alone = pair_of("compiled", share_from=None)
    expected = sessions_of(alone, sb.dsbd(1, 2, 2, "fixed"), 2, tokens=40)
    decoder = Decoder(pair.target, ahead=4)
    for one in sessions:
        decoder.add(one)
    while not all(one.length for one in sessions):
        decoder.step()
    while decoder.busy:
        decoder.step()
    for one in expected:
        list(decode(alone.target, [one]))
    assert [one.settled for one in sessions] == [one.settled for one in expected]


def test_who_needs_the_rows_of_its_prompt_computes_them_itself(monkeypatch):
    lm = pair_of("compiled").target
    monkeypatch.setattr(lm, "_copy_beginning", None)
    seats = [seat(SYSTEM) for _ in range(2)]
    needs = [Needs(logits=True), Needs(logits=True, prompt=True)]
    found = lm.extend(seats, [Forest.rooted(SYSTEM[-1:])] * 2, needs)
    assert len(found[1].prompt) == len(SYSTEM) - 1


@pytest.mark.parametrize("share_from", [8, None])
def test_pairs_are_loaded_so_that_their_prompts_are_shared(share_from):
    """Both models of the pair; loading the same model objects otherwise makes other caches."""
    target, draft = (tiny("llama", seed=seed, num_hidden_layers=1) for seed in (0, 1))
    pair = sb.load(target, draft, share_from=share_from)
    assert (pair.target.share_from, pair.draft.share_from) == (share_from, share_from)
    assert sb.load(target, draft, share_from=share_from).target is pair.target
    assert sb.load(target, draft).target is not pair.target
    prompts = [[*range(3, 30), last] for last in (7, 9, 11)]
    found = sb.generate(pair, prompts, sb.sampling(), seed=1, max_new_tokens=6)
    assert [one.text for one in found] == [
        one.text for one in sb.generate(sb.load(target, draft), prompts, sb.sampling(), seed=1, max_new_tokens=6)
    ]


def test_a_beginning_that_only_the_first_layers_have_read_is_computed_again():
    lm = HuggingFaceLM(tiny("llama", num_hidden_layers=4), engine="compiled", share_from=8)
    root = Forest.rooted(SYSTEM[-1:])
    first, second = seat(SYSTEM), seat(SYSTEM)
    LiveLayers(lm, 2).extend([first], [root])
    found = lm.extend([first, second], [root, root])
    assert torch.equal(found[0].logits, found[1].logits)


class Never:
    """A controller for which drafts never pay, so that the draft model stores nothing."""

    largest = Shape(2, 2)

    def plan(self, session):
        return Shape(0, 0)

    def settle(self, session, turn):
        pass


def test_nobody_waits_for_a_session_that_stores_nothing():
    pair = pair_of("compiled", chunk=8)
    method = sb.dsbd(2, 3, 2, "fixed")
    (idle,) = sessions_of(pair, method, 1, tokens=60)
    (second,) = sessions_of(pair, method, 1, tokens=5)
    idle.parts = replace(idle.parts, controller=Never())
    decoder = Decoder(pair.target)
    decoder.add(idle)
    while idle.length < 2:
        decoder.step()
    decoder.add(second)
    for _ in range(10):
        decoder.step()
    assert second.length > 0
    decoder.close()


def test_prompts_of_other_namespaces_are_computed_anew(monkeypatch):
    lm = pair_of("compiled").target
    monkeypatch.setattr(lm, "_copy_beginning", None)
    seats = [seat(SYSTEM) for _ in range(3)]
    for number, one in enumerate(seats):
        one.namespace = str(number)
    lm.extend(seats, [Forest.rooted(SYSTEM[-1:])] * 3)
    assert all(cache.leader is None for cache in lm.caches)


@pytest.mark.parametrize("when", ["close", "extend"])
def test_a_copy_without_room_changes_nothing(when, monkeypatch):
    lm = pair_of("compiled").target
    prompt = SYSTEM * 5
    root = Forest.rooted(prompt[-1:])
    first, second = seat(prompt), seat(prompt)
    (expected,) = lm.extend([first], [root])
    if when == "close":
        lm._cache(second)
    with monkeypatch.context() as full:
        full.setattr(lm.runner.store, "grow", Mock(side_effect=MemoryError("no room")))
        with pytest.raises(MemoryError):
            lm.close(first) if when == "close" else lm.extend([second], [root])
    (found,) = lm.extend([second], [root])
    assert torch.equal(found.logits, expected.logits)
    lm.close(first)
    lm.close(second)
    assert lm.caches == []


@pytest.mark.parametrize("wrong", [0, -3, 2.5, "always", True])
def test_what_is_no_number_of_tokens_is_refused(wrong):
    with refused("share_from is"):
        sb.load(tiny("llama"), share_from=wrong)

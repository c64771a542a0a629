"""Compiled runs that end early, because another client waits, have the same texts as runs that go on."""

import pytest

import specbeam as sb
from specbeam.core import compiling
from specbeam.core.decoder import Decoder
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from tests.support.loops import PROMPTS, pair

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

__all__ = ["pair"]  # a fixture
METHODS = [sb.sampling(), sb.beam_sampling(3), sb.dsbd(3, 4, 2, "fixed")]
OPTIONS = {"max_new_tokens": 24, "eos_token_id": []}


def sessions_of(pair, method, count, **options):
    return Request.of(pair, PROMPTS[:count], method, Settings.given(OPTIONS | options, None), 7).sessions


def decoded(decoder, sessions, before_step):
    """The number of turns of each session in each step."""
    turns = []
    for session in sessions:
        decoder.add(session)
    while decoder.busy:
        before = [session.count.target_passes for session in sessions]
        before_step()
        decoder.step()
        turns.append([session.count.target_passes - earlier for session, earlier in zip(sessions, before, strict=True)])
    return turns


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_runs_that_are_asked_to_end_take_one_turn_and_have_the_same_texts(pair, method, count):
    alone = sessions_of(pair, method, count)
    with Decoder(pair.target, ahead=8) as decoder:
        turns = decoded(decoder, alone, lambda: None)
    assert max(map(max, turns)) > 1
    asked = sessions_of(pair, method, count)
    with Decoder(pair.target, ahead=8) as decoder:
        turns = decoded(decoder, asked, decoder.early_end.ask)
    assert max(map(max, turns)) == 1
    assert [session.texts.tokens.tolist() for session in asked] == [session.texts.tokens.tolist() for session in alone]


def test_the_end_of_one_session_ends_the_runs_of_others(pair, monkeypatch):
    """So that nobody waits for an answer that is ready."""
    monkeypatch.setattr("specbeam.core.runs.allowed_threads", lambda: 1)  # on more, the other may be over before
    for follows in (False, True):
        sessions = sessions_of(pair, sb.sampling(), 1, max_new_tokens=4) + sessions_of(pair, sb.sampling(), 1)
        with Decoder(pair.target, ahead=16) as decoder:
            decoder.early_end.follows_ends = follows
            turns = decoded(decoder, sessions, lambda: None)
        first = next(step for step in turns if step[0])
        assert first[0] == 4
        assert (first[1] < 16) == follows


def test_sessions_that_are_not_to_move_take_no_turn(pair):
    resting, moving = sessions_of(pair, sb.sampling(), 2)
    with Decoder(pair.target, ahead=8) as decoder:
        decoder.add(resting)
        decoder.add(moving)
        while not moving.over:
            decoder.step([moving])
        assert resting.count.target_passes == 0
        while decoder.busy:
            decoder.step()
    assert resting.length == moving.length == 24

"""One thread at a time decodes with a model, whatever wraps it; what is refused leaves no model held."""

import threading

import pytest

import specbeam as sb
from specbeam.core.decoder import Decoder
from specbeam.core.guard import ThreadGuard
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.errors import NotSupported
from specbeam.models.memory.lm import MemoryLM
from specbeam.models.memory.plan import MemoryPlan
from tests.support.tiny_models import tiny


class User:
    """Whoever works with a model."""


def in_another_thread(work):
    """Run work in a thread of its own to its end, and return what it raised."""
    failures = []

    def run():
        try:
            work()
        except NotSupported as error:
            failures.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return failures


@pytest.fixture(scope="module")
def pair():
    return sb.load(tiny("llama", seed=1, vocab_size=11), tiny("llama", seed=2, vocab_size=11), check=False)


def session_of(pair, method=None):
    method = sb.speculative_sampling(2) if method is None else method
    settings = Settings.given({"max_new_tokens": 3, "eos_token_id": []}, None)
    (session,) = Request.of(pair, [[3, 1, 4]], method, settings, 3).sessions
    return session


def test_a_hold_that_is_given_back_is_as_before():
    guard = ThreadGuard()
    user = User()
    users = []
    assert guard.hold(user) is None
    assert in_another_thread(lambda: users.append(guard.hold(user))) == []
    assert users == [threading.current_thread()]
    guard.give_back(user, None)
    assert in_another_thread(guard.check) == []


def test_a_model_with_memory_is_kept_to_one_thread(pair):
    target = MemoryLM(pair.target, MemoryPlan(4, 2, recall="initial"), None)
    assert target.guard is pair.target.guard
    with Decoder(target) as decoder:
        decoder.add(session_of(pair, sb.greedy()))
        (why,) = in_another_thread(lambda: Decoder(pair.target).add(session_of(pair)))
        assert "is decoding with this model" in why
    assert in_another_thread(pair.target.guard.check) == []


def test_a_session_that_is_refused_leaves_no_model_held(pair, monkeypatch):
    """The draft is in use elsewhere, the target is not: the target stays free, whether a decoder is new or has sessions."""
    decoder = Decoder(pair.target)
    release = threading.Event()
    held = threading.Event()

    def use_the_draft():
        pair.draft.guard.hold(decoder_of_another)
        held.set()
        release.wait()
        pair.draft.guard.drop(decoder_of_another)

    decoder_of_another = User()
    other = threading.Thread(target=use_the_draft)
    other.start()
    held.wait()
    try:
        with pytest.raises(NotSupported, match="is decoding with this model"):
            decoder.add(session_of(pair))
        assert not decoder.busy
        assert in_another_thread(pair.target.guard.check) == []
    finally:
        release.set()
        other.join()

    def fail(*given):
        raise RuntimeError("a part is broken")

    monkeypatch.setattr("specbeam.core.decoder.keeps_nodes", fail)
    with pytest.raises(RuntimeError):
        decoder.add(session_of(pair))
    for model in (pair.target, pair.draft):
        assert in_another_thread(model.guard.check) == []

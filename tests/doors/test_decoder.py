"""Sessions come, take turns and go: `Decoder`, of which batches, streams and servers are made."""

import pytest

import specbeam as sb
from specbeam.core.decode import Decoder, decode
from specbeam.core.forest import Forest
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.errors import Cancelled
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import Pair
from tests.support.seats import seat
from tests.support.tiny_models import tiny

CHUNK = 16
LONG = [(5 * place + 3) % 60 for place in range(100)]


@pytest.fixture(scope="module", params=["plain", "compiled"])
def pair(request):
    target, draft = tiny("llama", seed=1, vocab_size=64), tiny("llama", seed=2, vocab_size=64)
    models = [HuggingFaceLM(model, chunk=CHUNK, engine=request.param) for model in (target, draft)]
    return Pair(target, draft, None, *models)


METHODS = [sb.sampling(), sb.beam_search(3), sb.dsbd(3, 4, 2, width="dynamic"), sb.speculative_sampling(3)]


def session_of(pair, prompt, method, seed=3, tokens=12):
    settings = Settings.given({"max_new_tokens": tokens, "eos_token_id": []}, None)
    (session,) = Request.of(pair, [prompt], method, settings, seed).sessions
    return session


def texts(session):
    assert session.failure is None
    return [(one.tokens, one.finished) for one in session.hypotheses()]


def alone(pair, prompt, method, **options):
    session = session_of(pair, prompt, method, **options)
    for _ in decode(pair.target, [session]):
        pass
    return texts(session)


def finish(decoder):
    while decoder.busy:
        decoder.step()


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one.name)
def test_a_session_that_joins_late_writes_what_it_writes_alone(pair, method):
    decoder = Decoder(pair.target)
    first, second, third = (session_of(pair, prompt, method) for prompt in ([3, 4, 5], [9, 8], LONG))
    decoder.add(first)
    decoder.step()
    decoder.add(second)
    decoder.step()
    decoder.add(third)
    finish(decoder)
    for session in (first, second, third):
        assert texts(session) == alone(pair, session.prompt, method)
    assert pair.target.caches == []
    assert pair.draft.caches == []


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one.name)
def test_a_cancelled_session_is_gone_at_once_and_costs_the_others_nothing(pair, method):
    sessions = [session_of(pair, prompt, method) for prompt in ([3, 4, 5], LONG, [7, 7, 7], [2])]
    decoder = Decoder(pair.target, at_once=2)
    for session in sessions:
        decoder.add(session)
    decoder.step()  # the first is live, the second is being stored, the others wait for their places
    assert decoder.cancel(sessions[0])
    assert decoder.cancel(sessions[1])
    assert pair.target.caches == []
    assert pair.draft.caches == []
    decoder.step()
    assert decoder.cancel(sessions[3]) or sessions[3].over
    assert not decoder.cancel(sessions[3])
    finish(decoder)
    for gone in (sessions[0], sessions[1], sessions[3]):
        assert isinstance(gone.failure, Cancelled)
        assert "it was cancelled" in str(gone.failure)
    assert texts(sessions[2]) == alone(pair, sessions[2].prompt, method)


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one.name)
def test_a_long_prompt_is_stored_between_the_turns_of_others(pair, method):
    """Whoever is live has a turn in every step, and no pass stores more than a chunk of prompts."""
    short, long = session_of(pair, [3, 4, 5], method, tokens=30), session_of(pair, LONG, method)
    decoder = Decoder(pair.target)
    decoder.add(short)
    decoder.step()
    decoder.add(long)
    steps = 0
    while long.length == 0:
        before = pair.target.passes
        done = decoder.step()
        assert short.over or short in [session for session, _ in done]
        assert pair.target.passes - before <= 2
        steps += 1
    chunks = -(-len(LONG) // CHUNK) - 1
    assert steps >= chunks
    finish(decoder)
    assert texts(long) == alone(pair, LONG, method)
    assert texts(short) == alone(pair, [3, 4, 5], method, tokens=30)


def test_the_draft_model_stores_its_prompt_in_chunks_too(pair):
    method = sb.dsbd(2, 3, 2, "fixed")
    decoder = Decoder(pair.target)
    short, long = session_of(pair, [3, 4, 5], method, tokens=40), session_of(pair, LONG, method)
    decoder.add(short)
    decoder.step()
    decoder.add(long)
    while long.length == 0:
        before = pair.draft.passes
        decoder.step()
        assert pair.draft.passes - before <= 2 + 1
    decoder.close()
    assert pair.draft.caches == []


def test_chunks_are_those_that_one_pass_after_the_other_would_store(pair):
    root = Forest.rooted(LONG[-1:])
    at_once, in_chunks = seat(LONG), seat(LONG)
    (expected,) = pair.target.extend([at_once], [root])
    expected = expected.logits.clone()
    pair.target.close(at_once)
    while not pair.target.fill([in_chunks])[0]:
        pass
    (found,) = pair.target.extend([in_chunks], [root])
    assert (found.logits == expected).all()
    pair.target.close(in_chunks)


def test_more_sessions_than_places_wait_for_theirs(pair):
    decoder = Decoder(pair.target, at_once=2)
    sessions = [session_of(pair, [3, 4, number], sb.greedy(), tokens=3 + number) for number in range(5)]
    for session in sessions:
        decoder.add(session)
    assert decoder.free == 0
    most = 0
    while decoder.busy:
        most = max(most, len(decoder.step()))
    assert most == 2
    assert all(session.over for session in sessions)
    assert decoder.free == 2


def test_a_lone_session_may_run_ahead_and_somebody_may_join_it(pair):
    if not pair.target.supports_runs:
        pytest.skip("its turns are not compiled")
    method = sb.dsbd(3, 4, 2, "fixed")
    decoder = Decoder(pair.target, ahead=2)
    first, second = session_of(pair, [3, 4, 5], method), session_of(pair, [9, 8], method)
    decoder.add(first)
    assert decoder.step() == []
    assert 0 < first.length < 12
    decoder.add(second)
    decoder.step()  # both have moved, be it by turns that are shown or by runs side by side
    assert second.length > 0
    finish(decoder)
    for session in (first, second):
        assert texts(session) == alone(pair, session.prompt, method)


def test_leaving_closes_what_is_not_over(pair):
    with Decoder(pair.target) as decoder:
        for prompt in ([3, 4, 5], LONG):
            decoder.add(session_of(pair, prompt, sb.dsbd(2, 3, 2, width="dynamic")))
        decoder.step()
        assert pair.target.caches
    assert pair.target.caches == []
    assert pair.draft.caches == []
    assert not decoder.busy

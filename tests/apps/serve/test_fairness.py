"""Keys that flood delay themselves, and what is decoded is answered."""

import asyncio
import logging
import re
import threading
import time

import pytest

import specbeam as sb
from specbeam.apps.serve.engine import Draining, Engine, EngineLimits, QueueFull, QueueTimeout
from tests.apps.serve.conftest import CHUNK, pair_on
from tests.apps.serve.test_engine import Ends, sessions_of

pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx2")

from tests.apps.serve.test_faults import answer_of, started, told  # noqa: E402

LIMITS = EngineLimits(max_running=2, max_waiting=6, chunk=CHUNK)
KEYS = {"flood": 1.0, "other": 1.0}


@pytest.fixture(scope="module")
def plain():
    return pair_on("plain")


class Held:
    """An engine that does nothing between the jobs that are submitted, until it is let go."""

    def __init__(self, engine):
        self.goes_on = threading.Event()
        begun = threading.Event()
        engine.call(lambda: (begun.set(), self.goes_on.wait(60)))
        assert begun.wait(30)


def request(pair, key, texts, **options):
    prompts = [[3, 4 + number] for number in range(texts)]
    return Ends(sessions_of(pair, prompts, sb.sampling(), **options), key=key)


def outcome(ends):
    """How the texts of a request ended: the kinds of their errors."""
    return {type(session.failure).__name__ for session in ends.wait()}


def test_in_a_full_queue_the_key_with_most_texts_gives_way_by_its_newest_request(plain):
    with Engine(plain, LIMITS, KEYS) as engine:
        held = Held(engine)
        first, second, third = (request(plain, "flood", 2) for _ in range(3))
        fourth = request(plain, "flood", 2)
        for one in (first, second, third, fourth):  # two places of the running ones are free
            engine.submit(one.jobs)
        with pytest.raises(QueueFull):
            engine.submit(request(plain, "flood", 1).jobs)
        other = request(plain, "other", 1)
        engine.submit(other.jobs)
        held.goes_on.set()
        assert outcome(fourth) == {"QueueFull"}
        for one in (first, second, third, other):
            assert outcome(one) == {"NoneType"}
        assert (engine.waiting, engine._queue_of) == (0, {})


def test_a_burst_of_another_key_gets_its_share_of_a_full_queue(plain):
    """Requests that are to give way no longer count; they used to until the engine's next step."""
    with Engine(plain, LIMITS, KEYS) as engine:
        held = Held(engine)
        flood = [request(plain, "flood", 2) for _ in range(4)]
        for one in flood:
            engine.submit(one.jobs)
        others = [request(plain, "other", 1) for _ in range(4)]
        for one in others:
            engine.submit(one.jobs)
        with pytest.raises(QueueFull):
            engine.submit(request(plain, "other", 1).jobs)
        held.goes_on.set()
        assert [outcome(one) for one in flood] == [{"NoneType"}] * 2 + [{"QueueFull"}] * 2
        assert [outcome(one) for one in others] == [{"NoneType"}] * 4
        assert (engine.waiting, engine._queue_of) == (0, {})


def test_a_key_with_as_many_texts_as_the_fullest_does_not_push_it_out(plain):
    with Engine(plain, LIMITS, KEYS) as engine:
        held = Held(engine)
        flood = request(plain, "flood", 4)
        other = request(plain, "other", 4)
        engine.submit(flood.jobs)
        engine.submit(other.jobs)
        for key in KEYS:
            with pytest.raises(QueueFull):
                engine.submit(request(plain, key, 1).jobs)
        held.goes_on.set()
        assert outcome(flood) == outcome(other) == {"NoneType"}


def test_a_heavier_key_may_have_more_texts_before_it_gives_way(plain):
    with Engine(plain, LIMITS, {"flood": 8.0, "other": 1.0}) as engine:
        held = Held(engine)
        flood = request(plain, "flood", 8)
        engine.submit(flood.jobs)
        with pytest.raises(QueueFull):
            engine.submit(request(plain, "other", 2).jobs)
        held.goes_on.set()
        assert outcome(flood) == {"NoneType"}


def test_a_request_that_has_started_is_not_thrown_away_for_another_key(plain):
    with Engine(plain, LIMITS, KEYS) as engine:
        long = request(plain, "flood", 8, max_new_tokens=80)
        engine.submit(long.jobs)
        while not engine.inside:
            time.sleep(0.001)
        held = Held(engine)
        other = request(plain, "other", 2)
        engine.submit(other.jobs)
        held.goes_on.set()
        assert outcome(long) == outcome(other) == {"NoneType"}


def test_a_place_stays_free_for_other_keys(plain):
    with Engine(plain, EngineLimits(max_running=4, max_waiting=40, chunk=CHUNK), KEYS) as engine:
        flood = request(plain, "flood", 20, max_new_tokens=60)
        most = 0
        engine.submit(flood.jobs)
        while not all(job.is_over for job in flood.jobs):
            most = max(most, len(engine.inside))
            time.sleep(0.001)
        assert most == 3
    with Engine(plain, EngineLimits(max_running=4, max_waiting=40, chunk=CHUNK), {"only": 1.0}) as engine:
        alone = request(plain, "only", 20, max_new_tokens=60)
        engine.submit(alone.jobs)
        while not all(job.is_over for job in alone.jobs):
            most = max(most, len(engine.inside))
            time.sleep(0.001)
        assert most == 4


@pytest.mark.parametrize(("weights", "most"), [({"flood": 1.0, "other": 1.0}, 4), ({"flood": 3.0, "other": 1.0}, 6)])
def test_keys_in_use_share_the_running_places_by_weight(plain, weights, most, monkeypatch):
    """Also between the requests of a key that sends one after the other."""
    monkeypatch.setattr("specbeam.apps.serve.engine.ACTIVE_S", 600.0)
    with Engine(plain, EngineLimits(max_running=8, max_waiting=80, chunk=CHUNK), weights) as engine:
        first = request(plain, "other", 1)
        engine.submit(first.jobs)
        assert outcome(first) == {"NoneType"}
        flood = request(plain, "flood", 30, max_new_tokens=40)
        engine.submit(flood.jobs)
        seen = 0
        while not all(job.is_over for job in flood.jobs):
            seen = max(seen, sum(job.key == "flood" for job in [*engine.inside]))
            time.sleep(0.001)
        assert seen == most
        assert set(engine._last_job) == {"other", "flood"}


def test_texts_of_a_request_that_has_started_wait_for_their_turn(plain):
    """The time in the queue ends with the first text of a request: 20 texts in 2 places need longer than one."""
    with Engine(plain, EngineLimits(max_running=1, max_waiting=40, chunk=CHUNK)) as engine:
        many = request(plain, "flood", 12, max_new_tokens=60)
        late = request(plain, "flood", 1)
        now = time.monotonic()
        for job in (*many.jobs, *late.jobs):
            job.start_by = now + 0.05
        engine.submit(many.jobs)
        while not engine.inside and not many.jobs[0].is_over:
            time.sleep(0.001)
        held = Held(engine)
        engine.submit(late.jobs)
        time.sleep(0.1)
        held.goes_on.set()
        assert outcome(late) == {QueueTimeout.__name__}
        assert outcome(many) == {"NoneType"}


def figures_of(server):
    return re.sub('model_name="[^"]*"', 'model_name="m"', server.metrics.text().decode())


@pytest.mark.parametrize(
    "beams", [{"use_beam_search": True}, {"num_beams": 2}, {"specbeam": {"beams": 2}}, {"best": 2}]
)
def test_requests_may_choose_the_offered_methods_alone_by_whatever_field(plain, beams):
    body = {"prompt": [3, 4], "max_tokens": 2}
    with started(plain, methods=("sampling",)) as (_, app):
        refused = answer_of(asyncio.run(told(app, body | beams)))["error"]["message"]
        assert "this server offers sampling" in refused
    with started(plain, methods=("sampling", "beam_search", "best_first")) as (_, app):
        assert answer_of(asyncio.run(told(app, body | beams)))["choices"]


def test_what_is_decoded_at_the_time_limit_is_answered_and_the_rest_is_empty(plain):
    """Whole and streamed; a request of which nothing is decoded is refused."""
    body = {"prompt": [[3, 4 + number] for number in range(30)], "max_tokens": 100, "ignore_eos": True, "seed": 1}
    body["specbeam"] = {"method": "sampling"}
    with started(plain, max_running=1, request_timeout=0.6) as (server, app):
        asyncio.run(told(app, body | {"prompt": [3, 4], "max_tokens": 1}))  # its parts are made
        assert 'specbeam:texts_cut_total{engine="0",model_name="m",reason="request_timeout"} 0.0' in figures_of(server)
        for more in ({}, {"logprobs": 1}):
            sent = asyncio.run(told(app, body | more))
            answer = answer_of(sent)
            assert sent[0]["status"] == 200, answer
            choices = answer["choices"]
            assert [choice["index"] for choice in choices] == [*range(30)]
            assert {choice["finish_reason"] for choice in choices} == {"length"}
            counts = [choice["finished"] for choice in choices]
            assert not any(counts[-5:])
            assert answer["usage"]["completion_tokens"] > 0
            assert any("were not decoded" in warning for warning in answer["specbeam"]["warnings"])
        events = b"".join(one.get("body", b"") for one in asyncio.run(told(app, body | {"stream": True}))).decode()
        assert events.count('"finish_reason":"length"') == 30
        assert "error" not in events
        assert server.metrics.cut["request_timeout"] > 0
        assert server.metrics.cut["draining"] == 0
    with started(plain, max_running=1, request_timeout=1e-9) as (_, app):
        assert answer_of(asyncio.run(told(app, body)))["error"]["code"] == "request_timeout"


def test_what_is_decoded_at_the_end_of_a_server_is_answered(plain):
    body = {"prompt": [[3, 4 + number] for number in range(20)], "max_tokens": 120, "ignore_eos": True, "seed": 1}
    body["specbeam"] = {"method": "sampling"}
    with started(plain, max_running=1, drain_timeout=0.3) as (server, app):

        async def ended():
            await told(app, body | {"prompt": [3, 4], "max_tokens": 1})
            asked = asyncio.ensure_future(told(app, body))
            while not server.engine.inside or not server.engine.inside[0].session.length:
                await asyncio.sleep(0.001)
            await asyncio.get_running_loop().run_in_executor(None, server.drain)
            refused = await told(app, body)
            return await asked, refused

        sent, refused = asyncio.run(ended())
        answer = answer_of(sent)
        assert sent[0]["status"] == 200, answer
        assert answer["usage"]["completion_tokens"] > 0
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        assert any("shut down" in warning for warning in answer["specbeam"]["warnings"])
        headers = {name.decode(): value.decode() for name, value in refused[0]["headers"]}
        assert (refused[0]["status"], answer_of(refused)["error"]["code"]) == (503, "draining")
        assert int(headers["retry-after"]) > 0


def test_an_engine_that_has_ended_refuses_as_one_that_shuts_down(plain):
    """So a request at the moment of a signal gets 503 and not 500."""
    engine = Engine(plain, LIMITS).start()
    engine.close()
    with pytest.raises(Draining):
        engine.submit(request(plain, "other", 1).jobs)
    with pytest.raises(Draining):
        engine.call(lambda: 1).result()


def test_the_log_names_paths_clients_and_refusals(plain, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("specbeam.serve"), "propagate", True)
    with started(plain) as (_, app), caplog.at_level(logging.INFO, "specbeam.serve"):
        asyncio.run(told(app, {}, path="/v1/nowhere", client=("192.0.2.7", 9)))
        asyncio.run(told(app, {}, path="/health", headers=[(b"host", b"evil.example")], client=("192.0.2.8", 9)))
    lines = [record.fields for record in caplog.records if record.getMessage() == "request"]
    assert [(one["path"], one["client"], one["status"]) for one in lines] == [
        ("/v1/nowhere", "192.0.2.7", 404),
        ("/health", "192.0.2.8", 403),
    ]
    assert lines[1]["error"] == "forbidden"

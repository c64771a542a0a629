"""Clients that leave, owners that break, engines that hang: each costs its own request, and nobody waits for ever."""

import asyncio
import contextlib
import json
import threading
import time
from concurrent.futures import CancelledError

import pytest

import specbeam as sb
from specbeam.apps.serve.engine import Engine, EngineFailed, EngineLimits, QueueTimeout
from tests.apps.serve.conftest import CHUNK, LONG, SHORT, pair_on
from tests.apps.serve.test_engine import Ends, sessions_of

LIMITS = EngineLimits(max_running=4, max_waiting=40, chunk=CHUNK)
SCOPE = {
    "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
    "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "asgi": {"spec_version": "2.3"},
    "http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "root_path": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def plain():
    return pair_on("plain")


def test_a_client_that_leaves_while_its_text_is_scored_costs_nobody_anything(plain):
    """A future is cancelled between and within the pieces of its task, as `asyncio.wrap_future` does it."""
    pieces = []
    with Engine(plain, LIMITS) as engine:

        def leaves_within():
            pieces.append(1)
            futures[-1].cancel()
            yield from ()
            return 3

        def goes_on():
            while True:
                pieces.append(2)
                yield

        futures = []
        with engine._condition:  # the task starts after its future is here
            futures.append(engine.run(leaves_within()))
        endless = engine.run(goes_on())
        while pieces.count(2) < 3:
            time.sleep(0.001)
        assert endless.cancel()
        scoring = engine.score(LONG, [[5] * 50], 0)
        scoring.cancel()
        with pytest.raises(CancelledError):
            scoring.result()
        assert engine.call(lambda: 7).result(timeout=30) == 7
        assert len(engine.generate([[3, 4]], sb.sampling(), seed=7, **SHORT)) == 1
        count = len(pieces)
        assert engine.call(lambda: 8).result(timeout=30) == 8
        assert len(pieces) == count  # nothing more was done for who has left
        assert (engine.counts.restarts, engine.state, engine.stalled_s) == (0, "ready", 0.0)
        assert plain.target.caches == []


def test_an_owner_or_a_watcher_that_breaks_costs_its_own_job_alone(plain):
    expected = [one.tokens for one in sb.generate(plain, [[3, 4]], sb.sampling(), seed=7, **SHORT)]

    def breaks(*given):
        raise RuntimeError("broken on purpose")

    with Engine(plain, LIMITS) as engine:
        shown = Ends(sessions_of(plain, [[5, 6]], sb.sampling()), see=breaks)
        engine.submit(shown.jobs)
        deaf = Ends(sessions_of(plain, [[7, 8]], sb.sampling()))
        watch = deaf.watch
        deaf.jobs[0].watch = lambda job: (watch(job), breaks())
        engine.submit(deaf.jobs)
        engine._post(breaks)
        assert [one.tokens for one in engine.generate([[3, 4]], sb.sampling(), seed=7, **SHORT)] == expected
        (session,) = shown.wait()
        assert isinstance(session.failure, EngineFailed)
        assert "broken on purpose" in str(session.failure)
        (session,) = deaf.wait()
        assert session.failure is None
        assert (engine.counts.restarts, engine.inside, engine.waiting) == (0, [], 0)
        assert plain.target.caches + plain.draft.caches == []


def test_a_thread_that_ends_by_an_error_leaves_a_dead_engine_and_nobody_waiting(plain, monkeypatch):
    def breaks(*given):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(Engine, "_restart", breaks)
    engine = Engine(plain, LIMITS).start()
    monkeypatch.setattr(engine, "_let_in", breaks)
    waiting = Ends(sessions_of(plain, [[3, 4]], sb.sampling()))
    with pytest.MonkeyPatch.context() as quiet:
        quiet.setattr(threading, "excepthook", lambda given: None)
        engine.submit(waiting.jobs)
        (session,) = waiting.wait()
        engine._thread.join(30)
    assert isinstance(session.failure, EngineFailed)
    assert engine.state == "dead"
    with pytest.raises(EngineFailed, match="the engine is dead"):
        engine.call(lambda: 1).result(timeout=30)
    engine.close()
    assert len(sb.generate(plain, [[3, 4]], sb.sampling(), **SHORT)) == 1  # the pair is free again


def test_whoever_waits_for_an_engine_that_hangs_is_told_when_it_is_given_up(plain):
    goes_on = threading.Event()
    engine = Engine(plain, LIMITS).start()
    compiling = engine.call(lambda: goes_on.wait(30), patience_s=1000)
    time.sleep(0.05)
    assert engine.stalled_s == 0  # a task that may take long is no stall
    behind = engine.call(lambda: 1)
    engine.abandon("no step for long")
    for future in (compiling, behind):
        with pytest.raises(EngineFailed, match="no step for long"):
            future.result(timeout=5)
    goes_on.set()
    engine.close()
    assert engine.state == "dead"
    assert not engine._thread.is_alive()
    hanging = Engine(plain, LIMITS).start()
    goes_on.clear()
    hanging.call(lambda: goes_on.wait(30))
    time.sleep(0.05)
    assert hanging.stalled_s > 0
    goes_on.set()
    hanging.close()


def test_a_key_has_its_own_limit_and_who_waits_too_long_finds_no_place(plain):
    with Engine(plain, LIMITS, None, {"ann": 1}) as engine:
        most = {"ann": 0, "bob": 0}
        many = {key: Ends(sessions_of(plain, [[3], [4], [5]], sb.sampling()), key=key) for key in most}
        for ends in many.values():
            for job in ends.jobs:

                def watch(job, tell=ends.watch):
                    for key in most:
                        most[key] = max(most[key], sum(one.key == key for one in engine.inside))
                    tell(job)

                job.watch = watch
        with engine._condition:
            for ends in many.values():
                engine._inbox.append(lambda jobs=ends.jobs: engine._take(jobs))
                engine._queued += 3
            engine._condition.notify()
        for ends in many.values():
            ends.wait()
        assert most == {"ann": 1, "bob": 3}
        engine.share({}, {"ann": 2})
        engine.call(lambda: None).result()
        assert engine._most_running == {"ann": 2}
        late = Ends(sessions_of(plain, [[3]], sb.sampling()), start_by=0.0)
        engine.submit(late.jobs)
        (session,) = late.wait()
        assert isinstance(session.failure, QueueTimeout)


uvicorn = pytest.importorskip("uvicorn")

from specbeam.apps.serve.app import BeamServer, make_app  # noqa: E402
from specbeam.apps.serve.config import ServerConfig  # noqa: E402
from specbeam.apps.serve.pools import KeyedPool  # noqa: E402
from specbeam.apps.serve.refusals import Refusal, invalid  # noqa: E402


@contextlib.contextmanager
def started(pair, **given):
    """A server without a port; requests go to its application."""
    server = BeamServer(ServerConfig(model="bundled", name="tiny", chunk=CHUNK, warm_up=False, **given), lambda: pair)
    server.start()
    try:
        yield server, make_app(server)
    finally:
        server.drain()
        server.close_pools()


async def told(app, body, key="", leaves=False, **scope):
    """What the application sends for a body; its client may leave before it reads anything.

    Args:
        scope: fields of the request that differ.
    """
    sent = []
    waits = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    headers = [*SCOPE["headers"], (b"authorization", f"Bearer {key}".encode())]

    async def receive():
        if waits:
            return waits.pop()
        if leaves:
            return {"type": "http.disconnect"}
        return await asyncio.sleep(3600)

    async def send(message):
        sent.append(message)

    await asyncio.wait_for(app(SCOPE | {"headers": headers} | scope, receive, send), 60)
    return sent


def answer_of(sent):
    return json.loads(b"".join(message.get("body", b"") for message in sent))


def test_a_stream_whose_client_leaves_before_it_begins_is_forgotten(plain):
    with started(plain) as (server, app):
        body = {"prompt": LONG[:5], "max_tokens": 100, "stream": True, "specbeam": {"trace": True}}
        for _ in range(3):  # more than may be shown side by side
            asyncio.run(told(app, body, leaves=True))
        assert (server.asking, server._shown) == ({}, set())
        server.engine.call(lambda: None).result()
        assert server.engine.inside == []
        assert server.metrics.finished["abort"] == 3
        bad = answer_of(asyncio.run(told(app, {"prompt": LONG, "max_tokens": 8, "model": "other"})))
        assert bad["error"]["code"] == "model_not_found"


def test_keys_are_read_again_and_stay_as_they_are_if_the_file_is_wrong(plain, tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text("ann old 1 2\n")
    with started(plain, api_key_file=str(file)) as (server, app):
        file.write_text("ann new 3 1\n")
        server.read_keys()
        server.engine.call(lambda: None).result()
        assert (server.engine._line.weights, server.engine._most_running) == ({"ann": 3.0}, {"ann": 1})
        file.write_text("ann\n")
        with pytest.raises(sb.SpecbeamError, match="line 1"):
            server.read_keys()
        body = {"prompt": [3, 4], "max_tokens": 1}
        assert [asyncio.run(told(app, body, key))[0]["status"] for key in ("old", "new")] == [401, 200]


def test_no_salt_makes_one_key_know_what_another_one_asks(plain):
    with started(plain, api_keys=("first", "second")) as (_, app):

        async def cached(key, **more):
            body = {"prompt": LONG, "max_tokens": 2, "seed": 1, "logprobs": 0} | more
            return answer_of(await told(app, body, key))["usage"]["prompt_tokens_details"]["cached_tokens"]

        async def all_of_them():
            assert await cached("first") == 0
            assert await cached("first") > 0
            for salt in ("key1", "", '["key1", null]', "key1\x00"):
                assert await cached("second", **({"cache_salt": salt} if salt else {})) == 0
            assert await cached("first", cache_salt="key1") == 0

        asyncio.run(all_of_them())


def test_slow_work_keeps_its_thread_until_it_is_over_and_costs_its_key_alone():
    goes_on = threading.Event()

    def made(pool, key, function):
        return pool.make(key, function, "busy", invalid("too slow", "tools", "bad_grammar"))

    async def ask():
        pool = KeyedPool(3, "test", 1, 0.05, 0.05)
        with pytest.raises(Refusal, match="too slow") as caught:
            await made(pool, "bomber", lambda: goes_on.wait(30))
        assert (caught.value.param, caught.value.code) == ("tools", "bad_grammar")
        with pytest.raises(Refusal, match="busy") as caught:
            await made(pool, "bomber", lambda: 1)
        assert (caught.value.status, caught.value.code, caught.value.param) == (429, "queue_timeout", "tools")
        assert await asyncio.gather(*(made(pool, key, lambda: 2) for key in "abcab")) == [2] * 5
        goes_on.set()
        while True:
            with contextlib.suppress(Refusal):
                assert await made(pool, "bomber", lambda: 3) == 3
                break
        assert (pool._own, pool._inside) == ({}, {})  # nothing is kept of keys without work

    asyncio.run(ask())

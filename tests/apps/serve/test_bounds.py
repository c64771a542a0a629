"""Bounds before work: texts that are too long are refused before they are tokenized, and operators always get an answer."""

import asyncio
import copy
import random
import time

import pytest
from tokenizers import AddedToken

pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx2")

from specbeam.apps.serve import app as serving  # noqa: E402
from specbeam.apps.serve import guarding  # noqa: E402
from specbeam.apps.serve.app import _kv_bytes, half_of_free_memory  # noqa: E402
from specbeam.apps.serve.bounds import characters_per_token  # noqa: E402
from specbeam.apps.serve.config import ServerConfig  # noqa: E402
from tests.apps.serve.test_faults import answer_of, started, told  # noqa: E402
from tests.support.checking import refused  # noqa: E402
from tests.support.machines import put_machine  # noqa: E402
from tests.support.tokenizer_kinds import KINDS, tokenizer_of  # noqa: E402

PIECES = ["a", " ", "  ", "the ", "Hallo", "\n", "\u1112\u1161\u11ab", "e\u0301", "\U0001f600", "<s>", "xyz" * 50]


def holds(tokenizer, bound):
    """Whether random texts have at least as many tokens as the bound says."""
    chance = random.Random(0)
    texts = ["".join(chance.choices(PIECES, k=1 + chance.randrange(60))) for _ in range(300)]
    return all(len(text) <= bound * len(tokenizer(text)["input_ids"]) for text in texts)


def test_no_text_has_fewer_tokens_than_the_bound_says(worded):
    bound = characters_per_token(worded.tokenizer)
    assert bound < 200
    assert holds(worded.tokenizer, bound)


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_that_drop_letters_or_join_them_without_limit_have_no_bound(kind):
    bound = characters_per_token(tokenizer_of(kind))
    assert bound is None or holds(tokenizer_of(kind), bound)


def test_tokens_that_swallow_spaces_beside_them_leave_no_bound(worded):
    tokenizer = copy.deepcopy(worded.tokenizer)
    tokenizer.add_special_tokens({"mask_token": AddedToken("<mask>", lstrip=True)})
    assert len(tokenizer(" " * 1000 + "<mask>", add_special_tokens=False)["input_ids"]) == 1
    assert characters_per_token(tokenizer) is None


def test_a_tokenizer_in_python_and_none_have_no_bound():
    assert characters_per_token(None) is None
    assert characters_per_token(object()) is None


def test_a_text_that_cannot_fit_is_refused_without_being_tokenized(worded, monkeypatch):
    long = "Hund " * 200_000
    with started(worded) as (server, app):
        assert server.served.longest_token is not None

        def tokenizes(*given, **more):
            raise AssertionError("the text was tokenized")

        monkeypatch.setattr(type(worded.tokenizer), "__call__", tokenizes)
        for body in ({"prompt": long}, {"prompt": ["a", long]}):
            began = time.thread_time()
            sent = asyncio.run(told(app, body))
            error = answer_of(sent)["error"]
            if isinstance(body["prompt"], str):
                assert (sent[0]["status"], error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
                assert "at least" in error["message"]
            assert time.thread_time() - began < 2


def test_large_bodies_of_one_key_leave_threads_to_others(worded, monkeypatch):
    """Each takes as long as a bomb; another key's large body is read at once, and small ones of all keys are, too."""
    monkeypatch.setattr(serving, "READ_S", 0.5)
    slow = []

    def tokenized(raw, served):
        if b"bomb" in raw:
            slow.append(1)
            time.sleep(1.5)
        return {"count": 1}

    monkeypatch.setattr(serving, "_tokenized", tokenized)
    with started(worded, api_keys=("first", "second")) as (_, app):

        async def sent(client, key, text):
            began = time.monotonic()
            answer = await client.post("/tokenize", json={"prompt": text}, headers={"authorization": f"Bearer {key}"})
            return answer.status_code, time.monotonic() - began

        async def all_of_them():
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                bombs = [asyncio.ensure_future(sent(client, "first", "bomb " * 20_000)) for _ in range(8)]
                while len(slow) < serving.READERS_PER_KEY:
                    await asyncio.sleep(0.01)
                others = [await sent(client, "second", text) for text in ("a " * 20_000, "a", "b " * 20_000)]
                others.append(await sent(client, "first", "a"))
                return others, await asyncio.gather(*bombs)

        others, bombs = asyncio.run(all_of_them())
        assert [status for status, _ in others] == [200] * 4
        assert max(seconds for _, seconds in others) < 1.2
        assert {status for status, _ in bombs} == {408}


def test_health_is_answered_however_many_requests_are_in_progress(worded, monkeypatch):
    monkeypatch.setattr(guarding, "MOST_REQUESTS", 0)
    with started(worded) as (_, app):

        async def asked():
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                paths = ("/health", "/live", "/ready", "/metrics", "/v1/models")
                return [await client.get(path) for path in paths]

        answers = asyncio.run(asked())
        assert [one.status_code for one in answers] == [200, 200, 200, 200, 503]
        assert answers[-1].json()["error"]["code"] == "too_many_requests"
        assert answers[-1].headers["retry-after"] == "1"


def test_the_description_of_the_api_is_made_once(worded, monkeypatch):
    with started(worded) as (_, app):
        monkeypatch.setattr(serving, "get_openapi", None)

        async def asked():
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
                return (await client.get("/openapi.json")).json()

        assert "ResponsesBody" in asyncio.run(asked())["components"]["schemas"]


def test_open_metrics_are_read_without_a_key_and_others_with_one(worded):
    """By a collector on another machine; all else needs its key."""

    async def asked(app):
        transport = httpx.ASGITransport(app=app, client=("10.0.0.9", 7))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            key = {"authorization": "Bearer secret"}
            open_ones = [await client.get(path) for path in ("/metrics", "/v1/models")]
            return [*open_ones, await client.get("/metrics", headers=key)]

    cases = (({}, 401, 200), ({"metrics_key": "m"}, 401, 401), ({"open_metrics": True}, 200, 200))
    for given, status, status_with_key in cases:
        with started(worded, api_keys=("secret",), **given) as (_, app):
            figures, models, with_key = asyncio.run(asked(app))
        assert [figures.status_code, models.status_code, with_key.status_code] == [status, 401, status_with_key]
        assert ("specbeam:num_requests_running" in figures.text) == (status == 200)
    with refused("give one of them"):
        ServerConfig(open_metrics=True, metrics_key="m")


def test_half_of_the_memory_that_a_container_leaves_is_for_caches(worded, tmp_path, monkeypatch):
    files = {"meminfo": "MemAvailable: 90000000 kB\n", "groups/memory.max": "4000000000"}
    put_machine(tmp_path, monkeypatch, files | {"groups/memory.current": "1000000000"})
    assert half_of_free_memory() == 1_500_000_000
    put_machine(tmp_path / "none", monkeypatch, {})
    assert half_of_free_memory() is None


def test_more_memory_for_caches_than_there_is_is_refused(tmp_path, monkeypatch):
    put_machine(tmp_path, monkeypatch, {"meminfo": "MemAvailable: 4000000 kB\n"})
    assert _kv_bytes(ServerConfig(kv_gb=4), True) == 4_000_000_000
    assert _kv_bytes(ServerConfig(kv_gb=5), False) == 5_000_000_000
    with refused(r"kv_gb is 5, but only 4\.1 GB of memory are free"):
        _kv_bytes(ServerConfig(kv_gb=5), True)

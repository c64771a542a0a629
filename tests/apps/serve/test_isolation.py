"""What goes wrong around one request, in the model or the machine, and what the others notice of it: nothing."""

import asyncio
import io
import json
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

import specbeam as sb
from specbeam.apps.serve.logs import set_up_log
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import BUNDLED, Pair
from tests.apps.serve.conftest import CHUNK
from tests.support.tiny_models import tiny

pytest.importorskip("uvicorn")

from tests.apps.serve.test_faults import answer_of, started, told

PROMPTS = ["Ein Hund läuft.", "Wo ist mein Hut?", "Ich habe Hunger."]
POISON = "Das ist böse."
TOKENS = 12
SEEDS = {prompt: number for number, prompt in enumerate(PROMPTS)}


@pytest.fixture(scope="module")
def spoken():
    """A pair that is run pass by pass, with words."""
    if not (BUNDLED / "target").is_dir():
        pytest.skip("the bundled pair is not in this checkout")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    models = [tiny("llama", seed=seed, vocab_size=len(tokenizer)) for seed in (1, 2)]
    lms = [HuggingFaceLM(model, chunk=CHUNK, engine="plain", share_from=None) for model in models]
    for lm in lms:
        lm.runner.runs = None  # each turn calls `extend`, in which the tests raise
    return Pair(*models, tokenizer, *lms)


@pytest.fixture(scope="module")
def expected(spoken):
    method = sb.dsbd()
    return {
        prompt: sb.generate(spoken, prompt, method, seed=seed, max_new_tokens=TOKENS)[0].text
        for prompt, seed in SEEDS.items()
    }


def body_of(prompt, **more):
    return {"prompt": prompt, "seed": SEEDS.get(prompt, 7), "max_tokens": TOKENS} | more


def text_of(sent):
    """The text of an answer, at once or as a stream."""
    raw = b"".join(message.get("body", b"") for message in sent).decode()
    if raw.startswith("{"):  # a stream may begin with a comment, if its first text takes long
        return json.loads(raw)["choices"][0]["text"]
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    assert all("error" not in event for event in events), events
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def together(server, app, bodies):
    """What is sent for bodies that are let in side by side."""
    await told(app, bodies[-1] | {"max_tokens": 1})  # the parts of the method are made
    goes_on = threading.Event()
    server.engine.call(lambda: goes_on.wait(30))
    asked = [asyncio.ensure_future(told(app, body)) for body in bodies]
    while server.engine.waiting < len(bodies) and not all(
        one.done() for one in asked
    ):  # a slow machine: side by side or not
        await asyncio.sleep(0.002)
    goes_on.set()
    return await asyncio.gather(*asked)


def is_poisoned(session, tokenizer):
    return tokenizer.decode(session.prompt, skip_special_tokens=True) == POISON


def test_a_model_that_raises_in_one_request_fails_that_one_and_the_others_have_their_texts(
    spoken, expected, monkeypatch
):
    """A pass is shared, so all of it is lost; each is then decoded again alone: streams, too, as far as their texts come again."""
    extend = spoken.target.extend

    def raises(sessions, forests, needs=None):
        if any(is_poisoned(session, spoken.tokenizer) for session in sessions):
            raise RuntimeError("cannot take this")
        return extend(sessions, forests, needs)

    monkeypatch.setattr(spoken.target, "extend", raises)
    with started(spoken, max_running=4, queue_timeout=900.0, request_timeout=900.0) as (server, app):
        submit = server.engine.submit
        submitted = []
        monkeypatch.setattr(server.engine, "submit", lambda jobs: submitted.extend(jobs) or submit(jobs))
        bodies = [body_of(POISON), body_of(PROMPTS[0]), body_of(PROMPTS[1], stream=True), body_of(PROMPTS[2])]
        poisoned, *others = asyncio.run(together(server, app, bodies))
        ends = [job.end_by for job in submitted if not job.alone]
        assert sum(job.alone for job in submitted) == 4
        assert {job.end_by for job in submitted if job.alone} <= {*ends}  # no request gets more time than it had
        assert poisoned[0]["status"] == 500
        assert answer_of(poisoned)["error"]["code"] == "engine_error"
        assert [text_of(sent) for sent in others] == [expected[prompt] for prompt in PROMPTS]
        traced = body_of(PROMPTS[0], stream=True, specbeam={"trace": True})
        poisoned, seen = asyncio.run(together(server, app, [body_of(POISON), traced]))
        assert poisoned[0]["status"] == 500
        assert b"engine_error" in b"".join(
            message.get("body", b"") for message in seen
        )  # its turns were seen: not twice
        assert server.engine.counts.restarts == 4
        assert len(server.engine._restarted) == 0  # what failed alone speaks against nothing else, nor did it before
        assert server.health()[0] == 200
        assert (server.engine.inside, server.engine.waiting, server.asking) == ([], 0, {})
    assert spoken.target.caches + spoken.draft.caches == []


def test_logits_that_are_no_numbers_in_one_request_fail_that_one_alone(spoken, expected, monkeypatch):
    extend = spoken.target.extend

    def spoils(sessions, forests, needs=None):
        scored = extend(sessions, forests, needs)
        return [
            replace(one, logits=one.logits * float("nan")) if is_poisoned(session, spoken.tokenizer) else one
            for session, one in zip(sessions, scored, strict=True)
        ]

    monkeypatch.setattr(spoken.target, "extend", spoils)
    with started(spoken, max_running=4, queue_timeout=900.0, request_timeout=900.0) as (server, app):
        bodies = [body_of(POISON), *map(body_of, PROMPTS)]
        poisoned, *others = asyncio.run(together(server, app, bodies))
        assert poisoned[0]["status"] == 422
        assert answer_of(poisoned)["error"]["code"] == "broken_law"
        assert [text_of(sent) for sent in others] == [expected[prompt] for prompt in PROMPTS]
        assert server.engine.counts.restarts == 0


def test_a_disk_that_is_full_for_the_log_ends_no_request(spoken, expected, monkeypatch):
    class Full(io.StringIO):
        written = 0

        def write(self, text):
            Full.written += 1
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stderr", Full())
    set_up_log()
    with started(spoken) as (_, app):
        found = [asyncio.run(told(app, body_of(prompt))) for prompt in PROMPTS]
        bad = asyncio.run(told(app, body_of(PROMPTS[0], n=0)))
    assert [text_of(sent) for sent in found] == [expected[prompt] for prompt in PROMPTS]
    assert bad[0]["status"] == 400
    assert Full.written >= 4


def test_a_clock_that_jumps_changes_no_text_and_no_deadline(spoken, expected, monkeypatch):
    """Deadlines, waiting times and latencies are of the clock that only goes forward."""
    jumps = iter(range(10**9))
    clock = time.time

    def jumping():
        return clock() + (-1) ** next(jumps) * 10**7

    monkeypatch.setattr(time, "time", jumping)
    with started(spoken, queue_timeout=900.0, request_timeout=900.0) as (server, app):
        found = asyncio.run(together(server, app, [body_of(PROMPTS[0], stream=True), *map(body_of, PROMPTS[1:])]))
        assert [text_of(sent) for sent in found] == [expected[prompt] for prompt in PROMPTS]
        report = answer_of(found[1])["specbeam"]["report"]
        for name in ("seconds", "queue_seconds", "first_token_seconds"):
            assert 0 <= report[name] < 60
        assert server.engine.stalled_s < 60
        assert server.health()[0] == 200


def test_new_settings_of_methods_are_limited_by_key_and_known_ones_are_not(spoken, monkeypatch):
    monkeypatch.setattr("specbeam.apps.serve.app.MOST_NEW", 2)
    with started(spoken, api_keys=("first", "second")) as (server, app):

        async def ask(depth, key="first"):
            body = body_of(PROMPTS[0], specbeam={"method": "speculative_sampling", "depth": depth})
            sent = await told(app, body, key)
            headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
            return sent[0]["status"], headers.get("retry-after"), sent

        async def all_of_them():
            return [await ask(2), await ask(3), await ask(4), await ask(2), await ask(5, "second")]

        statuses = asyncio.run(all_of_them())
        assert [status for status, _, _ in statuses] == [200, 200, 429, 200, 200]
        assert answer_of(statuses[2][2])["error"]["code"] == "key_limit"
        assert 1 <= int(statuses[2][1]) <= 60
        assert server.metrics.rejected == Counter({"key_limit": 1})

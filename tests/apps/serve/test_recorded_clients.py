"""Requests as clients sent them to this server, recorded: each is answered again, and in the form that its client reads.

`client_requests.jsonl` has a request per line. Those of Open WebUI follow its source; all others went over a socket.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from tests.apps.serve.test_clients import worded_pair
from tests.support.asgi import asking, events_of

LINES = (Path(__file__).parent / "client_requests.jsonl").read_text(encoding="utf-8").splitlines()
REQUESTS = [json.loads(line) for line in LINES]
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if tools %}{% endif %}"
CLIENTS = sorted({one["client"].split()[0] for one in REQUESTS})


@pytest.fixture(scope="module")
def ask():
    with asking(worded_pair(TEMPLATE), max_n=16) as asked:
        yield asked


def of(client):
    return [one for one in REQUESTS if one["client"].split()[0] == client]


@pytest.mark.parametrize("client", CLIENTS)
def test_what_a_client_sends_is_answered(ask, client):
    for one in of(client):
        body = one["body"]
        content = None if body is None else json.dumps(_within(body)).encode()
        answer = ask(one["path"], method=one["method"], headers=one["headers"], content=content)
        assert answer.status_code == one["status"], (one, answer.text)
        if one["status"] != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        elif body is not None and body.get("stream"):
            _check_stream(one["path"], answer)
        elif body is not None:
            _check_whole(one["path"], body, answer.json())


def _within(body):
    """The body with ids of the tokenizer here in place of those of another one."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and isinstance(prompt[0], list):
        return body | {"prompt": [[token % 60 + 3 for token in one] for one in prompt]}
    return body


def _check_stream(path, answer):
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer)
    assert not [event for event in events if event.get("error")]
    if path == "/v1/responses":
        assert events[0]["type"] == "response.created"
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
    else:
        assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1]


def _check_whole(path, body, found):
    if path == "/v1/responses":
        assert found["output"]
        assert found["status"] in ("completed", "incomplete")
        return
    assert len(found["choices"]) == max(body.get("n") or 1, 1) * _prompts(body)
    for choice in found["choices"]:
        if body.get("logprobs"):
            assert choice["logprobs"]
        if isinstance(body.get("tool_choice"), dict):
            assert choice["message"].get("tool_calls") or choice["finish_reason"] == "length"


def _prompts(body):
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


def test_recordings_hold_every_client_and_no_secret():
    assert set(CLIENTS) >= {"openai-node", "langchain-openai", "litellm", "llama-index-llms-openai-like", "lm-eval"}
    assert not any("authorization" in one["headers"] or "cookie" in one["headers"] for one in REQUESTS)
    stainless = {name for one in of("openai-node") for name in one["headers"] if name.startswith("x-stainless")}
    assert {"x-stainless-lang", "x-stainless-runtime", "x-stainless-retry-count"} <= stainless

"""What clients of other servers send and read: histories, calls, forms, streams, and pages of another origin."""

import asyncio
import contextlib
import json

import pytest

import specbeam as sb
from specbeam.doors.chats import prompt_of_messages
from specbeam.doors.cli.talking import ChatOptions, Cost, PairSpeaker
from specbeam.doors.sources import token_ids
from specbeam.errors import BadPrompt
from tests.support import words
from tests.support.tiny_models import tiny
from tests.support.tokenizer_kinds import tokenizer_of

pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx2")

from specbeam.apps.serve.app import BeamServer, make_app  # noqa: E402
from specbeam.apps.serve.config import ServerConfig  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}({{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}"
    "{% endfor %}){% endfor %}{% if m.reasoning_content is defined %}<{{ m.reasoning_content }}>{% endif %}"
    "{% if m.name is defined %}[{{ m.name }}]{% endif %} {% endfor %}"
)
ORIGIN = "https://page.example"
USER = {"role": "user", "content": "Hallo"}


def worded_pair(template=TEMPLATE):
    tokenizer = words.tokenizer(words.JSON)
    tokenizer.chat_template = template
    return sb.load(tiny("llama", vocab_size=len(tokenizer)), tokenizer=tokenizer)


@contextlib.contextmanager
def asking(pair, **given):
    """A server without a port; yields what sends it a request and returns the answer."""
    config = ServerConfig(model="tiny", name="tiny", warm_up=False, cors_origins=(ORIGIN,), **given)
    server = BeamServer(config, lambda: pair)
    server.start()
    app = make_app(server)

    async def sent(method, path, body, headers):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://testserver") as client:
            return await client.request(method, path, json=body, headers=headers)

    def ask(path, body=None, method="POST", headers=None):
        return asyncio.run(sent(method, path, body, headers))

    try:
        yield ask
    finally:
        server.drain()
        server.close_pools()


@pytest.fixture(scope="module")
def ask():
    with asking(worded_pair()) as asked:
        yield asked


def chunks_of(answer):
    """The choices of all events of a stream."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", answer.text
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


def streamed_texts(answer):
    """The text of each choice of a stream, and how many pieces it came in."""
    texts = {}
    pieces = {}
    for choice in chunks_of(answer):
        piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + piece
        pieces[choice["index"]] = pieces.get(choice["index"], 0) + bool(piece)
    return texts, pieces


# Histories.


def prompt_tokens(ask, *messages, **more):
    answer = ask("/v1/chat/completions", {"messages": [*messages], "max_tokens": 1} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens"]


SILENT = {
    "annotations": [{"type": "url_citation", "url_citation": {"url": "a"}}],
    "id": "msg_1",
    "refusal": "",
    "audio": None,
    "function_call": None,
    "tool_calls": [],
    "cache_control": {"type": "ephemeral"},
    "provider_specific_fields": {"refusal": None},
    "images": [],
    "name": "",
    "reasoning": "",
    "reasoning_content": "",
    "thinking_blocks": None,
    "anything": None,
}


def test_fields_of_messages_that_say_nothing_about_the_text_are_taken(ask):
    plain = {"role": "assistant", "content": "Ja"}
    expected = prompt_tokens(ask, USER, plain, USER)
    for name, value in SILENT.items():
        assert prompt_tokens(ask, USER, plain | {name: value}, USER) == expected, name
    assert prompt_tokens(ask, USER, plain | SILENT, USER) == expected
    parts = [{"type": "text", "text": "Ja", "cache_control": {"type": "ephemeral"}, "annotations": [], "id": ""}]
    assert prompt_tokens(ask, USER, {"role": "assistant", "content": parts}, USER) == expected
    counted = ask("/tokenize", {"messages": [USER, plain | SILENT, USER]}).json()["count"]
    assert counted == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("refusal", "Nein"),
        ("audio", {"id": "a"}),
        ("function_call", {"name": "f", "arguments": "{}"}),
        ("prefix", True),
        ("images", ["a"]),
        ("index", 0),
    ],
)
def test_fields_of_messages_that_change_the_text_are_refused_by_name(ask, name, value):
    message = {"role": "assistant", "content": "Ja", name: value}
    error = ask("/v1/chat/completions", {"messages": [USER, message, USER], "max_tokens": 1}).json()["error"]
    assert error["param"] == "messages"
    assert f"messages.1.{name}" in error["message"]


def test_reasoning_of_earlier_turns_reaches_the_template_by_either_name(ask):
    plain = {"role": "assistant", "content": "Ja"}
    without = prompt_tokens(ask, USER, plain)
    for given in ({"reasoning_content": "hm"}, {"reasoning": "hm"}, {"reasoning_content": "hm", "reasoning": "hm"}):
        assert prompt_tokens(ask, USER, plain | given) == without + len("<hm>")
    assert prompt_tokens(ask, USER, plain | {"name": "Bo"}) == without + len("[Bo]")
    body = {"messages": [USER, plain | {"reasoning_content": "a", "reasoning": "b"}], "max_tokens": 1}
    error = ask("/v1/chat/completions", body).json()["error"]
    assert "differ" in error["message"]


def test_wishes_that_leave_the_text_alone_are_taken_and_those_without_effect_named(ask):
    body = {"messages": [USER], "max_tokens": 4, "seed": 3}
    plain = ask("/v1/chat/completions", body).json()
    for more in (
        {"store": False}, {"metadata": {"a": "b", "c": 1}}, {"verbosity": "medium"}, {"modalities": ["text"]},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}},
        {"service_tier": "flex"}, {"safety_identifier": "s"}, {"parallel_tool_calls": False}, {"user": "u"},
        {"tools": [], "stop": None, "logit_bias": {}}, {"logprobs": False, "top_logprobs": 0}, {"tool_choice": "auto"},
        {"stream": False, "stream_options": {"include_usage": False}}, {"store": True}, {"verbosity": "low"},
    ):  # fmt: skip
        answer = ask("/v1/chat/completions", body | more)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"] == plain["choices"][0]["message"]
        (name,) = [*more][:1]
        is_named = more in ({"store": True}, {"verbosity": "low"})
        assert [name in line for line in answer.json()["specbeam"]["warnings"]] == [True] * is_named
    for more, name in (
        ({"modalities": ["text", "audio"]}, "modalities"), ({"audio": {"voice": "a"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"), ({"reasoning_effort": "high"}, "reasoning_effort"),
    ):  # fmt: skip
        error = ask("/v1/chat/completions", body | more)
        assert error.status_code == 400
        assert error.json()["error"]["param"] == name


# Calls.


def call(arguments):
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_arguments_of_earlier_calls_reach_the_template_as_an_object(ask):
    """Through every door that renders a template; what the caller has stays as it is."""
    pair = worded_pair()
    for arguments, shown in (
        ('{"city": "Bonn", "n": 2}', "(f city=Bonn n=2)"),
        ({"city": "Bonn", "n": 2}, "(f city=Bonn n=2)"),
        ("{}", "(f)"),
        ("", "(f)"),
        (None, "(f)"),
    ):
        messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}]
        answer = {"role": "tool", "tool_call_id": "c1", "content": "9"}
        expected = f"user:Hallo assistant:{shown} tool:9 "
        ids = prompt_of_messages(pair.tokenizer, None, [*messages, answer])
        assert pair.tokenizer.decode(ids) == expected
        assert token_ids(pair, {"messages": [*messages, answer]}, 0, pair.target.vocab) == ids
        assert messages[1]["tool_calls"] == [call(arguments)]
        assert prompt_tokens(ask, *messages, answer) == len(expected)
    without = {"id": "c1", "type": "function", "function": {"name": "f"}}
    assert prompt_tokens(ask, {"role": "assistant", "tool_calls": [without]}) == len("assistant:(f) ")


@pytest.mark.parametrize("arguments", ["nope", '{"city":', "[1]", "3", '"text"', ["a"]])
def test_arguments_that_are_no_object_are_refused(ask, arguments):
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}]
    with pytest.raises(BadPrompt, match=r"arguments of a call in messages\[1\].tool_calls"):
        prompt_of_messages(worded_pair().tokenizer, None, messages)
    error = ask("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "bad_prompt")
    assert "JSON" in error["message"]


def test_what_a_tool_says_to_caches_is_not_shown_to_the_model():
    template = "{{ messages[0].content }}{{ tools | tojson }}"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    marked = {**tool, "cache_control": {"type": "ephemeral"}}
    with asking(worded_pair(template)) as ask:
        plain, cached = [prompt_tokens(ask, USER, tools=[one], tool_choice="none") for one in (tool, marked)]
        assert plain == cached


# Forms.


def test_a_json_object_begins_with_a_brace(ask):
    pytest.importorskip("llguidance")
    ends = {"max_tokens": 6, "stop_token_ids": [1]}
    for wanted in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        for seed in range(6):
            body = {"prompt": "Hallo", "seed": seed} | ends | wanted
            assert ask("/v1/completions", body).json()["choices"][0]["text"].startswith("{")
            body = {"messages": [USER], "seed": seed} | ends | wanted
            assert ask("/v1/chat/completions", body).json()["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize("parameters", [{}, {"properties": {"a": {"type": "integer"}}}, None])
def test_the_arguments_of_a_call_are_an_object_whatever_their_schema_says(ask, parameters):
    pytest.importorskip("llguidance")
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for seed in range(4):
        body = {"messages": [USER], "seed": seed, "max_tokens": 6, "tools": tools, "tool_choice": "required"}
        (choice,) = ask("/v1/chat/completions", body).json()["choices"]
        calls = choice["message"].get("tool_calls")
        assert (calls[0]["function"]["arguments"] if calls else choice["message"]["content"]).startswith("{")


def test_parameters_of_a_function_that_are_no_object_are_refused(ask):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]
    body = {"messages": [USER], "max_tokens": 6, "tools": tools, "tool_choice": "required"}
    error = ask("/v1/chat/completions", body).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "bad_grammar")


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_the_schema_of_any_object_gives_objects_with_every_backend(backend):
    pytest.importorskip(backend)
    pair = worded_pair()
    options = {"max_new_tokens": 8, "grammar_backend": backend}
    for seed in range(6):
        (one,) = sb.generate(pair, "Hallo", "sampling", json_schema={"type": "object"}, seed=seed, **options)
        assert one.text.startswith("{")
    with_names = {one.text[:2] for seed in range(20) for one in sb.generate(
        pair, "Hallo", "sampling", json_schema={"type": "object"}, seed=seed, **options
    )}  # fmt: skip
    assert any('"' in text for text in with_names), "objects with properties are among them"


# Pages of another origin.


def preflight(ask, origin, headers="authorization", method="POST", path="/v1/chat/completions"):
    asked = {"origin": origin, "access-control-request-method": method, "access-control-request-headers": headers}
    return ask(path, method="OPTIONS", headers=asked)


@pytest.mark.parametrize(
    "headers",
    [
        "authorization,content-type,x-stainless-os,x-stainless-lang,x-stainless-retry-count,openai-organization",
        "anthropic-version, x-api-key",
        "x-title",
    ],
)
def test_a_page_of_an_allowed_origin_may_send_the_headers_of_its_client(ask, headers):
    for method in ("GET", "POST", "DELETE"):
        answer = preflight(ask, ORIGIN, headers, method)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert answer.headers["access-control-allow-headers"] == headers
        assert method in answer.headers["access-control-allow-methods"].split(", ")


def test_a_page_of_another_origin_may_not(ask):
    for origin in ("https://other.example", ORIGIN + ".other.example", "null", ORIGIN.upper()):
        answer = preflight(ask, origin)
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("origin", ["*", "https://page.example/", "https://Page.example", "page.example", ""])
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(origin):
    with pytest.raises(sb.errors.BadSetting, match="cors_origins"):
        ServerConfig(model="tiny", cors_origins=(origin,))


def test_a_page_can_read_errors_and_the_name_of_its_request(ask):
    answer = ask("/v1/completions", {"prompt": 3}, headers={"origin": ORIGIN})
    assert answer.status_code == 400
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


# Streams.


def joined_logprobs(choices):
    """The log-probabilities of a choice of a stream, its parts joined."""
    joined = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            joined[name] = None if values is None else [*(joined.get(name) or []), *values]
    return joined


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": "Hallo du", "logprobs": 1, "echo": True},
        {"prompt": "Hallo du", "logprobs": 0, "echo": True},
        {"prompt": [[4, 5, 6, 7], [9, 10, 11]], "logprobs": 3, "echo": True, "n": 2},
        {"prompt": ["Hallo du", "Ja"], "logprobs": 2, "echo": True, "n": 2, "num_beams": 3},
        {"prompt": ["Hallo", "Ja"], "logprobs": 2, "echo": True, "max_tokens": 0, "n": 2},
        {"prompt": "Hallo", "echo": True, "max_tokens": 0},
        {"prompt": "Hallo", "logprobs": 2, "n": 2},
        {"prompt": "Hallo", "logprobs": 2, "echo": True, "stop": ["a", "e", "i"]},
        {"prompt": "H", "logprobs": 2, "echo": True, "return_tokens_as_token_ids": True},
    ],
)
def test_a_stream_has_the_text_and_the_log_probabilities_of_the_whole_answer(ask, more):
    body = {"max_tokens": 5, "seed": 2} | more
    whole = ask("/v1/completions", body).json()["choices"]
    streamed = chunks_of(ask("/v1/completions", body | {"stream": True}))
    assert {choice["index"] for choice in streamed} == {choice["index"] for choice in whole}
    for choice in whole:
        own = [one for one in streamed if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"]
        assert [one["finish_reason"] for one in own if one["finish_reason"]] == [choice["finish_reason"]]
        found = joined_logprobs(own)
        expected = choice["logprobs"] or {}
        for name in ("tokens", "text_offset", "top_logprobs"):
            assert found.get(name) == expected.get(name), name
        numbers = [-1.0 if one is None else one for one in found.get("token_logprobs", [])]
        assert numbers == pytest.approx([-1.0 if one is None else one for one in expected.get("token_logprobs", [])])


def test_a_chat_stream_has_the_log_probabilities_of_the_whole_answer(ask):
    body = {"messages": [USER], "max_tokens": 5, "seed": 2, "logprobs": True, "top_logprobs": 2, "n": 2}
    whole = ask("/v1/chat/completions", body).json()["choices"]
    streamed = chunks_of(ask("/v1/chat/completions", body | {"stream": True}))
    for choice in whole:
        own = [one for one in streamed if one["index"] == choice["index"] and one.get("logprobs")]
        assert joined_logprobs(own)["content"] == choice["logprobs"]["content"]


def random_pair(kind, **changes):
    tokenizer = tokenizer_of(kind)
    return sb.load(tiny("llama", vocab_size=len(tokenizer), **changes), tokenizer=tokenizer)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback as in Llama", "word pieces", "slow, joined otherwise"])
def test_the_pieces_of_any_tokenizer_are_the_text(kind, monkeypatch):
    """Of completions by several methods, with special tokens and without, and with stop strings that may begin in a piece."""
    monkeypatch.setattr("specbeam.apps.serve.engine.DELAY_S", 0.0)
    with asking(random_pair(kind)) as ask:
        for seed in range(6):
            for more in (
                {}, {"skip_special_tokens": False}, {"num_beams": 3, "n": 2}, {"n": 2},
                {"stop": ["a\ufffd", "yes", "s."], "include_stop_str_in_output": seed % 2 == 0},
            ):  # fmt: skip
                body = {"prompt": [5, 6], "max_tokens": 24, "seed": seed, "ignore_eos": True} | more
                whole = ask("/v1/completions", body).json()["choices"]
                texts, _ = streamed_texts(ask("/v1/completions", body | {"stream": True}))
                assert texts == {choice["index"]: choice["text"] for choice in whole}


def test_a_usual_text_streams_token_by_token(monkeypatch):
    monkeypatch.setattr("specbeam.apps.serve.engine.DELAY_S", 0.0)
    with asking(worded_pair()) as ask:
        body = {
            "prompt": "Hallo",
            "max_tokens": 40,
            "seed": 1,
            "ignore_eos": True,
            "stream": True,
            "specbeam": {"method": "sampling"},
        }
        answer = ask("/v1/completions", body | {"logit_bias": {str(token): -100 for token in range(4)}})
        _, pieces = streamed_texts(answer)
        assert pieces[0] > 10


def test_tokens_that_are_spelled_alike_are_all_reported():
    """Halves of characters have one and the same text; the likeliest keeps it, and others are named by their number."""
    with asking(random_pair("byte level")) as ask:
        body = {"prompt": [5, 6], "max_tokens": 12, "seed": 1, "logprobs": 20, "ignore_eos": True}
        found = ask("/v1/completions", body).json()["choices"][0]["logprobs"]["top_logprobs"]
        assert [len(top) for top in found] == [20] * 12
        assert all([*top.values()] == sorted(top.values(), reverse=True) for top in found)
        assert any("\ufffd" in top and any(name.startswith("token_id:") for name in top) for top in found)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback as in Llama", "words, cleaned up"])
def test_the_chat_of_a_terminal_shows_exactly_the_text(kind, monkeypatch):
    monkeypatch.setattr("specbeam.core.decode.DELAY_S", 0.0)
    pair = random_pair(kind)
    speaker = PairSpeaker(pair, "tiny", "{{ messages[0].content }}")
    ids = prompt_of_messages(pair.tokenizer, speaker.template, [{"role": "user", "content": "a.s"}])
    for seed in range(4):
        options = {"max_new_tokens": 24, "eos_token_id": []}
        (whole,) = sb.generate(pair, [ids], "sampling", seed=seed, **options)
        cost = Cost()
        pieces = [
            *speaker.answer(
                [{"role": "user", "content": "a.s"}], ChatOptions("sampling", settings=options, seed=seed), cost
            )
        ]
        assert "".join(pieces) == whole.text
        assert cost.tokens == 24

"""What clients of other servers send and read: histories, calls, forms, streams, and pages of another origin."""

import asyncio
import itertools

import pytest

import specbeam as sb
from specbeam.doors.chats import prompt_of_messages
from specbeam.doors.cli.pair_speaker import PairSpeaker
from specbeam.doors.cli.talking import ChatOptions, Cost
from specbeam.doors.sources import token_ids
from specbeam.errors import BadPrompt
from tests.support import words
from tests.support.tiny_models import tiny
from tests.support.tokenizer_kinds import tokenizer_of

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from specbeam.apps.serve.asking import Asking
from specbeam.apps.serve.config import ServerConfig
from tests.support.asgi import asking, choices_of, events_of
from tests.support.slow_parts import compile_slowly

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


@pytest.fixture(scope="module")
def ask():
    with asking(worded_pair(), cors_origins=(ORIGIN,)) as asked:
        yield asked


def streamed_texts(answer):
    """The text of each choice of a stream, and how many pieces it came in."""
    texts = {}
    pieces = {}
    for choice in choices_of(answer):
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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_several_answers_of_a_method_that_does_not_sample_are_the_same_text(ask, path):
    """As OpenAI's server answers `n` at temperature 0, whole and streamed, with log-probabilities, and counted."""
    given = {"prompt": ["Hallo", "Ja"]} if path == "/v1/completions" else {"messages": [USER]}
    body = given | {"max_tokens": 6, "temperature": 0, "seed": 1, "specbeam": {"method": "sampling"}}
    body |= {"logprobs": 1} if path == "/v1/completions" else {"logprobs": True}
    one = ask(path, body).json()
    three = ask(path, body | {"n": 3}).json()
    assert [choice["index"] for choice in three["choices"]] == [*range(3 * len(one["choices"]))]
    for number, choice in enumerate(three["choices"]):
        assert choice | {"index": 0} == one["choices"][number // 3] | {"index": 0}
    assert three["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    assert any("same text" in warning for warning in three["specbeam"]["warnings"])
    texts, _ = streamed_texts(ask(path, body | {"n": 3, "stream": True}))
    key = "text" if path == "/v1/completions" else "message"
    whole = [choice[key] if key == "text" else choice[key]["content"] for choice in three["choices"]]
    assert [texts[number] for number in sorted(texts)] == whole
    drawn = ask(path, body | {"n": 1, "best_of": 4}).json()
    assert drawn["choices"][0][key] == one["choices"][0][key]


def test_values_that_openai_takes_for_nothing_are_taken_for_nothing(ask):
    body = {"prompt": "Hallo", "max_tokens": 8, "seed": 1, "specbeam": {"method": "sampling"}}
    plain = ask("/v1/completions", body).json()["choices"][0]["text"]
    for stop in ("", [], [""]):
        assert ask("/v1/completions", body | {"stop": stop}).json()["choices"][0]["text"] == plain
    greedy = ask("/v1/completions", body | {"temperature": 0}).json()["choices"][0]["text"]
    for seed in range(3):
        assert ask("/v1/completions", body | {"top_p": 0, "seed": seed}).json()["choices"][0]["text"] == greedy
    assert ask("/v1/completions", body | {"top_p": -0.1}).json()["error"]["param"] == "top_p"


def test_a_schema_that_need_not_be_kept_is_kept_and_says_so(ask):
    pytest.importorskip("llguidance")
    schema = {"name": "a", "schema": {"type": "object"}, "strict": False}
    wanted = {"response_format": {"type": "json_schema", "json_schema": schema}}
    answer = ask("/v1/completions", {"prompt": "Hallo", "max_tokens": 6, "seed": 1} | wanted).json()
    assert answer["choices"][0]["text"].startswith("{")
    assert any("strict" in warning for warning in answer["specbeam"]["warnings"])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages", "/chat/completions", "/api/chat", "/v1/files"])
def test_a_path_of_another_server_is_refused_with_advice(ask, path):
    answer = ask(path, {"input": "a"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "unknown_url"
    assert "Not Found" not in error["message"]


# Messages of the system.


def test_messages_of_the_developer_are_messages_of_the_system_to_templates_that_do_not_know_them(ask):
    system = prompt_tokens(ask, {"role": "system", "content": "be"}, USER)
    assert prompt_tokens(ask, {"role": "developer", "content": "be"}, USER) == system
    template = (
        "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{{ m.role }}:{{ m.content }} {% endfor %}"
    )
    with asking(worded_pair(template)) as other:
        assert prompt_tokens(other, {"role": "developer", "content": "be"}, USER) == len("Ddeveloper:be user:Hallo ")


def test_a_message_of_the_system_that_a_template_leaves_out_is_named():
    template = "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }} {% endfor %}"
    body = {"messages": [{"role": "system", "content": "be"}, USER], "max_tokens": 2, "seed": 1}
    with asking(worded_pair(template)) as other:
        warnings = other("/v1/chat/completions", body).json()["specbeam"]["warnings"]
        assert any("messages of the system" in warning for warning in warnings)
        body["messages"] = [USER]
        assert other("/v1/chat/completions", body).json()["specbeam"]["warnings"] == []


def test_a_model_without_a_template_says_so_of_all_messages():
    with asking(worded_pair(None)) as other:
        error = other("/v1/chat/completions", {"messages": [{"role": "system", "content": "be"}, USER]}).json()["error"]
        assert "no chat template" in error["message"]
        assert "of the system" in error["message"]


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
    with pytest.raises(BadPrompt, match=r"arguments of messages\[1\].tool_calls\[0\]"):
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


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),  # a program
        ({"origin": ORIGIN, "sec-fetch-site": "cross-site"}, 200),
        ({"origin": ORIGIN}, 200),
        ({"origin": "http://testserver"}, 200),
        ({"origin": "http://testserver", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://proxy.example", "sec-fetch-site": "same-origin"}, 200),  # behind a proxy with another host
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
        ({"origin": "http://testserver:81", "sec-fetch-site": "same-site"}, 403),
        ({"origin": "http://testserver.evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
def test_a_page_of_another_site_makes_nothing_decode(ask, headers, status):
    body = {"prompt": "Hallo", "max_tokens": 1}
    answer = ask("/v1/completions", body, headers=headers)
    assert answer.status_code == status
    if status == 403:
        assert "--cors-origin" in answer.json()["error"]["message"]
        assert ask("/v1/specbeam/requests/1", method="DELETE", headers=headers).status_code == 403
        assert ask("/v1/models", method="GET", headers=headers).status_code == 200


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_that_is_not_said_to_be_json_is_refused(ask, kind):
    """Pages may send these types, and none at all, to any server without asking it first."""
    headers = {} if kind is None else {"content-type": kind}
    answer = ask("/v1/completions", content=b'{"prompt": "Hallo"}', headers=headers)
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "not_json"
    typed = {"content-type": "Application/JSON; charset=utf-8"}
    assert ask("/v1/completions", content=b'{"prompt": "Hallo", "max_tokens": 1}', headers=typed).status_code == 200


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
    streamed = choices_of(ask("/v1/completions", body | {"stream": True}))
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
    streamed = choices_of(ask("/v1/chat/completions", body | {"stream": True}))
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


def test_a_usual_text_streams_in_pieces(monkeypatch):
    """Of a token each, unless the client is slower than the engine, as on a busy machine."""
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
        assert pieces[0] > 1


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


# Compilation.


def test_a_stream_says_that_code_is_compiled_to_clients_that_know_of_it(monkeypatch):
    """Events without choices for those with a `specbeam` object, comments for others."""
    with asking(worded_pair()) as other:
        compile_slowly(monkeypatch)
        body = {"prompt": "Hallo", "max_tokens": 3, "seed": 1, "stream": True}
        known = other("/v1/completions", body | {"specbeam": {"method": "sampling"}})
        notes = [one["specbeam"]["compiling"] for one in events_of(known) if "compiling" in (one.get("specbeam") or {})]
        assert len(notes) > 1
        assert all(note["done"] >= 0 for note in notes)
        texts, _ = streamed_texts(known)
        assert len(texts[0]) == 3
        plain = other("/v1/completions", body | {"num_beams": 2})
        assert not [one for one in events_of(plain) if "compiling" in (one.get("specbeam") or {})]
        assert ": ping\n\n" in plain.text


def test_a_stream_without_text_sends_pings_while_its_request_takes_steps(monkeypatch):
    """A proxy ends a connection on which nothing is sent, whether or not the request moves."""
    monkeypatch.setattr("specbeam.apps.serve.asking.PING_S", 0.0)
    with asking(worded_pair()) as ask:
        answer = ask("/v1/completions", {"prompt": "Hallo", "max_tokens": 60, "stream": True, "best": 2})
        assert answer.text.split("data: ")[0].count(": ping") > 1
        assert choices_of(answer)[-1]["finish_reason"]


def test_a_stream_sends_pings_while_its_texts_are_scored(monkeypatch):
    monkeypatch.setattr("specbeam.apps.serve.asking.PING_S", 0.0)
    monkeypatch.setattr("specbeam.apps.serve.asking.COMPILING_S", 0.02)
    score = Asking._score

    async def slow(self, *given):
        await asyncio.sleep(0.3)
        return await score(self, *given)

    monkeypatch.setattr(Asking, "_score", slow)
    body = {"prompt": "Hallo", "max_tokens": 3, "seed": 1, "stream": True, "logprobs": 1}
    with asking(worded_pair()) as ask:
        for echo in (False, True):
            assert ask("/v1/completions", body | {"echo": echo}).text.count(": ping") > 8


def test_the_turns_of_texts_that_are_decoded_apart_have_their_own_numbers():
    body = {"prompt": "Hallo", "max_tokens": 12, "seed": 1, "stream": True, "n": 3}
    with asking(worded_pair()) as ask:
        for shown in ({"trace": True}, {"stream": "live"}):
            found = ask("/v1/completions", body | {"specbeam": {"method": "sampling"} | shown})
            (kind,) = {"turn" if "trace" in shown else "live"}
            shown_runs = [one["specbeam"] for one in events_of(found) if kind in (one.get("specbeam") or {})]
            by_run = {}
            for one in shown_runs:
                by_run.setdefault(one["run"], []).append(one[kind])
            texts, _ = streamed_texts(found)
            assert sorted(by_run) == [0, 1, 2]
            for run, turns in by_run.items():
                if kind == "turn":
                    assert [turn["n"] for turn in turns] == [*range(1, len(turns) + 1)]
                settled = [turn["settled"] for turn in turns]
                assert all(after.startswith(before) for before, after in itertools.pairwise(settled))
                assert texts[run].startswith(settled[-1])

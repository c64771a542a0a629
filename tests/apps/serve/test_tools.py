"""Tools: calls that models write in their own formats, and calls that a grammar forces."""

import json

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from specbeam.apps.serve.tools import ToolUse, calls_in, start_of_calls
from tests.support.asgi import asking, choices_of
from tests.support.writers import writer

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hallo"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "time")]
USE = ToolUse(("weather", "time"), "auto")
BONN = {"city": "Bonn"}

ONE = {
    "Hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
    "Hermes without its end": '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}',
    "Llama": '{"name": "weather", "parameters": {"city": "Bonn"}}',
    "Llama, marked": '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Bonn"}}',
    "Mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bonn"}}]',
    "Mistral, later": '[TOOL_CALLS]weather[ARGS]{"city": "Bonn"}',
    "Mistral, with an id": '[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{"city": "Bonn"}',
    "arguments as a text": '{"name": "weather", "arguments": "{\\"city\\": \\"Bonn\\"}"}',
}
TWO = {
    "Hermes": ONE["Hermes"] + '\n<tool_call>{"name": "time", "arguments": {}}</tool_call>',
    "Llama": ONE["Llama"] + '; {"name": "time", "parameters": {}}',
    "Mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bonn"}}, {"name": "time", "arguments": {}}]',
    "Mistral, later": ONE["Mistral, later"] + "[TOOL_CALLS]time[ARGS]{}",
}


def found_in(text):
    before, calls = calls_in(USE, text)
    return before, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("kind", ONE)
def test_a_call_is_found_in_the_format_of_each_family(kind):
    assert found_in(ONE[kind]) == ("", [("weather", BONN)])
    assert found_in(f"\n{ONE[kind]}\n") == ("", [("weather", BONN)])
    if not ONE[kind].startswith("{"):
        assert found_in(f"Let me see. \n{ONE[kind]}") == ("Let me see.", [("weather", BONN)])


@pytest.mark.parametrize("kind", TWO)
def test_several_calls_are_found_in_order(kind):
    assert found_in(TWO[kind]) == ("", [("weather", BONN), ("time", {})])


@pytest.mark.parametrize(
    "text",
    [
        "Bonn is fine.", "", "{}", '{"a": 1}', '{"name": "other", "parameters": {}}', '{"name": "time"}', '{"name": "time", "p',
        '{"name": "time", "parameters": [1]}', '<tool_call>{"name": "time", "arguments": {}', "<tool_call>no</tool_call>",
        '<tool_call>{"name": "time", "arguments": {}}</tool_call> and then', '[TOOL_CALLS]time[ARGS]{"city"', "[TOOL_CALLS]",
        '{"name": "time", "parameters": {}} and then', '{"name": 3, "parameters": {}}', "{" * 2000, "[TOOL_CALLS] [1, 2]",
        "I would write <tool_call> here", '"{"name": "time", "parameters": {}}"',
    ],
)  # fmt: skip
def test_a_text_without_a_whole_call_of_a_known_function_stays_a_text(text):
    assert found_in(text) == (text, [])


@pytest.mark.parametrize(
    "text", [*ONE.values(), *TWO.values(), "Bonn. " + ONE["Hermes"], "a <tool> b", "[TOOL] {", "x  \n"]
)
def test_text_before_calls_only_grows(text):
    """So a stream never sends a part of a call, and takes nothing back."""
    whole, _ = calls_in(USE, text)
    sent = ""
    for size in range(len(text) + 1):
        now = text[: start_of_calls(text[:size])]
        assert now.startswith(sent)
        sent = now
    assert whole.startswith(sent)


SPLIT = {
    "Hermes": (["<tool_call>", ' {"name": "weather", ', '"arguments": {"city": "Bonn"}}', "</tool_call>"], ()),
    "Hermes after a text": (
        ["Let me", " see. ", "<tool_call>", '{"name": "weather", "arguments": {"city": "Bonn"}}', "</tool_call>"],
        (),
    ),
    "Llama": (["<|python_tag|>", '{"name": "weather", ', '"parameters": {"city": "Bonn"}}'], ("<|python_tag|>",)),
    "Llama, unmarked": (['{"name": "weather", ', '"parameters": {"city": "Bonn"}}'], ()),
    "Mistral": (
        ["Let me", " see.", "[TOOL_CALLS]", ' [{"name": "weather", ', '"arguments": {"city": "Bonn"}}]'],
        ("[TOOL_CALLS]",),
    ),
    "Mistral, later": (
        ["[TOOL_CALLS]", "weather", "[ARGS]", '{"city": ', '"Bonn"}'],
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
}


@pytest.mark.parametrize(
    ("kind", "are_named"), [*((kind, True) for kind in SPLIT), ("Llama", False), ("Mistral", False)]
)
def test_a_model_that_calls_a_tool_by_itself_is_answered_as_a_call(kind, are_named):
    """Whole and streamed, with marks that are special tokens or not, named by the tokenizer or only marked as special."""
    pieces, special = SPLIT[kind]
    content = "Let me see." if pieces[0] == "Let me" else None
    body = {"messages": [USER], "tools": TOOLS, "temperature": 0, "seed": 1}
    with asking(writer(pieces, special, are_named=are_named)) as ask:
        (choice,) = ask(CHAT, body).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == content
        (call,) = choice["message"]["tool_calls"]
        assert (call["type"], call["function"]["name"]) == ("function", "weather")
        assert json.loads(call["function"]["arguments"]) == BONN
        chunks = choices_of(ask(CHAT, body | {"stream": True}))
        assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == (content or "")
        (streamed,) = [one for chunk in chunks for one in chunk["delta"].get("tool_calls", [])]
        assert streamed["function"] == call["function"]
        assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]
        without = ask(CHAT, body | {"tool_choice": "none"}).json()["choices"][0]
        assert without["finish_reason"] == "stop"
        assert "tool_calls" not in without["message"]


def test_a_model_that_answers_in_words_has_no_calls():
    body = {"messages": [USER], "tools": TOOLS, "temperature": 0}
    for pieces in (["Let me", " see."], ["{", "a}"], ["<tool_call>", "no"]):
        with asking(writer(pieces)) as ask:
            (choice,) = ask(CHAT, body).json()["choices"]
            assert choice["message"]["content"] == "".join(pieces)
            assert choice["finish_reason"] == "stop"
            chunks = choices_of(ask(CHAT, body | {"stream": True}))
            assert "".join(chunk["delta"]["content"] for chunk in chunks) == "".join(pieces)


def test_calls_have_short_ids_where_the_template_is_mistrals():
    template = "{% if false %}[TOOL_CALLS]{% endif %}{{ messages[-1].content }}>{% if tools %}{% endif %}"
    pieces, special = SPLIT["Mistral"]
    body = {"messages": [USER], "tools": TOOLS, "temperature": 0}
    ids = []
    for form in (template, template.replace("[TOOL_CALLS]", "")):
        with asking(writer(pieces, special, form)) as ask:
            ids.append(ask(CHAT, body).json()["choices"][0]["message"]["tool_calls"][0]["id"])
    assert len(ids[0]) == 9
    assert ids[0].isalnum()
    assert ids[1].startswith("call_")


def test_a_required_call_chooses_between_tools_by_a_grammar():
    """Each tool with its own arguments, and references inside a schema lead to their places."""
    pytest.importorskip("llguidance")
    nested = {
        "$defs": {"n": {"type": "integer", "enum": [7]}},
        "properties": {"n": {"$ref": "#/$defs/n"}},
        "required": ["n"],
    }
    yes = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": nested | {"additionalProperties": False}}},
        {"type": "function", "function": {"name": "g", "parameters": yes}},
    ]
    seen = set()
    with asking(writer(["Hallo"])) as ask:
        for seed in range(12):
            body = {"messages": [USER], "tools": tools, "tool_choice": "required", "seed": seed, "max_tokens": 80}
            answer = ask(CHAT, body | {"specbeam": {"method": "sampling"}}).json()
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            assert arguments == {"n": 7} if call["function"]["name"] == "f" else isinstance(arguments["ok"], bool)
            seen.add(call["function"]["name"])
        assert seen == {"f", "g"}
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
        body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
        assert ask(CHAT, body).json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "g"
        cut = ask(CHAT, body | {"stop": ["ok"]}).json()["choices"][0]
        assert cut["finish_reason"] == "stop"
        assert "tool_calls" not in cut["message"]


def test_arguments_that_are_no_json_of_others_are_written_so_that_all_can_read_them():
    _, (call,) = calls_in(USE, '{"name": "weather", "parameters": {"city": "\\ud800", "size": NaN}}')
    assert json.loads(call.arguments.encode()) == {"city": "\ud800", "size": None}


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice", "there are no tools"),
        ({"tool_choice": "other"}, "tool_choice", "must be 'auto'"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", "weather, time"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice",
            "must be",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": []}}]},
                }
            },
            "tool_choice",
            "must be",
        ),
        ({"tools": [{"type": "custom"}]}, "tools", "must be a function"),
        ({"response_format": {"type": "json_object"}}, "tool_choice", "could not call a tool"),
        ({"structured_outputs": {"regex": "a"}}, "tool_choice", "could not call a tool"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused_by_name(more, param, words):
    with asking(writer(["Hallo"])) as ask:
        error = ask(CHAT, {"messages": [USER], "tools": TOOLS} | more).json()["error"]
        assert error["param"] == param
        assert words in error["message"]


def test_half_a_character_in_a_message_is_refused():
    raw = json.dumps({"messages": [{"role": "user", "content": "\ud800"}]}).encode()
    with asking(writer(["Hallo"])) as ask:
        answer = ask(CHAT, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert r"has half of a character, '\ud800'; send both halves" in answer.json()["error"]["message"]


def test_a_template_that_hides_tools_cannot_choose_one_and_a_forced_call_says_so():
    pytest.importorskip("llguidance")
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 60, "seed": 1}
    with asking(writer(["Hallo"], template="{{ messages[-1].content }}>")) as ask:
        error = ask(CHAT, body).json()["error"]
        assert (error["param"], error["code"]) == ("tools", "not_supported")
        assert "does not show tools" in error["message"]
        answer = ask(CHAT, body | {"tool_choice": "required"}).json()
        assert any("does not show tools" in warning for warning in answer["specbeam"]["warnings"])

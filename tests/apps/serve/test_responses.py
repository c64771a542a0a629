"""OpenAI's Responses API, read by OpenAI's own client: texts, streams, tools, and what is refused."""

import asyncio
import json
import re

import pytest

pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx2")
openai = pytest.importorskip("openai")

from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402

from tests.apps.serve.test_tools import BONN, CITY, SPLIT  # noqa: E402
from tests.support.asgi import asking, events_of  # noqa: E402
from tests.support.writers import writer  # noqa: E402

RESPONSES = "/v1/responses"
CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
EVENT = TypeAdapter(ResponseStreamEvent)
PLAIN = {"input": "Hallo", "temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def ask():
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}({{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}"
        "{% endfor %}){% endfor %}{% if m.reasoning_content is defined %}<{{ m.reasoning_content }}>{% endif %} {% endfor %}>"
        "{% if tools %}{% endif %}"
    )
    with asking(writer(["Let me", " see", "."], template=template)) as asked:
        yield asked


def events(ask, body):
    """The events of a stream, each checked by OpenAI's types and numbered in order."""
    answer = ask(RESPONSES, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    found = events_of(answer)
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    assert [f"event: {event['type']}" for event in found] == [
        line for line in answer.text.split("\n") if line.startswith("event")
    ]
    for event in found:
        EVENT.validate_python(event)
    return found


def test_a_response_has_the_text_of_the_chat_whole_and_streamed(ask):
    chat = ask(CHAT, {"messages": [{"role": "user", "content": "Hallo"}], "temperature": 0, "seed": 1}).json()
    whole = ask(RESPONSES, PLAIN).json()
    found = Response.model_validate(whole)
    assert found.output_text == chat["choices"][0]["message"]["content"] == "Let me see."
    assert (found.status, found.store if hasattr(found, "store") else False) == ("completed", False)
    assert found.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert found.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert whole["specbeam"]["method"] == chat["specbeam"]["method"]
    streamed = events(ask, PLAIN)
    kinds = [event["type"].removeprefix("response.") for event in streamed]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(event["delta"] for event in streamed if event["type"].endswith(".delta")) == "Let me see."
    last = streamed[-1]["response"]
    for name in ("output_text", "status"):
        assert getattr(Response.model_validate(last), name) == getattr(found, name)
    assert last["usage"] == whole["usage"]


def test_a_text_that_is_cut_off_is_incomplete(ask):
    body = PLAIN | {"max_output_tokens": 1}
    whole = ask(RESPONSES, body).json()
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert Response.model_validate(whole).output_text == "Let me"
    assert events(ask, body)[-1]["type"] == "response.incomplete"


def test_a_conversation_reaches_the_template_in_order(ask):
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bonn"}', "id": "fc_1"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "id": "m", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
        call | {"status": "completed"}, call,
        {"type": "function_call_output", "call_id": "c1", "output": "9"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "8"}]},
    ]  # fmt: skip
    expected = "system:be user:a assistant:b assistant:(weather city=Bonn)(weather city=Bonn)<hm> tool:9 tool:8 >"
    found = ask(RESPONSES, PLAIN | {"input": items, "instructions": "be"}).json()
    assert found["usage"]["input_tokens"] == len(expected)
    assert found["instructions"] == "be"


@pytest.mark.parametrize("kind", SPLIT)
def test_calls_of_tools_are_items_whole_and_streamed(kind):
    pieces, special = SPLIT[kind]
    body = PLAIN | {"tools": [TOOL]}
    with asking(writer(pieces, special)) as ask:
        whole = Response.model_validate(ask(RESPONSES, body).json())
        *texts, call = whole.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", BONN)
        assert whole.output_text == ("Let me see." if texts else "")
        streamed = events(ask, body)
        ended = Response.model_validate(streamed[-1]["response"])
        assert [item.type for item in ended.output] == [item.type for item in whole.output]
        assert ended.output[-1].arguments == call.arguments
        (done,) = [event for event in streamed if event["type"] == "response.function_call_arguments.done"]
        assert (done["arguments"], done["output_index"]) == (call.arguments, len(texts))


def test_forms_tools_and_log_probabilities_are_those_of_chats():
    pytest.importorskip("llguidance")
    yes = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    wanted = {"format": {"type": "json_schema", "name": "ok", "schema": yes, "strict": True}}
    with asking(writer(["Hallo"])) as ask:
        text = Response.model_validate(ask(RESPONSES, {"input": "a", "seed": 1, "text": wanted}).json()).output_text
        assert isinstance(json.loads(text)["ok"], bool)
        for choice in ("required", {"type": "function", "name": "weather"}):
            (call,) = ask(
                RESPONSES, {"input": "a", "seed": 1, "tools": [TOOL | {"parameters": yes}], "tool_choice": choice}
            ).json()["output"]
            assert isinstance(json.loads(call["arguments"])["ok"], bool)
        body = PLAIN | {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
        whole = ask(RESPONSES, body).json()
        Response.model_validate(whole)
        (part,) = whole["output"][0]["content"]
        assert [len(one["top_logprobs"]) for one in part["logprobs"]] == [2] * len(part["logprobs"])
        assert part["logprobs"][0]["token"] == "Hallo"
        (done,) = [event for event in events(ask, body) if event["type"] == "response.output_text.done"]
        assert done["logprobs"] == part["logprobs"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input"),
        ({"input": [{"role": "nobody", "content": "a"}]}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": 5}]}, "input"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text"),
        ({"specbeam": {"trace": True}}, "specbeam"),
        ({"max_tokens": 3}, "max_tokens"),
    ],
)
def test_a_response_that_this_server_cannot_give_is_refused_by_its_own_field(ask, more, param):
    answer = ask(RESPONSES, PLAIN | more)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{"}
ASKED = {"role": "user", "content": "a"}
GOOD_CALL = CALL | {"arguments": "{}"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"input": [ASKED, {"role": "nobody", "content": "a"}]}, r"input\[1\]\.role is 'nobody'"),
        ({"input": [ASKED, {"role": "nobody", "content": "a"}], "instructions": "b"}, r"input\[1\]\.role is 'nobody'"),
        ({"input": [ASKED, GOOD_CALL, CALL]}, r"the arguments of input\[2\] are '\{'"),
        ({"input": [ASKED, GOOD_CALL, CALL], "instructions": "b"}, r"the arguments of input\[2\] are '\{'"),
        ({"input": [{"role": "messages.0", "content": "a"}]}, r"input\[0\]\.role is 'messages\.0'"),
        ({"max_output_tokens": 100_000}, r"^max_output_tokens is 100000"),
        ({"max_output_tokens": 4000, "input": "Hallo " * 30}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, r"^text\.format\.schema is missing"),
        ({"text": {"format": {"type": "json_schema", "name": "", "schema": {}}}}, r"^text\.format\.name is ''"),
        ({"text": {"format": {"type": "no"}}}, r"^text\.format\.type is 'no'"),
        ({"tools": [{"type": "function"}]}, r"^tools has \{'type': 'function'\}"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}},
            r"^tool_choice is \{'type': 'function', 'name'",
        ),
    ],
)
def test_a_refusal_of_a_response_names_what_its_client_sent(ask, more, message):
    """Not the fields of the chat that is made of it; values stay as they are."""
    answer = ask(RESPONSES, PLAIN | more)
    assert answer.status_code == 400
    found = answer.json()["error"]
    assert re.search(message, found["message"]), found["message"]
    assert not {"messages", "response_format", "max_completion_tokens"} & {found["param"]}
    outside = re.sub(r"'[^']*'", "", found["message"])
    assert not re.search(r"messages[.\[]|response_format|max_completion_tokens|json_schema", outside), found["message"]


def test_openais_client_reads_responses_and_their_streams():
    pieces, special = SPLIT["Hermes"]

    async def tried(app_of):
        transport = httpx.ASGITransport(app=app_of)
        async with openai.AsyncOpenAI(
            base_url="http://testserver/v1", api_key="none", http_client=httpx.AsyncClient(transport=transport)
        ) as client:
            found = await client.responses.create(model="tiny", input="Hallo", temperature=0, tools=[TOOL])
            async with client.responses.stream(model="tiny", input="Hallo", temperature=0, tools=[TOOL]) as stream:
                streamed = await stream.get_final_response()
        return found, streamed

    from specbeam.apps.serve.app import with_pair
    from specbeam.apps.serve.config import ServerConfig

    config = ServerConfig(model="tiny", name="tiny", warm_up=False)

    async def lived():
        guarded = with_pair(config, writer(pieces, special))
        async with guarded.app.router.lifespan_context(guarded.app):
            while (
                await httpx.AsyncClient(transport=httpx.ASGITransport(app=guarded)).get("http://testserver/health")
            ).status_code != 200:
                await asyncio.sleep(0.02)
            return await tried(guarded)

    found, streamed = asyncio.run(lived())
    for one in (found, streamed):
        (call,) = one.output
        assert json.loads(call.arguments) == BONN

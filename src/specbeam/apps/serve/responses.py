"""OpenAI's Responses API, as another form of chats: bodies become chats, and answers of chats become responses.

Nothing is stored, so a request has the whole conversation in `input`.
"""

import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from specbeam.apps.serve.protocol import (
    ChatBody,
    OfBody,
    SpecbeamOptions,
    Strict,
    object_of,
    refusal_of_fields,
)
from specbeam.apps.serve.refusals import Refusal, invalid, shown
from specbeam.doors import LARGEST_INTEGER

MOST_ITEMS = 512


class TextWishes(Strict):
    """The object `text` of a body."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Strict):
    """The object `reasoning` of a body."""

    effort: Literal["none"] | None = None
    summary: str | None = None  # has no effect: there is no reasoning
    generate_summary: str | None = None


class ResponsesBody(OfBody):
    """The body of a request for a response."""

    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MOST_ITEMS)]
    )
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    num_beams: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None = None
    use_beam_search: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    text: TextWishes | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=64)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    reasoning: Reasoning | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    specbeam: SpecbeamOptions | None = None
    store: bool | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    # These have no effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


SAME = (
    *OfBody.model_fields, "model", "seed", "num_beams", "use_beam_search", "stream", "parallel_tool_calls", "priority",
    "cache_salt", "specbeam", "store", "metadata",
)  # fmt: skip
LOGPROBS = "message.output_text.logprobs"
STORED = ("previous_response_id", "conversation", "prompt")


def response_request(raw: bytes) -> tuple[ChatBody, "ResponseForm"]:
    """Return the chat of a request for a response, and the form of its answer. Raises `Refusal`, which names the fields."""
    given = object_of(raw)
    for name in STORED:
        if name in given:
            raise invalid(
                f"{name} is given, but this server stores no conversations; send the whole one in input", name,
                "not_supported",
            )  # fmt: skip
    try:
        body = ResponsesBody.model_validate(given)
    except ValidationError as error:
        raise refusal_of_fields(error, ResponsesBody) from error
    names = ResponseNames()
    given_chat = _chat_of(body, names)
    try:
        chat = ChatBody.model_validate(given_chat)
    except ValidationError as error:
        raise names.refusal(refusal_of_fields(error, ChatBody)) from error
    return chat, ResponseForm(body, names)


# The fields of a chat in messages, or a quoted value, which stays as it is.
_IN_MESSAGES = re.compile(
    r"""(?P<value>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"""|\bmessages(?:\.|\[)(?P<message>\d+)\]?(?:\.tool_calls(?:\.|\[)(?P<call>\d+)\]?)?"""
    r"""|\btools\.(?P<tool>\d+)\.function\b|\bresponse_format(?P<schema>\.json_schema)?|\bmax(?:_completion)?_tokens\b"""
)
_PARAMS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
}  # chat: response


@dataclass
class ResponseNames:
    """The names of a chat's fields in the body of the response that it was made of.

    Attributes:
        items: by the place of a message, and of a call in it if it is one, the field of the body.
        choices: the values of `tool_choice` in the chat and in the body.
    """

    items: dict[tuple[int, int | None], str] = field(default_factory=dict)
    choices: tuple[Any, Any] = (None, None)

    def refusal(self, refusal: Refusal) -> Refusal:
        """Return the refusal of a chat with the names of the body."""
        if refusal.param == "tool_choice" and self.choices[1] is not None:
            in_chat, in_body = map(shown, self.choices)
            refusal.message = refusal.message.replace(in_chat, in_body)
        refusal.message = self.text(refusal.message)
        refusal.param = _PARAMS.get(refusal.param or "", refusal.param)
        return refusal

    def text(self, message: str) -> str:
        """Return a message about a chat with the names of the body."""
        return _IN_MESSAGES.sub(self._name, message)

    def _name(self, found: "re.Match[str]") -> str:
        if found["value"] is not None:
            return found[0]
        if found["message"] is not None:
            message = int(found["message"])
            call = None if found["call"] is None else int(found["call"])
            return self.items.get((message, call)) or self.items.get((message, None), "input")
        if found["tool"] is not None:
            return f"tools.{found['tool']}"
        return "text.format" if found[0].startswith("response_format") else "max_output_tokens"


def _chat_of(body: ResponsesBody, names: ResponseNames) -> dict[str, Any]:
    """Return the chat of a body, as JSON, and fill in the names of its fields."""
    chat = {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    if body.specbeam is not None:
        if body.specbeam.trace or body.specbeam.stream == "live":
            raise invalid("responses show no turns; use /v1/chat/completions for specbeam.trace and 'live'", "specbeam")
        chat["specbeam"] = body.specbeam.model_dump(exclude_unset=True)
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat["messages"] = [*instructions, *_messages_of(items, names, len(instructions))]
    if instructions:
        names.items[0, None] = "instructions"
    if isinstance(body.input, str):
        names.items[len(instructions), None] = "input"
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.tools:
        chat["tools"] = [_tool_of(tool) for tool in body.tools]
    if body.tool_choice is not None:
        chat["tool_choice"] = _choice_of(body.tool_choice)
        names.choices = (chat["tool_choice"], body.tool_choice)
    if body.text is not None:
        chat["verbosity"] = body.text.verbosity
        chat["response_format"] = _format_of(body.text.format)
    unknown = set(body.include or ()) - {LOGPROBS, "reasoning.encrypted_content"}
    if unknown:
        raise invalid(f"include has {shown(min(unknown))}; this server can include {LOGPROBS}", "include")
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.stream:
        chat["stream_options"] = {"include_usage": True}
    return {name: value for name, value in chat.items() if value is not None}


def _list_in(item: Mapping[str, Any], name: str, place: int) -> list[Any]:
    """Return a list of an item of an input; an empty one if it is missing."""
    found = item.get(name) or []
    if not isinstance(found, list):
        raise invalid(f"input[{place}].{name} is {shown(found)}; it must be a list", "input")
    return found


def _messages_of(items: Sequence[Mapping[str, Any]], names: ResponseNames, before: int) -> list[dict[str, Any]]:
    """Return the messages of a chat for the items of an input, and fill in the names of their fields.

    Args:
        before: number of messages before them.
    """
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for place, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":
            parts = [*_list_in(item, "summary", place), *_list_in(item, "content", place)]
            reasoning += _text_of(parts, place)
            continue
        if kind == "function_call_output":
            output = _text_of(item.get("output"), place)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            names.items[before + len(messages) - 1, None] = f"input[{place}]"
            continue
        if kind == "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            if not (messages and messages[-1]["role"] == "assistant" and not reasoning):
                messages.append({"role": "assistant", "content": ""})
                names.items[before + len(messages) - 1, None] = f"input[{place}]"
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append(call)
            names.items[before + len(messages) - 1, len(calls) - 1] = f"input[{place}]"
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": _text_of(item.get("content"), place)})
            names.items[before + len(messages) - 1, None] = f"input[{place}]"
        else:
            raise invalid(
                f"input[{place}] is of type {shown(kind)}; this server reads messages, reasoning, function_call and "
                "function_call_output",
                "input",
                "unsupported_content",
            )
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
            reasoning = ""
    if not messages:
        raise invalid("input has no message; send one", "input")
    return messages


def _text_of(content: Any, place: int) -> str:
    """Return the text of an item: a string, or parts with texts."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        is_text = kind in ("input_text", "output_text", "text", "summary_text", "reasoning_text")
        if not is_text or not isinstance(part.get("text"), str):
            raise invalid(
                f"input[{place}] has the content {shown(part)}; this server reads text only", "input",
                "unsupported_content",
            )  # fmt: skip
        texts.append(part["text"])
    return "".join(texts)


def _tool_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise invalid(
            f"tools has {shown(dict(tool))}; this server knows tools of type 'function'", "tools", "not_supported"
        )
    if not isinstance(tool.get("name"), str):
        raise invalid(f"tools has {shown(dict(tool))}; each tool must have a name", "tools")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice_of(choice: Any) -> Any:
    """Return the choice of a tool as chats have it."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_choice_of(tool) for tool in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _format_of(wanted: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the form of a text as chats have it."""
    if wanted is None or wanted.get("type") != "json_schema":
        return None if wanted is None else dict(wanted)
    inner = {name: value for name, value in wanted.items() if name != "type"}
    return {"type": "json_schema", "json_schema": inner}


class ResponseForm:
    """The form of a response: turns the answer of a chat, whole or streamed, into it."""

    def __init__(self, body: ResponsesBody, names: ResponseNames) -> None:
        self.body = body
        self.names = names
        self._number = -1  # of the last event
        self._head: dict[str, Any] = {}  # the first chunk of a stream

    def whole(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response for the answer of a chat."""
        (choice,) = answer["choices"][:1]
        items = _items_of(self._own(answer), choice["message"], choice["logprobs"], choice["finish_reason"])
        return self._response(answer, items, choice["finish_reason"], answer["usage"]) | {
            "specbeam": self._named(answer["specbeam"])
        }

    def _named(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the object `specbeam` of an answer, with the names of the body in its warnings."""
        return {**found, "warnings": [self.names.text(warning) for warning in found["warnings"]]}

    def _own(self, answer: Mapping[str, Any]) -> str:
        """Return the id of a request, without the mark of chats."""
        return str(answer["id"]).removeprefix("chatcmpl-")

    def _response(
        self, answer: Mapping[str, Any], items: list[dict[str, Any]], reason: str | None, usage: Any
    ) -> dict[str, Any]:
        """Return a response.

        Args:
            items: its output so far.
            reason: how the text ended; None if it has not.
        """
        body = self.body
        status = {None: "in_progress", "length": "incomplete"}.get(reason, "completed")
        wishes = body.text or TextWishes()
        return {
            "id": f"resp_{self._own(answer)}",
            "object": "response",
            "created_at": answer["created"],
            "completed_at": None if reason is None else int(time.time()),
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": answer["model"],
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "text": {"format": wishes.format or {"type": "text"}, "verbosity": wishes.verbosity or "medium"},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": body.user,
            "metadata": body.metadata or {},
        } | {name: getattr(body, name) for name in OfBody.model_fields}

    async def events(self, chunks: AsyncIterator[dict[str, Any] | None]) -> AsyncIterator[dict[str, Any] | None]:
        """Yield the events of a response for the chunks of a chat; None for a ping."""
        text = ""
        logprobs: list[Any] = []
        message: dict[str, Any] = {}
        reason = "stop"
        last: dict[str, Any] = {}
        is_open = False  # whether the message has been announced
        async for chunk in chunks:
            if chunk is None:
                yield None
                continue
            if not self._head:
                self._head = chunk
                for kind in ("response.created", "response.in_progress"):
                    yield self._event(kind, response=self._response(chunk, [], None, None))
            if not chunk["choices"]:
                last = chunk
                continue
            (choice,) = chunk["choices"][:1]
            piece = choice["delta"].get("content") or ""
            scores = (choice.get("logprobs") or {}).get("content") or []
            logprobs += scores
            if piece and not is_open:
                is_open = True
                for event in self._opening():
                    yield event
            if piece:
                text += piece
                yield self._event(
                    "response.output_text.delta", **self._place(), delta=piece, logprobs=_logprobs(scores)
                )
            if choice["finish_reason"] is not None:
                message = {"content": text, "tool_calls": choice["delta"].get("tool_calls") or []}
                reason = choice["finish_reason"]
        items = _items_of(self._own(self._head), message, {"content": logprobs}, reason)
        for event in self._closing(items, is_open):
            yield event
        response = self._response(self._head, items, reason, last["usage"]) | {
            "specbeam": self._named(last["specbeam"])
        }
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, refusal: Refusal) -> dict[str, Any]:
        """Return the event for a refusal after the beginning of a stream."""
        refusal = self.names.refusal(refusal)
        code = "rate_limit_exceeded" if refusal.status == 429 else "server_error"
        if not self._head:
            return self._event("error", code=code, message=refusal.message, param=refusal.param)
        response = self._response(self._head, [], "failed", None) | {
            "status": "failed",
            "error": {"code": code, "message": refusal.message},
        }
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **content: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **content}

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._own(self._head)}", "output_index": 0, "content_index": 0}

    def _opening(self) -> Iterator[dict[str, Any]]:
        """Yield the events before the first text of a message."""
        item = _message_item(self._own(self._head), "in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place(), part=_text_part("", []))

    def _closing(self, items: Sequence[Mapping[str, Any]], is_open: bool) -> Iterator[dict[str, Any]]:
        """Yield the events after the last text, with all calls of tools.

        Args:
            is_open: whether the message has been announced.
        """
        for place, item in enumerate(items):
            if item["type"] == "message":
                if not is_open:  # an empty text
                    yield from self._opening()
                (part,) = item["content"]
                text = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._event("response.output_text.done", **self._place(), **text)
                yield self._event("response.content_part.done", **self._place(), part=part)
            else:
                own = {"output_index": place, "item_id": item["id"]}
                begun = {**item, "status": "in_progress", "arguments": ""}
                yield self._event("response.output_item.added", output_index=place, item=begun)
                kind = "response.function_call_arguments"
                yield self._event(f"{kind}.delta", **own, delta=item["arguments"])
                yield self._event(f"{kind}.done", **own, name=item["name"], arguments=item["arguments"])
            yield self._event("response.output_item.done", output_index=place, item=dict(item))


def _items_of(own: str, message: Mapping[str, Any], logprobs: Any, reason: str) -> list[dict[str, Any]]:
    """Return the output of a response: its text, and its calls of tools."""
    calls = message.get("tool_calls") or []
    items = []
    if message["content"] or not calls:
        scores = (logprobs or {}).get("content") or []
        part = _text_part(message["content"] or "", _logprobs(scores))
        items.append(_message_item(own, "incomplete" if reason == "length" else "completed", [part]))
    for place, call in enumerate(calls):
        items.append(
            {
                "id": f"fc_{own}_{place}",
                "type": "function_call",
                "status": "completed",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
        )
    return items


def _message_item(own: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": f"msg_{own}", "type": "message", "status": status, "role": "assistant", "content": content}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprobs(scores: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return log-probabilities of a chat in the format of responses."""
    return [dict(score) for score in scores]


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of tokens in the format of responses."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def as_typed_event(event: Mapping[str, Any] | None) -> bytes:
    """Return an event of a response as a server-sent event; None as a comment, which clients ignore."""
    if event is None:
        return b": ping\n\n"
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n".encode()

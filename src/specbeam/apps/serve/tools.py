"""Tools of a chat: which ones an answer may call, and the calls in the text of a model.

A model writes calls in the format of its chat template. A named tool, or a required one, is forced by a grammar instead.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specbeam.apps.serve.protocol import ChatBody
from specbeam.apps.serve.refusals import invalid, shown
from specbeam.doors import as_json, shows_tools
from specbeam.errors import SpecbeamError

ANY_OBJECT = {"type": "object"}  # the schema of every JSON object


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call.

    Attributes:
        names: names of the functions.
        how: "named": the text is the arguments of the only function; "required": the text is an object with the name of
            a function and its arguments; "auto": the model writes text, or calls in its own format.
        short_ids: whether calls have ids of nine letters and digits, which Mistral's chat templates demand.
    """

    names: tuple[str, ...]
    how: Literal["named", "required", "auto"]
    short_ids: bool = False


@dataclass(frozen=True)
class ToolCall:
    """A call of a function.

    Attributes:
        arguments: a JSON object as text.
    """

    id: str
    name: str
    arguments: str

    @property
    def json(self) -> dict[str, Any]:
        """The call in OpenAI's format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


# What a request asks for.


def tool_use_of(body: ChatBody, template: Any) -> ToolUse | None:
    """Return the tools that an answer may call; None for a plain text.

    Args:
        template: the chat template, or several by name.

    Raises `Refusal` for a choice that names unknown tools, or if the model is to choose but its template shows no tools.
    """
    names = tuple(str(_function_of(tool)["name"]) for tool in body.tools or [])
    how, chosen = _choice_of(body.tool_choice, names)
    if how == "none" or not chosen:
        return None
    is_mistral = "[TOOL_CALLS]" in str(template)
    if how == "named" or (how == "required" and len(chosen) == 1):
        return ToolUse(chosen, "named", is_mistral)
    if how == "required":
        return ToolUse(chosen, "required", is_mistral)
    if not shows_tools(template):
        raise invalid(
            "the chat template of this model does not show tools, so it cannot choose one; name a tool in tool_choice, or "
            "set tool_choice to 'required' or 'none'",
            "tools",
            "not_supported",
        )
    has_format = body.response_format is not None and body.response_format.type != "text"
    if has_format or body.structured_outputs is not None:
        raise invalid(
            f"{'response_format' if has_format else 'structured_outputs'} constrains the whole text, so the model could "
            "not call a tool; leave it out, or set tool_choice to 'none'",
            "tool_choice",
        )
    return ToolUse(chosen, "auto", is_mistral)


def _choice_of(choice: Any, names: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return how an answer may call tools ("none", "auto", "required", "named"), and the names of these tools."""
    if choice in (None, "auto", "none"):
        return choice or "auto", names
    if choice == "required":
        if not names:
            raise invalid("tool_choice is 'required', but there are no tools; send tools", "tool_choice")
        return "required", names
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = _inner(choice, "function").get("name")
        if name in names:
            return "named", (str(name),)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = _inner(choice, "allowed_tools")
        tools = allowed.get("tools")
        chosen = [_inner(tool, "function").get("name") for tool in tools] if isinstance(tools, list) else []
        are_known = bool(chosen) and all(isinstance(one, str) and one in names for one in chosen)
        if allowed.get("mode") in ("auto", "required") and are_known:
            return str(allowed["mode"]), tuple(map(str, chosen))
    raise invalid(
        f"tool_choice is {shown(choice)}; it must be 'auto', 'none', 'required', or name functions of tools: "
        f"{', '.join(names) or 'there are none'}",
        "tool_choice",
    )


def _inner(value: Any, name: str) -> Mapping[str, Any]:
    """Return an object inside another one; an empty one if it is missing."""
    inner = value.get(name) if isinstance(value, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"tools has {shown(tool)}; each tool must be a function with a name", "tools")
    return function


def plain_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool for a chat template, without its `cache_control`."""
    found = {name: value for name, value in tool.items() if name != "cache_control"}
    function = found.get("function")
    if isinstance(function, dict):
        found["function"] = {name: value for name, value in function.items() if name != "cache_control"}
    return found


# The grammar of a forced call.


def schema_of_call(body: ChatBody, use: ToolUse) -> dict[str, Any]:
    """Return the JSON schema of the text of a forced call."""
    parameters = {name: _parameters_of(body.tools or [], name) for name in use.names}
    if use.how == "named":
        return parameters[use.names[0]]
    calls = []
    for number, (name, schema) in enumerate(parameters.items()):
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "arguments": _moved(schema, f"#/anyOf/{number}/properties/arguments"),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls}


def _parameters_of(tools: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the schema of a function's arguments. Raises `Refusal` if it is not the schema of an object."""
    function = next(one for one in map(_function_of, tools) if one["name"] == name)
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise invalid(
            f"the parameters of function {name!r} are {shown(parameters)}; they must be a schema of type 'object'",
            "tools",
            "bad_grammar",
        )
    return ANY_OBJECT | parameters


def _moved(schema: Any, place: str) -> Any:
    """Return a schema for another place in a document: its references to itself point there."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _moved(value, place) for name, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        found["$ref"] = place + target[1:]
    return found


# The calls in a text.

HERMES = "<tool_call>"  # Hermes, Qwen: <tool_call>{"name": ..., "arguments": ...}</tool_call>
LLAMA = "<|python_tag|>"  # Llama 3: {"name": ..., "parameters": ...}, often without this mark
MISTRAL = "[TOOL_CALLS]"  # Mistral: [TOOL_CALLS][{"name": ..., "arguments": ...}] or [TOOL_CALLS]name[ARGS]{...}
MARKS = (HERMES, LLAMA, MISTRAL)
_HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MISTRAL_NAME = re.compile(r"\s*([\w.-]+?)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)")
_JSON = json.JSONDecoder()


def new_call(use: ToolUse, name: str, arguments: str) -> ToolCall:
    """Return a call with a new id."""
    own = secrets.token_hex(12)
    return ToolCall(own[:9] if use.short_ids else f"call_{own}", name, arguments)


def forced_call(use: ToolUse, text: str) -> ToolCall:
    """Return the call in a text that the grammar of `schema_of_call` has formed."""
    if use.how == "named":
        return new_call(use, use.names[0], text)
    found = json.loads(text)
    return new_call(use, found["name"], as_json(found["arguments"]))


def calls_in(use: ToolUse, text: str) -> tuple[str, list[ToolCall]]:
    """Return the text before the calls that a model has written, and these calls.

    The calls are empty if the text has none, one of them is broken or cut off, or one names an unknown function.

    Args:
        text: the text with the special tokens that mark calls.
    """
    start = start_of_calls(text)
    found = _read(text[start:])
    is_call = found and all(name in use.names for name, _ in found)
    if not is_call:
        return text, []
    calls = [new_call(use, name, as_json(arguments)) for name, arguments in found]
    return text[:start], calls


def start_of_calls(text: str) -> int:
    """Return the place where calls may begin in a text; its length if no part of it can belong to a call.

    The end of a text counts if it is the beginning of a mark. White space at the end counts, too, because it may stand
    before a call.
    """
    if text.lstrip()[:1] in ("", "{"):
        return 0
    places = [text.find(mark) for mark in MARKS if mark in text]
    longest = max(map(len, MARKS))
    sizes = range(1, min(longest, len(text) + 1))
    places += [len(text) - size for size in sizes if any(mark.startswith(text[-size:]) for mark in MARKS)]
    start = min(places, default=len(text))
    return len(text[:start].rstrip())


def _read(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return names and arguments of the calls in a text that consists of calls; nothing if one is broken."""
    text = text.strip()
    try:
        if text.startswith(HERMES):
            inner = _HERMES_CALL.findall(text)
            if _HERMES_CALL.sub("", text).strip():
                return []  # text after a call
            return [_named(json.loads(one), "arguments") for one in inner]
        if text.startswith(MISTRAL):
            return _of_mistral(text)
        return [_named(one, "parameters") for one in _objects(text.removeprefix(LLAMA))]
    except (ValueError, SpecbeamError, RecursionError):
        return []


def _of_mistral(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of Mistral's formats: a list of objects, or a mark, a name and an object for each."""
    found: list[tuple[str, dict[str, Any]]] = []
    for part in text.split(MISTRAL)[1:]:
        if part.lstrip().startswith("["):
            found += [_named(one, "arguments") for one in json.loads(part)]
            continue
        named = _MISTRAL_NAME.match(part)
        if named is None:
            raise ValueError("a call has no name")
        arguments = json.loads(part[named.end() :])
        found.append(_named({"name": named.group(1), "arguments": arguments}, "arguments"))
    return found


def _objects(text: str) -> list[Any]:
    """Return the JSON objects of a text, separated by semicolons or white space."""
    found = []
    place = 0
    while rest := text[place:].lstrip(" \t\r\n;"):
        place = len(text) - len(rest)
        one, place = _JSON.raw_decode(text, place)
        found.append(one)
    return found


def _named(call: Any, usual: str) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call. Raises `ValueError` for anything else.

    Args:
        usual: the field with the arguments; models use "arguments" and "parameters" for each other.
    """
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("a call is not an object with a name")
    other = {"arguments": "parameters", "parameters": "arguments"}[usual]
    arguments = call.get(usual, call.get(other))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not an object")
    return call["name"], arguments

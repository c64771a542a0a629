"""Chat templates: conversion of messages to the tokens of a prompt."""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specbeam.errors import BadPrompt

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ALIKE = 0.82  # least similarity of a mistyped role, above that of "user_1" and "function_call"
BUNDLED_TEMPLATE = (
    "{% if messages|length != 1 or messages[0]['role'] != 'user' %}"
    "{{ raise_exception('the bundled model translates one user message and supports neither conversations nor messages of "
    "the system') }}"
    "{% endif %}{{ messages[0]['content'] }}"
)


def shows_tools(template: Any) -> bool:
    """Return whether a chat template reads the tools of a request.

    Args:
        template: the template, or several by name.
    """
    return "tools" in str(template)


def prompt_of_messages(
    tokenizer: Any,
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    tools: Any = None,
    goes_on: bool = False,
    starts: bool | None = None,
    adds_special: bool | None = None,
    further: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of the messages of a chat.

    See `text_of_messages` and `tokens_of_chat` for the arguments and errors.
    """
    text = text_of_messages(tokenizer, template, messages, tools, goes_on, starts, further)
    return tokens_of_chat(tokenizer, template, text, adds_special)


def text_of_messages(
    tokenizer: Any,
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    tools: Any = None,
    goes_on: bool = False,
    starts: bool | None = None,
    further: Mapping[str, Any] | None = None,
) -> str:
    """Return the messages of a chat as the text of a prompt.

    Args:
        template: a Jinja template; None: the tokenizer's own.
        goes_on: whether to continue the last message.
        starts: whether the template begins an answer; None: unless the last message is continued.
        further: further variables of the template.

    Raises `BadPrompt` if the template rejects the messages, or the role of one seems mistyped.
    """
    named = str(template or tokenizer.chat_template)
    for number, message in enumerate(messages):
        _check_role(str(message.get("role")), named, number)
    conversation = [_with_arguments(message, number) for number, message in enumerate(messages)]
    try:
        text = tokenizer.apply_chat_template(
            conversation,
            tools=tools or None,
            chat_template=template,
            add_generation_prompt=not goes_on if starts is None else starts,
            continue_final_message=goes_on,
            tokenize=False,
            **(further or {}),
        )
    except Exception as error:  # raised by the template, for any reason
        raise BadPrompt(f"the chat template rejects these messages: {str(error)[:200]}") from error
    return str(text)


def tokens_of_chat(tokenizer: Any, template: str | None, text: str, adds_special: bool | None = None) -> list[int]:
    """Return the token ids of a text of `text_of_messages`.

    Args:
        template: as there.
        adds_special: whether the tokenizer adds special tokens. None: as in transformers, not to its own template, which
            contains them; to another template, unless its text begins with the first special token.

    Raises `BadPrompt` if the text cannot be tokenized, or there are no tokens.
    """
    if adds_special is None:
        start = tokenizer.bos_token
        is_written = start is not None and text.startswith(start)
        adds_special = template is not None and not is_written
    try:
        ids = list(tokenizer(text, add_special_tokens=adds_special, **without_warning(tokenizer, text))["input_ids"])
    except Exception as error:  # for example of half a character
        raise BadPrompt(f"the messages cannot be tokenized: {str(error)[:200]}") from error
    if not ids:
        raise BadPrompt("the messages have no tokens")
    return ids


def without_warning(tokenizer: Any, text: str) -> dict[str, bool]:
    """Return the options by which a tokenizer of transformers does not log that a text is long: specbeam has an error.

    The tokenizer warns of its own `model_max_length`, whatever the model's positions are.
    """
    longest = getattr(tokenizer, "model_max_length", None)
    may_be_long = longest is not None and len(text.encode("utf-8", "replace")) >= longest
    return {"verbose": False} if may_be_long else {}


def _check_role(role: str, template: str, number: int) -> None:
    """Raise `BadPrompt` for a role that is nearly a usual one and that the template does not name.

    Templates pass such a role on as written, or leave its message out.
    """
    is_known = role in ROLES or role in template or "lower" in template
    meant = [] if is_known else difflib.get_close_matches(role.lower(), ROLES, 1, ALIKE)
    if meant:
        raise BadPrompt(f"messages[{number}] has the role {role!r}; did you mean {meant[0]!r}?")


def _with_arguments(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a message with the arguments of tool calls as objects; clients send them as JSON texts.

    Raises `BadPrompt` for anything but JSON objects, which templates would show incorrectly, and for messages to the model
    without content.
    """
    found = dict(message)
    if found.get("content") is None and found.get("role") != "assistant":
        raise BadPrompt(f"messages[{number}] has no content, only {', '.join(found)}; give its text as 'content'")
    calls = found.get("tool_calls")
    if isinstance(calls, list):
        where = f"messages[{number}].tool_calls"
        found["tool_calls"] = [_call_with_arguments(call, f"{where}[{place}]") for place, call in enumerate(calls)]
    return found


def _call_with_arguments(call: Any, where: str) -> Any:
    """Return a tool call with its arguments as an object, by default an empty one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise BadPrompt(
                f"the arguments of {where} are {arguments[:80]!r}; they must be a JSON object: {error}"
            ) from error
    if not isinstance(arguments, Mapping):
        raise BadPrompt(f"the arguments of {where} are {str(arguments)[:80]}; they must be a JSON object")
    return {**call, "function": {**function, "arguments": dict(arguments)}}

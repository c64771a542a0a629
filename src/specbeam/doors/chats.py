"""Chat templates: from messages to the tokens of a prompt."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specbeam.errors import BadPrompt

BUNDLED_TEMPLATE = (
    "{% if messages|length != 1 or messages[0]['role'] != 'user' %}"
    "{{ raise_exception('the bundled model translates one message of a user; it holds no conversation') }}"
    "{% endif %}{{ messages[0]['content'] }}"
)


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

    Args:
        template: in Jinja; None: the tokenizer's own.
        goes_on: whether the last message is to be continued.
        starts: whether the template begins an answer; None: unless the last message is continued.
        adds_special: whether the tokenizer adds special tokens; None: not to its own template, which writes all of them, as
            in transformers, and to another template unless it has written the first one.
        further: what else the template is given.

    Raises:
        BadPrompt: the template refuses the messages, or there are no tokens.
    """
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
        if adds_special is None:
            start = tokenizer.bos_token
            is_written = start is not None and text.startswith(start)
            adds_special = template is not None and not is_written
        ids = list(tokenizer(text, add_special_tokens=adds_special)["input_ids"])
    except Exception as error:  # of the template: anything may be wrong with what it was given
        raise BadPrompt(f"the chat template refuses these messages: {str(error)[:200]}") from error
    if not ids:
        raise BadPrompt("the messages have no tokens")
    return ids


def _with_arguments(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a message in whose tool calls the arguments are objects: clients send them as JSON texts.

    Raises `BadPrompt` if they are no JSON object: a template would show something else than was called.
    """
    found = dict(message)
    calls = found.get("tool_calls")
    if isinstance(calls, list):
        found["tool_calls"] = [_call_with_arguments(call, f"messages[{number}].tool_calls") for call in calls]
    return found


def _call_with_arguments(call: Any, where: str) -> Any:
    """Return a tool call with its arguments as an object; without any it has an empty one."""
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
                f"the arguments of a call in {where} are {arguments[:80]!r}, which is no JSON: {error}; they must be a JSON "
                "object"
            ) from error
    if not isinstance(arguments, Mapping):
        raise BadPrompt(f"the arguments of a call in {where} are {str(arguments)[:80]}; they must be a JSON object")
    return {**call, "function": {**function, "arguments": dict(arguments)}}

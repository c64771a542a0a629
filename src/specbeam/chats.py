"""Chat templates: from messages to the tokens of a prompt."""

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
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
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

"""Prompts in any container that transformers accepts or returns, split into single prompts and converted to token ids.

| given | prompts |
| --- | --- |
| a text; a list, tuple, range, iterator, array or tensor of integers | one |
| messages: a list of mappings with a "role" | one, by the tokenizer's chat template |
| an encoding: a mapping with `input_ids`, such as a `BatchEncoding`, or one of `tokenizers` | one per row, without padding |
| an array or tensor of integers with two dimensions | one per row, without padding |
| a row of a data set: a mapping with "text", "prompt", "messages" or "prompt_token_ids" | those of the value |
| an open text file | one per line |
| a table, a column, or any other ordered iterable | one per element, each in one of these forms |
"""

import reprlib
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral, Number
from typing import Any

import numpy as np
from tokenizers import Encoding

from specbeam.doors.chats import prompt_of_messages, shows_tools, without_warning
from specbeam.errors import BadPrompt

TAKEN = "a text, a list of token ids, the messages of a chat, or the output of a tokenizer"
# The fields of a mapping with prompts; a mapping has one of them.
FIELDS = ("input_ids", "prompt_token_ids", "messages", "prompt", "text", "input_features")
# Inputs other than text, which would be ignored.
_OTHER_INPUTS = (
    "inputs_embeds", "pixel_values", "pixel_values_videos", "input_values", "image", "images", "video", "videos", "audio",
)  # fmt: skip
# Further outputs of tokenizers and feature extractors, without effect: they follow from ids and text.
_DERIVED = {"special_tokens_mask", "offset_mapping", "length"}
_BY_TOKEN = ("attention_mask", "token_type_ids", "position_ids")
_DEEPEST = 4  # maximum number of containers around a prompt


@dataclass(frozen=True)
class EncodedPrompt:
    """A row of an encoding, possibly padded.

    Attributes:
        ids: the token ids, including padding.
        by_token: numbers per token, by name: `attention_mask`, `token_type_ids`, `position_ids`.
        rows: number of rows of the encoding. Without a mask, rows of several may be padded.
    """

    ids: list[Any]
    by_token: dict[str, list[Any]] = field(default_factory=dict)
    rows: int = 1


@dataclass(frozen=True)
class Conversation:
    """The messages of a chat.

    Attributes:
        messages: mappings with a "role".
        tools: descriptions of functions for the template; None: no functions.
    """

    messages: list[Mapping[str, Any]]
    tools: Any = None


def prompts_in(given: Any, name: str = "prompts") -> list[Any]:
    """Return a list of single prompts, not yet tokenized; a list of prompts is returned unchanged.

    Each is a text, a list of numbers, an `EncodedPrompt`, a `Conversation`, features, or an object that `PromptReader`
    unpacks or rejects later, so that a broken prompt does not affect the others. Iterators are read to the end.

    Args:
        given: one prompt or many, in any form of the table above.
        name: a name for messages.

    Raises:
        BadPrompt: `given` neither is nor contains a prompt: a number, bytes, a set, a path, None, another object, or a
            mapping without a prompt field. The message names its type.
    """
    if isinstance(given, (str, EncodedPrompt, Conversation)):
        return [given]
    if hasattr(given, "readline") and isinstance(given, Iterable):  # an open text file
        return [line.rstrip("\r\n").removeprefix("\ufeff") if isinstance(line, str) else line for line in given]
    if isinstance(given, Encoding):
        by_token = {"attention_mask": given.attention_mask, "token_type_ids": given.type_ids}
        return [EncodedPrompt(given.ids, by_token)]
    convert = _conversion_of(given)
    if convert is not None:
        return prompts_in(convert(), name)
    if isinstance(given, Mapping):
        return _prompts_of_mapping(given, name)
    if is_array(given):
        return _prompts_of_array(given, name)
    elements = _elements(given, name)
    if elements and (set(map(type, elements)) == {int} or all(map(_is_number, elements))):
        return [elements]
    if elements and all(map(_is_message, elements)):
        return [Conversation(elements)]
    return [list(element) if isinstance(element, Iterator) else element for element in elements]


@dataclass(frozen=True)
class PromptReader:
    """Conversion of single prompts to token ids.

    Attributes:
        tokenizer: a tokenizer of transformers; None: prompts are token ids.
        vocab: vocabulary size of the model; None: unlimited.
        pad: the padding token of encodings without a mask; None: no padding.
        unsure: tokens that may be padding or text.
        adds_special: whether the tokenizer adds special tokens to texts.
    """

    tokenizer: Any = None
    vocab: int | None = None
    pad: int | None = None
    unsure: Sequence[int] = ()
    adds_special: bool = True

    def ids(self, prompt: Any, name: str) -> list[int]:
        """Return the token ids of a single prompt, without padding.

        Args:
            prompt: a text, or one prompt in any other form.
            name: of the prompt, for messages.

        Raises:
            BadPrompt: it is empty, has tokens outside the vocabulary, or cannot be read; the message names its type.
        """
        for _ in range(_DEEPEST):
            if isinstance(prompt, str):
                return self._known(self._ids_of_text(prompt, name), name)
            if isinstance(prompt, EncodedPrompt):
                return self._known(self._without_padding(prompt, name), name)
            if isinstance(prompt, Conversation):
                return self._known(self._ids_of_chat(prompt, name), name)
            if isinstance(prompt, list) and set(map(type, prompt)) <= {int}:
                return self._known([*prompt], name)
            if isinstance(prompt, list) and all(map(_is_number, prompt)):
                return self._known([_as_id(token, name) for token in prompt], name)
            if _holds_fractions(prompt):
                raise BadPrompt(f"{name} is a {_type_of(prompt)}; token ids are integers")
            found = prompts_in(prompt, name)
            if not found:
                raise BadPrompt(f"{name} is empty; it must have at least one token")
            if len(found) > 1:
                raise BadPrompt(
                    f"{name} is a {_type_of(prompt)} of {len(found)} prompts; give each as a separate prompt"
                )
            (prompt,) = found
        raise BadPrompt(f"{name} is nested in more than {_DEEPEST} containers; it must be {TAKEN}")

    def _known(self, ids: list[int], name: str) -> list[int]:
        """Return the token ids if there are any, all in the vocabulary; otherwise raise `BadPrompt`."""
        if not ids:
            raise BadPrompt(f"{name} is empty; it must have at least one token")
        least = min(ids)
        if least < 0:
            raise BadPrompt(f"{name} has token id {least}; token ids begin at 0")
        most = max(ids)
        if self.vocab is not None and most >= self.vocab:
            raise BadPrompt(
                f"{name} has token id {most}; the model's vocabulary is 0 to {self.vocab - 1}: was it made with "
                "another tokenizer?"
            )
        return ids

    def _ids_of_text(self, text: str, name: str) -> list[int]:
        """Return the token ids of a text. White space is valid; "" is not, even with added special tokens."""
        if self.tokenizer is None:
            raise BadPrompt(f"{name} is text, but there is no tokenizer; give load(tokenizer=...) or token ids")
        if not text:
            raise BadPrompt(f"{name} is empty; it must have some text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadPrompt(f"{name} has half a character (a lone surrogate); it must be valid Unicode") from error
        further = {} if self.adds_special else {"add_special_tokens": False}
        try:
            return list(self.tokenizer(str(text), **further, **without_warning(self.tokenizer, text))["input_ids"])
        except Exception as error:  # raised by the tokenizer, for any reason
            raise BadPrompt(f"{name} is rejected by {type(self.tokenizer).__name__}: {str(error)[:200]}") from error

    def _ids_of_chat(self, chat: Conversation, name: str) -> list[int]:
        """Return the token ids of a chat by the tokenizer's own template.

        As in transformers' pipelines, a final message of the assistant is continued; otherwise an answer begins.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            lacks = "there is no tokenizer"
            if self.tokenizer is not None:
                lacks = "the tokenizer of this pair has no chat template"
            raise BadPrompt(f"{name} has messages, and {lacks}; give a text or token ids")
        if chat.tools and not shows_tools(self.tokenizer.chat_template):
            raise BadPrompt(f"{name} has tools, and the chat template does not show them to the model; leave them out")
        goes_on = bool(chat.messages) and chat.messages[-1]["role"] == "assistant"
        try:
            return prompt_of_messages(self.tokenizer, None, chat.messages, chat.tools, goes_on)
        except BadPrompt as error:
            raise BadPrompt(f"{name}: {error}") from error

    def _without_padding(self, row: EncodedPrompt, name: str) -> list[int]:
        """Return the token ids of a row without the padding on either side."""
        ids = [_as_id(token, name) for token in row.ids]
        for what, values in row.by_token.items():
            if len(values) != len(ids):
                raise BadPrompt(
                    f"{name} has {len(ids)} token ids and {len(values)} numbers in {what}; they must have the same length"
                )
        mask = row.by_token.get("attention_mask")
        kept = self._unpadded(ids, row.rows, name) if mask is None else _marked(mask, name)
        if not kept:
            return []
        if kept[-1] - kept[0] + 1 != len(kept):
            hole = next(place for place, other in enumerate(kept, kept[0]) if place != other)
            why = f"attention_mask is 0 at token {hole}"
            if mask is None:
                why = f"token {hole} is the pad token {self.pad}"
            raise BadPrompt(
                f"{name} has a hole: {why}, between other tokens; padding must be on the left or right; leave such tokens "
                "out, or give an attention_mask of ones to keep them"
            )
        _check_ids_suffice(row, kept, name)
        return ids[kept[0] : kept[-1] + 1]

    def _unpadded(self, ids: list[int], rows: int, name: str) -> list[int]:
        """Return the places of tokens other than padding in a row without a mask, as in transformers' `generate`.

        Raises `BadPrompt` if the row begins or ends with a token that may be padding or text.
        """
        kept = [place for place, token in enumerate(ids) if token != self.pad]
        if rows > 1 and kept:
            for token in (ids[kept[0]], ids[kept[-1]]):
                if token in self.unsure:
                    raise BadPrompt(
                        f"{name} begins or ends with token {token}, which may be padding or text; give attention_mask, or a "
                        "list of token ids for each prompt"
                    )
        return kept


def token_lists(given: Any, name: str) -> list[int] | list[list[int]]:
    """Return one list of token ids, or several, from lists, arrays, tensors and iterators of integers without padding.

    Raises `BadPrompt` for anything else, or if it is empty.
    """
    held: Any = given if is_array(given) or isinstance(given, Mapping) else _elements(given, name)
    found = prompts_in(held, name)
    reader = PromptReader()
    lists = [reader.ids(one, name) for one in found]
    if not lists:
        raise BadPrompt(f"{name} is empty; it must have at least one token")
    is_flat = held.ndim == 1 if is_array(held) else found[0] is held
    return lists[0] if is_flat else lists


def features_in(given: Any) -> Any:
    """Return the features of a window of audio, float[channels, frames], from the output of a feature extractor.

    Anything else is returned unchanged.
    """
    if isinstance(given, Mapping) and given.get("input_features") is not None:
        found = prompts_in(given)
        given = found[0] if len(found) == 1 else found
    if _holds_fractions(given) and given.ndim == 3 and given.shape[0] == 1:
        return given[0]
    return given


def as_plain(value: Any) -> Any:
    """Return a value with arrays, tensors, tuples and deques converted to lists of Python numbers."""
    if is_array(value):
        return as_plain(_listed(value)) if value.ndim else value.item()
    if isinstance(value, (list, tuple, deque, range)):
        return [as_plain(one) for one in value]
    return value


def is_array(value: Any) -> bool:
    """Return whether a value is an array of numpy, a tensor of torch, or a similar column."""
    is_bytes = isinstance(value, memoryview)
    return hasattr(value, "tolist") and hasattr(value, "ndim") and hasattr(value, "dtype") and not is_bytes


def _holds_fractions(value: Any) -> bool:
    """Return whether a value is an array of floats, complex numbers or booleans."""
    kind = str(getattr(value, "dtype", ""))
    return is_array(value) and any(name in kind for name in ("float", "bool", "complex"))


def _is_number(value: Any) -> bool:
    """Return whether a value is a single number of any kind; non-integers are rejected later."""
    if isinstance(value, (str, bytes)):
        return False
    return isinstance(value, (Number, np.generic)) or (is_array(value) and value.ndim == 0)


def _is_message(value: Any) -> bool:
    """Return whether a value is a message of a chat."""
    return isinstance(value, Mapping) and "role" in value


def _as_id(token: Any, name: str) -> int:
    """Return a token id as an int. Raises `BadPrompt` for anything but integers, and for True and False."""
    is_integer = isinstance(token, Integral) and not isinstance(token, bool)
    if is_integer or (is_array(token) and token.ndim == 0 and "int" in str(token.dtype)):
        return int(token)
    raise BadPrompt(f"{name} has {str(token)[:40]!r} of type {_type_of(token)}; token ids are integers")


def _type_of(value: Any) -> str:
    """Return the name of a value's type; for arrays, also that of the elements' type."""
    found = type(value).__name__
    return f"{found} of {value.dtype}" if is_array(value) else found


def _conversion_of(given: Any) -> Callable[[], Any] | None:
    """Return a function that converts a table, column or value of pyarrow, pandas or polars to Python objects, or None.

    Iterating over such a table would yield columns or their names.
    """
    for method in ("to_pylist", "as_py", "to_dicts"):
        found = getattr(given, method, None)
        if callable(found) and not isinstance(given, type):
            return found
    is_frame = hasattr(given, "iloc") and hasattr(given, "columns")
    return (lambda: given.to_dict(orient="records")) if is_frame else None


def _elements(given: Any, name: str) -> list[Any]:
    """Return the elements of an ordered container. Raises `BadPrompt`, which names the type, for anything else."""
    if isinstance(given, list):
        return given
    has_order = not isinstance(given, Set) or isinstance(given, (KeysView, ItemsView))
    if has_order and not isinstance(given, (bytes, bytearray, memoryview, type)):
        if isinstance(given, Iterable):
            return list(given)
        if hasattr(given, "__getitem__") and hasattr(given, "__len__"):  # data sets of torch have no iterator
            return [given[number] for number in range(len(given))]
    raise _no_prompt(given, name, "" if has_order else ", which has no order")


def _no_prompt(given: Any, name: str, why: str = "") -> BadPrompt:
    """Return the error for a value that is not a prompt and contains none."""
    return BadPrompt(
        f"{name} is {reprlib.repr(given)} of type {_type_of(given)}{why}; it must be {TAKEN}, or a list of these"
    )


def _prompts_of_array(given: Any, name: str) -> list[Any]:
    """Return the prompts in an array: rows of token ids, elements of a column, or features of windows of audio."""
    if _holds_fractions(given):
        return _rows_of_array(given) if given.ndim == 3 else [given]
    if "int" not in str(given.dtype):  # a column of texts or objects
        return prompts_in(_listed(given), name)
    if given.ndim == 0:
        raise _no_prompt(given, name)
    if given.ndim == 1:
        return [_listed(given)]
    rows = _rows_of_array(given)
    return rows if given.ndim > 2 else [EncodedPrompt(_listed(row), rows=len(rows)) for row in rows]


def _rows_of_array(array: Any) -> list[Any]:
    """Return the rows of an array; those of a nested tensor differ in length."""
    try:
        return list(array.unbind() if hasattr(array, "unbind") else array)
    except Exception as error:  # for example, a sparse tensor
        raise BadPrompt(f"a {_type_of(array)} cannot be read row by row: {str(error)[:200]}") from error


def _listed(array: Any) -> Any:
    """Return an array as nested lists. Raises `BadPrompt` if its values cannot be read."""
    try:
        return array.tolist()
    except Exception as error:  # for example, on the device "meta"
        raise BadPrompt(f"a {_type_of(array)} cannot be read: {str(error)[:200]}") from error


def _prompts_of_mapping(given: Mapping[Any, Any], name: str) -> list[Any]:
    """Return the prompts in an encoding, in a row of a data set, or in rows stored by column.

    Other columns are ignored, but images, audio and similar inputs are rejected.
    """
    kind = type(given).__name__
    further = [one for one in _OTHER_INPUTS if given.get(one) is not None]
    if further:
        raise BadPrompt(f"{name} is a {kind} with {', '.join(further)}, which would be ignored; leave it out")
    held = [one for one in FIELDS if given.get(one) is not None]
    if len(held) > 1:
        raise BadPrompt(f"{name} is a {kind} with {' and '.join(held)}; give one of them")
    if not held:
        keys = ", ".join(map(str, [*given][:8])) or "nothing"
        advice = "a chat is a list of messages" if "role" in given else f"it must have one of {', '.join(FIELDS)}"
        raise BadPrompt(f"{name} is a {kind} with {keys}; {advice}")
    (key,) = held
    if key == "input_ids":
        return _rows_of_encoding(given, name)
    if key == "input_features":
        return _windows_of(given[key], name)
    found = prompts_in(given[key], f"{key} of {name}")
    if key == "messages":
        return _conversations(found, given.get("tools"), name)
    return found or [EncodedPrompt([])]


def _conversations(found: list[Any], tools: Any, name: str) -> list[Conversation]:
    """Return chats, with the tools of their row. Raises `BadPrompt` for anything but messages."""
    chats = []
    for one in found:
        inside = prompts_in(one, f"messages of {name}")
        if len(inside) != 1 or not isinstance(inside[0], Conversation):
            raise BadPrompt(f"messages of {name} must be mappings with a role, or lists of such mappings")
        chats += inside
    if tools is None:
        return chats or [Conversation([])]
    if len(chats) > 1:
        raise BadPrompt(f"{name} has tools for {len(chats)} chats; give each chat in its own row")
    return [Conversation(one.messages, tools) for one in chats]


def _rows_of_encoding(given: Mapping[Any, Any], name: str) -> list[EncodedPrompt]:
    """Return the rows of an encoding. Raises `BadPrompt` if shapes differ or a field would be ignored."""
    known = {"input_ids", *_BY_TOKEN, *_DERIVED}
    ignored = [str(key) for key in given if key not in known and given[key] is not None]
    if ignored:
        raise BadPrompt(
            f"{name} is a {type(given).__name__} with input_ids and {', '.join(ignored)}, which would be ignored; leave it "
            "out"
        )
    ids, is_flat = _as_rows(given["input_ids"], "input_ids", name)
    by_token: dict[str, list[list[Any]]] = {}
    for key in _BY_TOKEN:
        if given.get(key) is not None:
            by_token[key], is_flat_too = _as_rows(given[key], key, name)
            if is_flat_too != is_flat or len(by_token[key]) != len(ids):
                raise BadPrompt(
                    f"{name} has {len(ids)} rows of input_ids and {len(by_token[key])} of {key}; shapes must be the same"
                )
    return [
        EncodedPrompt(row, {key: values[number] for key, values in by_token.items()}, len(ids))
        for number, row in enumerate(ids)
    ]


def _as_rows(value: Any, key: str, name: str) -> tuple[list[list[Any]], bool]:
    """Return the rows of a field of an encoding, and whether it is a single flat row."""
    values = as_plain(value if is_array(value) else _elements(value, f"{key} of {name}"))
    if not isinstance(values, list):
        raise _no_prompt(value, f"{key} of {name}")
    are_rows = [isinstance(one, list) for one in values]
    if values and all(are_rows):
        return values, False
    if any(are_rows):
        raise BadPrompt(f"{key} of {name} has both rows and numbers; it must be one row, or a list of rows")
    return [values], True


def _windows_of(value: Any, name: str) -> list[Any]:
    """Return the features of each window of audio. Raises `BadPrompt` unless they form an array."""
    if isinstance(value, (list, tuple)) and not any(map(is_array, value)):
        try:
            value = np.asarray(value, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise BadPrompt(f"input_features of {name} are not an array of numbers: {error}") from error
    return prompts_in(value, f"input_features of {name}")


def _marked(mask: list[Any], name: str) -> list[int]:
    """Return the places where a mask is 1. Raises `BadPrompt` for values other than 0 and 1."""
    for value in mask:
        if value not in (0, 1):
            raise BadPrompt(f"{name} has {str(value)[:40]!r} in attention_mask; it must have only 0 and 1")
    return [place for place, value in enumerate(mask) if value]


def _check_ids_suffice(row: EncodedPrompt, kept: list[int], name: str) -> None:
    """Raise `BadPrompt` for token types other than 0 and positions other than 0, 1, 2, ..., which would be ignored."""
    types = row.by_token.get("token_type_ids")
    if types is not None and any(types[place] != 0 for place in kept):
        raise BadPrompt(f"{name} has token_type_ids that are not 0, which would be ignored; leave them out")
    positions = row.by_token.get("position_ids")
    if positions is not None and [positions[place] for place in kept] != list(range(len(kept))):
        raise BadPrompt(f"{name} has position_ids other than 0, 1, 2, ..., which are not supported; leave them out")

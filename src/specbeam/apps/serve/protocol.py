"""Request bodies: OpenAI's fields, vLLM's fields for beams, and the object `specbeam`."""

import json
import re
from collections.abc import Sequence
from functools import reduce
from operator import or_
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from specbeam.apps.serve.refusals import MOST_PROBLEMS, Refusal, invalid, shown
from specbeam.doors import LARGEST_INTEGER, OPTIONS, kind_of, nearest

# openai's own types for bodies are TypedDicts without bounds, which would accept unknown fields and leave each limit to be
# checked here, and its package (27 MB) would come to every server. The tests read all answers by its types instead.
DEEPEST = 32  # levels of nested brackets in a body
MOST_PROMPTS = 4096  # checked before validation; the operator's limit is lower
Text = Annotated[str, Field(max_length=2**20)]
Ids = Annotated[
    list[Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]], Field(min_length=1, max_length=2**20, fail_fast=True)
]
StopText = Annotated[str, Field(max_length=256)]


class Strict(BaseModel):
    """A body or a part of one: unknown fields are refused, and strings are not converted to numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: bool | None = None  # has no effect


class CatalogueChoice(Strict):
    """A catalogue of the server, and the items of it that an answer may be."""

    name: Annotated[str, Field(max_length=256)]
    items: Annotated[list[str | int], Field(min_length=1, max_length=2**20)] | None = None
    bitmap: Annotated[str, Field(max_length=2**24)] | None = None  # base64, a bit per item, item 0 in the lowest bit


class JsonSchema(Strict):
    """The schema in OpenAI's `response_format`."""

    name: Annotated[str, Field(min_length=1, max_length=64)] = "schema"
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    """The constraint on a text in OpenAI's format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """The constraint on a text in vLLM's format: exactly one field."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=256)] | None = None
    grammar: str | None = None


def _fields_inside(place: str) -> dict[str, Any]:
    """Return pydantic's fields for the options in a part of a body: "" or "specbeam"."""
    found: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if option.field is None or option.field.inside != place:
            continue
        kind = kind_of(option)
        bounds: dict[str, Any] = dict(option.field.bounds)
        if bounds:
            kind = Annotated[_without_none(kind), Field(**bounds)]
        found[name] = (kind | None, None)
    return found


def _without_none(kind: Any) -> Any:
    """Return a type without None, if it allows that."""
    others = [one for one in get_args(kind) if one is not NoneType]
    return reduce(or_, others) if others else kind


if TYPE_CHECKING:

    class OfBody(Strict):
        temperature: float | None = None

    class OfSpecbeam(BaseModel):
        no_repeat_ngram_size: int | None = None

else:
    OfBody = create_model("OfBody", __base__=Strict, **_fields_inside(""))
    OfSpecbeam = create_model("OfSpecbeam", **_fields_inside("specbeam"))


class SpecbeamOptions(OfSpecbeam):
    """The object `specbeam` of a body: these fields, and any setting of the method."""

    model_config = ConfigDict(extra="allow", strict=True)

    method: Annotated[str, Field(max_length=64)] | None = None
    beams: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None = None
    beams_returned: Annotated[int, Field(ge=0, le=LARGEST_INTEGER)] | Literal["all"] = 0
    min_logp: Annotated[float, Field(le=0)] | None = None
    stream: Literal["settled", "live"] = "settled"
    trace: bool = False
    audit: bool = False
    report: bool = True


class Body(OfBody):
    """The fields that completions and chats share, besides those generated from `OPTIONS`."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0, le=LARGEST_INTEGER)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST_INTEGER)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=300)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=8)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None = None
    best_of: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None = None
    best: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None = None
    use_beam_search: bool | None = None
    num_beams: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None = None
    beam_width: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    catalogue: Annotated[str, Field(max_length=256)] | CatalogueChoice | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    specbeam: SpecbeamOptions | None = None


class CompletionBody(Body):
    """The body of a completion."""

    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None


class HistoryPart(Strict):
    """A part of a conversation, perhaps written by another server: unknown fields are accepted if they are empty."""

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: one for name, one in value.items() if name in cls.model_fields or one not in ("", [], {})}


class ContentPart(HistoryPart):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str
    # These have no effect.
    annotations: list[Any] | None = None
    cache_control: dict[str, Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class Message(HistoryPart):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=64)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    # These have no effect.
    id: str | None = None
    annotations: list[Any] | None = None
    cache_control: dict[str, Any] | None = None
    provider_specific_fields: dict[str, Any] | None = None


class ChatBody(Body):
    """The body of a chat."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=256)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=64)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None


class TokenizeBody(Strict):
    """The body of /tokenize: a text or a chat."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=256)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Ids


BodyKind = TypeVar("BodyKind", bound=BaseModel)


def parse_body(kind: type[BodyKind], raw: bytes) -> BodyKind:
    """Return a validated body. Raises `Refusal`, which names the invalid fields."""
    value = object_of(raw)
    _check_count(value.get("prompt"))
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise refusal_of_fields(error, kind) from error


def object_of(raw: bytes, what: str = "the body", param: str | None = None) -> dict[str, Any]:
    """Return a JSON object without its null fields. Raises `Refusal` if it is not an object.

    Args:
        what: its name in messages.
        param: the field with this value; None for a whole body.
    """
    value = _json(raw, what, param)
    if not isinstance(value, dict):
        raise invalid(f"{what} is {shown(value)}; it must be a JSON object", param, "bad_json")
    found: dict[str, Any] = _without_nulls(value)
    return found


def _check_count(prompts: Any) -> None:
    """Raise `Refusal` for too many prompts, before pydantic tries every type on each of them."""
    is_list = isinstance(prompts, list) and not isinstance(next(iter(prompts), 0), int)
    if is_list and len(prompts) > MOST_PROMPTS:
        raise invalid(f"there are {len(prompts)} prompts; a request may have at most {MOST_PROMPTS}", "prompt")


# Parts of a body with free keys, where null may have a meaning.
_FOREIGN = frozenset(
    {"schema", "json", "tools", "tool_calls", "tool_choice", "chat_template_kwargs", "metadata", "logit_bias"}
)


def _without_nulls(value: Any) -> Any:
    """Return a part of a body without its null fields, which count as not given."""
    if isinstance(value, dict):
        return {
            name: one if name in _FOREIGN else _without_nulls(one) for name, one in value.items() if one is not None
        }
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value


def _json(raw: bytes, what: str, param: str | None) -> Any:
    if _depth(raw) > DEEPEST:
        raise invalid(f"{what} is nested more than {DEEPEST} levels deep; make it flatter", param, "bad_json")
    try:
        found = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_without_twins)
        if _SURROGATE.search(raw):
            json.dumps(found, ensure_ascii=False).encode()  # half of a pair is no text, and no answer could repeat it
        return found
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise invalid(
            f"{what} has half of a character, {half!r}; send both halves of the pair", param, "bad_json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise invalid(f"{what} is not valid JSON: {str(error)[:200]}", param, "bad_json") from error


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # an escaped half of a character


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not allowed")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a duplicate key")
    return found


# A JSON string up to its closing quote, or to the end of the body. Possessive, so that matching takes linear time.
_TEXTS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_OPENING = np.frombuffer(b"[{", dtype=np.uint8)
_CLOSING = np.frombuffer(b"]}", dtype=np.uint8)


def _depth(raw: bytes) -> int:
    """Return the maximum nesting depth of brackets outside strings."""
    letters = np.frombuffer(_TEXTS.sub(b"", raw), dtype=np.uint8)
    opened = np.isin(letters, _OPENING).astype(np.int32)
    closed = np.isin(letters, _CLOSING).astype(np.int32)
    return int((opened - closed).cumsum().max(initial=0))


def refusal_of_fields(error: ValidationError, kind: type[BaseModel]) -> Refusal:
    """Return one refusal for all validation errors of a body."""
    problems = error.errors(include_url=False, include_context=False)
    if unsupported := _unsupported_content(problems):
        return invalid(unsupported, str(problems[0]["loc"][0]), "unsupported_content")
    texts: dict[str, list[str]] = {}  # by their beginning, the kinds that a value may have
    code = "bad_setting"
    first: str | None = None
    for problem in problems[: 4 * MOST_PROBLEMS]:
        where = [str(part) for part in problem["loc"]]
        name = where[0] if where else ""
        path = _path_of(where)
        if problem["type"] == "extra_forbidden":
            text = f"{path} is not a field of this request{_nearest(name, kind) if len(where) == 1 else ''}"
            code = "unknown_field"
        elif problem["type"] == "missing":
            text = f"{path} is missing"
        else:
            text = f"{path} is {shown(problem['input'])}: "
        if first is None:
            first = name or None
        kinds = texts.setdefault(text, [])
        wanted = _wanted(problem["msg"])
        if text.endswith(": ") and wanted not in kinds:
            kinds.append(wanted)
    whole = [text + _either(kinds) for text, kinds in texts.items()]
    more = "" if len(whole) <= MOST_PROBLEMS else "; and more"
    if first == "messages" and any("content" in map(str, problem["loc"]) for problem in problems):
        code = "unsupported_content"
    return invalid("; ".join(whole[:MOST_PROBLEMS]) + more, first, code)


def _path_of(where: Sequence[str]) -> str:
    """Return the path of a value, without pydantic's names of the types that it may have."""
    of_types = ("function-", "constrained", "list[", "literal[")
    names = [
        part for part in where[1:] if part not in ("str", "int", "bool", "float") and not part.startswith(of_types)
    ]
    return ".".join([*where[:1], *names])


_MUST_BE = "it must be "
_SHOULD_BE = "input should be "
# What pydantic calls kinds of JSON, and their names.
_KINDS = (
    (r"a valid dictionary( or instance of \w+)?", "an object"),
    (r"\ban? valid (?=[aeiou])", "an "),
    (r"\ban? valid ", "a "),
)


def _wanted(message: str) -> str:
    """Return pydantic's message about a value in the words of JSON."""
    text = message.lower()
    if not text.startswith(_SHOULD_BE):
        return text
    text = text.removeprefix(_SHOULD_BE)
    for pattern, name in _KINDS:
        text = re.sub(pattern, name, text)
    return _MUST_BE + text


def _either(wanted: Sequence[str]) -> str:
    """Return what a value must be, from the kinds that it may have."""
    kinds = [one.removeprefix(_MUST_BE) for one in wanted if one.startswith(_MUST_BE)]
    others = [one for one in wanted if not one.startswith(_MUST_BE)]
    return "; ".join([*([_MUST_BE + " or ".join(kinds)] if kinds else []), *others])


_UNSUPPORTED = {
    "image_url": "images", "input_image": "images", "image": "images", "input_audio": "sounds", "audio": "sounds",
    "video_url": "videos", "input_video": "videos", "file": "files", "input_file": "files",
}  # fmt: skip


def _unsupported_content(problems: Sequence[Any]) -> str:
    """Return a message about a part of a message that is no text; "" if there is none."""
    for problem in problems:
        where = [str(part) for part in problem["loc"]]
        given = problem["input"]
        if where[-1:] == ["type"] and isinstance(given, str) and given in _UNSUPPORTED:
            path = _path_of(where).removesuffix(".type")
            return f"{path} is of type {given!r}: {_UNSUPPORTED[given]} are not supported; send parts of type 'text'"
    return ""


_REPLACED = {
    "suffix": "infilling is not supported",
    "prediction": "predicted outputs are not supported",
    "functions": "use tools",
    "audio": "audio answers are not supported",
    "moderation": "moderation is not supported",
    "web_search_options": "web search is not supported",
    "function_call": "use tool_choice",
    "guided_json": "use structured_outputs",
    "guided_regex": "use structured_outputs",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
    "chat_template": "only the operator sets a template: specbeam serve --chat-template FILE",
    "bad_words": "use logit_bias",
    "method": "put it into the object specbeam",
}


def _nearest(name: str, kind: type[BaseModel]) -> str:
    """Return advice for an unknown field, as the end of a message."""
    if name in _REPLACED:
        return f": {_REPLACED[name]}"
    option = OPTIONS.get(name)
    if option is not None and option.field is not None and option.field.inside:
        return f": put it into the object {option.field.inside}"
    names = () if option is None else option.names
    field = next((other for other in names if other in kind.model_fields), "")
    if field:
        return f": use {field}"
    near = nearest(name, kind.model_fields)
    return f"; did you mean {near}?" if near else ""

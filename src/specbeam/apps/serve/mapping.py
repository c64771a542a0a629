"""Translates request bodies to prompts, a method and settings, with checks of all limits of the server."""

import base64
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbeam import Catalogue, Method, Pair
from specbeam.apps.serve.auth import Client
from specbeam.apps.serve.config import ServerConfig
from specbeam.apps.serve.processors import CountPenalty, TokenBias
from specbeam.apps.serve.protocol import (
    Body,
    CatalogueChoice,
    ChatBody,
    CompletionBody,
    JsonSchema,
    Message,
    SpecbeamOptions,
    StructuredOutputs,
)
from specbeam.apps.serve.refusals import Refusal, invalid, refusal_of, shown
from specbeam.apps.serve.tools import ANY_OBJECT, ToolUse, plain_tool, schema_of_call, tool_use_of
from specbeam.doors import (
    OPTIONS,
    PromptReader,
    Settings,
    hears,
    hint,
    prompts_in,
    shows_tools,
    text_of_messages,
    tokens_of_chat,
    usual_method,
)
from specbeam.errors import BadPrompt, SpecbeamError
from specbeam.recipes import HEAD_RECIPES, RECIPES, best_first

RECIPE_OF = {make.__name__: make for make in (*RECIPES, *HEAD_RECIPES) if make.__name__ != "auto"}
LARGEST_SETTING = 64  # largest number, and longest list, in the settings of a method
DEEPEST_SCHEMA = 32
MOST_PROPERTIES = 1000
SMALLEST_TOP_P = 1e-6


@dataclass(frozen=True)
class Served:
    """The models and defaults that answer requests.

    Args:
        name: name of the model in requests.
        method: method of requests that do not choose one.
        config: the operator's settings.
        template: chat template; None: the tokenizer's, if it has one.
        longest_token: number of characters that no token of a text exceeds on average; None if there is no bound.
        catalogues: the catalogues that requests may name.
        unfit: the methods that the pair cannot run, for lack of a draft for example.
    """

    pair: Pair
    name: str
    method: Method
    config: ServerConfig
    template: str | None = None
    longest_token: int | None = None
    catalogues: Mapping[str, Catalogue] = field(default_factory=dict)
    unfit: frozenset[str] = frozenset()

    @property
    def hears(self) -> bool:
        """Whether the model reads audio."""
        return hears(self.pair)

    @property
    def chat_template(self) -> Any:
        """The template of chats, or several by name; None if there is none."""
        return self.template or getattr(self.pair.tokenizer, "chat_template", None)

    @property
    def room(self) -> int | None:
        """The maximum number of tokens of prompt and answer together; None if no limit is known."""
        most = self.pair.room(0)
        stated = self.config.max_model_len
        if stated and most is not None:
            return min(stated, most)
        return stated or most


@dataclass(frozen=True)
class Order:
    """A checked request, ready to be decoded.

    Attributes:
        prompts: token ids of each prompt.
        texts: text of each prompt; "" if it was given as token ids.
        method, settings, seed: see `Request.of`.
        method_key: key of the method with its settings; "" for the server's default method.
        count: number of answers returned per prompt.
        drawn: number of independent answers decoded per prompt, of which the best `count` are returned.
        top: number of likeliest tokens to report per token; None without log-probabilities.
        tools: the tools that an answer may call; None for a plain text.
        constraint_field: the field that constrains the texts; None if they are free.
        warnings: fields without effect.
    """

    body: Body
    options: SpecbeamOptions
    prompts: list[list[int]]
    texts: list[str]
    method: Method
    settings: Settings
    seed: int | None
    count: int
    drawn: int
    top: int | None
    echo: bool = False
    tools: ToolUse | None = None
    constraint_field: str | None = None
    method_key: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, ChatBody)

    @property
    def copies(self) -> int:
        """How often each answer is returned: a method that does not sample has one answer for all `count`."""
        return self.count if self.method.beams == 1 and self.drawn < self.count else 1

    @property
    def streams(self) -> bool:
        return bool(self.body.stream)


def order_of(body: Body, served: Served) -> Order:
    """Return the order in a body. Raises `Refusal`, which names the field at fault, if it cannot be fulfilled."""
    config = served.config
    options = body.specbeam or SpecbeamOptions()
    check_model(body.model, served)
    if served.hears:
        raise invalid(
            f"{served.name} transcribes speech; send audio to /v1/audio/transcriptions", "model", "not_supported"
        )
    _check_streaming(body, options)
    prompts, texts = _prompts(body, served)
    tools = tool_use_of(body, served.chat_template) if isinstance(body, ChatBody) else None
    constraint_field, constraint = _constraint(body, tools, config)
    method, drawn, method_key = _method(body, options, served)
    count = body.best or body.n or 1
    if body.max_tokens == 0 and not (isinstance(body, CompletionBody) and body.echo):
        raise invalid("max_tokens is 0; it must be at least 1, unless echo is true", "max_tokens")
    items = _catalogue(body, served)
    if items is not None and constraint_field is not None:
        raise invalid(f"{constraint_field} and catalogue both constrain the text; give one of them", "catalogue")
    most = _new_tokens(body, prompts, served)
    if items is not None and body.max_tokens is None and body.max_completion_tokens is None:
        most = items.longest(served.pair.tokenizer, served.pair.eos) + 1
    if body.max_tokens != 0 and (body.min_tokens or 0) > most:
        raise invalid(
            f"min_tokens is {body.min_tokens}, but the limit is {most} new tokens; lower min_tokens or raise max_tokens",
            "min_tokens",
        )
    width = max(count, drawn, method.beams)
    texts_in_all = len(prompts) * width
    if texts_in_all > config.max_texts:
        raise invalid(
            f"{len(prompts)} prompts with {width} beams or answers each make {texts_in_all} texts; this server decodes at "
            f"most {config.max_texts} per request",
            "n",
            "too_large_beams",
        )
    warnings = _without_effect(body, served)
    if drawn < count and method.beams == 1:
        warnings.append(f"{method.name} does not sample here, so the {count} choices of a prompt are the same text")
    given = _settings(body, options, served, method)
    if body.best is not None:
        given.setdefault("length_penalty", 0.0)
    given |= constraint
    given["catalogue"] = items
    if items is not None:
        _check_ends(body, items, served)
    given["max_new_tokens"] = max(most, 1)
    given["num_return_sequences"] = count if method.beams > 1 else drawn
    processors = _processors(body, prompts, served)
    if processors:
        given["logits_processor"] = processors
    try:
        settings = Settings.given(given)
    except SpecbeamError as error:
        raise refusal_of(error) from error
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    return Order(
        body, options, prompts, texts, method, settings, body.seed, count, drawn, _top(body), echo, tools, constraint_field,
        method_key, warnings,
    )  # fmt: skip


def number_of_texts(body: Body) -> int:
    """Return the smallest number of texts that a request decodes, before its prompts are read."""
    if body.max_tokens == 0:
        return 0
    if not isinstance(body, CompletionBody):
        return 1
    return len(body.prompt) if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int) else 1


def _without_effect(body: Body, served: Served) -> list[str]:
    """Return a warning for each field of a body that has no effect."""
    found = []
    if body.store:
        found.append("store is true, but this server stores no answers")
    if isinstance(body, ChatBody) and body.verbosity not in (None, "medium"):
        found.append(f"verbosity is {body.verbosity!r}, but the model does not see it; ask for it in a message")
    if isinstance(body, ChatBody) and body.tools and not shows_tools(served.chat_template):
        found.append("the chat template does not show tools, so the model has not seen them")
    if isinstance(body, ChatBody) and hides_system(body, served):
        found.append("the chat template leaves out messages of the system, so the model has not seen them")
    wanted = body.response_format
    if wanted is not None and wanted.json_schema is not None and wanted.json_schema.strict is False:
        found.append("response_format.json_schema.strict is false, but texts always follow their schema here")
    return found


def check_model(name: str | None, served: Served) -> None:
    """Raise `Refusal` if a request names a model other than the served one."""
    if name is not None and name != served.name:
        raise invalid(
            f"model {shown(name)} does not exist; this server has {served.name!r}", "model", "model_not_found", 404
        )


def check_priority(body: Body, client: Client) -> None:
    """Raise `Refusal` if a request goes before others further than its key permits."""
    if body.priority is not None and body.priority < client.least_priority:
        raise Refusal(
            403,
            "permission_error",
            "forbidden",
            f"priority is {body.priority}, and with this key it must be at least {client.least_priority}; the operator can "
            "permit lower numbers in the file of API keys",
            "priority",
        )


def _check_streaming(body: Body, options: SpecbeamOptions) -> None:
    if body.stream_options is not None and body.stream_options.include_usage and not body.stream:
        raise invalid("stream_options needs a stream; set stream to true, or leave it out", "stream_options")
    shows = options.trace or options.stream == "live"
    if options.trace and options.stream == "live":
        raise invalid("specbeam.trace includes the live beams; leave out specbeam.stream 'live'", "specbeam")
    if shows and not body.stream:
        raise invalid("specbeam.trace and specbeam.stream 'live' need a stream; set stream to true", "specbeam")
    if shows and isinstance(body, CompletionBody) and _is_batch(body.prompt):
        raise invalid("specbeam.trace and specbeam.stream 'live' show one prompt; send only one", "prompt")


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


# Prompts.


def _prompts(body: Body, served: Served) -> tuple[list[list[int]], list[str]]:
    """Return the token ids of each prompt, and its text, "" if ids were given."""
    if isinstance(body, ChatBody):
        return [chat_ids(body, served)], [""]
    assert isinstance(body, CompletionBody)
    given = prompts_in(body.prompt, "prompt")
    if len(given) > served.config.max_prompts:
        raise invalid(
            f"there are {len(given)} prompts; this server accepts at most {served.config.max_prompts}", "prompt"
        )
    special = body.add_special_tokens is not False
    ids = [prompt_ids(prompt, served, special, f"prompt {number}") for number, prompt in enumerate(given)]
    texts = [prompt if isinstance(prompt, str) else "" for prompt in given]
    return ids, texts


def prompt_ids(prompt: str | list[int], served: Served, special: bool = True, name: str = "the prompt") -> list[int]:
    """Return the token ids of a prompt. Raises `Refusal` if it is empty, or is a text and there is no tokenizer.

    Args:
        special: whether the tokenizer adds its special tokens to a text.
        name: name of the prompt in messages.
    """
    tokenizer = served.pair.tokenizer
    if tokenizer is None and isinstance(prompt, str):
        raise invalid("this server has no tokenizer; give token ids", "prompt", "not_supported")
    if isinstance(prompt, str):
        _check_length(prompt, served, "prompt")
    try:
        return PromptReader(tokenizer, served.pair.target.vocab, adds_special=special).ids(prompt, name)
    except BadPrompt as error:
        raise invalid(str(error), "prompt", "bad_prompt") from error


def _check_length(text: str, served: Served, param: str) -> None:
    """Raise `Refusal` for a text that has too many tokens whatever they are, before they are counted."""
    if served.room is None or served.longest_token is None:
        return
    least = -(-len(text) // served.longest_token)
    if least >= served.room:
        raise invalid(
            f"the prompt has {len(text)} characters, so at least {least} tokens; prompt and answer together may have "
            f"{served.room}: shorten the prompt",
            param,
            "context_length_exceeded",
        )


def chat_ids(body: Any, served: Served) -> list[int]:
    """Return the token ids of a chat, rendered by the chat template."""
    tokenizer = served.pair.tokenizer
    if tokenizer is None or served.chat_template is None:
        raise invalid(
            "this model has no chat template, so it has no form for messages, neither of the system nor of others; use "
            "/v1/completions, or start the server with --chat-template FILE",
            "messages",
            "not_supported",
        )
    further = dict(getattr(body, "chat_template_kwargs", None) or {})
    goes_on = bool(getattr(body, "continue_final_message", None))
    starts = getattr(body, "add_generation_prompt", None)
    tools = [plain_tool(tool) for tool in getattr(body, "tools", None) or []]
    if goes_on and starts:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other; set one of them",
            "add_generation_prompt",
        )
    if wrong := {"tools", "chat_template", "tokenize", "conversation", "return_dict"} & set(further):
        raise invalid(
            f"chat_template_kwargs must not set {', '.join(sorted(wrong))}; leave it out", "chat_template_kwargs"
        )
    messages = [_message(one, served.chat_template) for one in body.messages]
    adds_special = getattr(body, "add_special_tokens", None)
    try:
        text = text_of_messages(tokenizer, served.template, messages, tools, goes_on, starts, further)
        _check_length(text, served, "messages")
        return tokens_of_chat(tokenizer, served.template, text, adds_special)
    except BadPrompt as error:
        raise invalid(str(error), "messages", "bad_prompt") from error


def hides_system(body: ChatBody, served: Served) -> bool:
    """Return whether a chat has messages of the system that its template leaves out."""
    template = served.chat_template
    messages = [_message(one, template) for one in body.messages]
    others = [one for one in messages if one["role"] not in ("system", "developer")]
    if len(others) == len(messages) or not others:
        return False
    tools = [plain_tool(tool) for tool in body.tools or []]
    try:
        texts = {text_of_messages(served.pair.tokenizer, served.template, each, tools) for each in (messages, others)}
    except BadPrompt:  # it cannot do without the message of the system, so it shows it
        return False
    return len(texts) == 1


def _message(message: Message, template: Any) -> dict[str, Any]:
    """Return a message for a chat template. To most templates, messages of the developer are messages of the system."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    is_unknown = message.role == "developer" and "developer" not in str(template)
    given = {"role": "system" if is_unknown else message.role, "content": content}
    if message.role == "assistant":
        given["content"] = content or ""
    for name in ("name", "tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value:
            given[name] = value
    reasoning = message.reasoning or message.reasoning_content
    if message.reasoning_content and message.reasoning_content != reasoning:
        raise invalid("reasoning and reasoning_content of a message differ; give one of them", "messages", "bad_prompt")
    if reasoning:  # templates use either name
        given |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return given


def _new_tokens(body: Body, prompts: Sequence[Sequence[int]], served: Served) -> int:
    """Return the maximum number of new tokens of each text."""
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
    given = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    longest = max(map(len, prompts))
    room = None if served.room is None else served.room - longest
    if room is not None and room < 1:
        raise invalid(
            f"the prompt has {longest} tokens; prompt and answer together may have {served.room}: shorten the prompt",
            "messages" if isinstance(body, ChatBody) else "prompt",
            "context_length_exceeded",
        )
    limit = served.config.max_tokens
    if given is None:
        wanted = 16 if isinstance(body, CompletionBody) else limit
        return min(wanted, limit, room or limit)
    name = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
    if given > limit:
        raise invalid(f"{name} is {given}; this server allows at most {limit}", name)
    if room is not None and given > room:
        raise invalid(
            f"the prompt has {longest} tokens and {name} is {given}; together they may be at most {served.room}",
            name,
            "context_length_exceeded",
        )
    return given


# Methods.


def _method(body: Body, options: SpecbeamOptions, served: Served) -> tuple[Method, int, str]:
    """Return the method, the number of independent answers that it draws per prompt, and its key."""
    config = served.config
    if body.best is not None:
        return _best_first(body, options, served)
    count = body.n or 1
    if count > config.max_n:
        raise invalid(f"n is {count}; this server returns at most {config.max_n}", "n")
    wants_beams = bool(body.use_beam_search) or body.num_beams is not None or body.beam_width is not None
    if body.use_beam_search is False and (body.num_beams or body.beam_width):
        raise invalid(
            "use_beam_search is false, but a number of beams is given; leave one of them out", "use_beam_search"
        )
    further = dict(options.model_extra or {})
    width = _width(body, options, wants_beams, count, config)
    if options.method is None and not wants_beams and options.beams is None:
        refuse_loose(further)
        method = served.method
        key = ""
        wanted = max(count, body.best_of or count)
        if config.method == "" and wanted > method.beams > 1 and wanted <= config.max_beams:
            method = usual_method(served.pair, [*config.settings, f"beams={wanted}"])  # a beam per answer
            key = repr(("", wanted))
    else:
        method, key = named_method(options, further, width, served)
    if body.best_of is not None and body.best_of < count and not wants_beams:
        raise invalid(f"best_of is {body.best_of} and n is {count}; best_of must be at least n", "best_of")
    if method.beams > 1:
        check_beams(method, config)
        if count > method.beams:
            advice = "lower n or raise the beams"
            if count > config.max_beams:
                advice = f"this server allows at most {config.max_beams} beams, so lower n"
            raise invalid(f"n is {count}, but {method.name} keeps {method.beams} beams; {advice}", "n")
        return method, count, key
    drawn = body.best_of or count
    if drawn > config.max_n:
        raise invalid(f"best_of is {drawn}; this server draws at most {config.max_n}", "best_of")
    if method.greedy or body.temperature == 0:
        return method, 1, key  # all answers would be the same
    return method, drawn, key


def _best_first(body: Body, options: SpecbeamOptions, served: Served) -> tuple[Method, int, str]:
    """Return the method of a request for the `best` most probable texts; see `_method`."""
    count = body.best or 1
    others: dict[str, Any] = {"n": body.n, "best_of": body.best_of, "num_beams": body.num_beams}
    others |= {"use_beam_search": body.use_beam_search, "beam_width": body.beam_width}
    others |= {"specbeam.method": options.method, "specbeam.beams": options.beams}
    given = [name for name, value in others.items() if value]
    if given:
        raise invalid(f"best chooses the method and the number of answers; leave out {', '.join(given)}", "best")
    if count > served.config.max_n:
        raise invalid(f"best is {count}; this server returns at most {served.config.max_n}", "best")
    if served.config.methods and "best_first" not in served.config.methods:
        raise invalid(f"best is not offered here; this server offers {', '.join(served.config.methods)}", "best")
    refuse_loose(dict(options.model_extra or {}))
    return best_first(count), count, repr(("best", count))


def refuse_loose(further: Mapping[str, Any]) -> None:
    """Raise `Refusal` if settings of a method are given without the method."""
    if further:
        near = hint(min(further), SpecbeamOptions.model_fields)
        of_methods = {name for make in RECIPE_OF.values() for name in inspect.signature(make).parameters}
        advice = "settings of a method need the method in specbeam.method"
        if not set(further) <= of_methods:
            advice = f"the fields are {', '.join(SpecbeamOptions.model_fields)}, and settings of the method"
        raise invalid(
            f"specbeam has {', '.join(sorted(further))}{near}; {advice}",
            "specbeam",
            "unknown_field",
        )


def check_beams(method: Method, config: ServerConfig) -> None:
    """Raise `Refusal` if a method has more beams than the server allows."""
    if method.beams > config.max_beams:
        raise invalid(
            f"{method.name} has {method.beams} beams; this server allows at most {config.max_beams}",
            "specbeam",
            "too_large_beams",
        )


def _width(body: Body, options: SpecbeamOptions, wants_beams: bool, count: int, config: ServerConfig) -> int | None:
    """Return the number of beams that a request asks for; None if it asks for none."""
    named = {"specbeam.beams": options.beams, "num_beams": body.num_beams, "beam_width": body.beam_width}
    if wants_beams:
        named["best_of"] = body.best_of
    given = {name: value for name, value in named.items() if value is not None}
    if len(set(given.values())) > 1:
        values = ", ".join(f"{name} is {value}" for name, value in given.items())
        raise invalid(f"the numbers of beams differ: {values}; give one of them", [*given][-1].split(".")[0])
    for name, value in given.items():
        if value > config.max_beams:
            raise invalid(
                f"{name} is {value}; this server allows at most {config.max_beams} beams",
                name.split(".")[0],
                "too_large_beams",
            )
        return value
    if wants_beams:
        return min(max(count, config.default_beams if count == 1 else count), config.max_beams)
    return None


def named_method(
    options: SpecbeamOptions, further: dict[str, Any], width: int | None, served: Served
) -> tuple[Method, str]:
    """Return the method of a request, or a beam search if it names none, and the key of the method with its settings.

    Args:
        further: settings of the method other than `beams`.
        width: number of beams; None: the method's default.
    """
    has_draft = served.pair.draft is not None
    allowed = served.config.methods or tuple(RECIPE_OF)
    searches = ("speculative_beam_search", "beam_search") if has_draft else ("beam_search",)  # of the same texts
    name = options.method or next((one for one in searches if one in allowed), searches[0])
    if name == "auto" or name not in RECIPE_OF or name not in allowed:
        offered = [one for one in RECIPE_OF if one in allowed and one not in served.unfit]
        if options.method is None:
            raise invalid(f"beams are decoded by {name}, and this server offers {', '.join(offered)}", "specbeam")
        near = hint(name, offered)
        raise invalid(f"specbeam.method is {shown(name)}{near}; this server offers {', '.join(offered)}", "specbeam")
    make = RECIPE_OF[name]
    known = inspect.signature(make).parameters
    chosen = {key: _setting(name, key, value, known) for key, value in further.items()}
    _check_skipping(name, chosen)
    if width is not None:
        if "beams" not in known:
            raise invalid(f"{name} has no beams; leave out the number of beams, or choose another method", "specbeam")
        chosen["beams"] = width
    if options.trace and "trace" in known and chosen.get("semantics") != "hf":
        chosen["trace"] = True
    try:
        method = make(**chosen)
        if method.needs_draft and not has_draft:
            raise invalid(f"{name} needs a draft model, which this server does not have", "specbeam", "not_supported")
    except SpecbeamError as error:
        refusal = refusal_of(error)
        raise Refusal(refusal.status, refusal.kind, refusal.code, refusal.message, "specbeam") from error
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise invalid(f"specbeam has settings that {name} does not accept: {str(error)[:200]}", "specbeam") from error
    return method, repr((name, sorted(chosen.items())))


# Settings that requests must not have: objects, names of files on the server, and models, which would be loaded by name.
OBJECTS = ("trace", "task", "search", "others")


def _check_skipping(method: str, chosen: Mapping[str, Any]) -> None:
    """Raise `Refusal` if a text would depend on the layers that swift chose for the texts of other requests."""
    skip = chosen.get("skip", "bayes")
    if method == "swift" and skip in ("bayes", "random") and chosen.get("rule") != "match":
        raise invalid(
            f"swift with skip {skip!r} learns from all requests, so with rule {chosen.get('rule', 'path')!r} a seed "
            "does not fix the text; set specbeam.rule to 'match', or specbeam.skip to 'exit' with layers, 'clasp' or a set",
            "specbeam",
        )


def _setting(method: str, key: str, value: Any, known: Mapping[str, inspect.Parameter]) -> Any:
    """Return a setting of a method from JSON. Raises `Refusal` if its name is unknown or its value out of bounds."""
    if key not in known or key in OBJECTS:
        names = [name for name in known if name not in OBJECTS]
        raise invalid(
            f"specbeam.{key} is not a setting of {method}{hint(key, names)}; it has {', '.join(names) or 'none'}",
            "specbeam",
            "unknown_field",
        )
    if isinstance(value, list):
        if len(value) > LARGEST_SETTING:
            raise invalid(f"specbeam.{key} has {len(value)} values; this server allows {LARGEST_SETTING}", "specbeam")
        return tuple(_setting(method, key, one, known) for one in value)
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise invalid(f"specbeam.{key} is {shown(value)}; it must be a number, a string or a list of these", "specbeam")
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not abs(value) <= LARGEST_SETTING:
        raise invalid(f"specbeam.{key} is {shown(value)}; this server allows at most {LARGEST_SETTING}", "specbeam")
    return value


# Settings.


def _settings(body: Body, options: SpecbeamOptions, served: Served, method: Method) -> dict[str, Any]:
    """Return the options of `Settings` in a body."""
    given: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if option.field is None:
            continue
        value = getattr(options if option.field.inside else body, name)
        if value is None:
            continue
        if name == "top_k":
            value = max(value, 0)  # vLLM uses -1 for no limit
        if name == "top_p" and value == 0:
            value = SMALLEST_TOP_P  # OpenAI's 0 keeps the likeliest token alone
        if not (option.warper and method.greedy):
            given[name] = value
        elif option.is_on(value) and not (name == "temperature" and value == 0):
            raise invalid(
                f"{name} is {value}, but {method.name} does not sample; choose specbeam.method beam_sampling or dsbd, or "
                f"leave out {name}",
                name,
            )
    if body.min_tokens is not None:
        given["min_new_tokens"] = body.min_tokens
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if filled := [stop for stop in stops if stop]:  # OpenAI's "" stops nothing
        given["stop_strings"] = filled
    ends = served.pair.eos
    more = body.stop_token_ids or []
    if wrong := [token for token in more if token >= served.pair.target.vocab]:
        raise invalid(
            f"stop_token_ids has {wrong[0]}; the model's tokens are 0 to {served.pair.target.vocab - 1}",
            "stop_token_ids",
        )
    if body.ignore_eos:
        given["eos_token_id"] = list(more)
    elif more:
        given["eos_token_id"] = [*ends, *more]
    return given


def _processors(body: Body, prompts: Sequence[Sequence[int]], served: Served) -> list[Any]:
    processors: list[Any] = []
    if body.presence_penalty or body.frequency_penalty:
        lengths = {len(prompt) for prompt in prompts}
        if len(lengths) > 1:
            name = "presence_penalty" if body.presence_penalty else "frequency_penalty"
            raise invalid(f"{name} needs prompts of the same length; send one prompt per request", name)
        processors.append(CountPenalty(lengths.pop(), body.presence_penalty or 0.0, body.frequency_penalty or 0.0))
    if body.logit_bias:
        vocab = served.pair.target.vocab
        biases: dict[int, float] = {}
        for token, value in body.logit_bias.items():
            if not re.fullmatch(r"[0-9]{1,9}", token) or int(token) >= vocab:
                raise invalid(
                    f"logit_bias has the key {shown(token)}; keys must be token ids from 0 to {vocab - 1}", "logit_bias"
                )
            biases[int(token)] = value
        processors.append(TokenBias(biases))
    return processors


def _top(body: Body) -> int | None:
    """Return the number of likeliest tokens to report per token; None without log-probabilities."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    assert isinstance(body, ChatBody)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs is given without logprobs; set logprobs to true", "top_logprobs")
    return body.top_logprobs or 0 if body.logprobs else None


# Constraints.


def _constraint(body: Body, tools: ToolUse | None, config: ServerConfig) -> tuple[str | None, dict[str, Any]]:
    """Return the field that constrains the texts, and the option of `Settings` for it; None and {} without one."""
    constraints: dict[str, dict[str, Any]] = {}
    wanted = body.response_format
    if wanted is not None and wanted.type != "text":
        constraints["response_format"] = _json_constraint(wanted.type, wanted.json_schema)
    if body.structured_outputs is not None:
        constraints["structured_outputs"] = _structured(body.structured_outputs)
    if tools is not None and tools.how != "auto":
        assert isinstance(body, ChatBody)
        constraints["tools"] = {"json_schema": schema_of_call(body, tools)}
    if len(constraints) > 1:
        raise invalid(f"{' and '.join(constraints)} both constrain the text; give one of them", [*constraints][-1])
    for name, constraint in constraints.items():
        _check_constraint(constraint, name, config)
        if body.skip_special_tokens is False:
            raise invalid(
                f"skip_special_tokens is false, but {name} allows no special tokens in the text; leave one of them out",
                "skip_special_tokens",
            )
        return name, constraint
    return None, {}


def _catalogue(body: Body, served: Served) -> Catalogue | None:
    """Return the items to which a body confines its answers; None if it does not."""
    if body.catalogue is None:
        return None
    choice = CatalogueChoice(name=body.catalogue) if isinstance(body.catalogue, str) else body.catalogue
    if choice.name not in served.catalogues:
        known = ", ".join(served.catalogues) or "none"
        raise invalid(f"there is no catalogue {shown(choice.name)}; this server has {known}", "catalogue")
    found = served.catalogues[choice.name]
    try:
        if choice.items is not None:
            found = found.only(choice.items)
        if choice.bitmap is not None:
            found = found.only(base64.b64decode(choice.bitmap, validate=True))
    except (SpecbeamError, ValueError) as error:
        raise invalid(str(error), "catalogue") from error
    return found


def _check_ends(body: Body, items: Catalogue, served: Served) -> None:
    """Raise `Refusal` if an end token of the request is a token of an item: texts would end within items.

    Each set of such tokens would also need a trie of its own.
    """
    further = {*(body.stop_token_ids or [])} - {*served.pair.eos}
    if inside := items.tokens_among(served.pair.tokenizer, tuple(further)):
        raise invalid(
            f"stop_token_ids has {inside[0]}, which is a token of items of the catalogue, so that a text would end within "
            "an item; leave it out",
            "stop_token_ids",
        )


def _json_constraint(kind: str, schema: JsonSchema | None) -> dict[str, Any]:
    if kind == "json_object":
        return {"json_schema": ANY_OBJECT}
    if schema is None:
        raise invalid("response_format has no json_schema.schema; add the schema", "response_format", "bad_grammar")
    return {"json_schema": schema.schema_}


def _structured(asked: StructuredOutputs) -> dict[str, Any]:
    given = {name: value for name, value in asked.model_dump(by_alias=True).items() if value not in (None, False)}
    if len(given) != 1:
        raise invalid(
            f"structured_outputs has {', '.join(given) or 'no field'}; it must have exactly one of json, json_object, "
            "regex, choice and grammar",
            "structured_outputs",
        )
    ((name, value),) = given.items()
    if name == "json_object":
        return {"json_schema": ANY_OBJECT}
    if name == "json":
        return {"json_schema": value}
    if name == "choice":
        return {"regex": "|".join(map(re.escape, value))}
    return {name: value}


def _check_constraint(constraint: Mapping[str, Any], param: str, config: ServerConfig) -> None:
    """Raise `Refusal` if a constraint is larger than the server allows, or its schema is invalid."""
    ((kind, value),) = constraint.items()
    most = {"json_schema": config.max_schema, "regex": config.max_regex, "grammar": config.max_grammar}[kind]
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > most:
        raise invalid(f"the {kind} has {len(text)} characters; this server allows at most {most}", param, "bad_grammar")
    if kind != "json_schema":
        return
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise invalid(f"the schema is not valid JSON: {str(error)[:200]}", param, "bad_grammar") from error
    depth, properties = _size_of(schema)
    if depth > DEEPEST_SCHEMA or properties > MOST_PROPERTIES:
        raise invalid(
            f"the schema has {depth} levels and {properties} properties; this server allows at most {DEEPEST_SCHEMA} and "
            f"{MOST_PROPERTIES}",
            param,
            "bad_grammar",
        )
    if outside := _reference_outside(schema):
        raise invalid(
            f"the schema refers to {shown(outside)}; only references into the schema itself, '#...', are supported",
            param,
            "bad_grammar",
        )


def _size_of(schema: Any) -> tuple[int, int]:
    """Return the number of levels of a schema, and the number of its properties."""
    deepest = 0
    properties = 0
    waiting = [(schema, 1)]
    while waiting:
        part, depth = waiting.pop()
        deepest = max(deepest, depth)
        if isinstance(part, dict):
            named = part.get("properties")
            properties += len(named) if isinstance(named, dict) else 0
            waiting += [(value, depth + 1) for value in part.values()]
        elif isinstance(part, list):
            waiting += [(value, depth) for value in part]
    return deepest, properties


def _reference_outside(schema: Any) -> str | None:
    """Return a reference in a schema that points outside it; None if there is none."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            target = part.get("$ref")
            if isinstance(target, str) and not target.startswith("#"):
                return target
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return None

"""From the body of a request to what is decoded: the one place where their names meet."""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbeam import Method, Pair
from specbeam.apps.serve.config import ServerConfig
from specbeam.apps.serve.processors import CountPenalty, TokenBias
from specbeam.apps.serve.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    JsonSchema,
    Message,
    SpecbeamOptions,
    StructuredOutputs,
)
from specbeam.apps.serve.refusals import Refusal, invalid, refusal_of, shown
from specbeam.doors import OPTIONS, PromptReader, Settings, hears, hint, prompt_of_messages, prompts_in, usual_method
from specbeam.errors import BadPrompt, SpecbeamError
from specbeam.recipes import HEAD_RECIPES, RECIPES

RECIPE_OF = {make.__name__: make for make in (*RECIPES, *HEAD_RECIPES) if make.__name__ != "auto"}
LARGEST_SETTING = 64  # of a method, where the server has no limit of its own
DEEPEST_SCHEMA = 32
MOST_PROPERTIES = 1000
ANY_OBJECT = {"type": "object"}  # the schema of every JSON object


@dataclass(frozen=True)
class Served:
    """What requests are answered with.

    Args:
        pair: the models.
        name: by which requests call the model.
        method: of requests that name none.
        config: what the operator has set.
        template: the chat template; None: that of the tokenizer, if it has one.
    """

    pair: Pair
    name: str
    method: Method
    config: ServerConfig
    template: str | None = None

    @property
    def hears(self) -> bool:
        """Whether the model reads audio."""
        return hears(self.pair)

    @property
    def room(self) -> int | None:
        """The most tokens of prompt and text together; None: no limit is known."""
        most = self.pair.room(0)
        stated = self.config.max_model_len
        if stated and most is not None:
            return min(stated, most)
        return stated or most


@dataclass(frozen=True)
class Order:
    """What a request asks for, ready to be decoded.

    Attributes:
        prompts: token ids of each prompt.
        texts: their texts, where there are any.
        method, settings, seed: as for `Request.of`.
        method_key: the name of the method with the settings that were given; "": the server's own.
        count: answers per prompt that are returned.
        drawn: independent answers per prompt of which the best are returned; `count` without a choice.
        top: likeliest tokens to report per token; None: no log-probabilities are asked for.
        form_field: the field that says what form the texts must have; None: there is no form.
        warnings: what was done otherwise than asked.
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
    forced_tool: str | None = None
    form_field: str | None = None
    method_key: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, ChatBody)

    @property
    def streams(self) -> bool:
        return bool(self.body.stream)


def order_of(body: Body, served: Served) -> Order:
    """Return what a body asks for. Raises `Refusal` where it cannot be honoured, with the name of the field."""
    config = served.config
    options = body.specbeam or SpecbeamOptions()
    check_model(body.model, served)
    if served.hears:
        raise invalid(
            f"{served.name} writes down speech; send audio to /v1/audio/transcriptions", "model", "not_supported"
        )
    _check_streaming(body, options)
    prompts, texts = _prompts(body, served)
    tool = _forced_tool(body) if isinstance(body, ChatBody) else None
    field_of_form, form = _form(body, tool, config)
    method, drawn, method_key = _method(body, options, served)
    count = body.n or 1
    if body.max_tokens == 0 and not (isinstance(body, CompletionBody) and body.echo):
        raise invalid("max_tokens is 0; it must be at least 1, unless echo is true", "max_tokens")
    most = _new_tokens(body, prompts, served)
    if body.max_tokens != 0 and (body.min_tokens or 0) > most:
        raise invalid(
            f"min_tokens is {body.min_tokens}, and there are at most {most} new tokens; lower it, or raise max_tokens",
            "min_tokens",
        )
    texts_in_all = len(prompts) * max(count, drawn, method.beams)
    if texts_in_all > config.max_texts:
        raise invalid(
            f"{len(prompts)} prompts with {max(count, drawn, method.beams)} beams or answers each make {texts_in_all}; "
            f"this server decodes at most {config.max_texts} per request",
            "n",
            "too_large_beams",
        )
    warnings = _without_effect(body)
    given = _settings(body, options, served, method, warnings)
    given |= form
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
        body, options, prompts, texts, method, settings, body.seed, count, drawn, _top(body), echo, tool, field_of_form,
        method_key, warnings,
    )  # fmt: skip


def _without_effect(body: Body) -> list[str]:
    """Return in words which wishes of a body have no effect, though not upon the text alone."""
    found = []
    if body.store:
        found.append("store is true, and this server stores no answers")
    if isinstance(body, ChatBody) and body.verbosity not in (None, "medium"):
        found.append(f"verbosity is {body.verbosity!r}, which the model is not told; say it in a message")
    return found


def check_model(name: str | None, served: Served) -> None:
    """Raise `Refusal` if a request names another model than there is."""
    if name is not None and name != served.name:
        raise invalid(
            f"there is no model {shown(name)} here; this server has {served.name!r}", "model", "model_not_found", 404
        )


def _check_streaming(body: Body, options: SpecbeamOptions) -> None:
    if body.stream_options is not None and body.stream_options.include_usage and not body.stream:
        raise invalid("stream_options is for streams; leave it out, or set stream to true", "stream_options")
    shows = options.trace or options.stream == "live"
    if options.trace and options.stream == "live":
        raise invalid("specbeam.trace shows all beams of each turn, so specbeam.stream must not be 'live'", "specbeam")
    if shows and not body.stream:
        raise invalid("specbeam.trace and specbeam.stream are for streams; set stream to true", "specbeam")
    if shows and isinstance(body, CompletionBody) and _is_batch(body.prompt):
        raise invalid("specbeam.trace and specbeam.stream follow one prompt; give one", "prompt")


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


# Prompts.


def _prompts(body: Body, served: Served) -> tuple[list[list[int]], list[str]]:
    """Return the token ids of each prompt, and its text, "" where ids were given."""
    if isinstance(body, ChatBody):
        return [chat_ids(body, served)], [""]
    assert isinstance(body, CompletionBody)
    given = prompts_in(body.prompt, "prompt")
    if len(given) > served.config.max_prompts:
        raise invalid(f"there are {len(given)} prompts; this server takes {served.config.max_prompts}", "prompt")
    special = body.add_special_tokens is not False
    ids = [prompt_ids(prompt, served, special, f"prompt {number}") for number, prompt in enumerate(given)]
    texts = [prompt if isinstance(prompt, str) else "" for prompt in given]
    return ids, texts


def prompt_ids(prompt: str | list[int], served: Served, special: bool = True, name: str = "the prompt") -> list[int]:
    """Return the token ids of a prompt. Raises `Refusal` if it has none, or if it is a text and there is no tokenizer.

    Args:
        special: whether a text gets the special tokens that the tokenizer adds.
        name: of the prompt, for messages.
    """
    tokenizer = served.pair.tokenizer
    if tokenizer is None and isinstance(prompt, str):
        raise invalid("this server has no tokenizer; give token ids", "prompt", "not_supported")
    try:
        return PromptReader(tokenizer, served.pair.target.vocab, adds_special=special).ids(prompt, name)
    except BadPrompt as error:
        raise invalid(str(error), "prompt", "bad_prompt") from error


def chat_ids(body: Any, served: Served) -> list[int]:
    """Return the token ids of the messages of a chat, by the chat template."""
    tokenizer = served.pair.tokenizer
    template = served.template or getattr(tokenizer, "chat_template", None)
    if tokenizer is None or template is None:
        raise invalid(
            "this model has no chat template; use /v1/completions, or start the server with --chat-template FILE",
            "messages",
            "not_supported",
        )
    further = dict(getattr(body, "chat_template_kwargs", None) or {})
    goes_on = bool(getattr(body, "continue_final_message", None))
    starts = getattr(body, "add_generation_prompt", None)
    tools = [_plain_tool(tool) for tool in getattr(body, "tools", None) or []]
    if goes_on and starts:
        raise invalid("continue_final_message and add_generation_prompt contradict each other", "add_generation_prompt")
    if wrong := {"tools", "chat_template", "tokenize", "conversation", "return_dict"} & set(further):
        raise invalid(f"chat_template_kwargs sets {', '.join(sorted(wrong))}; leave it out", "chat_template_kwargs")
    messages = [_message(one) for one in body.messages]
    adds_special = getattr(body, "add_special_tokens", None)
    try:
        return prompt_of_messages(
            tokenizer, served.template or None, messages, tools, goes_on, starts, adds_special, further
        )
    except BadPrompt as error:
        raise invalid(str(error), "messages", "bad_prompt") from error


def _message(message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    given = {"role": message.role, "content": content or ""}
    for name in ("name", "tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value:
            given[name] = value
    reasoning = message.reasoning or message.reasoning_content
    if message.reasoning_content and message.reasoning_content != reasoning:
        raise invalid(
            "a message has reasoning and reasoning_content, and they differ; give one of them", "messages", "bad_prompt"
        )
    if reasoning:  # templates know it by either name
        given |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return given


def _new_tokens(body: Body, prompts: Sequence[Sequence[int]], served: Served) -> int:
    """Return the most new tokens of each text."""
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
    given = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    longest = max(map(len, prompts))
    room = None if served.room is None else served.room - longest
    if room is not None and room < 1:
        raise invalid(
            f"the prompt has {longest} tokens, and prompt and text together may have {served.room}; shorten it",
            "messages" if isinstance(body, ChatBody) else "prompt",
            "context_length_exceeded",
        )
    limit = served.config.max_tokens
    if given is None:
        wanted = 16 if isinstance(body, CompletionBody) else limit
        return min(wanted, limit, room or limit)
    name = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
    if given > limit:
        raise invalid(f"{name} is {given}; this server gives at most {limit}", name)
    if room is not None and given > room:
        raise invalid(
            f"the prompt has {longest} tokens and {name} is {given}; together they may be {served.room}",
            name,
            "context_length_exceeded",
        )
    return given


# Methods.


def _method(body: Body, options: SpecbeamOptions, served: Served) -> tuple[Method, int, str]:
    """Return the method, how many independent answers it draws for each prompt, and its name with its settings."""
    config = served.config
    count = body.n or 1
    if count > config.max_n:
        raise invalid(f"n is {count}; this server gives at most {config.max_n}", "n")
    wants_beams = bool(body.use_beam_search) or body.num_beams is not None or body.beam_width is not None
    if body.use_beam_search is False and (body.num_beams or body.beam_width):
        raise invalid(
            "use_beam_search is false, and a number of beams is given; leave one of them out", "use_beam_search"
        )
    further = dict(options.model_extra or {})
    width = _width(body, options, wants_beams, count, config)
    if options.method is None and not wants_beams and options.beams is None:
        if further:
            first = min(further)
            near = hint(first, SpecbeamOptions.model_fields)
            raise invalid(
                f"specbeam has {', '.join(sorted(further))}{near}, which are settings of a method; name it in "
                "specbeam.method",
                "specbeam",
                "unknown_field",
            )
        method = served.method
        key = ""
        wanted = max(count, body.best_of or count)
        if config.method == "" and wanted > method.beams > 1 and wanted <= config.max_beams:
            method = usual_method(served.pair, [*config.settings, f"beams={wanted}"])  # as many beams as answers
            key = repr(("", wanted))
    else:
        method, key = named_method(options, further, width, served)
    if body.best_of is not None and body.best_of < count and not wants_beams:
        raise invalid(f"best_of is {body.best_of} and n is {count}; best_of must be at least n", "best_of")
    if method.beams > 1:
        if method.beams > config.max_beams:
            raise invalid(
                f"{method.name} has {method.beams} beams; this server takes {config.max_beams}",
                "specbeam",
                "too_large_beams",
            )
        if count > method.beams:
            raise invalid(f"n is {count}, and {method.name} keeps {method.beams} beams; ask for fewer answers", "n")
        return method, count, key
    drawn = body.best_of or count
    if drawn > config.max_n:
        raise invalid(f"best_of is {drawn}; this server draws at most {config.max_n}", "best_of")
    if drawn > 1 and (method.greedy or body.temperature == 0):
        if body.best_of is not None and count == 1:
            return method, 1, key  # all answers are the same
        raise invalid(f"{method.name} has one answer, as nothing is drawn; n is {count}: ask for beams", "n")
    return method, drawn, key


def _width(body: Body, options: SpecbeamOptions, wants_beams: bool, count: int, config: ServerConfig) -> int | None:
    """Return the number of beams that a request asks for; None if it asks for none."""
    named = {"specbeam.beams": options.beams, "num_beams": body.num_beams, "beam_width": body.beam_width}
    if wants_beams:
        named["best_of"] = body.best_of
    given = {name: value for name, value in named.items() if value is not None}
    if len(set(given.values())) > 1:
        raise invalid(
            "the number of beams is given differently: "
            + ", ".join(f"{name} is {value}" for name, value in given.items())
            + "; give it once",
            [*given][-1].split(".")[0],
        )
    for name, value in given.items():
        if value > config.max_beams:
            raise invalid(
                f"{name} is {value}; this server takes at most {config.max_beams} beams",
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
    """Return the method that a request names, or the beam search that it asks for, and its name with its settings.

    Args:
        further: settings of the method besides its beams.
        width: beams; None: as many as the method has by itself.
    """
    has_draft = served.pair.draft is not None
    name = options.method or ("speculative_beam_search" if has_draft else "beam_search")
    allowed = served.config.methods or tuple(RECIPE_OF)
    if name == "auto" or name not in RECIPE_OF or (options.method is not None and name not in allowed):
        raise invalid(
            f"specbeam.method is {shown(name)}; this server has {', '.join(one for one in RECIPE_OF if one in allowed)}",
            "specbeam",
        )
    make = RECIPE_OF[name]
    known = inspect.signature(make).parameters
    chosen = {key: _setting(name, key, value, known) for key, value in further.items()}
    _check_skipping(name, chosen)
    if width is not None:
        if "beams" not in known:
            raise invalid(f"{name} has no beams; leave the number of beams out, or choose another method", "specbeam")
        chosen["beams"] = width
    if options.trace and "trace" in known and chosen.get("semantics") != "hf":
        chosen["trace"] = True
    try:
        method = make(**chosen)
        if method.needs_draft and not has_draft:
            raise invalid(
                f"{name} drafts with a model, and this server has no draft model", "specbeam", "not_supported"
            )
    except SpecbeamError as error:
        refusal = refusal_of(error)
        raise Refusal(refusal.status, refusal.kind, refusal.code, refusal.message, "specbeam") from error
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise invalid(f"specbeam holds settings that {name} does not take: {str(error)[:200]}", "specbeam") from error
    return method, repr((name, sorted(chosen.items())))


# Settings that are not for requests: objects, names of what is kept on disk, and models, which would be loaded by name.
_OBJECTS = ("trace", "task", "search", "others")


def _check_skipping(method: str, chosen: Mapping[str, Any]) -> None:
    """Raise `Refusal` if a text would depend on what a search has learnt from the texts of other requests."""
    skip = chosen.get("skip", "bayes")
    if method == "swift" and skip in ("bayes", "random") and chosen.get("rule") != "match":
        raise invalid(
            f"swift with skip {skip!r} learns from all requests, and with rule {chosen.get('rule', 'path')!r} the text of a "
            "seed depends on that; set specbeam.rule to 'match', or specbeam.skip to 'exit' with layers, 'clasp' or a set",
            "specbeam",
        )


def _setting(method: str, key: str, value: Any, known: Mapping[str, inspect.Parameter]) -> Any:
    """Return a setting of a method from JSON. Raises `Refusal` if there is none of that name, or it is out of bounds."""
    if key not in known or key in _OBJECTS:
        names = [name for name in known if name not in _OBJECTS]
        raise invalid(
            f"specbeam.{key} is no setting of {method}{hint(key, names)}; it has {', '.join(names) or 'none'}",
            "specbeam",
            "unknown_field",
        )
    if isinstance(value, list):
        if len(value) > LARGEST_SETTING:
            raise invalid(f"specbeam.{key} has {len(value)} values; at most {LARGEST_SETTING} are taken", "specbeam")
        return tuple(_setting(method, key, one, known) for one in value)
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise invalid(f"specbeam.{key} is {shown(value)}; it must be a number, a word or a list of these", "specbeam")
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not abs(value) <= LARGEST_SETTING:
        raise invalid(f"specbeam.{key} is {shown(value)}; this server takes at most {LARGEST_SETTING}", "specbeam")
    return value


# Settings.


def _settings(
    body: Body, options: SpecbeamOptions, served: Served, method: Method, warnings: list[str]
) -> dict[str, Any]:
    """Return the options of `Settings` that a body gives by other names, or by the same."""
    given: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if option.field is None:
            continue
        value = getattr(options if option.field.inside else body, name)
        if value is None:
            continue
        if name == "top_k":
            value = max(value, 0)  # vLLM writes -1 for all
        if not (option.warper and method.greedy):
            given[name] = value
        elif option.is_on(value) and not (name == "temperature" and value == 0):
            raise invalid(
                f"{name} is {value}, and {method.name} does not draw; choose specbeam.method beam_sampling or dsbd, or "
                "leave it out",
                name,
            )
    if body.min_tokens is not None:
        given["min_new_tokens"] = body.min_tokens
    if body.stop:
        given["stop_strings"] = [body.stop] if isinstance(body.stop, str) else list(body.stop)
    ends = served.pair.eos
    more = body.stop_token_ids or []
    if wrong := [token for token in more if token >= served.pair.target.vocab]:
        raise invalid(
            f"stop_token_ids holds {wrong[0]}; the model knows 0 to {served.pair.target.vocab - 1}", "stop_token_ids"
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
            raise invalid(f"{name} with several prompts of different lengths is not supported; send one each", name)
        processors.append(CountPenalty(lengths.pop(), body.presence_penalty or 0.0, body.frequency_penalty or 0.0))
    if body.logit_bias:
        vocab = served.pair.target.vocab
        biases: dict[int, float] = {}
        for token, value in body.logit_bias.items():
            if not re.fullmatch(r"[0-9]{1,9}", token) or int(token) >= vocab:
                raise invalid(
                    f"logit_bias has {shown(token)}; it must have token ids from 0 to {vocab - 1}", "logit_bias"
                )
            biases[int(token)] = value
        processors.append(TokenBias(biases))
    return processors


def _top(body: Body) -> int | None:
    """Return how many likeliest tokens are to be reported per token; None without log-probabilities."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    assert isinstance(body, ChatBody)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs is given without logprobs; set logprobs to true", "top_logprobs")
    return body.top_logprobs or 0 if body.logprobs else None


# Forms.


def _form(body: Body, tool: str | None, config: ServerConfig) -> tuple[str | None, dict[str, Any]]:
    """Return the field that says what form texts must have, and the option of `Settings` for it; None and {} without one."""
    forms: dict[str, dict[str, Any]] = {}
    wanted = body.response_format
    if wanted is not None and wanted.type != "text":
        forms["response_format"] = _json_form(wanted.type, wanted.json_schema)
    if body.structured_outputs is not None:
        forms["structured_outputs"] = _structured(body.structured_outputs)
    if tool is not None:
        assert isinstance(body, ChatBody)
        forms["tools"] = {"json_schema": _parameters_of(body.tools or [], tool)}
    if len(forms) > 1:
        raise invalid(f"{' and '.join(forms)} both say what form the text must have; give one", [*forms][-1])
    for name, form in forms.items():
        _check_form(form, name, config)
        if body.skip_special_tokens is False:
            raise invalid(
                f"skip_special_tokens is false and {name} says what form the text has, which no special token is a part of; "
                "leave one of them out",
                "skip_special_tokens",
            )
        return name, form
    return None, {}


def _json_form(kind: str, schema: JsonSchema | None) -> dict[str, Any]:
    if kind == "json_object":
        return {"json_schema": ANY_OBJECT}
    if schema is None:
        raise invalid("response_format is a json_schema without json_schema.schema", "response_format", "bad_grammar")
    if schema.strict is False:
        raise invalid(
            "response_format.json_schema.strict is false; here a text always keeps to its schema: leave it out",
            "response_format",
        )
    return {"json_schema": schema.schema_}


def _structured(asked: StructuredOutputs) -> dict[str, Any]:
    given = {name: value for name, value in asked.model_dump(by_alias=True).items() if value not in (None, False)}
    if len(given) != 1:
        raise invalid(
            f"structured_outputs has {', '.join(given) or 'nothing'}; it must have one of json, json_object, regex, choice "
            "and grammar",
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


def _check_form(form: Mapping[str, Any], param: str, config: ServerConfig) -> None:
    """Raise `Refusal` if a form is larger than the server takes."""
    ((kind, value),) = form.items()
    most = {"json_schema": config.max_schema, "regex": config.max_regex, "grammar": config.max_grammar}[kind]
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > most:
        raise invalid(f"the form has {len(text)} characters; this server takes {most}", param, "bad_grammar")
    if kind != "json_schema":
        return
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise invalid(f"the schema is no JSON: {str(error)[:200]}", param, "bad_grammar") from error
    depth, properties = _size_of(schema)
    if depth > DEEPEST_SCHEMA or properties > MOST_PROPERTIES:
        raise invalid(
            f"the schema is {depth} deep and has {properties} properties; this server takes {DEEPEST_SCHEMA} and "
            f"{MOST_PROPERTIES}",
            param,
            "bad_grammar",
        )
    if outside := _reference_outside(schema):
        raise invalid(f"the schema refers to {shown(outside)}; only '#...' can be looked up", param, "bad_grammar")


def _size_of(schema: Any) -> tuple[int, int]:
    """Return how deep a schema is, and how many properties it has."""
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


# Tools.


def _forced_tool(body: ChatBody) -> str | None:
    """Return the name of the function that the answer has to call; None if it is no call."""
    choice = body.tool_choice
    tools = body.tools or []
    names = [_function_of(tool)["name"] for tool in tools]
    if choice == "none" or (choice in (None, "auto") and not tools):
        return None
    if isinstance(choice, dict):
        name = choice.get("function", {}).get("name") if isinstance(choice.get("function"), dict) else None
        if choice.get("type") != "function" or name not in names:
            raise invalid(f"tool_choice is {shown(choice)}; it must name a function of tools", "tool_choice")
        return str(name)
    if choice == "required" and len(names) == 1:
        return str(names[0])
    raise invalid(
        "the model cannot choose between tools here; name one in tool_choice, or set it to 'none' or, with one tool, "
        "'required'",
        "tool_choice",
        "not_supported",
    )


def _function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"tools holds {shown(tool)}; each must be a function with a name", "tools")
    return function


def _parameters_of(tools: Sequence[Mapping[str, Any]], name: str) -> Any:
    for tool in tools:
        function = _function_of(tool)
        if function["name"] == name:
            return ANY_OBJECT | _checked_parameters(function.get("parameters") or {}, name)
    raise invalid(f"tools has no function {name!r}", "tools")


def _checked_parameters(parameters: Any, name: str) -> dict[str, Any]:
    """Return the schema of the arguments of a function, which are an object. Raises `Refusal` if it says otherwise."""
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise invalid(
            f"the parameters of function {name!r} are {shown(parameters)}; they must be a schema of type 'object'",
            "tools",
            "bad_grammar",
        )
    return parameters


def _plain_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as templates show it: without what it says to caches."""
    found = {name: value for name, value in tool.items() if name != "cache_control"}
    function = found.get("function")
    if isinstance(function, dict):
        found["function"] = {name: value for name, value in function.items() if name != "cache_control"}
    return found

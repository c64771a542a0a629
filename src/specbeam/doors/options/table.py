"""The options of generation, each once: name, type, allowed values and meaning, and the names that it has elsewhere.

`Options` gives each option its type, for editors and type checkers; `OPTIONS` says everything else. From them come the
signature of `generate`, the flags of all commands, the fields of the server's bodies, the settings of a row of a job, the
table of options in the documentation, and the hints of misspelt names.

A program can add an option of its own with `add_option`, before it imports the command line or the server. This option
makes its own logits processor (`GenerationOption.make`).
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypedDict, get_type_hints

from specbeam.core.errors import BadSetting
from specbeam.doors.options import checks
from specbeam.doors.options.checks import (
    FINITE,
    FLAG,
    GRAMMAR_BACKENDS,
    INTEGER,
    LARGEST_INTEGER,
    LARGEST_LENGTH_PENALTY,
    NUMBER,
    Check,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LogitsProcessorList


class Options(TypedDict, total=False):
    """The options of one call of `generate`, with the names and meanings of transformers where it has them."""

    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    temperature: float | None
    top_h: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    repetition_penalty: float | None
    num_return_sequences: int
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    stop_strings: str | Iterable[str] | None
    eos_token_id: SupportsIndex | Iterable[int] | None
    json_schema: str | bool | Mapping[str, Any] | None
    regex: str | None
    grammar: str | None
    grammar_backend: str
    no_repeat_ngram_size: int | None
    bad_words_ids: Sequence[Sequence[int]] | None
    min_length: int | None
    forced_bos_token_id: int | None
    forced_eos_token_id: SupportsIndex | Iterable[int] | None
    suppress_tokens: Sequence[int] | None
    begin_suppress_tokens: Sequence[int] | None
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Sequence[Any]] | None
    exponential_decay_length_penalty: Sequence[float] | None
    encoder_repetition_penalty: float | None
    encoder_no_repeat_ngram_size: int | None
    guidance_scale: float | None
    watermarking_config: Any
    renormalize_logits: bool | None
    remove_invalid_values: bool | None
    prefix_allowed_tokens_fn: "Callable[[int, Tensor], list[int]] | None"
    logits_processor: "LogitsProcessorList | Sequence[Any] | None"
    decoder_start_token_id: int | None
    decoder_input_ids: Any


@dataclass(frozen=True)
class Flag:
    """An option on the command line.

    Args:
        help: its meaning there; "": that of the option.
        kind: the type of its value; None: that of the option.
        name: without dashes; "": that of the option.
    """

    help: str = ""
    kind: Any = None
    name: str = ""


@dataclass(frozen=True)
class Field:
    """An option as a field of a request to the server.

    Args:
        bounds: of numbers, as pydantic names them: ge, gt, le.
        inside: the object of the body that it stands in; "": the body itself.
    """

    bounds: Mapping[str, float] = field(default_factory=dict)
    inside: str = ""


@dataclass(frozen=True)
class GenerationOption:
    """One option of generation.

    Args:
        name: as in transformers, where it has the option.
        meaning: in one line.
        checks: tests of a value, in this order, each with what the value must be.
        default: None: not set.
        warper: the class of transformers that applies the option where tokens are drawn, in the order of `OPTIONS`.
        off: values that change nothing.
        of_models: whether a model's own generation config sets it, unless the caller does.
        of_rows: whether a row of a job may set it: JSON has a form for it.
        flag: its form on the command line; None: it has none.
        field: its form in requests to the server; None: it has none, or one of `names`.
        names: what it is called in OpenAI's API, vLLM and elsewhere; the first is the server's name if it has no `field`.
        kind: the type of an added option; that of others is in `Options`.
        make: for an added option: makes a logits processor from its value and the facts of a text (`TextFacts`).
    """

    name: str
    meaning: str
    checks: tuple[Check, ...] = ()
    default: Any = None
    warper: str = ""
    off: tuple[Any, ...] = ()
    of_models: bool = True
    of_rows: bool = True
    flag: Flag | None = None
    field: Field | None = None
    names: tuple[str, ...] = ()
    kind: Any = None
    make: Callable[[Any, Any], Any] | None = None

    def is_on(self, value: object) -> bool:
        """Return whether a value changes anything."""
        return value is not None and value not in self.off

    def check(self, value: object) -> None:
        """Raise `BadSetting` with what the option must be, unless it may have this value."""
        if value is None and self.default is None:
            return
        for is_valid, expected in self.checks:
            checks.require(is_valid(value), self.name, value, expected)


def _counted(least: int, meaning: str = "") -> tuple[Check, ...]:
    """Return the checks of a count of at least `least`."""
    return (*INTEGER, (lambda count: count >= least, f">= {least}{meaning}"))


PROBABILITY: tuple[Check, ...] = (*NUMBER, (lambda value: 0 < value <= 1, "in (0, 1]"))
PROBABILITY_OR_OFF: tuple[Check, ...] = (*NUMBER, (lambda value: 0 < value <= 1, "in (0, 1] (1: off)"))
CUTOFF: tuple[Check, ...] = (*NUMBER, (lambda value: 0 <= value < 1, "in [0, 1) (0: off)"))
PENALTY: tuple[Check, ...] = (*NUMBER, (lambda value: value > 0, "> 0"), *FINITE)
NGRAM = _counted(0, " (0: off)")
TOKEN = _counted(0)
TOKENS: tuple[Check, ...] = ((checks.are_tokens, "a list of token ids"),)

_BUILT_IN = (
    GenerationOption(
        "max_new_tokens",
        "Maximum number of new tokens. Not set: the model's own, else 256, or fewer if it has no room.",
        _counted(1),
        flag=Flag(
            "Maximum number of new tokens per answer; by default the model's own, else 256, or fewer if it has no room."
        ),
        names=("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"),
    ),
    GenerationOption(
        "max_length",
        "Maximum number of tokens of prompt and text together; max_new_tokens takes precedence.",
        INTEGER,
        flag=Flag(),
    ),
    GenerationOption(
        "min_new_tokens",
        "Number of new tokens before which no text ends.",
        _counted(0),
        flag=Flag(),
        names=("min_tokens",),
    ),
    # Warpers, in the order of transformers.
    GenerationOption(
        "temperature",
        "Sampling temperature; 0 draws nothing at random.",
        (
            *NUMBER,
            (lambda value: value >= 0, ">= 0"),
            *FINITE,
            (lambda value: value == 0 or value >= 1e-4, "0 or at least 0.0001"),
        ),
        warper="TemperatureLogitsWarper",
        off=(1,),
        flag=Flag("Sampling temperature; by default the model's own, else 1. With 0 nothing is random."),
        field=Field({"ge": 0, "le": 2}),
    ),
    GenerationOption(
        "top_h",
        "Draw among the tokens that keep the entropy below this share of the whole.",
        PROBABILITY,
        warper="TopHLogitsWarper",
        flag=Flag(),
    ),
    GenerationOption(
        "top_k",
        "Draw among the k likeliest tokens only; 0: all.",
        _counted(0, " (0: all tokens)"),
        warper="TopKLogitsWarper",
        off=(0,),
        flag=Flag("Sample among the k likeliest tokens only; by default the model's own setting, else all."),
        field=Field({"ge": -1, "le": LARGEST_INTEGER}),
    ),
    GenerationOption(
        "top_p",
        "Draw among the fewest likeliest tokens with total probability p.",
        PROBABILITY,
        warper="TopPLogitsWarper",
        off=(1,),
        flag=Flag(
            "Sample among the fewest likeliest tokens with total probability p; by default the model's own, else 1."
        ),
        field=Field({"gt": 0, "le": 1}),
    ),
    GenerationOption(
        "min_p",
        "Draw among the tokens with at least p times the probability of the likeliest.",
        (*NUMBER, (lambda value: 0 <= value <= 1, "in [0, 1]")),
        warper="MinPLogitsWarper",
        off=(0,),
        flag=Flag(
            "Sample among the tokens with at least p times the probability of the likeliest; by default the model's own, "
            "else 0."
        ),
        field=Field({"ge": 0, "le": 1}),
    ),
    GenerationOption(
        "typical_p",
        "Draw among the tokens whose surprise is nearest to the expected one, with total probability p.",
        PROBABILITY_OR_OFF,
        warper="TypicalLogitsWarper",
        off=(1,),
        flag=Flag(),
    ),
    GenerationOption(
        "epsilon_cutoff",
        "Draw among the tokens of at least this probability.",
        CUTOFF,
        warper="EpsilonLogitsWarper",
        off=(0,),
        flag=Flag(),
    ),
    GenerationOption(
        "eta_cutoff",
        "Draw among the tokens of at least this probability, lowered where the entropy is high.",
        CUTOFF,
        warper="EtaLogitsWarper",
        off=(0,),
        flag=Flag(),
    ),
    GenerationOption(
        "repetition_penalty",
        "Make tokens that occurred before less likely (above 1) or likelier (below 1).",
        PENALTY,
        off=(1,),
        flag=Flag(
            "Make tokens that occurred before less likely (above 1) or likelier (below 1); by default the model's own, "
            "else 1."
        ),
        field=Field({"gt": 0, "le": 10}),
    ),
    GenerationOption(
        "num_return_sequences",
        "Number of answers per prompt.",
        _counted(1),
        default=1,
        of_models=False,
        flag=Flag("Number of answers per prompt.", int),
        names=("n",),
    ),
    GenerationOption(
        "length_penalty",
        "A score is log-likelihood / length ** this exponent.",
        (
            *NUMBER,
            *FINITE,
            (
                lambda value: abs(value) <= LARGEST_LENGTH_PENALTY,
                f"between -{LARGEST_LENGTH_PENALTY} and {LARGEST_LENGTH_PENALTY}",
            ),
        ),
        flag=Flag("A score is log-likelihood / length ** this exponent; by default the model's own, else 1."),
        field=Field(),
    ),
    GenerationOption(
        "early_stopping",
        "When a beam search ends: True, False or 'never', as in transformers.",
        ((lambda value: isinstance(value, bool) or value == "never", "True, False or 'never'"),),
        field=Field(),
    ),
    GenerationOption(
        "stop_strings",
        "Texts that end an answer.",
        (
            (checks.are_texts, "texts of at least one character"),
            (checks.are_proper, "proper text; this holds half a character"),
        ),
        flag=Flag("End an answer after this text. May be given several times.", list[str], "stop"),
        names=("stop",),
    ),
    GenerationOption(
        "eos_token_id",
        "The tokens that end a text, in place of the model's own; []: none does.",
        ((checks.are_integers, "a token id or several; to end at a text, use stop_strings"),),
        of_models=False,
        names=("stop_token_ids",),
    ),
    GenerationOption(
        "json_schema",
        "The text is JSON of this schema; True: any JSON.",
        of_models=False,
        flag=Flag("Answer in JSON that fits this schema: the schema itself or a file with it.", str | None),
        names=("response_format", "guided_json"),
    ),
    GenerationOption(
        "regex",
        "The text matches this regular expression.",
        of_models=False,
        flag=Flag("Answer with texts that match this regular expression."),
        names=("structured_outputs", "guided_regex"),
    ),
    GenerationOption(
        "grammar",
        "The text is one of this Lark grammar.",
        of_models=False,
        flag=Flag("Answer with texts of this Lark grammar: the grammar itself or a file with it."),
        names=("structured_outputs", "guided_grammar"),
    ),
    GenerationOption(
        "grammar_backend",
        "The library that applies json_schema, regex and grammar.",
        ((lambda name: name in GRAMMAR_BACKENDS, " or ".join(map(repr, GRAMMAR_BACKENDS))),),
        default="llguidance",
        of_models=False,
        of_rows=False,
        flag=Flag("Library that applies schemas, expressions and grammars: llguidance or xgrammar."),
    ),
    GenerationOption(
        "no_repeat_ngram_size",
        "No n tokens in a row come twice; 0: off.",
        NGRAM,
        off=(0,),
        flag=Flag(),
        field=Field({"ge": 0, "le": LARGEST_INTEGER}, "specbeam"),
    ),
    GenerationOption(
        "bad_words_ids",
        "Sequences of tokens that no text has.",
        ((checks.are_words, "lists of token ids, one per word, like [[5], [6, 7]]"),),
    ),
    GenerationOption(
        "min_length", "Number of tokens of prompt and text before which no text ends.", _counted(0), flag=Flag()
    ),
    GenerationOption("forced_bos_token_id", "The first token of every text.", TOKEN, of_rows=False, flag=Flag()),
    GenerationOption(
        "forced_eos_token_id",
        "The last token of texts that reach the limit.",
        ((checks.are_token_ids, "a token id or several"),),
        of_rows=False,
    ),
    GenerationOption("suppress_tokens", "Tokens that no text has.", TOKENS),
    GenerationOption("begin_suppress_tokens", "Tokens that no text begins with.", TOKENS),
    GenerationOption(
        "sequence_bias",
        "What is added to the logits of sequences of tokens.",
        ((checks.are_biases, "pairs of token ids and a number, like [[[5], -1.0], [[6, 7], 2.5]]"),),
        names=("logit_bias",),
    ),
    GenerationOption(
        "exponential_decay_length_penalty",
        "From so many new tokens on, the end becomes likelier by this factor per token.",
        ((checks.is_decay, "a number of new tokens and a factor above 0, like (15, 1.6)"),),
    ),
    GenerationOption(
        "encoder_repetition_penalty", "As repetition_penalty, for tokens of the prompt or source.", PENALTY, flag=Flag()
    ),
    GenerationOption(
        "encoder_no_repeat_ngram_size", "No n tokens in a row of the prompt or source come again.", NGRAM, flag=Flag()
    ),
    GenerationOption(
        "guidance_scale",
        "Classifier-free guidance: how far laws move away from those without the prompt; 1: off.",
        (*NUMBER, *FINITE),
        off=(1,),
        flag=Flag(),
    ),
    GenerationOption("watermarking_config", "A watermark, as a WatermarkingConfig of transformers or its fields."),
    GenerationOption(
        "renormalize_logits",
        "Normalise the scores of a beam search after processors.",
        FLAG,
        of_rows=False,
        flag=Flag(),
    ),
    GenerationOption("remove_invalid_values", "Replace NaN and infinite logits.", FLAG, of_rows=False, flag=Flag()),
    GenerationOption(
        "prefix_allowed_tokens_fn",
        "A function of a prompt's number and its tokens so far that returns the tokens allowed next.",
        ((callable, "a callable that takes the number of a prompt and its tokens"),),
        of_models=False,
        of_rows=False,
    ),
    GenerationOption(
        "logits_processor",
        "Logits processors of transformers, applied after those that options ask for.",
        ((checks.are_callables, "a list of callables that take input_ids and scores"),),
        of_models=False,
        of_rows=False,
    ),
    GenerationOption(
        "decoder_start_token_id",
        "The token that the decoder of an encoder-decoder model begins with.",
        TOKEN,
        of_models=False,
        of_rows=False,
        flag=Flag(),
    ),
    GenerationOption(
        "decoder_input_ids",
        "The tokens that the decoder of an encoder-decoder model begins with, or as many lists as sources.",
        of_models=False,
        of_rows=False,
    ),
)
OPTIONS: dict[str, GenerationOption] = {option.name: option for option in _BUILT_IN}


def add_option(option: GenerationOption) -> None:
    """Let all doors take one more option: `generate`, the command line, the server and jobs.

    To be called before the command line or the server is imported. Raises `BadSetting` if there is one of that name.
    """
    if option.name in OPTIONS:
        raise BadSetting(f"there is an option {option.name} already; give yours another name")
    OPTIONS[option.name] = option


def kind_of(option: GenerationOption) -> Any:
    """Return the type of an option's values."""
    return option.kind if option.kind is not None else _kinds()[option.name]


@cache
def _kinds() -> dict[str, Any]:
    """Return the types of the options in `Options`; those that only a type checker can look up are Any."""
    return get_type_hints(Options, localns={"Tensor": Any, "LogitsProcessorList": Any})


def warper_names() -> tuple[str, ...]:
    """Return the options that apply only where tokens are drawn, in the order of transformers."""
    return tuple(name for name, option in OPTIONS.items() if option.warper)


def config_names() -> tuple[str, ...]:
    """Return the options that a model's own generation config sets, besides warpers."""
    return tuple(name for name, option in OPTIONS.items() if option.of_models and not option.warper and not option.make)


def row_names() -> tuple[str, ...]:
    """Return the options that a row of a job may set for itself."""
    return tuple(name for name, option in OPTIONS.items() if option.of_rows)


def nearest(name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """Return the known name that was probably meant by an unknown one; "" if none is near.

    Args:
        aliases: names of other libraries for known ones.
    """
    names = [*known]
    meant = (aliases or {}).get(name, "")
    if meant in names:
        return meant
    near = difflib.get_close_matches(name, names, 1)
    return near[0] if near else ""


def hint(name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """Return what a message says after an unknown name: the one that was probably meant, in brackets; see `nearest`."""
    meant = nearest(name, known, aliases)
    return f" (did you mean {meant}?)" if meant else ""


def aliases() -> dict[str, str]:
    """Return our name of each name that an option has elsewhere."""
    return {other: name for name, option in OPTIONS.items() for other in option.names}


def as_markdown() -> str:
    """Return the table of all options, with their names at each door, for the documentation."""
    lines = [
        "| option | meaning | model's own | command line | server | row of a job |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, option in OPTIONS.items():
        flag = "" if option.flag is None else f"`--{(option.flag.name or name).replace('_', '-')}`"
        served = f"`{option.names[0]}`" if option.names else ""
        if option.field is not None:
            served = f"`{option.field.inside}.{name}`" if option.field.inside else f"`{name}`"
        of_model = "yes" if option.of_models else ""
        of_row = "yes" if option.of_rows else ""
        lines.append(f"| `{name}` | {option.meaning} | {of_model} | {flag} | {served} | {of_row} |")
    return "\n".join(lines)

"""The options of generation, each defined once: name, type, allowed values, meaning, and its names elsewhere.

`Options` has the types, for editors and type checkers; `OPTIONS` has everything else. They define the signature of
`generate`, the flags of all commands, the fields of requests to the server, the settings of a job's rows, the table in
the documentation, and the suggestions for misspelt names.

A program can add options with `add_option` before it imports the command line or the server. An added option makes a
logits processor (`GenerationOption.make`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypedDict, get_type_hints

from specbeam.core.errors import BadSetting
from specbeam.core.names import hint
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
    """The options of a call of `generate`, with the names and meanings of transformers where it has them."""

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
    catalogue: Any
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
    """The command-line flag of an option.

    Args:
        help: the help text; "": the option's meaning.
        kind: the type of the value; None: that of the option.
        name: the name without dashes; "": that of the option.
        is_common: whether `--help` lists it among the most used options.
    """

    help: str = ""
    kind: Any = None
    name: str = ""
    is_common: bool = False


@dataclass(frozen=True)
class Field:
    """The field of an option in requests to the server.

    Args:
        bounds: the bounds of a number, by pydantic's names ge, gt and le.
        inside: name of the enclosing object; "": the request body itself.
    """

    bounds: Mapping[str, float] = field(default_factory=dict)
    inside: str = ""


@dataclass(frozen=True)
class GenerationOption:
    """An option of generation.

    Args:
        name: the name in transformers, if it has the option.
        meaning: one line.
        checks: checks of a value, applied in this order, each with a description of valid values.
        default: the value if the option is not given; None: not set.
        warper: the transformers class that applies the option to sampling; applied in the order of `OPTIONS`.
        off: values without effect.
        of_models: whether the default is taken from a model's own generation config.
        of_rows: whether a row of a job may set it; its values must exist in JSON.
        flag: the flag of the command line, or None.
        field: the field of requests to the server; None: none, or one of `names`.
        names: names in OpenAI's API, vLLM and elsewhere. Without a `field`, the server uses the first one.
        kind: the type of an added option; types of built-in options are in `Options`.
        make: for an added option, makes a logits processor from its value and the facts about a text (`TextFacts`).
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
        """Return whether a value has any effect."""
        return value is not None and value not in self.off

    def check(self, value: object) -> None:
        """Raise `BadSetting` for an invalid value."""
        if value is None and self.default is None:
            return
        for is_valid, expected in self.checks:
            checks.require(is_valid(value), self.name, value, expected)


def checked_values(given: Mapping[str, Any], others: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the values of all options.

    Args:
        given: values to check, by name.
        others: values that were checked before, by name. Options that are in neither have their defaults.

    Raises `BadSetting` for the first given option that is unknown or has a wrong value.
    """
    unknown = sorted(set(given) - set(OPTIONS))
    if unknown:
        near = hint(unknown[0], OPTIONS, aliases())
        known = near or f"; there are {', '.join(OPTIONS)}"
        raise BadSetting(f"generation has no option {', '.join(unknown)}{known}")
    defaults = {name: option.default for name, option in OPTIONS.items()}
    values = {**defaults, **others, **given}
    for name, value in given.items():
        OPTIONS[name].check(value)
    checks.check_forms(values)
    return values


def _counted(least: int, meaning: str = "") -> tuple[Check, ...]:
    """Return the checks for an integer of at least `least`."""
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
        "Maximum number of new tokens per answer. Not set: the model's own limit, else 256 or the model's last position.",
        _counted(1),
        flag=Flag(is_common=True),
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
        "Minimum number of new tokens before an answer may end.",
        _counted(0),
        flag=Flag(),
        names=("min_tokens",),
    ),
    # Warpers, in the order of transformers.
    GenerationOption(
        "temperature",
        "Sampling temperature; 0: nothing is random.",
        (
            *NUMBER,
            (lambda value: value >= 0, ">= 0"),
            *FINITE,
            (lambda value: value == 0 or value >= 1e-4, "0 or at least 0.0001"),
        ),
        warper="TemperatureLogitsWarper",
        off=(1,),
        flag=Flag(is_common=True),
        field=Field({"ge": 0, "le": 2}),
    ),
    GenerationOption(
        "top_h",
        "Sample from the likeliest tokens, up to this share of the law's entropy.",
        PROBABILITY,
        warper="TopHLogitsWarper",
        flag=Flag(),
    ),
    GenerationOption(
        "top_k",
        "Sample from the k likeliest tokens; 0: off.",
        _counted(0, " (0: all tokens)"),
        warper="TopKLogitsWarper",
        off=(0,),
        flag=Flag(is_common=True),
        field=Field({"ge": -1, "le": LARGEST_INTEGER}),
    ),
    GenerationOption(
        "top_p",
        "Sample from the fewest likeliest tokens with total probability p; 1: off.",
        PROBABILITY,
        warper="TopPLogitsWarper",
        off=(1,),
        flag=Flag(is_common=True),
        field=Field({"ge": 0, "le": 1}),
    ),
    GenerationOption(
        "min_p",
        "Sample from the tokens with at least p times the probability of the likeliest; 0: off.",
        (*NUMBER, (lambda value: 0 <= value <= 1, "in [0, 1]")),
        warper="MinPLogitsWarper",
        off=(0,),
        flag=Flag(is_common=True),
        field=Field({"ge": 0, "le": 1}),
    ),
    GenerationOption(
        "typical_p",
        "Sample from the tokens with surprise nearest to the entropy and total probability p; 1: off.",
        PROBABILITY_OR_OFF,
        warper="TypicalLogitsWarper",
        off=(1,),
        flag=Flag(),
    ),
    GenerationOption(
        "epsilon_cutoff",
        "Sample from the tokens of at least this probability; 0: off.",
        CUTOFF,
        warper="EpsilonLogitsWarper",
        off=(0,),
        flag=Flag(),
    ),
    GenerationOption(
        "eta_cutoff",
        "Sample from the tokens of at least this probability, or less where the entropy is high; 0: off.",
        CUTOFF,
        warper="EtaLogitsWarper",
        off=(0,),
        flag=Flag(),
    ),
    GenerationOption(
        "repetition_penalty",
        "Make repeated tokens less likely (above 1) or likelier (below 1); 1: off.",
        PENALTY,
        off=(1,),
        flag=Flag(is_common=True),
        field=Field({"gt": 0, "le": 10}),
    ),
    GenerationOption(
        "num_return_sequences",
        "Number of answers per prompt.",
        _counted(1),
        default=1,
        of_models=False,
        flag=Flag(kind=int, is_common=True),
        names=("n",),
    ),
    GenerationOption(
        "length_penalty",
        "The score of a text is log-likelihood / length ** length_penalty.",
        (
            *NUMBER,
            *FINITE,
            (
                lambda value: abs(value) <= LARGEST_LENGTH_PENALTY,
                f"between -{LARGEST_LENGTH_PENALTY} and {LARGEST_LENGTH_PENALTY}",
            ),
        ),
        flag=Flag(is_common=True),
        field=Field(),
    ),
    GenerationOption(
        "early_stopping",
        "When a beam search stops: True, False or 'never', as in transformers.",
        ((lambda value: isinstance(value, bool) or value == "never", "True, False or 'never'"),),
        field=Field(),
    ),
    GenerationOption(
        "stop_strings",
        "Texts that end an answer, and stay in it; the server cuts them.",
        (
            (checks.are_texts, "texts of at least one character"),
            (checks.are_proper, "valid Unicode text; this has half a character (a lone surrogate)"),
        ),
        flag=Flag(
            "Text that ends an answer, which keeps it and the rest of its last token. May be given several times.",
            list[str],
            "stop",
            is_common=True,
        ),
        names=("stop",),
    ),
    GenerationOption(
        "eos_token_id",
        "End tokens, in place of the model's own; []: none.",
        ((checks.are_integers, "a token id or several; to end at a text, use stop_strings"),),
        of_models=False,
        names=("stop_token_ids",),
    ),
    GenerationOption(
        "json_schema",
        "JSON schema of the answers; True: any JSON.",
        of_models=False,
        flag=Flag("JSON schema of the answers: the schema itself or a file with it.", str | None, is_common=True),
        names=("response_format", "guided_json"),
    ),
    GenerationOption(
        "regex",
        "Regular expression that the answers match.",
        of_models=False,
        flag=Flag(is_common=True),
        names=("structured_outputs", "guided_regex"),
    ),
    GenerationOption(
        "grammar",
        "Lark grammar of the answers.",
        of_models=False,
        flag=Flag("Lark grammar of the answers: the grammar itself or a file with it.", is_common=True),
        names=("structured_outputs", "guided_grammar"),
    ),
    GenerationOption(
        "grammar_backend",
        "Library that enforces json_schema, regex and grammar: llguidance or xgrammar.",
        ((lambda name: name in GRAMMAR_BACKENDS, " or ".join(map(repr, GRAMMAR_BACKENDS))),),
        default="llguidance",
        of_models=False,
        of_rows=False,
        flag=Flag(is_common=True),
    ),
    GenerationOption(
        "catalogue",
        "Items to which answers are confined: a Catalogue, or what `catalogue` makes one of.",
        of_models=False,
        of_rows=False,
        flag=Flag(
            "File of items to which answers are confined (.json, .txt, .csv, .tsv, .npz, .catalogue).", str | None
        ),
    ),
    GenerationOption(
        "no_repeat_ngram_size",
        "No sequence of n tokens occurs twice; 0: off.",
        NGRAM,
        off=(0,),
        flag=Flag(),
        field=Field({"ge": 0, "le": LARGEST_INTEGER}, "specbeam"),
    ),
    GenerationOption(
        "bad_words_ids",
        "Sequences of tokens that never occur.",
        ((checks.are_words, "lists of token ids, one per word, like [[5], [6, 7]]"),),
    ),
    GenerationOption(
        "min_length",
        "Minimum number of tokens of prompt and text together before an answer may end.",
        _counted(0),
        flag=Flag(),
    ),
    GenerationOption("forced_bos_token_id", "First token of every answer.", TOKEN, of_rows=False, flag=Flag()),
    GenerationOption(
        "forced_eos_token_id",
        "Last token of answers that reach the length limit.",
        ((checks.are_token_ids, "a token id or several"),),
        of_rows=False,
    ),
    GenerationOption("suppress_tokens", "Tokens that never occur.", TOKENS),
    GenerationOption("begin_suppress_tokens", "Tokens that never come first.", TOKENS),
    GenerationOption(
        "sequence_bias",
        "Numbers added to the logits of sequences of tokens.",
        ((checks.are_biases, "pairs of token ids and a number, like [[[5], -1.0], [[6, 7], 2.5]]"),),
        names=("logit_bias",),
    ),
    GenerationOption(
        "exponential_decay_length_penalty",
        "A start and a factor: after `start` new tokens, the end becomes likelier by `factor` per token.",
        ((checks.is_decay, "a number of new tokens and a factor above 0, like (15, 1.6)"),),
    ),
    GenerationOption(
        "encoder_repetition_penalty",
        "Make tokens of the prompt or source likelier (above 1) or less likely (below 1); 1: off.",
        PENALTY,
        flag=Flag(),
    ),
    GenerationOption(
        "encoder_no_repeat_ngram_size",
        "No sequence of n tokens of the prompt or source is repeated; 0: off.",
        NGRAM,
        flag=Flag(),
    ),
    GenerationOption(
        "guidance_scale",
        "Classifier-free guidance: strength of the prompt, compared with a pass without the prompt; 1: off.",
        (*NUMBER, *FINITE),
        off=(1,),
        flag=Flag(),
    ),
    GenerationOption("watermarking_config", "Watermark: a WatermarkingConfig of transformers or its fields."),
    GenerationOption(
        "renormalize_logits",
        "Normalise the log-probabilities of a beam search after all processors.",
        FLAG,
        of_rows=False,
        flag=Flag(),
    ),
    GenerationOption("remove_invalid_values", "Replace NaN and infinite logits.", FLAG, of_rows=False, flag=Flag()),
    GenerationOption(
        "prefix_allowed_tokens_fn",
        "Function of a prompt's number and the tokens so far that returns the allowed next tokens.",
        ((callable, "a callable that takes the number of a prompt and its tokens"),),
        of_models=False,
        of_rows=False,
    ),
    GenerationOption(
        "logits_processor",
        "Logits processors of transformers, applied after those of the other options.",
        ((checks.are_callables, "a list of callables that take input_ids and scores"),),
        of_models=False,
        of_rows=False,
    ),
    GenerationOption(
        "decoder_start_token_id",
        "First token of the decoder of an encoder-decoder model.",
        TOKEN,
        of_models=False,
        of_rows=False,
        flag=Flag(),
    ),
    GenerationOption(
        "decoder_input_ids",
        "First tokens of the decoder of an encoder-decoder model: one list, or one per source.",
        of_models=False,
        of_rows=False,
    ),
)
OPTIONS: dict[str, GenerationOption] = {option.name: option for option in _BUILT_IN}


def add_option(option: GenerationOption) -> None:
    """Add an option to `generate`, the command line, the server and jobs.

    Call it before importing the command line or the server. Raises `BadSetting` if there is an option of that name.
    """
    if option.name in OPTIONS:
        raise BadSetting(f"there is an option {option.name} already; give yours another name")
    OPTIONS[option.name] = option


def kind_of(option: GenerationOption) -> Any:
    """Return the type of an option's values."""
    return option.kind if option.kind is not None else _kinds()[option.name]


@cache
def _kinds() -> dict[str, Any]:
    """Return the types in `Options`; types imported only for type checking are Any."""
    return get_type_hints(Options, localns={"Tensor": Any, "LogitsProcessorList": Any})


def warper_names() -> tuple[str, ...]:
    """Return the options that apply only to sampling, in the order of transformers."""
    return tuple(name for name, option in OPTIONS.items() if option.warper)


def config_names() -> tuple[str, ...]:
    """Return the options taken from a model's own generation config, except for warpers."""
    return tuple(name for name, option in OPTIONS.items() if option.of_models and not option.warper and not option.make)


def row_names() -> tuple[str, ...]:
    """Return the options that a row of a job may set."""
    return tuple(name for name, option in OPTIONS.items() if option.of_rows)


def aliases() -> dict[str, str]:
    """Return the names of options by their names elsewhere."""
    return {other: name for name, option in OPTIONS.items() for other in option.names}


def as_markdown() -> str:
    """Return the documentation's table of all options, with their names in Python, on the command line and elsewhere."""
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

"""The settings of `generate`, named as in transformers, and the warp and limits that are made from them."""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, SupportsIndex

from specbeam.core.constraint import Constrained, Constraint, Form
from specbeam.core.limits import Decode, Limits
from specbeam.errors import BadSetting, NotSupported
from specbeam.laws.ranking import NO_TRUNCATION, Truncation
from specbeam.laws.warp import Warp
from specbeam.options.checks import FORMS, as_decoder_prompts, as_list, as_texts, check, require
from specbeam.options.generation_config import OF_MODELS, WARPERS, read

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig, LogitsProcessorList

DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True)
class Settings:
    """The options of `generate`, with the names and meanings of transformers; None means not set.

    `decoder_start_token_id` and `decoder_input_ids` are for encoder-decoder models: what their decoder begins with.

    Options that transformers does not have:
        json_schema, regex, grammar: the form that every text must have; at most one of them (docs/constrained.md).
        grammar_backend: the library that enforces the form, "llguidance" or "xgrammar".
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    num_return_sequences: int = 1
    eos_token_id: SupportsIndex | Iterable[int] | None = None
    stop_strings: str | Sequence[str] | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    prefix_allowed_tokens_fn: "Callable[[int, Tensor], list[int]] | None" = None
    logits_processor: "LogitsProcessorList | Sequence[Any] | None" = None
    min_length: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: SupportsIndex | Iterable[int] | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    renormalize_logits: bool | None = None
    decoder_start_token_id: int | None = None
    decoder_input_ids: Any = None  # in any container of integers; kept as lists
    json_schema: str | bool | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    grammar_backend: str = "llguidance"

    def __post_init__(self) -> None:
        if self.decoder_input_ids is not None:
            object.__setattr__(self, "decoder_input_ids", as_decoder_prompts(self.decoder_input_ids))
        check({name: getattr(self, name) for name in _names()})

    @property
    def form(self) -> Form | None:
        """The form that texts must have, or None. A JSON schema is given as JSON text."""
        kind = self.form_kind
        if kind is None:
            return None
        return Form(kind, _as_json(self.json_schema) if kind == "json_schema" else getattr(self, kind))

    @property
    def form_kind(self) -> str | None:
        """The name of the option that sets the form: "json_schema", "regex", "grammar", or None."""
        return next((name for name in FORMS if getattr(self, name) is not None), None)

    @classmethod
    def given(cls, options: dict[str, Any], config: "GenerationConfig | None" = None) -> "Settings":
        """Return the settings in keyword arguments; options that are not given come from a generation config.

        Raises `BadSetting` for a wrong option, and `NotSupported` if the config sets a field that specbeam does not support.
        """
        names = _names()
        unknown = sorted(set(options) - set(names))
        if unknown:
            raise BadSetting(f"generate() has no option {', '.join(unknown)}; it has {', '.join(names)}")
        from_config: dict[str, Any] = {}
        if config is not None:
            from_config, unsupported = read(config, _names())
            if unsupported:
                raise NotSupported(
                    f"generation_config sets {', '.join(unsupported)}, which specbeam does not honour; unset them"
                )
        settings = cls(**(from_config | options))
        least = settings.min_new_tokens
        most = settings.max_new_tokens
        if least is not None and most is not None and least > most:
            warnings.warn(
                f"min_new_tokens={least} is more than max_new_tokens={most}: every text has {most} tokens", stacklevel=2
            )
        return settings

    def completed(self, config: "GenerationConfig | None", draws: bool, also: tuple[str, ...] = ()) -> "Settings":
        """Return these settings, with those that are not set taken from the model's own generation config, as transformers
        does it.

        Warns about fields of the config that specbeam does not support.

        Args:
            config: the model's generation config, or None.
            draws: whether the method draws tokens; otherwise no warpers are taken from the config.
            also: names of further settings that are taken from the config.
        """
        if config is None:
            return self
        from_config, unsupported = read(config, _names())
        if unsupported:
            warnings.warn(
                f"the model's generation_config sets {', '.join(unsupported)}, which specbeam does not honour",
                stacklevel=2,
            )
        names = (*OF_MODELS, *(WARPERS if draws else ()), *also)
        missing = {name: from_config[name] for name in names if name in from_config and getattr(self, name) is None}
        return replace(self, **missing)

    def warp(
        self,
        eos: tuple[int, ...],
        greedy: bool,
        prompt_length: int,
        prompt: int = 0,
        search: bool = False,
        constraint: Constraint | None = None,
        most: int | None = None,
    ) -> Warp:
        """Return the warp that turns a model's logits into the law that these settings describe.

        Args:
            eos: the end tokens.
            greedy: whether the method draws nothing.
            prompt_length: number of tokens of the prompt.
            prompt: number of the prompt, for `prefix_allowed_tokens_fn`.
            search: whether warpers work as in transformers' beam modes: on each row like a processor, keeping at least two
                tokens, and at least one more than there are end tokens, so that a beam can go on.
            constraint: applied after all processors; only warpers come after it.
            most: maximum number of new tokens, of which `forced_eos_token_id` is the last.
        """
        greedy = greedy or self.temperature == 0
        processors = self._processors(eos, prompt_length, prompt, search, most)
        bans = (
            None if constraint is None else Constrained(constraint, eos, prompt_length, self.form_kind or "constraint")
        )
        if bans is not None:
            processors = _joined(processors, [bans])
        truncation = NO_TRUNCATION if greedy else self._truncation()
        if search:
            if self.renormalize_logits:
                processors = self._renormalised(processors, truncation)
            truncation = truncation._replace(least=max(2, 1 + len(eos)), by_row=True)
            return Warp(processors, truncation, greedy, True, bans)
        return Warp(processors, truncation, greedy, constraint=bans)

    def new_tokens(self, prompt_length: int) -> int | None:
        """Return the maximum number of new tokens after a prompt of this length, or None if it is not set."""
        if self.max_new_tokens is not None or self.max_length is None:
            return self.max_new_tokens
        return self.max_length - prompt_length

    def limits(
        self, eos: tuple[int, ...], prompt_length: int, room: int | None, decode: Decode | None, keep: int
    ) -> Limits:
        """Return the stop rules of one session. Raises `BadSetting` if there are stop strings but no tokenizer.

        Args:
            eos: the end tokens.
            prompt_length: number of tokens of the prompt.
            room: number of new tokens for which the models have positions; None if there is no limit.
            decode: turns tokens into text, for stop strings; None without a tokenizer.
            keep: number of finished beams that are wanted.
        """
        most = self.new_tokens(prompt_length)
        if most is None:
            most = DEFAULT_NEW_TOKENS if room is None else min(DEFAULT_NEW_TOKENS, room)
        stops = as_texts(self.stop_strings)
        if stops and decode is None:
            raise BadSetting("stop_strings need a tokenizer; give load() one, or stop by eos_token_id")
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return Limits(most, eos, stops, decode, keep, self.early_stopping or False, penalty)

    def eos(self, model_default: SupportsIndex | Iterable[int] | None) -> tuple[int, ...]:
        """Return the end tokens: those of the settings, or else `model_default`."""
        chosen = self.eos_token_id if self.eos_token_id is not None else model_default
        if chosen is None:
            return ()
        return tuple(as_list(chosen))

    def _renormalised(
        self, processors: "LogitsProcessorList | None", truncation: Truncation
    ) -> "LogitsProcessorList | None":
        """Return the processors of a search, with one that makes their scores log-probabilities again.

        In other laws each row is normalised anyway. Raises `NotSupported` for warpers, which would have to come in between.
        """
        from transformers import LogitNormalization

        if truncation != NO_TRUNCATION:
            raise NotSupported(
                "renormalize_logits comes after temperature, top_k, top_p and min_p, and in a search these come last; leave "
                "one of them out"
            )
        return _joined(processors, [LogitNormalization()])

    def _processors(
        self, eos: tuple[int, ...], prompt_length: int, prompt: int, search: bool, most: int | None
    ) -> "LogitsProcessorList | None":
        """Return the logits processors of these settings, in the order of transformers; None if there are none."""
        from transformers import (
            ForcedBOSTokenLogitsProcessor,
            ForcedEOSTokenLogitsProcessor,
            LogitsProcessorList,
            MinLengthLogitsProcessor,
            MinNewTokensLengthLogitsProcessor,
            NoBadWordsLogitsProcessor,
            NoRepeatNGramLogitsProcessor,
            RepetitionPenaltyLogitsProcessor,
            SuppressTokensAtBeginLogitsProcessor,
            SuppressTokensLogitsProcessor,
        )

        processors = LogitsProcessorList()
        if self.repetition_penalty not in (None, 1.0):
            processors.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.no_repeat_ngram_size:
            processors.append(NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size))
        if self.bad_words_ids:
            processors.append(
                NoBadWordsLogitsProcessor([list(words) for words in self.bad_words_ids], list(eos) or None)
            )
        if self.min_length and eos:
            processors.append(MinLengthLogitsProcessor(self.min_length, list(eos)))
        if self.min_new_tokens and eos:
            processors.append(MinNewTokensLengthLogitsProcessor(prompt_length, self.min_new_tokens, list(eos)))
        if self.prefix_allowed_tokens_fn is not None:
            processors.append(allowed_after(self.prefix_allowed_tokens_fn, prompt, together=search))
        if self.forced_bos_token_id is not None:
            processors.append(ForcedBOSTokenLogitsProcessor(self.forced_bos_token_id))
        if self.forced_eos_token_id is not None and most is not None:
            ends = as_list(self.forced_eos_token_id)
            processors.append(ForcedEOSTokenLogitsProcessor(prompt_length + most, ends))
        if self.suppress_tokens:
            processors.append(SuppressTokensLogitsProcessor(list(self.suppress_tokens)))
        if self.begin_suppress_tokens:
            begin = prompt_length
            if prompt_length == 1 and self.forced_bos_token_id is not None:
                begin += 1
            processors.append(SuppressTokensAtBeginLogitsProcessor(list(self.begin_suppress_tokens), begin))
        processors.extend(self.logits_processor or [])
        return processors or None

    def _truncation(self) -> Truncation:
        """Return the temperature, top-k, top-p and min-p of these settings."""
        return Truncation(
            1.0 if self.temperature is None else float(self.temperature),
            self.top_k or 0,
            1.0 if self.top_p is None else self.top_p,
            self.min_p or 0.0,
        )


def allowed_after(allowed: "Callable[[int, Tensor], list[int]]", prompt: int, together: bool = False) -> Any:
    """Return a logits processor that applies a `prefix_allowed_tokens_fn` to one prompt, as transformers does.

    Args:
        allowed: the `prefix_allowed_tokens_fn`: takes the number of a prompt and its tokens, returns the allowed tokens.
        prompt: number of the prompt.
        together: whether the rows of a call are the live beams of one step. If other processors have banned every allowed
            token of a row, transformers allows them again with score 0; with `together` only if this is so for all beams.
    """
    from transformers import PrefixConstrainedLogitsProcessor

    def processed(input_ids: "Tensor", scores: "Tensor") -> "Tensor":
        beams = len(input_ids) if together else 1
        processor = PrefixConstrainedLogitsProcessor(lambda _, tokens: allowed(prompt, tokens), beams)
        banned: Tensor = processor(input_ids, scores)
        return banned

    return processed


def _names() -> list[str]:
    return [field.name for field in fields(Settings)]


def _as_json(schema: Any) -> str:
    """Return a JSON schema as JSON text. Raises `BadSetting` if it is no JSON, or neither an object nor True."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        value = {} if value is True else dict(value) if isinstance(value, Mapping) else value
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadSetting(f"json_schema is no JSON: {error}") from error
    require(isinstance(value, dict), "json_schema", value, "an object, or True for any JSON; one serves all prompts")
    return text


def _joined(*lists: "Sequence[Any] | None") -> "LogitsProcessorList | None":
    """Return the processors of several lists in one list; None if there are none."""
    from transformers import LogitsProcessorList

    return LogitsProcessorList([processor for processors in lists for processor in processors or []]) or None

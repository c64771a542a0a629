"""The options that transformers' users know, turned into a warp and limits."""

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
from specbeam.options.checks import FORMS, check, listed, require, texts
from specbeam.options.generation_config import OF_MODELS, WARPERS, read

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig, LogitsProcessorList

DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True)
class Settings:
    """Options of `generate`, named and meant as in transformers; None means not set.

    Those that transformers does not have:
        json_schema, regex, grammar: what every text has to look like; at most one of them (docs/constrained.md).
        grammar_backend: the library that keeps to it, "llguidance" or "xgrammar".
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
    json_schema: str | bool | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    grammar_backend: str = "llguidance"

    def __post_init__(self) -> None:
        check({name: getattr(self, name) for name in _names()})

    @property
    def form(self) -> Form | None:
        """What texts have to look like; a JSON schema as its JSON."""
        kind = self.form_kind
        if kind is None:
            return None
        return Form(kind, _as_json(self.json_schema) if kind == "json_schema" else getattr(self, kind))

    @property
    def form_kind(self) -> str | None:
        return next((name for name in FORMS if getattr(self, name) is not None), None)

    @classmethod
    def given(cls, options: dict[str, Any], config: "GenerationConfig | None" = None) -> "Settings":
        """From keyword arguments, completed by a generation config. What no method honours is refused by name."""
        names = _names()
        strange = sorted(set(options) - set(names))
        if strange:
            raise BadSetting(f"generate() has no option {', '.join(strange)}; it has {', '.join(names)}")
        if config is None:
            return cls(**options)
        known, strange = read(config, _names())
        if strange:
            raise NotSupported(
                f"generation_config sets {', '.join(strange)}, which specbeam does not honour; unset them"
            )
        return cls(**(known | options))

    def completed(self, config: "GenerationConfig | None", draws: bool) -> "Settings":
        """These settings, completed by the model's own generation config, as transformers does it.

        What draws nothing takes no warpers from it. What no method honours is named in a warning.
        """
        if config is None:
            return self
        known, strange = read(config, _names())
        if strange:
            warnings.warn(
                f"the model's generation_config sets {', '.join(strange)}, which specbeam does not honour",
                stacklevel=2,
            )
        wanted = (*OF_MODELS, *(WARPERS if draws else ()))
        return replace(self, **{name: known[name] for name in wanted if name in known and getattr(self, name) is None})

    def warp(
        self,
        eos: tuple[int, ...],
        greedy: bool,
        prompt_length: int,
        prompt: int = 0,
        search: bool = False,
        constraint: Constraint | None = None,
    ) -> Warp:
        """The law that these settings make of a model's logits.

        Args:
            greedy: nothing is drawn.
            prompt_length: in tokens.
            prompt: its number, for `prefix_allowed_tokens_fn`.
            search: as in transformers' beam modes, where warpers are processors of each row and keep as many tokens as let
                a beam go on beside every way to end.
            constraint: has the last word of all processors; only warpers come behind it.
        """
        greedy = greedy or self.temperature == 0
        processors = self._processors(eos, prompt_length, prompt, search)
        bans = (
            None if constraint is None else Constrained(constraint, eos, prompt_length, self.form_kind or "constraint")
        )
        if bans is not None:
            processors = _joined(processors, [bans])
        truncation = NO_TRUNCATION if greedy else self._truncation()
        if search:
            truncation = truncation._replace(least=max(2, 1 + len(eos)), by_row=True)
            return Warp(processors, truncation, greedy, True, bans)
        return Warp(processors, truncation, greedy, constraint=bans)

    def new_tokens(self, prompt_length: int) -> int | None:
        """The most new tokens behind a prompt of this length; None: not set."""
        if self.max_new_tokens is not None or self.max_length is None:
            return self.max_new_tokens
        return self.max_length - prompt_length

    def limits(
        self, eos: tuple[int, ...], prompt_length: int, room: int | None, decode: Decode | None, keep: int
    ) -> Limits:
        """`room`: new tokens for which the models have positions."""
        most = self.new_tokens(prompt_length)
        if most is None:
            most = DEFAULT_NEW_TOKENS if room is None else min(DEFAULT_NEW_TOKENS, room)
        stops = texts(self.stop_strings)
        if stops and decode is None:
            raise BadSetting("stop_strings need a tokenizer; give load() one, or stop by eos_token_id")
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return Limits(most, eos, stops, decode, keep, self.early_stopping or False, penalty)

    def eos(self, model_default: SupportsIndex | Iterable[int] | None) -> tuple[int, ...]:
        chosen = self.eos_token_id if self.eos_token_id is not None else model_default
        if chosen is None:
            return ()
        return tuple(listed(chosen))

    def _processors(
        self, eos: tuple[int, ...], prompt_length: int, prompt: int, search: bool
    ) -> "LogitsProcessorList | None":
        """In the order of transformers."""
        from transformers import (
            LogitsProcessorList,
            MinNewTokensLengthLogitsProcessor,
            NoBadWordsLogitsProcessor,
            NoRepeatNGramLogitsProcessor,
            RepetitionPenaltyLogitsProcessor,
        )

        chosen = LogitsProcessorList()
        if self.repetition_penalty not in (None, 1.0):
            chosen.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.no_repeat_ngram_size:
            chosen.append(NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size))
        if self.bad_words_ids:
            chosen.append(NoBadWordsLogitsProcessor([list(words) for words in self.bad_words_ids], list(eos) or None))
        if self.min_new_tokens and eos:
            chosen.append(MinNewTokensLengthLogitsProcessor(prompt_length, self.min_new_tokens, list(eos)))
        if self.prefix_allowed_tokens_fn is not None:
            chosen.append(allowed_after(self.prefix_allowed_tokens_fn, prompt, together=search))
        chosen.extend(self.logits_processor or [])
        return chosen or None

    def _truncation(self) -> Truncation:
        return Truncation(
            1.0 if self.temperature is None else float(self.temperature),
            self.top_k or 0,
            1.0 if self.top_p is None else self.top_p,
            self.min_p or 0.0,
        )


def allowed_after(allowed: "Callable[[int, Tensor], list[int]]", prompt: int, together: bool = False) -> Any:
    """transformers' processor for `prefix_allowed_tokens_fn`, for one prompt of a batch.

    Args:
        together: rows are the live beams of one step. What is allowed is forced where other processors have banned all of
            it, but not as long as one of the beams can go on.
    """
    from transformers import PrefixConstrainedLogitsProcessor

    def processed(input_ids: "Tensor", scores: "Tensor") -> "Tensor":
        beams = len(input_ids) if together else 1
        return PrefixConstrainedLogitsProcessor(lambda _, tokens: allowed(prompt, tokens), beams)(input_ids, scores)

    return processed


def _names() -> list[str]:
    return [field.name for field in fields(Settings)]


def _as_json(schema: Any) -> str:
    try:
        known = json.loads(schema) if isinstance(schema, str) else schema
        known = {} if known is True else dict(known) if isinstance(known, Mapping) else known
        text = json.dumps(known, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadSetting(f"json_schema is no JSON: {error}") from error
    require(isinstance(known, dict), "json_schema", known, "an object, or True for any JSON; one serves all prompts")
    return text


def _joined(*lists: "Sequence[Any] | None") -> "LogitsProcessorList | None":
    from transformers import LogitsProcessorList

    return LogitsProcessorList([one for some in lists for one in some or []]) or None

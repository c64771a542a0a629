"""The checked options of a call, and the warp and limits made from them."""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex

from specbeam.core.constraint import Constrained, Constraint, Form
from specbeam.core.laws.ranking import NO_TRUNCATION, Truncation
from specbeam.core.laws.warp import Warp, truncation_of
from specbeam.core.limits import Decode, Limits
from specbeam.doors.catalogue import catalogue
from specbeam.doors.inputs import token_lists
from specbeam.doors.options.checks import FORMS, as_list, as_texts, require
from specbeam.doors.options.generation_config import read
from specbeam.doors.options.processors import (
    TextFacts,
    has_further_warpers,
    joined,
    processors_of,
    warpers_of,
    watermark_of,
)
from specbeam.doors.options.table import OPTIONS, checked_values, config_names, warper_names
from specbeam.errors import BadPrompt, BadSetting, NotSupported, counted, warn

if TYPE_CHECKING:
    from transformers import GenerationConfig

DEFAULT_NEW_TOKENS = 256


class Settings:
    """The checked options of a call, by the names in `table.OPTIONS`; None means not set.

    Raises `BadSetting` for the first option that is unknown or has a wrong value.

    Attributes:
        config: the caller's generation config, if `given` read one.
    """

    config: "GenerationConfig | None" = None

    def __init__(self, **given: Any) -> None:
        self.values: Mapping[str, Any] = checked_values(_in_one_form(given))

    def __getattr__(self, name: str) -> Any:
        if name == "values" or name not in self.values:
            raise AttributeError(f"there is no option {name}")
        return self.values[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self.values == other.values

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        set_ones = [f"{name}={value!r}" for name, value in self.values.items() if value != OPTIONS[name].default]
        return f"Settings({', '.join(set_ones)})"

    def changed(self, **given: Any) -> "Settings":
        """Return a copy with other values for some options, without the generation config."""
        copy = Settings.__new__(Settings)
        copy.values = checked_values(_in_one_form(given), self.values)
        return copy

    @property
    def form(self) -> Form | None:
        """The form of constrained texts, or None; a JSON schema as JSON text."""
        kind = self.form_kind
        if kind is None or kind == "catalogue":
            return None
        return Form(kind, _as_json(self.json_schema) if kind == "json_schema" else getattr(self, kind))

    @property
    def form_kind(self) -> str | None:
        """The name of the option that constrains texts: "json_schema", "regex", "grammar", "catalogue", or None."""
        return next((name for name in (*FORMS, "catalogue") if getattr(self, name) is not None), None)

    @classmethod
    def given(cls, options: Mapping[str, Any], config: "GenerationConfig | None" = None) -> "Settings":
        """Return the settings of keyword arguments, completed by the caller's generation config.

        Raises `BadSetting` for a wrong option, and `NotSupported` if the config sets a field that specbeam does not support.
        """
        from_config: dict[str, Any] = {}
        if config is not None:
            found = read(config, OPTIONS)
            reasons = [found.reason, *found.unknown] if found.refused else found.unknown
            if reasons:
                raise NotSupported(
                    f"generation_config sets {', '.join(reasons)}, which specbeam does not support; set it to None"
                )
            from_config = found.settings
        settings = cls(**from_config | dict(options))
        settings.config = config
        least = settings.min_new_tokens
        most = settings.max_new_tokens
        if least is not None and most is not None and least > most:
            warn(
                f"min_new_tokens={least} is more than max_new_tokens={most}: every text has {counted(most, 'token')}",
            )
        return settings

    def completed(self, config: "GenerationConfig | None", draws: bool, also: tuple[str, ...] = ()) -> "Settings":
        """Return these settings, with missing ones taken from the model's own generation config, as in transformers.

        Warns about fields unknown to transformers' `generate`: they are meant for the model authors' own programs.

        Args:
            config: the model's generation config, or None.
            draws: whether the method draws tokens; otherwise the config's warpers are ignored.
            also: names of further settings to take from the config.

        Raises `NotSupported` if the config sets a field that transformers supports and specbeam does not.
        """
        if config is None:
            return self
        drawing = warper_names()
        found = read(config, (*config_names(), *drawing, *also))
        if found.refused:
            raise NotSupported(
                f"the model's generation_config sets {found.reason}, which specbeam does not support; remove it from "
                f"generation_config.json, or set pair.target_model.generation_config.{next(iter(found.refused))} = None"
            )
        if found.unknown:
            warn(
                f"the model's generation_config sets {', '.join(found.unknown)}, which neither transformers' generate nor "
                "specbeam reads",
            )
        taken = {name: value for name, value in found.settings.items() if draws or name not in drawing}
        missing = {name: value for name, value in taken.items() if getattr(self, name) is None}
        most = missing.get("max_new_tokens")
        if self.max_length is not None and most is not None:
            warn(
                f"max_length={self.max_length} is ignored, as in transformers, because the model's generation_config sets "
                f"max_new_tokens={most}; give max_new_tokens",
            )
        return self.changed(**missing)

    def warp(
        self, text: TextFacts, greedy: bool = False, constraint: Constraint | None = None, single: bool = False
    ) -> Warp:
        """Return the warp that turns a model's logits into the law of these settings.

        Args:
            text: the facts about the text.
            greedy: whether the method draws nothing.
            constraint: applied after all processors; only warpers come after it.
            single: whether the method has one beam, whose row is the joint law.
        """
        greedy = greedy or self.temperature == 0
        eos = text.eos
        search = text.search
        processors = processors_of(self, text)
        bans = None
        if constraint is not None:
            make = getattr(constraint, "processor", None) or partial(Constrained, constraint)
            bans = make(eos, text.prompt_length, self.form_kind or "constraint")
            processors.append(bans)
        truncation = NO_TRUNCATION if greedy else self._truncation()
        further = not greedy and has_further_warpers(self)
        last = self._last_processors(search, text.vocab)
        least = max(2, 1 + len(eos)) if search else 1
        if last and (further or truncation != NO_TRUNCATION) and not (search or single):
            raise NotSupported(
                "watermarking_config applies after temperature, top_k and other warpers, which apply to all beams jointly; "
                "leave the warpers out, or use a method with one beam or sb.beam_search"
            )
        if last or (search and further):  # apply all of them to single rows, in the order of transformers
            warpers = [] if greedy else warpers_of(self, least)
            return Warp(joined(processors, warpers, last), NO_TRUNCATION, greedy, search, bans)
        if further:
            truncation, others = truncation_of(warpers_of(self, least))
            return Warp(joined(processors), truncation, greedy, constraint=bans, others=others)
        if search:
            truncation = truncation._replace(least=least, by_row=True)
        return Warp(joined(processors), truncation, greedy, search, bans)

    def _last_processors(self, search: bool, vocab: int) -> list[Any]:
        """Return the processors after all warpers. Laws outside searches are always normalised."""
        watermark = watermark_of(self, vocab)
        if not (self.renormalize_logits and search):
            return watermark
        from transformers import LogitNormalization

        return [*watermark, LogitNormalization()]

    def new_tokens(self, prompt_length: int) -> int | None:
        """Return the maximum number of new tokens after a prompt of this length; None if not set."""
        most: int | None = self.max_new_tokens
        if most is not None or self.max_length is None:
            return most
        return int(self.max_length) - prompt_length

    def limits(
        self, eos: tuple[int, ...], prompt_length: int, room: int | None, decode: Decode | None, keep: int
    ) -> Limits:
        """Return the stop rules of a session. Raises `BadSetting` for stop strings without a tokenizer.

        Args:
            eos: the end tokens.
            prompt_length: number of tokens of the prompt.
            room: number of new tokens for which the models have positions; None: unlimited.
            decode: turns tokens into text, for stop strings; None without a tokenizer.
            keep: number of finished beams to collect.
        """
        most = self.new_tokens(prompt_length)
        if most is None:
            most = DEFAULT_NEW_TOKENS
        if room is not None:  # a caller's limit above `room` was rejected earlier
            most = min(most, room)
        stops = as_texts(self.stop_strings)
        if stops and decode is None:
            raise BadSetting("stop_strings need a tokenizer; give load() one, or stop by eos_token_id")
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return Limits(most, eos, stops, decode, keep, self.early_stopping or False, penalty)

    def eos(self, model_default: SupportsIndex | Iterable[int] | None) -> tuple[int, ...]:
        """Return the end tokens of the settings or, if not set, of `model_default`."""
        chosen = self.eos_token_id if self.eos_token_id is not None else model_default
        if chosen is None:
            return ()
        return tuple(as_list(chosen))

    def _truncation(self) -> Truncation:
        """Return the warpers applied by compiled steps: temperature, top-k, top-p and min-p."""
        given = {name: self.values[name] for name in Truncation._fields if name in OPTIONS}
        kinds = Truncation._field_defaults
        return Truncation(**{name: type(kinds[name])(value) for name, value in given.items() if value is not None})


def _in_one_form(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return given values, with decoder prompts as lists and a catalogue as `Catalogue`."""
    values = dict(given)
    if values.get("decoder_input_ids") is not None:
        values["decoder_input_ids"] = as_decoder_prompts(values["decoder_input_ids"])
    if values.get("catalogue") is not None:
        values["catalogue"] = catalogue(values["catalogue"])
    return values


def as_decoder_prompts(given: Any) -> list[int] | list[list[int]]:
    """Return decoder prompts as one list of token ids or several. Raises `BadSetting` for anything else."""
    try:
        return token_lists(given, "decoder_input_ids")
    except BadPrompt as error:
        raise BadSetting(f"{error}; it must be a list of token ids, or one such list for each source") from error


def _as_json(schema: Any) -> str:
    """Return a JSON schema as JSON text. Raises `BadSetting` unless it is a JSON object or True."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if value is True:
            value = {}
        elif isinstance(value, Mapping):
            value = dict(value)
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        advice = "; give the schema itself, as an object or its text" if isinstance(schema, str) else ""
        raise BadSetting(f"json_schema is not valid JSON: {error}{advice}") from error
    require(isinstance(value, dict), "json_schema", value, "an object, or True for any JSON; one serves all prompts")
    return text

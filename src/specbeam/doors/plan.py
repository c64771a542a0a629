"""The plan of a call: its prompts, sources, options and method, translated once into token ids, numbers and parts."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool

from specbeam.core.constraint import Constraint
from specbeam.core.draft.batch import models_of
from specbeam.core.draft.beams import NoDraft
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.lm import LM
from specbeam.core.noise import request_key
from specbeam.core.session import Parts
from specbeam.doors.catalogue import Catalogue
from specbeam.doors.grammar.compiled import compiled
from specbeam.doors.grammar.spelling import closing_tokens
from specbeam.doors.options.checks import as_list, as_texts, is_integer, require
from specbeam.doors.options.generation_config import OF_ENCODER_DECODERS, contradiction
from specbeam.doors.options.guidance import Guidance
from specbeam.doors.options.processors import TextFacts, biases_of
from specbeam.doors.options.settings import DEFAULT_NEW_TOKENS, Settings
from specbeam.doors.options.table import warper_names
from specbeam.doors.sources import (
    as_prompts,
    check_decoder_prompt,
    copied_tokens,
    decoder_prompt,
    readers,
    source_of,
    token_ids,
)
from specbeam.doors.usual import usual_method
from specbeam.engines.families import most_before_angles_change
from specbeam.engines.source import Source
from specbeam.errors import BadPrompt, BadSetting, NotSupported, counted
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.memory.lm import MemoryLM
from specbeam.models.pair import Pair
from specbeam.models.quantised import rounding_of
from specbeam.recipes.catalogue import resolve
from specbeam.recipes.method import Method, RequestInfo

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class PlannedText:
    """A text to decode.

    Attributes:
        number: number of the prompt.
        prompt: the initial tokens.
        warp: turns logits into the law of the text.
        limits: the stop rules.
        key: seed of the text's random numbers; None: random.
        context: inputs other than tokens, by model.
        read: source tokens that the text may copy; None without a source.
    """

    number: int
    prompt: list[int]
    warp: Warp
    limits: Limits
    key: int | None
    context: dict[Any, Any] = field(default_factory=dict)
    read: list[int] | None = None


@dataclass(frozen=True, eq=False)
class CallPlan:
    """A planned call. Later steps use these values and never read the options.

    Texts are numbered by their places. A rejected prompt has one place, which holds its error.

    Attributes:
        pair: the models.
        method: the decoding method.
        parts: the method's parts; their law also names rounded weights and constraints.
        eos: the end tokens.
        constraint: the grammar or catalogue constraint, or None.
        catalogue: the catalogue whose items are the answers, or None.
        answers: number of return sequences per prompt.
        answers_per_session: number of return sequences decoded together, as beams.
        audit: whether texts are audited.
        texts: the text, or the error of its prompt, of each place.
        prompt_of: the prompt number of each place.
    """

    pair: Pair
    method: Method
    parts: Parts
    eos: tuple[int, ...]
    constraint: Constraint | None
    catalogue: Catalogue | None
    answers: int
    answers_per_session: int
    audit: bool
    texts: tuple[PlannedText | BadPrompt, ...]
    prompt_of: tuple[int, ...]

    @classmethod
    def of(
        cls,
        pair: Pair,
        prompts: Any,
        method: Method | str | None = None,
        options: Settings | Mapping[str, Any] = NO_OPTIONS,
        seed: int | None = None,
        audit: bool = False,
        completes: bool = True,
    ) -> "CallPlan":
        """Plan a call without generating anything.

        Args:
            pair: the models.
            prompts: one prompt or many, in any form listed in `inputs`.
            method: a recipe or its name; None: the default of the pair.
            options: the options of `generate`, by name, or `Settings`.
            seed: the same seed gives the same answers; None: a random seed.
            audit: whether to test while decoding that the output has the declared law.
            completes: whether missing options are taken from the model's own generation config.

        Raises:
            BadSetting, NotSupported: the options are wrong, or the method does not support them. Errors of single prompts
                are in `texts`.
        """
        settings = options if isinstance(options, Settings) else Settings.given(options)
        chosen = usual_method(pair) if method is None else resolve(method)
        draws = not (chosen.greedy or settings.temperature == 0)
        reason = contradiction(settings.config, chosen.name, chosen.beams, draws)
        if reason is not None:
            raise BadSetting(reason)
        check_fit(chosen, settings)
        limit_is_given = settings.max_new_tokens is not None or settings.max_length is not None
        config = pair.generation_config if completes else None
        also = OF_ENCODER_DECODERS if isinstance(pair.target, EncoderDecoderLM) else ()
        settings = settings.completed(config, not chosen.greedy, also)
        require(seed is None or is_integer(seed), "seed", seed, "an integer, or None for a random seed")
        answers = settings.num_return_sequences
        if answers > 1 and chosen.keeping is not None:
            chosen = chosen.keeping(answers)
        values = _CallValues.of(pair, chosen, settings, audit, limit_is_given)
        per_session = answers if chosen.beams > 1 else 1
        placed = list(values.texts(prompts, None if seed is None else int(seed), answers // per_session))
        return cls(
            pair=pair,
            method=chosen,
            parts=values.parts,
            eos=values.eos,
            constraint=values.constraint,
            catalogue=settings.catalogue,
            answers=answers,
            answers_per_session=per_session,
            audit=audit,
            texts=tuple(text for _, text in placed),
            prompt_of=tuple(number for number, _ in placed),
        )


@dataclass(frozen=True, eq=False)
class _CallValues:
    """The values shared by all texts of a call, from which each text is planned.

    Attributes:
        guided: the model of the second pass for `guidance_scale`; None without guidance.
        closing: mask of the tokens that can complete a stop string; None if unknown or not needed.
        drafting: the models that draft.
        reading: the models that read sources.
        limit_is_given: whether the caller limited the length of texts.
    """

    pair: Pair
    method: Method
    settings: Settings
    parts: Parts
    eos: tuple[int, ...]
    constraint: Constraint | None
    guided: Any
    closing: Bool[np.ndarray, " vocab"] | None
    drafting: Sequence[LM]
    reading: list[EncoderDecoderLM]
    limit_is_given: bool

    @classmethod
    def of(cls, pair: Pair, method: Method, settings: Settings, audit: bool, limit_is_given: bool) -> "_CallValues":
        """Make the parts and check everything that does not depend on a prompt."""
        parts = method.parts(pair.target, pair.draft)
        eos = settings.eos(pair.eos)
        _check_tokens(settings, pair.target.vocab)
        constraint: Constraint | None = None
        if settings.catalogue is not None:
            limit = settings.max_new_tokens if limit_is_given else None
            constraint = settings.catalogue.constraint(pair.tokenizer, pair.target.vocab, eos, limit)
            if not limit_is_given:
                longest_item = settings.catalogue.longest(pair.tokenizer, eos)
                settings = settings.changed(max_new_tokens=longest_item + bool(eos), max_length=None)
                limit_is_given = True
        longest = settings.max_new_tokens or settings.max_length or DEFAULT_NEW_TOKENS
        is_sure = settings.temperature == 0
        method.check(RequestInfo(pair.target.vocab, eos, longest, settings.num_return_sequences, is_sure, audit))
        form = settings.form
        if form is not None:
            constraint = compiled(form, settings.grammar_backend, pair.tokenizer, pair.target.vocab, eos)
        parts = replace(parts, law=_full_law(parts.law, pair, settings, method.greedy))
        guided = _guided_by(method, parts, pair, settings)
        closing = _closing_tokens(pair, settings)
        drafting = models_of(parts.drafter) or ()
        reading = readers(pair, drafting)
        return cls(pair, method, settings, parts, eos, constraint, guided, closing, drafting, reading, limit_is_given)

    def texts(self, prompts: Any, seed: int | None, each: int) -> Iterator[tuple[int, PlannedText | BadPrompt]]:
        """Yield pairs of prompt number and text: `each` texts per prompt, or one error for a rejected prompt."""
        earlier: Counter[tuple[int, ...]] = Counter()  # number of texts so far, by prompt
        reads = isinstance(self.pair.target, EncoderDecoderLM)
        given = as_prompts(prompts)
        check_decoder_prompt(self.pair, self.settings, len(given))
        for number, prompt in enumerate(given):
            source = None
            context: dict[Any, Any] = {}  # of all texts of the prompt, so that its source is read once
            try:
                if reads:
                    source, read = source_of(self.pair, prompt, number, self.reading)
                    context = {lm: lm.own_source(source) for lm in self.reading}
                    start = decoder_prompt(self.pair, self.settings, number)
                    ids = [*read, *start]
                else:
                    start = ids = token_ids(self.pair, prompt, number, self.pair.target.vocab)
                room = self._room(start, number)
            except BadPrompt as error:
                yield number, error
                continue
            for _ in range(each):
                key = None if seed is None else request_key(seed, ids, earlier[tuple(ids)])
                earlier[tuple(ids)] += 1
                seen: list[int] | None = start if source is None else _tokens_of(source)
                warp, limits = self._law_of(start, number, room, seen)
                copied = None if source is None else copied_tokens(self.pair, source)
                yield number, PlannedText(number, start, warp, limits, key, context, copied)

    def _law_of(
        self, prompt: list[int], number: int, room: int | None, source: list[int] | None
    ) -> tuple[Warp, Limits]:
        """Return the warp and the limits of a text.

        Args:
            prompt: the token ids.
            number: number of the prompt.
            room: number of new tokens for which the models have positions; None: unlimited.
            source: the tokens of the encoder's input or, without an encoder, the prompt; None for audio.
        """
        pair = self.pair
        settings = self.settings
        method = self.method
        tokenizer = pair.known("tokenizer")
        decoder = None if tokenizer is None else tokenizer.decode  # including special tokens
        fills_beams = method.fills_beams or method.greedy or settings.temperature == 0
        keep = method.beams if fills_beams else settings.num_return_sequences
        limits = settings.limits(self.eos, len(prompt), room, decoder, keep)
        if method.beams == 1:  # greedy search and sampling stop at the first end token
            limits = replace(limits, early_stopping=True)
        limits = replace(limits, closing=self.closing)
        guidance = None
        if self.guided is not None:
            scale = float(settings.guidance_scale or 0)
            guidance = Guidance(self.guided, scale, len(prompt), by_place=method.search)
        text = TextFacts(
            self.eos, len(prompt), number, limits.max_new_tokens, method.search, source, pair.target.vocab, guidance,
            getattr(self.parts.rule, "needs_bounds", False),
        )  # fmt: skip
        return settings.warp(text, method.greedy, self.constraint, single=method.beams == 1), limits

    def _room(self, prompt: list[int], number: int) -> int | None:
        """Return the number of new tokens for which the models have positions; None: unlimited.

        Raises `BadPrompt` if prompt `number` is too long for the settings or the models. A limit in the model's own
        generation config does not count: texts then end at the last position.
        """
        settings = self.settings
        pair = self.pair
        models = pair if self.method.needs_draft else Pair(pair.known("target_model"), None, None, pair.target, None)
        room = models.room(len(prompt), self.drafting)
        wanted = settings.new_tokens(len(prompt))
        if wanted is not None and wanted < 1:
            whose = "" if self.limit_is_given else " in the model's generation_config"
            raise BadPrompt(
                f"prompt {number} has {len(prompt)} tokens and max_length is {settings.max_length}{whose}, prompt and new "
                "tokens together; raise it, or give max_new_tokens"
            )
        least = wanted if wanted is not None and self.limit_is_given else 1
        if room is not None and room < least:
            most = room + len(prompt)
            wish = f"{counted(len(prompt), 'token')} and may get {counted(least, 'new token')}, but"
            advice = f"shorten the prompt or lower max_new_tokens to {room}"
            if room < 1:  # no text is short enough
                wish = f"{counted(len(prompt), 'token')}, which leaves no room for a new one:"
                advice = "shorten the prompt"
            why = f"the model has {most} positions; {advice}"
            if any(most_before_angles_change(config) == most for config in _configs_of(models)):
                why = (
                    f"beyond {most} tokens the model changes the rotary angles of all tokens ('longrope'), and the KV cache "
                    f"has the old angles; {advice}, or use the long factors for all lengths (docs/models.md)"
                )
            raise BadPrompt(f"prompt {number} has {wish} {why}")
        return room


def _guided_by(method: Method, parts: Parts, pair: Pair, settings: Settings) -> Any:
    """Return the model of the second pass for `guidance_scale`; None without guidance.

    Raises `NotSupported` if the pair or the method cannot have it.
    """
    if settings.guidance_scale in (None, 1):
        return None
    if method.search and not isinstance(parts.drafter, NoDraft):
        raise NotSupported(
            f"{method.name} does not support guidance_scale: with several beams, transformers guides each beam by the "
            "earlier tokens of its row, which drafts cannot know; use sb.beam_search, or sb.dsbd, which guides each text "
            "by its own tokens"
        )
    return _guided_model(pair.target)


def _full_law(law: str, pair: Pair, settings: Settings, is_greedy: bool) -> str:
    """Return the method's law, with the temperature 0, the target's rounding and memory, and the constraint."""
    if settings.temperature == 0 and not is_greedy:
        law = f"{law}; at temperature 0, so nothing is drawn"
    rounding = rounding_of(pair.target)
    if rounding:
        law = f"{law}; of the target in {rounding}"
    if isinstance(pair.target, MemoryLM):
        law = f"{law}; of the target {pair.target.note}"
    if settings.form_kind is not None:
        law = f"{law}; constrained by {settings.form_kind}"
    return law


def _closing_tokens(pair: Pair, settings: Settings) -> Bool[np.ndarray, " vocab"] | None:
    """Return a mask of the tokens that can complete a stop string; None if unknown.

    Only compiled runs of several turns use it.
    """
    stops = as_texts(settings.stop_strings)
    tokenizer = pair.known("tokenizer")
    may_run = bool(stops) and tokenizer is not None and getattr(pair.target, "supports_runs", False)
    return closing_tokens(tokenizer, pair.target.vocab, stops) if may_run else None


def check_fit(method: Method, settings: Settings) -> None:
    """Raise `NotSupported` or `BadSetting` if the method would ignore a setting or has too few beams."""
    if method.greedy:
        warping = [name for name in warper_names() if getattr(settings, name) is not None]
        if warping and settings.temperature != 0:
            raise NotSupported(f"{method.name} does not draw, so {', '.join(warping)} would be ignored; leave it out")
        if settings.num_return_sequences > 1 and method.beams == 1:
            raise NotSupported(f"{method.name} has one answer; num_return_sequences is {settings.num_return_sequences}")
    if method.beams > 1 and settings.num_return_sequences > method.beams:
        raise BadSetting(
            f"num_return_sequences is {settings.num_return_sequences}, but {method.name} keeps {method.beams} beams; "
            f"set the method's beams={settings.num_return_sequences}"
        )


def _check_tokens(settings: Settings, vocab: int) -> None:
    """Raise `BadSetting` if an option contains a token id outside the model's vocabulary."""
    ends = [token for token in settings.eos(None) if not 0 <= token < vocab]
    if ends:
        raise BadSetting(f"eos_token_id is {ends[0]}; the model's vocabulary is 0 to {vocab - 1} ([] for no end token)")
    words = [token for word in settings.bad_words_ids or [] for token in word]
    named = {
        "bad_words_ids": words,
        "forced_bos_token_id": as_list(settings.forced_bos_token_id),
        "forced_eos_token_id": as_list(settings.forced_eos_token_id),
        "suppress_tokens": settings.suppress_tokens or [],
        "sequence_bias": [token for words in biases_of(settings.sequence_bias) for token in words],
        "begin_suppress_tokens": settings.begin_suppress_tokens or [],
    }
    for name, tokens in named.items():
        unknown = [token for token in tokens if token is not None and token >= vocab]
        if unknown:
            raise BadSetting(f"{name} holds {unknown[0]}; the model's vocabulary is 0 to {vocab - 1}")


def _guided_model(target: Any) -> Any:
    """Return the transformers model for the second pass.

    Raises `NotSupported` if there is none, or if its law would differ from that of the target's own passes.
    """
    reason = ""
    if not isinstance(target, HuggingFaceLM):
        reason = "this target is not a plain transformers model"
    elif isinstance(target, EncoderDecoderLM):
        reason = f"{type(target.model).__name__} reads a source, and transformers guides models that continue prompts"
    elif rounding_of(target):
        reason = f"the target runs in {rounding_of(target)}, and the second pass would not"
    elif target.engine == "compiled" and target.model.dtype != torch.float32:
        reason = (
            f"the target computes in float32, and the second pass would use {target.model.dtype}: load(dtype='float32')"
        )
    if reason:
        raise NotSupported(f"guidance_scale needs a second pass of the target without the prompt; {reason}")
    return target.model


def _tokens_of(source: Source) -> list[int] | None:
    """Return the tokens of a source; None if it is not text."""
    if source.inputs is None or source.name != "input_ids":
        return None
    return [int(token) for token in source.inputs[0].tolist()]


def _configs_of(pair: Pair) -> list[Any]:
    """Return the text configs of the models of a pair."""
    models: list[Any] = [pair.known("target_model"), pair.known("draft_model")]
    return [model.config.get_text_config() for model in models if hasattr(model, "config")]

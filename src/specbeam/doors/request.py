"""The checked input of one call: prompts as token ids, completed settings, and the sessions that decode them."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool

from specbeam.core.constraint import Constraint
from specbeam.core.draft.batch import models_of
from specbeam.core.draft.beams import NoDraft
from specbeam.core.limits import Ended
from specbeam.core.noise import request_key
from specbeam.core.records import Beam, Generation
from specbeam.core.session import Session
from specbeam.doors.grammar.compiled import compiled
from specbeam.doors.grammar.spelling import closing_tokens, text_of_tokens
from specbeam.doors.growing_text import GrowingText
from specbeam.doors.options.checks import as_list, as_texts, is_integer, require
from specbeam.doors.options.generation_config import OF_ENCODER_DECODERS
from specbeam.doors.options.guidance import Guidance
from specbeam.doors.options.processors import biases_of
from specbeam.doors.options.settings import Settings
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
from specbeam.engines.families import most_before_angles_change
from specbeam.engines.source import Source
from specbeam.errors import BadPrompt, BadSetting, NotSupported, SpecbeamError, TooFewAnswers
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.memory.lm import MemoryLM
from specbeam.models.pair import Pair
from specbeam.models.quantised import rounding_of
from specbeam.recipes.method import Method, RequestInfo


class Request:
    """The checked input of one call, with one session per prompt, or per return sequence if these are independent.

    A place is the number of a session in the request. A prompt that cannot be decoded takes one place without a session.

    Attributes:
        pair: the models.
        method: the method that decodes.
        settings: the options of the caller, completed by the model's generation config.
        audit: whether sessions are audited.
        parts: the parts that decode; their law names 8-bit weights and the form, too.
        eos: the end tokens.
        constraint: enforces the form of the texts; None if there is no form.
        answers_per_session: number of answers that each session gives.
        sessions: the sessions, in the order of their places.
        refused: the error of each prompt that cannot be decoded, by place.
        prompt_of: the number of the prompt at each place.
    """

    def __init__(
        self,
        pair: Pair,
        prompts: Any,
        method: Method,
        settings: Settings,
        seed: int | None,
        audit: bool = False,
        completes: bool = True,
    ) -> None:
        """Check the input and make the sessions. Nothing is decoded.

        Args:
            pair: the models.
            prompts: one prompt or many, in any form that `inputs` lists.
            method: the method that decodes.
            settings: the options of the caller.
            seed: the same seed gives the same answers; None: a random seed.
            audit: whether to test while decoding that the output has the declared law.
            completes: whether settings that are not given come from the model's own generation config.

        Raises:
            BadSetting, NotSupported: the settings are wrong, or the method cannot honour them. An error of a single prompt
                is stored in `refused`.
        """
        _check(method, settings)
        self._limit_is_given = settings.max_new_tokens is not None or settings.max_length is not None
        config = getattr(pair.target_model, "generation_config", None) if completes else None
        also = OF_ENCODER_DECODERS if isinstance(pair.target, EncoderDecoderLM) else ()
        settings = settings.completed(config, not method.greedy, also)
        require(seed is None or is_integer(seed), "seed", seed, "an integer, or None for a random seed")
        if settings.num_return_sequences > 1 and method.keeping is not None:
            method = method.keeping(settings.num_return_sequences)
        self.audit = audit
        self.pair = pair
        self.method = method
        self.settings = settings
        parts = method.parts(pair.target, pair.draft)
        self.eos = settings.eos(pair.eos)
        _check_tokens(settings, pair.target.vocab)
        method.check(RequestInfo(pair.target.vocab, self.eos, settings, audit))
        self.constraint = self._compiled_constraint()
        self.parts = replace(parts, law=self._full_law(parts.law))
        self._guided = self._guided_model()
        self._closing = self._closing_tokens()
        self._drafting = models_of(self.parts.drafter) or ()
        self._readers = readers(pair, self._drafting)
        self.answers_per_session = settings.num_return_sequences if method.beams > 1 else 1
        self.sessions: list[Session] = []
        self.refused: dict[int, SpecbeamError] = {}
        self.prompt_of: list[int] = []
        self._add_prompts(prompts, seed)

    def _compiled_constraint(self) -> Constraint | None:
        """Return the constraint that enforces the form of the texts; None if there is no form."""
        form = self.settings.form
        if form is None:
            return None
        return compiled(form, self.settings.grammar_backend, self.pair.tokenizer, self.pair.target.vocab, self.eos)

    def _guided_model(self) -> Any:
        """Return the model of the second pass for `guidance_scale`; None without guidance.

        Raises `NotSupported` if the pair or the method cannot have it.
        """
        if self.settings.guidance_scale in (None, 1):
            return None
        if self.method.search and not isinstance(self.parts.drafter, NoDraft):
            raise NotSupported(
                f"guidance_scale is not for {self.method.name}: with several beams transformers guides each beam by what "
                "stood in its place before, which drafts cannot know; take sb.beam_search, or sb.dsbd, which guides each "
                "text by itself"
            )
        return _guided_model(self.pair.target)

    def _full_law(self, law: str) -> str:
        """Return the method's law, completed by how the target's weights are rounded, and by the form of the texts."""
        rounding = rounding_of(self.pair.target)
        if rounding:
            law = f"{law}; of the target in {rounding}"
        if isinstance(self.pair.target, MemoryLM):
            law = f"{law}; of the target {self.pair.target.note}"
        if self.settings.form_kind is not None:
            law = f"{law}; constrained by {self.settings.form_kind}"
        return law

    def _closing_tokens(self) -> Bool[np.ndarray, " vocab"] | None:
        """Return which tokens can complete a stop string; None if that is not known or not needed.

        Only compiled runs of many turns need it.
        """
        stops = as_texts(self.settings.stop_strings)
        may_run = bool(stops) and self.pair.tokenizer is not None and getattr(self.pair.target, "supports_runs", False)
        return closing_tokens(self.pair.tokenizer, self.pair.target.vocab, stops) if may_run else None

    def _add_prompts(self, prompts: Any, seed: int | None) -> None:
        """Add the sessions of each prompt; a prompt that cannot be decoded takes one place, and its error is stored."""
        earlier: Counter[tuple[int, ...]] = Counter()  # number of sessions so far, by prompt
        reads = isinstance(self.pair.target, EncoderDecoderLM)
        given = as_prompts(prompts)
        check_decoder_prompt(self.pair, self.settings, len(given))
        for number, prompt in enumerate(given):
            source = None
            context: dict[Any, Any] = {}
            try:
                if reads:
                    source, read = source_of(self.pair, prompt, number, self._readers)
                    context = {lm: lm.own_source(source) for lm in self._readers}
                    start = decoder_prompt(self.pair, self.settings, number)
                    ids = [*read, *start]
                else:
                    start = ids = token_ids(self.pair, prompt, number, self.pair.target.vocab)
                room = self._room(start, number)
            except BadPrompt as error:
                self.refused[len(self.prompt_of)] = error
                self.prompt_of.append(number)
                continue
            for _ in range(self.settings.num_return_sequences // self.answers_per_session):
                key = None if seed is None else request_key(int(seed), ids, earlier[tuple(ids)])
                earlier[tuple(ids)] += 1
                tokens = start if source is None else _tokens_of(source)
                session = self._session(start, number, room, key, tokens)
                if source is not None:
                    session.context = context
                    session.read = copied_tokens(self.pair, source)
                self.sessions.append(session)
                self.prompt_of.append(number)

    def _session(
        self, prompt: list[int], number: int, room: int | None, key: int | None, source: list[int] | None
    ) -> Session:
        """Return a session at the next place.

        Args:
            prompt: the token ids.
            number: number of the prompt.
            room: number of new tokens for which the models have positions; None if there is no limit.
            key: key of the session's chance; None: random.
            source: the tokens that an encoder reads, or those of the prompt; None for a source that is not text.
        """
        decoder = None if self.pair.tokenizer is None else self.pair.tokenizer.decode  # with its special tokens
        fills_beams = self.method.fills_beams or self.method.greedy or self.settings.temperature == 0
        keep = self.method.beams if fills_beams else self.settings.num_return_sequences
        limits = self.settings.limits(self.eos, len(prompt), room, decoder, keep)
        if self.method.beams == 1:  # greedy search and sampling are over at their first end
            limits = replace(limits, early_stopping=True)
        limits = replace(limits, closing=self._closing)
        guidance = None
        if self._guided is not None:
            scale = float(self.settings.guidance_scale or 0)
            guidance = Guidance(self._guided, scale, len(prompt), by_place=self.method.search)
        warp = self.settings.warp(
            self.eos,
            self.method.greedy,
            len(prompt),
            number,
            self.method.search,
            self.constraint,
            limits.max_new_tokens,
            single=self.method.beams == 1,
            source=source,
            vocab=self.pair.target.vocab,
            guidance=guidance,
        )
        return Session(prompt, self.parts, warp, limits, key, len(self.prompt_of), self.audit, number)

    def _room(self, prompt: list[int], number: int) -> int | None:
        """Return the number of new tokens for which the models have positions; None if there is no limit.

        Raises `BadPrompt` if prompt `number` is too long for the settings or for the models. A limit in the model's own
        generation config asks for no room: texts then end where the positions end.
        """
        settings = self.settings
        pair = self.pair
        models = pair if self.method.needs_draft else Pair(pair.target_model, None, None, pair.target, None)
        room = models.room(len(prompt), self._drafting)
        wanted = settings.new_tokens(len(prompt))
        if wanted is not None and wanted < 1:
            whose = "" if self._limit_is_given else " in the model's generation_config"
            raise BadPrompt(
                f"prompt {number} has {len(prompt)} tokens and max_length is {settings.max_length}{whose}, prompt and new "
                "tokens together; raise it, or give max_new_tokens"
            )
        least = wanted if wanted is not None and self._limit_is_given else 1
        if room is not None and room < least:
            most = room + len(prompt)
            why = f"the model has {most} positions; shorten the prompt or lower max_new_tokens"
            if any(most_before_angles_change(config) == most for config in _configs_of(models)):
                why = (
                    f"beyond {most} tokens the model reads all of them with other angles ('longrope'), which what is stored "
                    "does not have; shorten the prompt or lower max_new_tokens, or give the model its long factors for all "
                    "lengths (docs/models.md)"
                )
            raise BadPrompt(f"prompt {number} has {len(prompt)} tokens and may get {least} new ones, but {why}")
        return room

    def text_of(self, tokens: list[int], shows_special: bool = False) -> str:
        """Return the text of new tokens; "" without a tokenizer.

        Under a constraint it is the exact text, without the end token.

        Args:
            tokens: token ids.
            shows_special: whether the text has special tokens; without effect under a constraint.
        """
        if self.pair.tokenizer is None:
            return ""
        if self.constraint is None:
            return str(self.pair.tokenizer.decode(tokens, skip_special_tokens=not shows_special))
        return text_of_tokens(self.pair.tokenizer, tokens[:-1] if self._is_complete(tokens) else tokens)

    def growing_text(self, shows_special: bool = False) -> GrowingText:
        """Return the text of tokens that become more, as far as it begins `text_of` of all of them."""
        if self.constraint is None:
            return GrowingText(self.pair.tokenizer, shows_special)
        return GrowingText(self.pair.tokenizer, is_exact=True, ends=self.eos)

    def _is_complete(self, tokens: list[int]) -> bool:
        """Return whether a text has its end token; under a constraint it then has the required form."""
        return bool(tokens) and tokens[-1] in self.eos

    def result(self, session: Session) -> list[Generation] | SpecbeamError:
        """Return the answers of a session that is over, or its error.

        If there are fewer answers than return sequences, the error is a `TooFewAnswers` that holds them.
        """
        if session.failure is not None:
            return session.failure
        answers = self.answers(session)
        wanted = self.answers_per_session
        if len(answers) == wanted:
            return answers
        return TooFewAnswers(
            f"prompt {self.prompt_of[session.place]} has {len(answers)} answers, num_return_sequences is {wanted}: a "
            "constraint, top-k, top-p, a ban or a collapse left fewer beams; they are in .generations",
            answers,
        )

    def answers(self, session: Session) -> list[Generation]:
        """Return the best hypotheses of a session, best first; at most `answers_per_session`."""
        limits = session.limits

        def score(text: Ended) -> float:
            return limits.normalised(text.loglik, len(text.tokens))

        texts = sorted(session.hypotheses(), key=score, reverse=True)
        if session.remaining > 0:
            # The session was over before its limit, so its live beams were given up: finished ones come first. Texts that
            # reach the limit compete with the finished ones by their scores, as in transformers.
            texts.sort(key=lambda text: not text.finished)
        if self.constraint is not None and not self.method.search:
            # A text that was cut off does not have the required form: complete ones come first.
            texts.sort(key=lambda text: not self._is_complete(text.tokens))
        found = [Beam(text.tokens, score(text), self.text_of(text.tokens), text.finished) for text in texts]
        beams = found[: self.method.beams]
        others = found[self.method.beams :]
        count = min(self.answers_per_session, len(beams))
        return [self._generation(session, beams, others, number) for number in range(count)]

    def _generation(self, session: Session, beams: list[Beam], others: list[Beam], number: int) -> Generation:
        """Return the answer that is beam `number` of the best beams of the session; `others` are the rest."""
        answer = beams[number]
        report = replace(session.report(len(answer.tokens)), other_beams=others)
        return Generation(answer.text, answer.tokens, beams, report, session.prompt)


def _check(method: Method, settings: Settings) -> None:
    """Raise `NotSupported` or `BadSetting` if the method would ignore a setting or cannot give enough answers."""
    if method.greedy:
        warping = [name for name in warper_names() if getattr(settings, name) is not None]
        if warping and settings.temperature != 0:
            raise NotSupported(f"{method.name} does not draw, so {', '.join(warping)} would be ignored; leave it out")
        if settings.num_return_sequences > 1 and method.beams == 1:
            raise NotSupported(f"{method.name} has one answer; num_return_sequences is {settings.num_return_sequences}")
    if method.beams > 1 and settings.num_return_sequences > method.beams:
        raise BadSetting(
            f"num_return_sequences is {settings.num_return_sequences}, but {method.name} keeps {method.beams} beams"
        )


def _check_tokens(settings: Settings, vocab: int) -> None:
    """Raise `BadSetting` if eos_token_id or bad_words_ids holds a token that the model does not have."""
    ends = [token for token in settings.eos(None) if not 0 <= token < vocab]
    if ends:
        raise BadSetting(f"eos_token_id is {ends[0]}; the model knows 0 to {vocab - 1} ([] for no end token)")
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
            raise BadSetting(f"{name} holds {unknown[0]}; the model knows 0 to {vocab - 1}")


def _guided_model(target: Any) -> Any:
    """Return the model of transformers that runs the second pass of a target.

    Raises `NotSupported` if it would have another law than the target's own passes, or if there is none.
    """
    reason = ""
    if not isinstance(target, HuggingFaceLM):
        reason = "the target of this pair is not run by transformers' model alone"
    elif isinstance(target, EncoderDecoderLM):
        reason = f"{type(target.model).__name__} reads a source, and transformers guides models that continue prompts"
    elif rounding_of(target):
        reason = f"the target is decoded in {rounding_of(target)}, and the second pass would not be"
    elif target.engine == "compiled" and target.model.dtype != torch.float32:
        reason = (
            f"the target computes in float32, and the second pass would in {target.model.dtype}: load(dtype='float32')"
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
    """Return the configurations of the models of a pair, of their texts."""
    models: list[Any] = [pair.target_model, pair.draft_model]
    return [model.config.get_text_config() for model in models if hasattr(model, "config")]

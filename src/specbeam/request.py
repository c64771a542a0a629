"""The checked input of one call: prompts as token ids, options completed, one session for each text that is drawn."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from specbeam.core.limits import Ended
from specbeam.core.noise import request_key
from specbeam.errors import BadPrompt, BadSetting, NotSupported, SpecbeamError, TooFewAnswers
from specbeam.grammar.compiled import compiled
from specbeam.grammar.spelling import closing_tokens, spelled
from specbeam.options.checks import is_integer, require, texts
from specbeam.options.settings import Settings
from specbeam.pair import Pair
from specbeam.recipes.method import Method, RequestInfo
from specbeam.records import Beam, Generation
from specbeam.session import Session


class Request:
    """One session per prompt, or per return sequence where these are independent."""

    def __init__(
        self, pair: Pair, prompts: Any, method: Method, settings: Settings, seed: int | None, audit: bool = False
    ) -> None:
        self.audit = audit
        _check(method, settings)
        own = getattr(pair.target_model, "generation_config", None)
        settings = settings.completed(own, draws=not method.greedy)
        require(seed is None or is_integer(seed), "seed", seed, "an integer, or None for fresh chance")
        self.pair = pair
        self.method = method
        self.settings = settings
        self.parts = method.parts(pair.target, pair.draft)
        self.eos = settings.eos(pair.eos)
        _check_tokens(settings, pair.target.vocab)
        method.check(RequestInfo(pair.target.vocab, self.eos, settings, audit))
        if pair.target.engine == "int8":
            self.parts = replace(self.parts, law=f"{self.parts.law}; of the target in int8")
        self.constraint = None
        if (form := settings.form) is not None:
            self.constraint = compiled(form, settings.grammar_backend, pair.tokenizer, pair.target.vocab, self.eos)
            self.parts = replace(self.parts, law=f"{self.parts.law}; constrained by {form.kind}")
        stops = texts(settings.stop_strings)
        may_run = bool(stops) and pair.tokenizer is not None and getattr(pair.target, "loops", False)
        self.closing = closing_tokens(pair.tokenizer, pair.target.vocab, stops) if may_run else None
        self.wanted = settings.num_return_sequences if method.beams > 1 else 1  # answers of one session
        self.sessions: list[Session] = []
        self.refused: dict[int, SpecbeamError] = {}
        self.prompt_of: list[int] = []  # prompt number of each session's place
        seen: Counter[tuple[int, ...]] = Counter()
        for number, prompt in enumerate(many(prompts)):
            try:
                ids = _token_ids(pair, prompt, number)
                room = _room(pair, method, ids, settings, number)
            except BadPrompt as error:
                self.refused[len(self.prompt_of)] = error
                self.prompt_of.append(number)
                continue
            for _ in range(settings.num_return_sequences // self.wanted):
                key = None if seed is None else request_key(int(seed), ids, seen[tuple(ids)])
                seen[tuple(ids)] += 1
                self.sessions.append(self._session(ids, number, room, key))
                self.prompt_of.append(number)

    def _session(self, prompt: list[int], number: int, room: int | None, key: int | None) -> Session:
        warp = self.settings.warp(
            self.eos, self.method.greedy, len(prompt), number, self.method.search, self.constraint
        )
        decoder = None if self.pair.tokenizer is None else self.pair.tokenizer.decode  # with its special tokens
        limits = self.settings.limits(self.eos, len(prompt), room, decoder, self.method.beams)
        limits = replace(limits, closing=self.closing)
        return Session(prompt, self.parts, warp, limits, key, len(self.prompt_of), self.audit, number)

    def decoded(self, tokens: list[int]) -> str:
        if self.pair.tokenizer is None:
            return ""
        if self.constraint is None:
            return self.pair.tokenizer.decode(tokens, skip_special_tokens=True)
        return spelled(self.pair.tokenizer, tokens[:-1] if self._complete(tokens) else tokens)

    def _complete(self, tokens: list[int]) -> bool:
        """Whether a text has its end token, which under a constraint says that it keeps to the form."""
        return bool(tokens) and tokens[-1] in self.eos

    def result(self, session: Session) -> list[Generation] | SpecbeamError:
        """The answers of a session that is over, or why there are none."""
        if session.failure is not None:
            return session.failure
        found = self.answers(session)
        if len(found) == self.wanted:
            return found
        return TooFewAnswers(
            f"prompt {self.prompt_of[session.place]} has {len(found)} answers, num_return_sequences is {self.wanted}: a "
            "constraint, top-k, top-p or a dynamic width left fewer beams (width='fixed' or min_beams keeps more); they "
            "are in .generations",
            found,
        )

    def answers(self, session: Session) -> list[Generation]:
        """The best hypotheses, at most as many as were asked for."""
        limits = session.limits

        def score(one: Ended) -> float:
            return limits.normalised(one.loglik, len(one.tokens))

        found = sorted(session.hypotheses(), key=score, reverse=True)
        if session.remaining > 0 and any(one.finished for one in found):  # live beams were given up, not finished
            found.sort(key=lambda one: not one.finished)
        if self.constraint is not None and not self.method.search:  # what was cut off does not keep to the form
            found.sort(key=lambda one: not self._complete(one.tokens))
        beams = [Beam(one.tokens, score(one), self.decoded(one.tokens), one.finished) for one in found]
        return [self._generation(session, beams, best) for best in range(min(self.wanted, len(beams)))]

    def _generation(self, session: Session, beams: list[Beam], best: int) -> Generation:
        chosen = beams[best]
        report = session.report(len(chosen.tokens))
        return Generation(chosen.text, chosen.tokens, beams, report, session.prompt)


def _check(method: Method, settings: Settings) -> None:
    if method.greedy:
        warping = [name for name in ("temperature", "top_k", "top_p", "min_p") if getattr(settings, name) is not None]
        if warping and settings.temperature != 0:
            raise NotSupported(f"{method.name} does not draw, so {', '.join(warping)} would be ignored; leave it out")
        if settings.num_return_sequences > 1 and method.beams == 1:
            raise NotSupported(f"{method.name} has one answer; num_return_sequences is {settings.num_return_sequences}")
    if method.beams > 1 and settings.num_return_sequences > method.beams:
        raise BadSetting(
            f"num_return_sequences is {settings.num_return_sequences}, but {method.name} keeps {method.beams} beams"
        )


def _check_tokens(settings: Settings, vocab: int) -> None:
    ends = [token for token in settings.eos(None) if not 0 <= token < vocab]
    if ends:
        raise BadSetting(f"eos_token_id is {ends[0]}; the model knows 0 to {vocab - 1} ([] for no end token)")
    words = [token for word in settings.bad_words_ids or [] for token in word if token >= vocab]
    if words:
        raise BadSetting(f"bad_words_ids holds {words[0]}; the model knows 0 to {vocab - 1}")


def many(prompts: Any) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):  # an array or a tensor of ids
        prompts = prompts.tolist()
    if not isinstance(prompts, Iterable):
        raise BadSetting(f"prompts is {prompts!r}; it must be a text, a list of token ids, or a list of these")
    prompts = list(prompts)
    if prompts and all(isinstance(one, int) for one in prompts):
        return [prompts]
    return prompts


def _token_ids(pair: Pair, prompt: Any, number: int) -> list[int]:
    if isinstance(prompt, str):
        if pair.tokenizer is None:
            raise BadPrompt(
                f"prompt {number} is text, but there is no tokenizer; give load(tokenizer=...) or token ids"
            )
        if not prompt.strip():
            raise BadPrompt(f"prompt {number} is empty; it must hold some text")
        ids = list(pair.tokenizer(prompt)["input_ids"])
    else:
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(prompt, (list, tuple, range)) or not all(isinstance(token, int) for token in prompt):
            raise BadPrompt(f"prompt {number} is {prompt!r}; it must be a text or a list of token ids")
        ids = list(prompt)
    if not ids:
        raise BadPrompt(f"prompt {number} is empty; it must hold at least one token")
    strange = [token for token in ids if not 0 <= token < pair.target.vocab]
    if strange:
        raise BadPrompt(
            f"prompt {number} holds token id {strange[0]}; the model knows 0 to {pair.target.vocab - 1}: "
            "was it made with another tokenizer?"
        )
    return ids


def _room(pair: Pair, method: Method, prompt: list[int], settings: Settings, number: int) -> int | None:
    models = pair if method.needs_draft else Pair(pair.target_model, None, None, pair.target, None)
    room = models.room(len(prompt))
    wanted = settings.new_tokens(len(prompt))
    if wanted is not None and wanted < 1:
        raise BadPrompt(
            f"prompt {number} has {len(prompt)} tokens and max_length is {settings.max_length}, prompt and new tokens "
            "together; raise it, or give max_new_tokens"
        )
    if room is not None and room < (wanted or 1):
        raise BadPrompt(
            f"prompt {number} has {len(prompt)} tokens and may get {wanted or 1} new ones, but the model "
            f"has {room + len(prompt)} positions; shorten the prompt or lower max_new_tokens"
        )
    return room

"""Text in, text out."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specbeam.auto import Choice, fastest, tokens_per_second
from specbeam.decode import decode
from specbeam.dice import request_key
from specbeam.energy import EnergyMeter
from specbeam.errors import AuditWarning, BadPrompt, BadSetting, NotSupported, SomeFailed, SpecbeamError
from specbeam.grammar.compiled import compiled
from specbeam.limits import Ended
from specbeam.pair import Pair, load
from specbeam.recipes.catalogue import resolve
from specbeam.recipes.method import Method
from specbeam.records import Audit, Beam, Generation, Report, Turn
from specbeam.session import Session
from specbeam.settings import Settings

if TYPE_CHECKING:
    from transformers import GenerationConfig

Prompt = str | Sequence[int]


def generate(
    pair: Pair | str,
    prompts: Any,
    method: Method | str = "dsbd",
    *,
    seed: int | None = None,
    batch_size: int = 32,
    audit: bool = False,
    generation_config: "GenerationConfig | None" = None,
    streamer: Any = None,
    on_result: Callable[[int, Generation | SpecbeamError], None] | None = None,
    **options: Any,
) -> list[Generation]:
    """Answer prompts.

    Args:
        pair: from `load`, or "bundled".
        prompts: one or many; each a string, or a list, array or tensor of token ids.
        method: a recipe (`sb.dsbd(beams=4)`) or its name; `sb.methods()` lists them.
        seed: the same seed gives the same answers, whatever else is in the batch. None: fresh chance.
        batch_size: prompts that are decoded side by side.
        audit: run the z-tests of `records.Audit` and put them into each report; a run that fails them warns.
        generation_config: transformers' own; keyword arguments go before it.
        streamer: transformers' own; for one prompt. It receives tokens as soon as they are settled.
        on_result: called with (prompt number, result) as soon as a prompt is done, in the order of finishing.
        options: the fields of `Settings`: max_new_tokens, min_new_tokens, temperature, top_k, top_p, min_p,
            repetition_penalty, no_repeat_ngram_size, bad_words_ids, prefix_allowed_tokens_fn, num_return_sequences,
            eos_token_id, stop_strings, length_penalty, early_stopping, logits_processor; and one of json_schema, regex
            and grammar, which every text then keeps to, with grammar_backend.

    Returns:
        One `Generation` per prompt and return sequence, in the order of the prompts.

    Raises:
        BadSetting, NotSupported: before anything is decoded.
        BadPrompt, BrokenLaw: there was one prompt, and it is at fault.
        SomeFailed: some of several prompts failed; the others are done and in its `generations`.
    """
    if isinstance(pair, str):
        pair = load(pair)
    settings = _settings(options, generation_config)
    request = Request(pair, prompts, _resolved(pair, prompts, method, settings), settings, seed, audit)
    if streamer is not None and len(request.prompt_of) != 1:
        raise NotSupported(
            f"a streamer follows one prompt with one return sequence; there are {len(request.prompt_of)}"
        )
    results: dict[int, list[Generation] | SpecbeamError] = {}

    def keep(place: int, result: list[Generation] | SpecbeamError) -> None:
        results[place] = result
        if on_result is not None:
            for one in [result] if isinstance(result, SpecbeamError) else result:
                on_result(request.prompt_of[place], one)

    for place, error in request.refused.items():
        keep(place, error)
    with EnergyMeter() as meter:
        for session in run(request, batch_size, streamer):
            keep(session.place, session.failure or request.answers(session))
    if audit:
        _judge_audit(request)
    return _collected(results, meter.joules)


def stream(pair: Pair | str, prompt: Prompt, method: Method | str = "dsbd", **options: Any) -> Iterator[str]:
    """Yield text as soon as no live beam can change it; with several beams that is their common prefix.

    Arguments and errors as in `generate`, for one prompt with one return sequence.
    """
    if isinstance(pair, str):
        pair = load(pair)
    if pair.tokenizer is None:
        raise NotSupported("streaming text needs a tokenizer; give load(tokenizer=...)")
    request = _single(pair, prompt, method, options)
    session = request.sessions[0]
    shown = ""
    for _ in decode(pair.target, [session]):
        text = request.decoded(settled_tokens(session))
        if text.startswith(shown) and len(text) > len(shown) and not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    if session.failure is not None:
        raise session.failure
    yield request.answers(session)[0].text[len(shown) :]


def turns_of(pair: Pair, prompt: Prompt, method: Method | str = "dsbd", **options: Any) -> Iterator[Turn]:
    """Yield the turns of one generation: what was drafted, scored and decided in each pass. For pictures and study.

    Arguments and errors as in `generate`, for one prompt with one return sequence. The logits in a turn are valid until
    the next one.
    """
    session = _single(pair, prompt, method, options).sessions[0]
    for turns in decode(pair.target, [session]):
        yield from (turn for _, turn in turns)
    if session.failure is not None:
        raise session.failure


def _single(pair: Pair, prompt: Prompt, method: Method | str, options: dict[str, Any]) -> "Request":
    seed, config = options.pop("seed", None), options.pop("generation_config", None)
    settings = _settings(options, config)
    request = Request(pair, prompt, _resolved(pair, prompt, method, settings), settings, seed)
    if len(request.prompt_of) != 1:
        raise NotSupported("this follows one prompt with one return sequence; call generate() for more")
    for error in request.refused.values():
        raise error
    return request


def _resolved(pair: Pair, prompts: Any, method: Method | str, settings: Settings) -> Method:
    method = resolve(method)
    return chosen_by_speed(pair, prompts, settings)[0] if method.name == "auto" else method


def chosen_by_speed(pair: Pair, prompts: Any, settings: Settings, tokens: int = 32) -> tuple[Method, Choice]:
    """The fastest exact method, measured on the first prompts where it is not known yet."""
    sample = _many(prompts)[:2]
    short = replace(settings, max_new_tokens=tokens, num_return_sequences=1, stop_strings=None)

    def measure(method: Method) -> float:
        request = Request(pair, sample, method, short, seed=0)
        return tokens_per_second(
            lambda: [token for session in run(request, 1, None) for token in next(session.hypotheses()).tokens]
        )

    return fastest(pair, settings, measure)


def settled_tokens(session: Session) -> list[int]:
    """New tokens that every possible answer begins with."""
    common = [*session.settled]
    for one in session.ended:
        common = common[: _agreement(common, one.tokens)]
    return common


class Request:
    """The checked input of one call: one session per prompt, or per return sequence where these are independent."""

    def __init__(
        self, pair: Pair, prompts: Any, method: Method, settings: Settings, seed: int | None, audit: bool = False
    ) -> None:
        self.audit = audit
        self.pair, self.method, self.settings = pair, method, settings
        _check(method, settings)
        self.parts = method.parts(pair.draft, pair.target)
        default = getattr(pair.target_model.generation_config, "eos_token_id", None)
        if default is None and pair.tokenizer is not None:
            default = pair.tokenizer.eos_token_id
        self.eos = settings.eos(default)
        self.constraint = None
        if (form := settings.form) is not None:
            self.constraint = compiled(form, settings.grammar_backend, pair.tokenizer, pair.target.vocab, self.eos)
            self.parts = replace(self.parts, law=f"{self.parts.law}; constrained by {form.kind}")
        self.sessions: list[Session] = []
        self.refused: dict[int, SpecbeamError] = {}
        self.prompt_of: list[int] = []  # prompt number of each session's place
        seen: Counter[tuple[int, ...]] = Counter()
        for number, prompt in enumerate(_many(prompts)):
            try:
                ids = _token_ids(pair, prompt, number)
                room = _room(pair, method, ids, settings, number)
            except BadPrompt as error:
                self.refused[len(self.prompt_of)] = error
                self.prompt_of.append(number)
                continue
            for _ in range(settings.num_return_sequences if method.beams == 1 else 1):
                key = None if seed is None else request_key(seed, ids, seen[tuple(ids)])
                seen[tuple(ids)] += 1
                self.sessions.append(self._session(ids, number, room, key))
                self.prompt_of.append(number)

    def _session(self, prompt: list[int], number: int, room: int | None, key: int | None) -> Session:
        warp = self.settings.warp(
            self.eos, self.method.greedy, len(prompt), number, self.method.search, self.constraint
        )
        decoder = None if self.pair.tokenizer is None else self.pair.tokenizer.decode  # with its special tokens
        limits = self.settings.limits(self.eos, room, decoder, self.method.beams)
        return Session(prompt, self.parts, warp, limits, key, len(self.prompt_of), self.audit)

    def decoded(self, tokens: list[int]) -> str:
        return self.pair.tokenizer.decode(tokens, skip_special_tokens=True) if self.pair.tokenizer else ""

    def answers(self, session: Session) -> list[Generation]:
        """The best hypotheses, as many as were asked for."""
        limits = session.limits

        def score(one: Ended) -> float:
            return limits.normalised(one.loglik, len(one.tokens))

        found = sorted(session.hypotheses(), key=score, reverse=True)
        done = [one for one in found if one.finished]
        # Stopped early: live beams were given up, not finished. Constrained: what was cut off does not keep to the form.
        if done and (session.remaining > 0 or self.constraint is not None):
            found = done + [one for one in found if not one.finished]
        beams = [Beam(one.tokens, score(one), self.decoded(one.tokens), one.finished) for one in found]
        wanted = self.settings.num_return_sequences if self.method.beams > 1 else 1
        return [self._generation(session, beams, best) for best in range(min(wanted, len(beams)))]

    def _generation(self, session: Session, beams: list[Beam], best: int) -> Generation:
        chosen = beams[best]
        report = session.report(len(chosen.tokens))
        return Generation(chosen.text, chosen.tokens, beams, report, session.prompt)


def run(request: Request, batch_size: int, streamer: Any) -> Iterator[Session]:
    """Decode, and yield sessions as they end. Prompts of similar length share a pass, which saves padding."""
    if batch_size < 1:
        raise BadSetting(f"batch_size is {batch_size}; it must be at least 1")
    line = sorted(request.sessions, key=lambda session: -len(session.prompt))
    if streamer is not None:
        return (yield from _streamed(request, line[0], streamer))
    for _ in decode(request.pair.target, _started(line), batch_size):
        for session in [one for one in line if one.over]:
            line.remove(session)
            yield session


def _streamed(request: Request, session: Session, streamer: Any) -> Iterator[Session]:
    """As transformers does it: the prompt comes first, and the end comes in any case, or a waiting reader would hang."""
    told = 0
    try:
        streamer.put(torch.tensor([session.prompt]))
        for _ in decode(request.pair.target, _started([session])):
            told = _tell(streamer, settled_tokens(session), told)
        if session.failure is None:
            _tell(streamer, request.answers(session)[0].tokens, told)
    finally:
        streamer.end()
    yield session


def _started(line: list[Session]) -> Iterator[Session]:
    """The clock of a session starts when it is let in."""
    for session in list(line):
        session.count.restart()
        yield session


def _tell(streamer: Any, tokens: list[int], told: int) -> int:
    for token in tokens[told:]:
        streamer.put(torch.tensor([token]))
    return max(told, len(tokens))


def _judge_audit(request: Request) -> None:
    whole = sum((session.audit for session in request.sessions), Audit())
    if whole.suspicious:
        warnings.warn(
            f"AUDIT FAILED: z_accept {whole.z_accept:.1f} over {whole.trials} trials, z_logp {whole.z_logp:.1f} over "
            f"{whole.draws} draws, where a correct run stays below 4: {request.method.name} did not have the law that it "
            "declares; please report this with the seed",
            AuditWarning,
            stacklevel=3,
        )


def _collected(results: dict[int, list[Generation] | SpecbeamError], joules: float | None) -> list[Generation]:
    failures = [one for one in results.values() if isinstance(one, SpecbeamError)]
    if len(results) == 1 and failures:
        raise failures[0]
    made = [results[place] for place in sorted(results)]
    total = sum(len(one.tokens) for answer in made if not isinstance(answer, SpecbeamError) for one in answer)
    flat: list[Generation | None] = []
    for answer in made:
        if isinstance(answer, SpecbeamError):
            flat.append(None)
        else:
            flat += [_with_energy(one, joules, total) for one in answer]
    if failures:
        raise SomeFailed(failures, flat)
    return [one for one in flat if one is not None]


def _with_energy(one: Generation, joules: float | None, total_tokens: int) -> Generation:
    """A request's energy, shared out by tokens: one pass serves many prompts and has one meter."""
    if joules is None or total_tokens == 0:
        return one
    share: Report = replace(one.report, joules=joules * len(one.tokens) / total_tokens)
    return replace(one, report=share)


def _settings(options: dict[str, Any], config: "GenerationConfig | None") -> Settings:
    known = Settings.__dataclass_fields__
    strange = sorted(set(options) - set(known))
    if strange:
        raise BadSetting(f"generate() has no option {', '.join(strange)}; it has {', '.join(known)}")
    settings = Settings(**options)
    return settings if config is None else settings.over(config)


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


def _many(prompts: Any) -> list[Any]:
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
    if room is not None and room < (settings.max_new_tokens or 1):
        raise BadPrompt(
            f"prompt {number} has {len(prompt)} tokens and may get {settings.max_new_tokens or 1} new ones, but the model "
            f"has {room + len(prompt)} positions; shorten the prompt or lower max_new_tokens"
        )
    return room


def _agreement(first: list[int], second: list[int]) -> int:
    """Length of the common prefix."""
    return next(
        (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )

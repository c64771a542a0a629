"""Text in, text out."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specbeam.audit import Audit
from specbeam.decode import decode
from specbeam.errors import AuditWarning, BadSetting, NotSupported, SomeFailed, SpecbeamError, TooFewAnswers
from specbeam.fastest import FastestMethod, fastest, tokens_per_second
from specbeam.measure.energy import EnergyMeter
from specbeam.options.checks import is_integer, require
from specbeam.options.generation_config import contradiction
from specbeam.options.settings import Settings
from specbeam.pair import Pair, load
from specbeam.recipes.catalogue import resolve
from specbeam.recipes.method import Method
from specbeam.records import Generation, Report, Turn
from specbeam.request import Request, many
from specbeam.runs import TURNS
from specbeam.session import Session

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
        audit: test while decoding that the output has the law that the method declares, and put the `audit.Audit` into each
            report; a run that fails the test warns.
        generation_config: transformers' own; keyword arguments go before it.
        streamer: transformers' own; for one prompt. It receives tokens as soon as they are settled.
        on_result: called with (prompt number, result) as soon as a prompt is done, in the order of finishing.
        options: the fields of `Settings`: max_new_tokens (256 or the room there is), max_length, min_new_tokens,
            temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram_size, bad_words_ids,
            prefix_allowed_tokens_fn, num_return_sequences, eos_token_id, stop_strings, length_penalty, early_stopping,
            logits_processor; and one of json_schema, regex and grammar, which every text then keeps to, with
            grammar_backend.

    Returns:
        One `Generation` per prompt and return sequence, in the order of the prompts. Its `beams` are all hypotheses that
        there were at the end, best first, which can be more than the method's beams: finished ones, and live ones that
        were cut off.

    Raises:
        BadSetting, NotSupported: before anything is decoded.
        BadPrompt, BrokenLaw, TooFewAnswers: there was one prompt, and it is at fault.
        SomeFailed: some of several prompts failed; the others are done and in its `generations`.
    """
    if isinstance(pair, str):
        pair = load(pair)
    settings = Settings.given(options, generation_config)
    method = _resolved(pair, prompts, method, settings, generation_config)
    request = Request(pair, prompts, method, settings, seed, audit)
    if streamer is not None:
        _check_single(request)
    results: dict[int, list[Generation] | SpecbeamError] = {}

    def keep(place: int, result: list[Generation] | SpecbeamError) -> None:
        results[place] = result
        if on_result is not None:
            for one in [result] if isinstance(result, SpecbeamError) else result:
                on_result(request.prompt_of[place], one)

    for place, error in request.refused.items():
        keep(place, error)
    with EnergyMeter(least_s=0.5) as meter:
        for session in run(request, batch_size, streamer):
            keep(session.place, request.result(session))
    if audit:
        _judge_audit(request)
    return _collected(request, results, meter.joules)


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
    for _ in decode(pair.target, [session], ahead=1):
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


def _single(pair: Pair, prompt: Prompt, method: Method | str, options: dict[str, Any]) -> Request:
    seed = options.pop("seed", None)
    config = options.pop("generation_config", None)
    settings = Settings.given(options, config)
    request = Request(pair, prompt, _resolved(pair, prompt, method, settings, config), settings, seed)
    _check_single(request)
    for error in request.refused.values():
        raise error
    return request


def _check_single(request: Request) -> None:
    count = len(request.prompt_of) * request.wanted
    if count != 1:
        raise NotSupported(f"a stream follows one prompt with one return sequence; there are {count}: call generate()")


def _resolved(
    pair: Pair, prompts: Any, method: Method | str, settings: Settings, config: "GenerationConfig | None"
) -> Method:
    method = resolve(method)
    if method.name == "auto":
        method = chosen_by_speed(pair, prompts, settings)[0]
    wrong = contradiction(config, method.name, method.beams, not (method.greedy or settings.temperature == 0))
    if wrong is not None:
        raise BadSetting(wrong)
    return method


def chosen_by_speed(pair: Pair, prompts: Any, settings: Settings, tokens: int = 32) -> tuple[Method, FastestMethod]:
    """The fastest exact method, measured on the first prompts where it is not known yet."""
    sample = many(prompts)[:2]
    short = replace(settings, max_new_tokens=tokens, num_return_sequences=1, stop_strings=None)

    def measure(method: Method) -> float:
        request = Request(pair, sample, method, short, seed=0)
        return tokens_per_second(
            lambda: [token for session in run(request, 1, None) for token in next(session.hypotheses()).tokens]
        )

    return fastest(pair, settings, measure)


def run(request: Request, batch_size: int, streamer: Any) -> Iterator[Session]:
    """Decode, and yield sessions as they end. Prompts of similar length share a pass, which saves padding."""
    require(is_integer(batch_size) and batch_size >= 1, "batch_size", batch_size, "an integer of at least 1")
    line = sorted(request.sessions, key=lambda session: -len(session.prompt))
    if streamer is not None:
        return (yield from _streamed(request, line[0], streamer))
    inside: list[Session] = []
    for _ in decode(request.pair.target, _started(line, inside), batch_size, ahead=TURNS):
        for session in [one for one in inside if one.over]:
            inside.remove(session)
            yield session


def _streamed(request: Request, session: Session, streamer: Any) -> Iterator[Session]:
    """As transformers does it: the prompt comes first, and the end comes in any case, or a waiting reader would hang."""
    told = 0
    try:
        streamer.put(torch.tensor([session.prompt]))
        for _ in decode(request.pair.target, _started([session], []), ahead=1):
            told = _tell(streamer, settled_tokens(session), told)
        if session.failure is None:
            _tell(streamer, request.answers(session)[0].tokens, told)
    finally:
        streamer.end()
    yield session


def _started(line: list[Session], inside: list[Session]) -> Iterator[Session]:
    """The clock of a session starts when it is let in; `inside` gets those that are."""
    for session in line:
        session.count.restart()
        inside.append(session)
        yield session


def _tell(streamer: Any, tokens: list[int], told: int) -> int:
    for token in tokens[told:]:
        streamer.put(torch.tensor([token]))
    return max(told, len(tokens))


def _judge_audit(request: Request) -> None:
    whole = sum((session.audit for session in request.sessions), Audit())
    if whole.suspicious:
        warnings.warn(
            f"AUDIT FAILED: evidence {whole.evidence:.3g}, which a correct run reaches at most once in so many runs; "
            f"z_accept {whole.z_accept:.1f} over {whole.trials} trials, z_logp {whole.z_logp:.1f} over {whole.draws} draws, "
            f"{whole.impossible} tokens of no odds: "
            f"{request.method.name} did not have the law that it declares; please report this with the seed",
            AuditWarning,
            stacklevel=3,
        )


def _collected(
    request: Request, results: dict[int, list[Generation] | SpecbeamError], joules: float | None
) -> list[Generation]:
    """As many places for each prompt as return sequences, whatever failed."""
    failures = [one for one in results.values() if isinstance(one, SpecbeamError)]
    if failures and len(set(request.prompt_of)) == 1 and len(failures) == len(results):
        raise failures[0]
    made: dict[int, list[Generation]] = {}
    for place in sorted(results):
        made.setdefault(request.prompt_of[place], []).extend(_made(results[place]))
    total = sum(len(one.tokens) for answers in made.values() for one in answers)
    flat: list[Generation | None] = []
    for answers in made.values():
        flat += [_with_energy(one, joules, total) for one in answers]
        flat += [None] * (request.settings.num_return_sequences - len(answers))
    if failures:
        raise SomeFailed(failures, flat)
    return [one for one in flat if one is not None]


def _made(result: list[Generation] | SpecbeamError) -> list[Generation]:
    if isinstance(result, SpecbeamError):
        return result.generations if isinstance(result, TooFewAnswers) else []
    return result


def _with_energy(one: Generation, joules: float | None, total_tokens: int) -> Generation:
    """A request's energy, shared out by tokens: one pass serves many prompts and has one meter."""
    if joules is None or total_tokens == 0:
        return one
    share: Report = replace(one.report, joules=joules * len(one.tokens) / total_tokens)
    return replace(one, report=share)


def settled_tokens(session: Session) -> list[int]:
    """New tokens that every possible answer begins with."""
    common = [*session.settled]
    for one in session.ended:
        common = common[: _agreement(common, one.tokens)]
    return common


def _agreement(first: list[int], second: list[int]) -> int:
    """Length of the common prefix."""
    return next(
        (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )

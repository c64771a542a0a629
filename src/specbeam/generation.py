"""The functions that generate text: `generate`, `stream` and `turns_of`."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from specbeam.core.audit import ALARM, Audit
from specbeam.core.audits import evidence_of
from specbeam.core.decode import decode, decode_live
from specbeam.core.records import Generation, Report, Turn
from specbeam.core.runs import TURNS
from specbeam.core.session import Session
from specbeam.doors.energy import EnergyMeter
from specbeam.doors.fastest import FastestMethod, fastest, tokens_per_second
from specbeam.doors.growing_text import common_length, unsent
from specbeam.doors.method_names import usual_name
from specbeam.doors.options.checks import is_integer, require
from specbeam.doors.options.settings import Settings
from specbeam.doors.options.table import Options
from specbeam.doors.options.unknown import check_names
from specbeam.doors.request import Request
from specbeam.doors.sources import as_prompts, source_length, sources_in
from specbeam.doors.usual import usual_method
from specbeam.engines.source import line_up, part
from specbeam.errors import AuditWarning, NotSupported, SomeFailed, SpecbeamError, TooFewAnswers, warn
from specbeam.models.pair import Pair, as_pair
from specbeam.recipes.catalogue import resolve
from specbeam.recipes.method import Method

if TYPE_CHECKING:
    from transformers import GenerationConfig

Prompt = str | Sequence[int]  # text or token ids; `generate` accepts more forms


def generate(
    pair: Pair | str | Path,
    prompts: Any,
    method: Method | str | None = None,
    *,
    seed: int | None = None,
    batch_size: int = 32,
    audit: bool = False,
    generation_config: "GenerationConfig | None" = None,
    streamer: Any = None,
    on_result: Callable[[int, Generation | SpecbeamError], None] | None = None,
    **options: Unpack[Options],
) -> list[Generation]:
    """Generate text for one or many prompts.

    Args:
        pair: the models, from `load`; or a name or path for `load`, such as "bundled".
        prompts: one prompt or many: texts, token ids in lists, arrays or tensors, the output of a tokenizer, the messages of
            chats, or rows of data sets (docs/start.md lists all forms). For an encoder-decoder model, prompts are the inputs
            of its encoder; for a speech model, features: float[channels, frames].
        method: a recipe (`sb.dsbd(beams=4)`) or its name; `sb.methods()` lists them. None: `dsbd` for a pair with a draft,
            otherwise `beam_sampling`, which has the same law. `report.law` names the law.
        seed: the same seed gives the same answers in any batch. None: a random seed.
        batch_size: maximum number of prompts, or of independent return sequences, decoded together.
        audit: test while decoding that the output has the method's declared law. The result is in each report
            (`audit.Audit`); a failure raises a warning.
        generation_config: a generation config of transformers; keyword arguments take precedence.
        streamer: a streamer of transformers, for one prompt. It receives tokens as soon as no live beam can change them.
        on_result: called with (prompt number, result) when a prompt is finished. The result is a `Generation`, or the error
            of the prompt.
        options: the options of generation (`Options`), with the names of transformers; the documentation has a table.

    Returns:
        One `Generation` per prompt and return sequence, in the order of the prompts. Its `beams` are the best texts,
        best first, at most one per beam of the method: finished texts before unfinished ones. Texts cut off by the
        length limit compete with finished ones by score, as in transformers. `report.other_beams` has the rest.

    Raises:
        BadSetting, NotSupported: an option is wrong or not supported; raised before decoding.
        BadPrompt, BrokenLaw, TooFewAnswers: the only prompt failed.
        SomeFailed: some of several prompts failed; the results of the others are in its `generations`.
    """
    pair = as_pair(pair, prompts)
    check_names(generate, options, [usual_name(pair.draft is not None)])
    require(isinstance(audit, bool), "audit", audit, "True or False")
    request = _request(pair, prompts, method, options, generation_config, seed, audit)
    if streamer is not None:
        has_both = all(callable(getattr(streamer, name, None)) for name in ("put", "end"))
        require(has_both, "streamer", streamer, "a streamer of transformers, with the methods put and end")
        _check_single(request)
    results: dict[int, list[Generation] | SpecbeamError] = {}

    def store_result(place: int, result: list[Generation] | SpecbeamError) -> None:
        results[place] = result
        if on_result is not None:
            for each in [result] if isinstance(result, SpecbeamError) else result:
                on_result(request.prompt_of[place], each)

    for place, error in request.refused.items():
        store_result(place, error)
    with EnergyMeter(least_s=0.5) as meter:
        for session in run(request, batch_size, streamer):
            store_result(session.place, request.result(session))
    if audit:
        _warn_if_audit_failed(request)
    return in_prompt_order(request, results, meter.joules)


def stream(
    pair: Pair | str | Path,
    prompt: Any,
    method: Method | str | None = None,
    *,
    seed: int | None = None,
    generation_config: "GenerationConfig | None" = None,
    **options: Unpack[Options],
) -> Iterator[str]:
    """Yield pieces of text as soon as no live beam and no later token can change them.

    With several beams, the pieces are their common prefix. Together they are exactly the text of `generate`. A tokenizer
    with an unknown decoder yields the whole text at the end, because any token could change it (`growing_text.py`).

    The arguments and errors are those of `generate`, for one prompt with one return sequence.
    """
    pair = as_pair(pair, prompt)
    check_names(stream, options, [usual_name(pair.draft is not None)])
    if pair.known("tokenizer") is None:
        raise NotSupported("streaming text needs a tokenizer; give load(tokenizer=...)")
    yield from pieces_of(_single_request(pair, prompt, method, options, generation_config, seed))


def pieces_of(request: Request) -> Iterator[str]:
    """Decode the only session of a request, and yield pieces of its text. Raises the session's error."""
    session = request.sessions[0]
    growing = request.growing_text()
    sent = ""
    for _ in decode_live(request.pair.target, session):
        text = growing.settled(settled_tokens(session))
        if text != sent:
            yield text[len(sent) :]
            sent = text
    if session.failure is not None:
        raise session.failure
    rest = unsent(request.answers(session)[0].text, sent)
    if rest:
        yield rest


def turns_of(
    pair: Pair | str | Path,
    prompt: Any,
    method: Method | str | None = None,
    *,
    seed: int | None = None,
    generation_config: "GenerationConfig | None" = None,
    **options: Unpack[Options],
) -> Iterator[Turn]:
    """Yield the turns of a generation, with the drafts, scores and verdict of each target pass, for pictures and study.

    The arguments and errors are those of `generate`, for one prompt with one return sequence. The logits of a turn are
    valid until the next turn.
    """
    pair = as_pair(pair, prompt)
    check_names(turns_of, options, [usual_name(pair.draft is not None)])
    session = _single_request(pair, prompt, method, options, generation_config, seed).sessions[0]
    for turns in decode(pair.target, [session]):
        yield from (turn for _, turn in turns)
    if session.failure is not None:
        raise session.failure


def _request(
    pair: Pair,
    prompts: Any,
    method: Method | str | None,
    options: Mapping[str, Any],
    config: "GenerationConfig | None",
    seed: int | None,
    audit: bool = False,
) -> Request:
    """Return the request of a call."""
    settings = Settings.given(options, config)
    prompts = as_prompts(prompts)  # once, because an iterator can be read only once
    return Request.of(pair, prompts, resolved_method(pair, prompts, method, settings), settings, seed, audit)


def _single_request(*arguments: Any) -> Request:
    """Return a request with a single session. Raises the error of the prompt.

    Args:
        arguments: the arguments of `_request`.
    """
    request = _request(*arguments)
    _check_single(request)
    for error in request.refused.values():
        raise error
    return request


def _check_single(request: Request) -> None:
    """Raise `NotSupported` unless the request has a single answer."""
    count = len(request.prompt_of) * request.answers_per_session
    if count != 1:
        raise NotSupported(f"streams need one prompt with one return sequence; there are {count}: call generate()")


def resolved_method(pair: Pair, prompts: Any, method: Method | str | None, settings: Settings) -> Method:
    """Return the method given as a name or an object; for "auto" the fastest one, for None the pair's default."""
    method = usual_method(pair) if method is None else resolve(method)
    return chosen_by_speed(pair, prompts, settings)[0] if method.name == "auto" else method


def chosen_by_speed(pair: Pair, prompts: Any, settings: Settings, tokens: int = 32) -> tuple[Method, FastestMethod]:
    """Return the fastest exact method, and the measurements behind the choice.

    Without stored figures, the candidates are measured on the first two prompts with up to `tokens` new tokens each.
    """
    sample = as_prompts(prompts)[:2]
    short = settings.changed(max_new_tokens=tokens, num_return_sequences=1, stop_strings=None)

    def measure(method: Method) -> float:
        request = Request.of(pair, sample, method, short, seed=0)
        return tokens_per_second(
            lambda: [token for session in run(request, 1, None) for token in next(session.hypotheses()).tokens]
        )

    return fastest(pair, settings, measure)


def run(request: Request, batch_size: int, streamer: Any) -> Iterator[Session]:
    """Decode the sessions of a request, and yield each when it ends.

    Sessions start in the order of decreasing length of prompt and source: passes of similar lengths need less padding.
    """
    require(is_integer(batch_size) and batch_size >= 1, "batch_size", batch_size, "an integer of at least 1")
    waiting = sorted(request.sessions, key=lambda session: (-len(session.prompt), -source_length(session)))
    if streamer is not None:
        return (yield from _streamed(request, waiting[0], streamer))
    sources = [source for session in waiting for source in sources_in(session)]
    line_up(sources)
    running: list[Session] = []
    try:
        for turns in decode(request.pair.target, _Started(waiting, running), batch_size, ahead=TURNS):
            request.see(turns)
            for session in [session for session in running if session.over]:
                running.remove(session)
                yield session
    finally:
        part(sources)


def _streamed(request: Request, session: Session, streamer: Any) -> Iterator[Session]:
    """Decode one session, pass its tokens to a streamer as transformers does, and yield the session.

    The streamer receives the prompt first. Its `end` is called even after an error, so that no reader waits forever.
    """
    sent = 0
    try:
        streamer.put(torch.tensor([session.prompt]))
        session.count.restart()
        for _ in decode_live(request.pair.target, session):
            sent = _put_new_tokens(streamer, settled_tokens(session), sent)
        if session.failure is None:
            _put_new_tokens(streamer, request.answers(session)[0].tokens, sent)
    finally:
        streamer.end()
    yield session


class _Started(Iterator[Session]):
    """Iterator over waiting sessions; one that is admitted starts its clock and is appended to `running`."""

    def __init__(self, waiting: list[Session], running: list[Session]) -> None:
        self._waiting = deque(waiting)
        self._running = running

    def __next__(self) -> Session:
        if not self._waiting:
            raise StopIteration
        session = self._waiting.popleft()
        session.count.restart()
        self._running.append(session)
        return session

    def __length_hint__(self) -> int:
        return len(self._waiting)


def _put_new_tokens(streamer: Any, tokens: list[int], sent: int) -> int:
    """Put the tokens after the first `sent` ones into the streamer. Returns the number of tokens sent so far."""
    for token in tokens[sent:]:
        streamer.put(torch.tensor([token]))
    return max(sent, len(tokens))


def _warn_if_audit_failed(request: Request) -> None:
    """Issue an `AuditWarning` if the sessions are suspicious, together or one by one, or if the audit tested nothing."""
    audits = [session.audit for session in request.sessions]
    whole = sum(audits, Audit())
    evidence = evidence_of(audits)
    drawn = [one for one in request.sessions if one.failure is None and not one.warp.greedy and not one.warp.search]
    if not evidence < ALARM:
        warn(
            f"AUDIT FAILED: {request.method.name} did not have its declared law; please report this with the seed, unless a "
            f"part is yours. Evidence {evidence:.3g} (a correct run reaches it with probability at most 1/{evidence:.3g}); "
            f"z_accept {whole.z_accept:.1f} over {whole.trials} trials, z_logp {whole.z_logp:.1f} over {whole.draws} draws, "
            f"{whole.impossible} tokens of probability 0",
            AuditWarning,
        )
    elif whole.empty and drawn:
        rule = type(request.plan.parts.rule).__name__
        warn(f"the audit tested nothing: {rule} notes neither draws nor trials (docs/write_a_method.md)", AuditWarning)


def in_prompt_order(
    request: Request, results: dict[int, list[Generation] | SpecbeamError], joules: float | None
) -> list[Generation]:
    """Return the generations of all prompts, in the order of the prompts.

    Args:
        request: the request.
        results: the generations or the error of each place of the request.
        joules: energy of the whole request; None if not measured.

    Raises:
        SpecbeamError: the error of the only prompt.
        SomeFailed: some of several prompts failed. Its `generations` has `num_return_sequences` entries per prompt, None
            for missing generations.
    """
    failures = [found for _, found in sorted(results.items()) if isinstance(found, SpecbeamError)]
    if failures and len(set(request.prompt_of)) == 1 and len(failures) == len(results):
        raise failures[0]
    of_prompt: dict[int, list[Generation]] = {}
    for place in sorted(results):
        of_prompt.setdefault(request.prompt_of[place], []).extend(_generations_in(results[place]))
    total = sum(len(answer.tokens) for answers in of_prompt.values() for answer in answers)
    flat: list[Generation | None] = []
    for answers in of_prompt.values():
        flat += [_with_energy(answer, joules, total) for answer in answers]
        flat += [None] * (request.plan.answers - len(answers))
    if failures:
        raise SomeFailed(failures, flat)
    return [answer for answer in flat if answer is not None]


def _generations_in(result: list[Generation] | SpecbeamError) -> list[Generation]:
    """Return the generations of a result; a `TooFewAnswers` contains some, other errors none."""
    if isinstance(result, SpecbeamError):
        return result.generations if isinstance(result, TooFewAnswers) else []
    return result


def _with_energy(generation: Generation, joules: float | None, total_tokens: int) -> Generation:
    """Return the generation with its share of the request's energy, in proportion to its tokens.

    Shares cannot be measured, because a pass serves many prompts.
    """
    if joules is None or total_tokens == 0:
        return generation
    report: Report = replace(generation.report, joules=joules * len(generation.tokens) / total_tokens)
    return replace(generation, report=report)


def settled_tokens(session: Session) -> list[int]:
    """Return the common prefix of all possible answers."""
    common = [*session.settled]
    for text in session.ended:
        common = common[: common_length(common, text.tokens)]
    return common

"""Converts decoded texts to answers in OpenAI's format."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from specbeam import Beam, Generation, Pair, __version__
from specbeam.apps.serve.engine import CUTS, Draining, Job, length_of
from specbeam.apps.serve.mapping import Order
from specbeam.apps.serve.scoring import TokenScore
from specbeam.apps.serve.tools import MARKS, ToolCall, calls_in, forced_call, start_of_calls
from specbeam.core import ALARM, evidence_of, weights_key
from specbeam.core.draft import NoDraft
from specbeam.doors import Request, as_texts, special_tokens, text_of_tokens
from specbeam.errors import Cancelled, SpecbeamError, TimedOut, TooFewAnswers

NO_LOGPROB = -9999.0  # OpenAI's number for a token of probability 0


@dataclass(frozen=True)
class ReturnedText:
    """One text of an answer.

    Attributes:
        index: its index in the answer.
        prompt: index of its prompt.
        text: the returned text, cut at a stop string; without calls of tools.
        tokens: tokens of the text, including the end token.
        finish_reason: "stop", "length" or "tool_calls".
        stop_reason: the stop string or the end token; None if the text was cut off.
        scores: scores of the tokens; None if not asked for.
        calls: calls of tools.
    """

    index: int
    prompt: int
    text: str
    tokens: list[int]
    beam: Beam
    finish_reason: str
    stop_reason: str | int | None
    scores: list[TokenScore] | None = None
    calls: Sequence[ToolCall] = ()


@dataclass(frozen=True)
class AnsweredRequest:
    """The outcome of a request.

    Attributes:
        choices: the returned texts, prompt by prompt.
        generations: generations of each prompt, best first.
        warnings: deviations from the request.
    """

    choices: list[ReturnedText]
    generations: list[list[Generation]]
    warnings: list[str] = field(default_factory=list)


def generations_of(
    request: Request, jobs: Sequence[Job], order: Order
) -> tuple[list[list[Generation]], list[str], SpecbeamError | None]:
    """Return the generations of each prompt, the deviations from the request, and the error if a text failed."""
    by_prompt: list[list[Generation]] = [[] for _ in order.prompts]
    warnings = [*order.warnings]
    results = [request.result(job.session) for job in jobs]
    failed = [result for result in results if isinstance(result, SpecbeamError)]
    missed = [result for result in failed if isinstance(result, MISSED)]
    if hard := [one for one in failed if not isinstance(one, (*MISSED, TooFewAnswers)) or _is_empty(one)]:
        return by_prompt, warnings, hard[-1]
    if len(missed) == len(results):
        return by_prompt, warnings, missed[-1]
    for message, times in Counter(map(str, missed)).items():
        warnings.append(f"{times} of {len(results)} texts were not decoded and are empty: {message}")
    for job, result in zip(jobs, results, strict=True):
        own = by_prompt[request.prompt_of[job.session.place]]
        if isinstance(result, TooFewAnswers):
            warnings.append(f"there are {len(result.generations)} answers, but n is {order.count}: {result}")
            result = result.generations
        if isinstance(result, SpecbeamError):
            own += _empty(request, order, job)
            continue
        if job.cut:
            warnings.append(f"a text was cut off: {CUTS[job.cut]}")
        own += result
    form = order.settings.form_kind
    if form is not None and any(one and not one[0].beams[0].finished for one in by_prompt):
        warnings.append(f"a text was cut off before it satisfied its {form}")
    return by_prompt, warnings, None


# How a text may end without being decoded while others of its request are: they are answered.
MISSED = (TimedOut, Cancelled, Draining)


def _is_empty(error: SpecbeamError) -> bool:
    return isinstance(error, TooFewAnswers) and not error.generations


def _empty(request: Request, order: Order, job: Job) -> list[Generation]:
    """Return the answers for a text that was not decoded: empty and cut off; none if the best of more are returned."""
    if order.method.beams == 1 and order.drawn > order.count:
        return []
    session = job.session
    nothing = Beam([], math.nan, "", finished=False)
    answer = Generation("", [], [nothing], session.report(0), session.prompt)
    return [answer] * (order.count if order.method.beams > 1 else 1)


def choices_of(
    request: Request,
    order: Order,
    generations: Sequence[Sequence[Generation]],
    scores: Sequence[list[TokenScore]] | None,
) -> list[ReturnedText]:
    """Return the texts of an answer.

    Args:
        generations: the returned generations of each prompt.
        scores: scores of the tokens of each generation, in the same order; None if not asked for.
    """
    choices = []
    place = 0
    for prompt, answers in enumerate(generations):
        for number, answer in enumerate(answers):
            beam = _beam_of(answer)
            text, stop, tokens = cut_text(request, order, answer.tokens)
            ended: str | int | None = stop
            if stop is None and beam.finished and answer.tokens and answer.tokens[-1] in request.eos:
                ended = answer.tokens[-1]
            reason = "stop" if beam.finished else "length"
            calls: Sequence[ToolCall] = ()
            if order.tools is not None and beam.finished and stop is None:
                text, calls = text_and_calls(request, order, text, tokens)
                reason = "tool_calls" if calls else reason
            own = None if scores is None else scores[place][: len(tokens)]
            index = prompt * order.count + number
            choices.append(ReturnedText(index, prompt, text, tokens, beam, reason, ended, own, calls))
            place += 1
    return choices


def _beam_of(answer: Generation) -> Beam:
    return next(beam for beam in answer.beams if beam.tokens == answer.tokens)


def shows_special(order: Order) -> bool:
    """Return whether the texts of an answer show special tokens."""
    return order.body.skip_special_tokens is False


def cut_text(request: Request, order: Order, tokens: list[int]) -> tuple[str, str | None, list[int]]:
    """Return a text up to its stop string, the stop string (None without one), and the tokens of this text."""
    special = shows_special(order)
    text = request.text_of(tokens, special)
    cut, stop = cut_at(order, text)
    if stop is None:
        return text, None, tokens
    end = len(cut)
    kept = len(tokens)
    while kept and len(request.text_of(tokens[: kept - 1], special)) >= end:
        kept -= 1
    return cut, stop, tokens[:kept]


def text_and_calls(request: Request, order: Order, text: str, tokens: list[int]) -> tuple[str, Sequence[ToolCall]]:
    """Return the text of an answer before its calls of tools, and the calls; the whole text and none if there are none.

    Args:
        text: the text of the tokens, without special tokens.
    """
    use = order.tools
    assert use is not None
    if use.how != "auto":
        return "", [forced_call(use, text)]
    visible = visible_tokens(request, tokens)
    if len(visible) == len(tokens):
        return calls_in(use, text)
    end = len(tokens) - (tokens[-1] in request.eos)
    _, calls = calls_in(use, request.text_of(tokens[len(visible) : end], True))
    return (request.text_of(visible).rstrip(), calls) if calls else (text, [])


def visible_tokens(request: Request, tokens: list[int]) -> list[int]:
    """Return the tokens before the first special token that marks a call of a tool; all tokens if there is none."""
    marks = _special_marks(request.pair.tokenizer)
    return tokens[: next((place for place, token in enumerate(tokens) if token in marks), len(tokens))]


@lru_cache(maxsize=8)
def _special_marks(tokenizer: Any) -> frozenset[int]:
    """Return the special tokens of a tokenizer that mark calls of tools."""
    vocab = tokenizer.get_vocab()
    return frozenset(vocab[mark] for mark in MARKS if mark in vocab) & special_tokens(tokenizer)


def cut_at(order: Order, text: str) -> tuple[str, str | None]:
    """Return a text up to its stop string, and the stop string; the whole text and None without one."""
    found = [(text.find(stop), stop) for stop in as_texts(order.settings.stop_strings) if stop in text]
    if not found:
        return text, None
    place, stop = min(found)
    end = place + len(stop) if order.body.include_stop_str_in_output else place
    return text[:end], stop


def sendable(order: Order, text: str) -> str:
    """Return the part of a settled text that can be sent: up to a stop string, or to the beginning of a possible one.

    If the model may call tools, the text ends where a call may begin.
    """
    if order.tools is not None and order.tools.how == "auto":
        text = text[: start_of_calls(text)]
    stops = as_texts(order.settings.stop_strings)
    cut, _ = cut_at(order, text)
    for size in range(min(max(map(len, stops), default=0), len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return cut[: len(text) - size]
    return cut


# Log-probabilities.


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary; printable ASCII characters map to themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    for place, byte in enumerate(others):
        found[chr(256 + place)] = byte
    return found


def token_text(pair: Pair, token: int) -> tuple[str, bytes]:
    """Return the text of a token and its bytes, which may be a part of a character."""
    if pair.tokenizer is None:
        return str(token), str(token).encode()
    return _token_text(pair.tokenizer, token)


@lru_cache(maxsize=2**17)
def _token_text(tokenizer: Any, token: int) -> tuple[str, bytes]:
    text = text_of_tokens(tokenizer, [token])
    if text == "":  # a special token
        text = str(tokenizer.decode([token], skip_special_tokens=False))
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text, text.encode()
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
        return text, bytes([int(found.group(1), 16)])
    if all(letter in _byte_of() for letter in piece):
        return text, bytes(_byte_of()[letter] for letter in piece)
    return text, text.encode()


def _named(pair: Pair, order: Order, token: int) -> tuple[str, bytes]:
    text, raw = token_text(pair, token)
    return (f"token_id:{token}", raw) if order.body.return_tokens_as_token_ids else (text, raw)


def _finite(value: float) -> float:
    return max(value, NO_LOGPROB)


def chat_logprobs(pair: Pair, order: Order, scores: Sequence[TokenScore]) -> dict[str, Any]:
    """Return log-probabilities in the format of chats."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, raw = _named(pair, order, token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    content = []
    for score in scores:
        top = [entry(token, logprob) for token, logprob in score.top]
        content.append(entry(score.token, score.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    pair: Pair, order: Order, scores: Sequence[TokenScore | None], tokens: Sequence[int], text: str, before: int = 0
) -> dict[str, Any]:
    """Return log-probabilities in the format of completions; None for the first token of a prompt, which has none.

    Args:
        tokens: the tokens of the scores.
        text: their text.
        before: number of characters before the first token.
    """
    names = [_named(pair, order, token)[0] for token in tokens]
    offsets = text_offsets(pair, tokens, text)
    tops = [None if score is None else _likeliest(pair, order, score) for score in scores]
    return {
        "tokens": names,
        "token_logprobs": [None if score is None else _finite(score.logprob) for score in scores],
        "top_logprobs": tops if order.top else None,
        "text_offset": [before + offset for offset in offsets[:-1]],
    }


def _likeliest(pair: Pair, order: Order, score: TokenScore) -> dict[str, float]:
    """Return the likeliest tokens by text. A token with the text of a likelier one is named by its id."""
    found: dict[str, float] = {}
    for token, value in score.top:
        name = _named(pair, order, token)[0]
        found[f"token_id:{token}" if name in found else name] = _finite(value)
    return found


def text_offsets(pair: Pair, tokens: Sequence[int], text: str) -> list[int]:
    """Return the place of each token in their text, in characters, and the place after the last one.

    A special token has no characters where the text does not show it.
    """
    hidden = set() if pair.tokenizer is None else special_tokens(pair.tokenizer)
    offsets = [0]
    for token in tokens:
        piece, _ = token_text(pair, token)
        is_shown = token not in hidden or text.startswith(piece, offsets[-1])
        offsets.append(offsets[-1] + (len(piece) if is_shown else 0))
    return offsets


# The answer.


def fingerprint(pair: Pair, chunk: int) -> str:
    """Return a hash of everything other than the request that a text depends on."""
    model = pair.known("target_model")
    parts = [__version__, pair.target.engine, str(getattr(model, "dtype", "")), weights_key(model), chunk]
    return "sb-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]


def choice_json(pair: Pair, order: Order, choice: ReturnedText) -> dict[str, Any]:
    """Return a choice of an answer that is not streamed."""
    found: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason}
    if order.is_chat:
        found["message"] = _message(choice)
        found["logprobs"] = None if choice.scores is None else chat_logprobs(pair, order, choice.scores)
    else:
        found["text"] = choice.text
        found["logprobs"] = (
            None
            if choice.scores is None
            else completion_logprobs(pair, order, choice.scores, choice.tokens, choice.text)
        )
    return found | extras_of(order, choice)


def _message(choice: ReturnedText) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [call.json for call in choice.calls]
    return message


def extras_of(order: Order, choice: ReturnedText) -> dict[str, Any]:
    """Return the fields of a choice that OpenAI's format does not have."""
    extras: dict[str, Any] = {
        "stop_reason": choice.stop_reason,
        "score": _number(choice.beam.score),
        "cumulative_logprob": None,
        "finished": choice.beam.finished,
    }
    if choice.scores is not None:
        extras["cumulative_logprob"] = _number(sum(score.logprob for score in choice.scores))
    if order.body.return_token_ids:
        extras["token_ids"] = choice.tokens
    if choice.beam.item is not None:
        extras["item"] = choice.beam.item
    if choice.beam.bound is not None:
        extras |= {"bound": _number(choice.beam.bound), "certain": choice.beam.certain}
    return extras


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def usage_of(order: Order, choices: Sequence[ReturnedText], cached: int) -> dict[str, Any]:
    """Return the numbers of tokens of the prompts and of the returned texts; drafts do not count."""
    prompt = sum(map(len, order.prompts))
    completion = sum(len(choice.tokens) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def cached_tokens(request: Request, jobs: Sequence[Job]) -> int:
    """Return the number of prompt tokens found in the prefix cache; each prompt counts once."""
    found: dict[int, int] = {}
    for job in jobs:
        prompt = request.prompt_of[job.session.place]
        count = job.session.recalled.get(request.pair.target, 0)
        found[prompt] = min(found.get(prompt, count), count)
    return sum(found.values())


def specbeam_json(request: Request, order: Order, jobs: Sequence[Job], outcome: AnsweredRequest) -> dict[str, Any]:
    """Return the object `specbeam` of an answer."""
    method = request.method
    found: dict[str, Any] = {
        "method": method.name,
        "settings": settings_json(order),
        "law": request.parts.law,
        "exact": method.exact,
        "lossless": method.lossless,
        "warnings": outcome.warnings,
    }
    if order.options.report:
        found["report"] = report_json(request, jobs, outcome)
    if order.options.beams_returned:
        found["beams"] = _beams_json(order, outcome)
    return found


def settings_json(order: Order) -> dict[str, Any]:
    """Return the settings of a request, without objects."""
    return {
        name: value
        for name, value in order.settings.values.items()
        if isinstance(value, (bool, int, float, str)) and name not in ("json_schema", "regex", "grammar")
    } | {"beams": order.method.beams, "seed": order.seed}


def report_json(request: Request, jobs: Sequence[Job], outcome: AnsweredRequest) -> dict[str, Any]:
    """Return the cost of a request, summed over its sessions."""
    counts = [job.session.count for job in jobs]
    widths = Counter(width for count in counts for width in count.widths)
    tokens = sum(length_of(job.session) for job in jobs)
    passes = sum(count.target_passes for count in counts)
    steps = sum(widths.values())
    joules = [job.joules for job in jobs if job.joules is not None]
    audits = [job.session.audit for job in jobs if job.session.audited]
    return {
        "target_passes": passes,
        "draft_passes": sum(count.draft_passes for count in counts),
        "passes_per_token": passes / tokens if tokens else None,
        "target_rows": sum(count.rows.scored for count in counts),
        "drafted": sum(count.drafted for count in counts),
        "accepted": sum(count.accepted for count in counts),
        "widths": {str(width): number for width, number in sorted(widths.items())},
        "mean_width": sum(width * number for width, number in widths.items()) / steps if steps else None,
        "seconds": _span(jobs, "started", "ended"),
        "queue_seconds": _span(jobs, "arrived", "started", first=True),
        "first_token_seconds": _span(jobs, "arrived", "first_token", first=True),
        "peak_kv_tokens": max((count.peak_kv_tokens for count in counts), default=0),
        "cached_tokens": cached_tokens(request, jobs),
        "joules": sum(joules) if joules else None,
        "joules_shared": any(job.shared for job in jobs),
        "audit": _audit_json(audits),
    }


def _audit_json(audits: Sequence[Any]) -> dict[str, Any] | None:
    if not audits:
        return None
    evidence = evidence_of(audits)
    trials = sum(audit.trials for audit in audits)
    return {"passed": evidence < ALARM, "evidence": _number(evidence), "trials": trials}


def _span(jobs: Sequence[Job], start: str, end: str, first: bool = False) -> float | None:
    """Return the seconds from the first start to the last end; with `first`, to the first end."""
    starts = [getattr(job, start) for job in jobs if getattr(job, start) is not None]
    ends = [getattr(job, end) for job in jobs if getattr(job, end) is not None]
    if not starts or not ends:
        return None
    return float((min(ends) if first else max(ends)) - min(starts))


def _beams_json(order: Order, outcome: AnsweredRequest) -> list[dict[str, Any]]:
    """Return the hypotheses of all prompts, best first."""
    most = order.options.beams_returned
    found = []
    for prompt, answers in enumerate(outcome.generations):
        beams = [_beam_of(one) for one in answers]
        if order.method.beams > 1 and answers:
            beams = answers[0].beams
        chosen = [answer.tokens for answer in answers]
        for beam in beams if most == "all" else beams[: int(most)]:
            number = chosen.index(beam.tokens) if beam.tokens in chosen else None
            one: dict[str, Any] = {
                "prompt": prompt,
                "text": beam.text,
                "score": _number(beam.score),
                "length": len(beam.tokens),
                "finished": beam.finished,
                "choice": None if number is None else prompt * order.count + number,
            }
            if order.body.return_token_ids:
                one["token_ids"] = beam.tokens
            found.append(one)
    return found


def drafting_passes(job: Job) -> int:
    """Return the number of target passes of a method that drafts; 0 for other methods.

    Turns without a draft count, too: compiled turns do not record them.
    """
    return 0 if isinstance(job.session.parts.drafter, NoDraft) else job.session.count.target_passes


def metrics_json(jobs: Sequence[Job], completion_tokens: int) -> dict[str, Any]:
    """Return the metrics of a request under vLLM's names."""
    first = _span(jobs, "arrived", "first_token", first=True)
    whole = _span(jobs, "started", "ended")
    queue = _span(jobs, "arrived", "started", first=True)
    counts = [job.session.count for job in jobs]
    passes = sum(map(drafting_passes, jobs))
    accepted = sum(count.accepted for count in counts)
    drafted = sum(count.drafted for count in counts)
    rows = sum(count.rows.scored for count in counts)
    return {
        "time_to_first_token_ms": _milliseconds(first),
        "generation_time_ms": _milliseconds(whole),
        "queue_time_ms": _milliseconds(queue),
        "tokens_per_second": completion_tokens / whole if whole else None,
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / passes if passes else None,
            "num_spec_steps": passes,
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
            "num_scored_rows": rows,
        },
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def best_of_mean(
    generations: Sequence[Sequence[Generation]], scores: Sequence[list[TokenScore]], count: int
) -> tuple[list[list[Generation]], list[list[TokenScore]]]:
    """Return the `count` generations of each prompt with the highest mean log-probability per token, and their scores."""
    chosen: list[list[Generation]] = []
    kept: list[list[TokenScore]] = []
    place = 0
    for answers in generations:
        own = [*scores[place : place + len(answers)]]
        place += len(answers)
        means = []
        for each in own:
            total = sum(score.logprob for score in each)
            means.append(total / max(len(each), 1))
        best = sorted(range(len(answers)), key=lambda number: -means[number])[:count]
        chosen.append([answers[number] for number in best])
        kept += [own[number] for number in best]
    return chosen, kept

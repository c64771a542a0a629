"""A comparison with the beam search of transformers, which separates rounding from other differences."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specbeam import Method, Pair, decode
from specbeam.core import Session
from specbeam.doors import FORMS, Prompt, Request, Settings
from specbeam.engines import cache_argument, cache_of
from specbeam.errors import BadSetting, SpecbeamError
from specbeam.lab.evaluate.replay import EqualsInOrder, Recorder, Rows, forward_logits, leaves, replaying

ScoredBeams = list[tuple[list[int], float]]  # new tokens and score of each beam, best first
CLOSE = 1e-4  # scores that differ by less count as equal
LIKELY = 10.0  # tokens whose logits are further below the best one's cannot decide anything
SPREAD = 4.0  # the logits may differ by this multiple of the difference between transformers' own passes


@dataclass(frozen=True)
class Difference:
    """The first difference between the beams of one prompt, and the evidence on its cause.

    Attributes:
        beam: rank of the first beam that differs, from 0.
        step: place of its first token that differs, from 0; None if only its score differs.
        theirs, ours: new tokens of this beam in transformers and in specbeam.
        gap: distance between the logits of the two tokens at this place; None if there are no two tokens to compare.
        replayed: whether transformers' search, given the logits that specbeam saw, finds specbeam's beams and scores.
        apart: largest distance of these logits, as log-odds of likely tokens, from the logits of a plain forward.
        noise: the largest such distance between a plain forward and one that runs token by token.
    """

    beam: int
    step: int | None
    theirs: list[int]
    ours: list[int]
    gap: float | None
    replayed: bool
    apart: float
    noise: float

    @property
    def is_rounding(self) -> bool:
        """Whether the search is the same, and its logits differ by at most `SPREAD` times `noise`."""
        return self.replayed and self.apart <= SPREAD * self.noise


@dataclass(frozen=True)
class Comparison:
    """The comparison of one method with transformers on one prompt.

    Attributes:
        prompt: number of the prompt.
        method: name of the method.
        off: largest distance between the scores of equal beams.
        difference: the first difference; None if all beams and scores are equal.
        failure: the reason why there are no beams to compare; None if there are.
    """

    prompt: int
    method: str
    off: float = 0.0
    difference: Difference | None = None
    failure: str | None = None


def comparisons(
    pair: Pair, prompts: Sequence[Prompt], methods: Sequence[Method], batch_size: int = 1, **options: Any
) -> Iterator[Comparison]:
    """Compare all beams and scores with transformers' ``generate(num_beams=W, do_sample=False)``.

    Args:
        pair: the target, and the draft if a method drafts with one.
        prompts: texts or token ids.
        methods: `beam_search` or `speculative_beam_search`, all with the same number of beams W.
        batch_size: number of prompts that specbeam decodes at the same time. Their logits are stored in memory.
        options: as in `specbeam.generate`; both sides get them.

    Yields:
        A comparison per method for each prompt. Scores differ if they are more than 1e-4 apart (for large scores, more
        than 1e-6 of the score).

    Raises:
        BadSetting: transformers has no such option, a method keeps fewer than 2 beams, or the methods keep different
            numbers of beams.
    """
    if strange := [method.name for method in methods if method.beams < 2]:
        raise BadSetting(f"{', '.join(strange)} keeps fewer than 2 beams, so there is nothing to compare with")
    if len({method.beams for method in methods}) > 1:
        numbers = ", ".join(f"{method.beams} of {method.name}" for method in methods)
        raise BadSetting(
            f"the methods keep different numbers of beams: {numbers}; compare methods with the same number"
        )
    strange = [name for name in (*FORMS, "grammar_backend") if options.get(name) is not None]
    if strange:
        raise BadSetting(f"transformers has no option {', '.join(strange)}, so there is nothing to compare with")
    # All beams are compared, whatever number of answers is asked for.
    options = {name: value for name, value in options.items() if name != "num_return_sequences"}
    for start in range(0, len(prompts), batch_size):
        runs = [
            RecordedBatch(pair, prompts[start : start + batch_size], method, _options_of_batch(options, start))
            for method in methods
        ]
        for place in range(len(runs[0].request.prompt_of)):
            yield from _compare_prompt(runs, place, start + place, options)


def _options_of_batch(options: dict[str, Any], start: int) -> dict[str, Any]:
    """Return the options for a batch that begins with prompt `start`.

    `prefix_allowed_tokens_fn` is called with the number of the prompt among all prompts, not in the batch.
    """
    allowed = options.get("prefix_allowed_tokens_fn")
    if allowed is None:
        return options
    return options | {"prefix_allowed_tokens_fn": lambda number, tokens: allowed(start + number, tokens)}


class RecordedBatch:
    """A batch of prompts decoded by one method, with the logits that the method saw.

    Attributes:
        sessions: by the place of the prompt in the batch.
        rows: the logits by place and path.
    """

    def __init__(self, pair: Pair, prompts: Sequence[Prompt], method: Method, options: dict[str, Any]) -> None:
        self.pair = pair
        self.method = method
        self.request = Request.of(pair, list(prompts), method, Settings.given(options), seed=None)
        self.sessions = {session.place: session for session in self.request.sessions}
        recorder = Recorder(pair.forgetful_target)
        for _ in decode(recorder, self.request.sessions, len(prompts)):
            pass
        self.rows = recorder.rows

    def beams(self, place: int) -> ScoredBeams | SpecbeamError:
        """Return the beams of the prompt at this place of the batch, or the error of a prompt that failed."""
        if place in self.request.refused:
            return self.request.refused[place]
        result = self.request.result(self.sessions[place])
        if isinstance(result, SpecbeamError):
            return result
        return [(beam.tokens, beam.score) for beam in result[0].beams[: self.method.beams]]


def _compare_prompt(
    runs: list[RecordedBatch], place: int, number: int, options: dict[str, Any]
) -> Iterator[Comparison]:
    """Yield a comparison per run for the prompt at a place of the batch, which is prompt `number` among all."""
    theirs: ScoredBeams | None = None
    for run in runs:
        ours = run.beams(place)
        name = run.method.name
        if isinstance(ours, SpecbeamError):
            yield Comparison(number, name, failure=str(ours))
            continue
        session = run.sessions[place]
        arguments = transformers_arguments(run.pair, session, run.method.beams, options, number)
        if theirs is None:
            theirs = transformers_beams(run.pair.target_model, session, arguments)
        off = 0.0
        for (our_tokens, our_score), (their_tokens, their_score) in zip(ours, theirs, strict=False):
            if our_tokens == their_tokens:
                off = max(off, abs(our_score - their_score))
        difference = None if are_same(ours, theirs) else _difference(run, place, theirs, ours, arguments)
        yield Comparison(number, name, off, difference)


def are_same(ours: ScoredBeams, theirs: ScoredBeams) -> bool:
    """Return whether both sides have the same beams in the same order, with scores that are close."""
    our_texts = [tokens for tokens, _ in ours]
    their_texts = [tokens for tokens, _ in theirs]
    return our_texts == their_texts and all(map(_close, ours, theirs))


def _close(ours: tuple[list[int], float], theirs: tuple[list[int], float]) -> bool:
    """Return whether the scores of two beams are close."""
    return math.isclose(ours[1], theirs[1], rel_tol=1e-6, abs_tol=CLOSE)


def transformers_arguments(
    pair: Pair, session: Session, beams: int, options: dict[str, Any], number: int
) -> dict[str, Any]:
    """Return the arguments of transformers' `generate` that mean the same as `options` in specbeam.

    Args:
        number: number of the prompt, for `prefix_allowed_tokens_fn`.
    """
    arguments = {name: value for name, value in options.items() if name not in ("max_length", "temperature")}
    arguments |= {"num_beams": beams, "num_return_sequences": beams, "do_sample": False}
    arguments |= {"max_new_tokens": session.limits.max_new_tokens, "eos_token_id": list(session.limits.eos)}
    if not session.limits.eos:
        arguments["pad_token_id"] = (
            1  # otherwise transformers requires an end token for padding, although nothing is padded
        )
    if arguments.get("stop_strings"):
        arguments["tokenizer"] = pair.tokenizer
    if (allowed := arguments.get("prefix_allowed_tokens_fn")) is not None:
        arguments["prefix_allowed_tokens_fn"] = lambda _, tokens: allowed(number, tokens)
    return arguments


def transformers_beams(model: Any, session: Session, arguments: dict[str, Any]) -> ScoredBeams:
    """Return the beams that transformers finds, best first: new tokens up to and including the end, and scores.

    If there are fewer texts than beams, transformers adds copies of the prompt with a score of -1e9. They are left out.
    """
    ids = torch.tensor([session.prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True, **arguments
    )
    beams: ScoredBeams = []
    for row, score in zip(out.sequences[:, len(session.prompt) :], out.sequences_scores.tolist(), strict=True):
        tokens = _tokens_up_to_end(row.tolist(), session)
        undivided = score * len(tokens) ** session.limits.length_penalty
        # A copy that ended has its score divided by the length penalty; a place that was never filled has not.
        if min(score, undivided) > -5e8:
            beams.append((tokens, score))
    return beams


def _tokens_up_to_end(tokens: list[int], session: Session) -> list[int]:
    """Return the tokens up to and including the first end token or stop string."""
    limits = session.limits
    for size in range(1, len(tokens) + 1):
        if tokens[size - 1] in limits.eos or limits.stopped_by(tokens[:size]) is not None:
            return tokens[:size]
    return tokens


def _difference(
    run: RecordedBatch, place: int, theirs: ScoredBeams, ours: ScoredBeams, arguments: dict[str, Any]
) -> Difference:
    """Return the first difference between the beams of a prompt, with the evidence on its cause."""
    model = run.pair.target_model
    session = run.sessions[place]
    rows = run.rows[place]
    beam = _first_that_differs(ours, theirs)
    our_tokens = ours[beam][0] if beam < len(ours) else []
    their_tokens = theirs[beam][0] if beam < len(theirs) else []
    shorter = min(len(our_tokens), len(their_tokens))
    pairs = enumerate(zip(our_tokens, their_tokens, strict=False))
    step = next((place for place, (a, b) in pairs if a != b), shorter)
    with EqualsInOrder():
        replay = transformers_beams(replaying(model, rows), session, arguments | {"use_cache": False})
    texts = [[*session.prompt, *tokens] for tokens, _ in (*ours, *theirs)]
    return Difference(
        beam=beam,
        step=None if our_tokens == their_tokens else step,
        theirs=their_tokens,
        ours=our_tokens,
        gap=_gap(model, session.prompt, our_tokens, their_tokens, step) if step < shorter else None,
        replayed=are_same(ours, replay),
        apart=_distance_from_plain(model, rows, len(session.prompt)),
        noise=max(_noise(model, text, len(session.prompt)) for text in texts),
    )


def _first_that_differs(ours: ScoredBeams, theirs: ScoredBeams) -> int:
    """Return the rank of the first beam whose tokens differ; if no tokens differ, of the first whose score does."""
    pairs = list(zip(ours, theirs, strict=False))
    texts = [k for k, (a, b) in enumerate(pairs) if a[0] != b[0]]
    if texts or len(ours) != len(theirs):
        return texts[0] if texts else len(pairs)
    return next(k for k, (a, b) in enumerate(pairs) if not _close(a, b))


def _gap(model: Any, prompt: list[int], ours: list[int], theirs: list[int], step: int) -> float:
    """Return the distance between the logits of the two tokens at `step`, by a plain forward."""
    row = forward_logits(model, [*prompt, *ours[:step]])[-1].float()
    return abs(float(row[ours[step]] - row[theirs[step]]))


def _distance_from_plain(model: Any, rows: Rows, start: int) -> float:
    """Return the largest distance of recorded logits from the logits of plain forwards; `start` is the prompt's length."""
    most = 0.0
    for leaf in leaves(rows):
        plain = forward_logits(model, leaf)[start - 1 :]
        places = [place for place in range(len(plain)) if leaf[: start + place] in rows]
        seen = torch.stack([rows[leaf[: start + place]] for place in places])
        most = max(most, _distance(plain[places], seen.to(plain.device)))
    return most


@torch.inference_mode()
def _noise(model: Any, text: list[int], start: int) -> float:
    """Return the distance between two runs of transformers: one pass over the text, and passes token by token.

    It is at least the last place of the largest logit in the model's dtype.
    """
    ids = torch.tensor([text], device=model.device)
    plain = model(ids).logits[0, start - 1 : -1]
    out = model(ids[:, :start], use_cache=True)
    rows = [out.logits[0, -1]]
    for place in range(start, ids.shape[1] - 1):
        out = model(ids[:, place : place + 1], **cache_argument(model, cache_of(out)), use_cache=True)
        rows.append(out.logits[0, -1])
    last_place = torch.finfo(plain.dtype).eps * float(plain.amax(-1).abs().max())
    return max(_distance(plain, torch.stack(rows)), last_place)


def _distance(plain: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest distance between the log-odds of likely tokens, which are at most `LIKELY` below the best one."""
    plain = plain.float().log_softmax(-1)
    other = other.float().log_softmax(-1)
    likely = plain > plain.amax(-1, keepdim=True) - LIKELY
    return float((plain - other).abs()[likely].max())

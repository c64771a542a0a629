"""Does beam search give what transformers gives? Where it does not: is it rounding?"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specbeam.decode import decode
from specbeam.errors import BadSetting, SpecbeamError
from specbeam.evaluate.replay import EqualsInOrder, Recorder, Rows, leaves, replaying, whole
from specbeam.generation import Prompt
from specbeam.options.checks import FORMS
from specbeam.options.settings import Settings
from specbeam.pair import Pair
from specbeam.recipes.method import Method
from specbeam.request import Request
from specbeam.session import Session

Scored = list[tuple[list[int], float]]  # new tokens of a beam, and its score
CLOSE = 1e-4  # scores nearer than this are the same
LIKELY = 10.0  # tokens whose log-odds are further below those of the best one decide nothing
SPREAD = 4.0  # by how much more than transformers' own passes our logits may differ


@dataclass(frozen=True)
class Difference:
    """The first difference between the beams of one prompt, and what it comes from."""

    beam: int  # rank of the first beam that differs
    step: int | None  # its first token that differs, from 0; None: only its score does
    theirs: list[int]
    ours: list[int]
    gap: float | None  # between the logits of the two tokens there; None: there are no two tokens
    replayed: bool  # transformers' own search, given the logits that specbeam saw, finds specbeam's beams and scores
    apart: float  # largest distance of these logits, as log-odds of likely tokens, from those of a plain forward
    noise: float  # the same between a plain forward and one token by token

    @property
    def is_rounding(self) -> bool:
        """Whether the search is the same, and its logits differ no more than transformers' own from pass to pass."""
        return self.replayed and self.apart <= SPREAD * self.noise


@dataclass(frozen=True)
class Comparison:
    """The beams of one prompt by one method beside those of transformers."""

    prompt: int
    method: str
    off: float = 0.0  # largest distance between the scores of equal beams
    difference: Difference | None = None  # None: all beams are the same
    failure: str | None = None  # why there are no beams to compare


def comparisons(
    pair: Pair, prompts: Sequence[Prompt], methods: Sequence[Method], batch_size: int = 1, **options: Any
) -> Iterator[Comparison]:
    """Compare with transformers' ``generate(num_beams=W, do_sample=False)``, prompt by prompt, in all beams and scores.

    Args:
        pair: target, and draft if a method drafts with one.
        prompts: texts or token ids.
        methods: `beam_search` or `speculative_beam_search`, all of the same number of beams W.
        batch_size: prompts that are decoded side by side. The logits of that many are kept.
        options: as in `generate`; both sides get them.

    Yields:
        For each prompt, one per method. Scores differ if they are further apart than 1e-4 (1e-6 of a large score).

    Raises:
        BadSetting: transformers has no such option.
    """
    if strange := [one.name for one in methods if one.beams < 2]:
        raise BadSetting(f"{', '.join(strange)} keeps fewer than 2 beams, so there is nothing to compare with")
    if len({one.beams for one in methods}) > 1:
        found = ", ".join(f"{one.beams} of {one.name}" for one in methods)
        raise BadSetting(f"the methods keep different numbers of beams: {found}; compare those of one number")
    strange = [name for name in (*FORMS, "grammar_backend") if options.get(name) is not None]
    if strange:
        raise BadSetting(f"transformers has no option {', '.join(strange)}, so there is nothing to compare with")
    options = {name: value for name, value in options.items() if name != "num_return_sequences"}  # all are compared
    for start in range(0, len(prompts), batch_size):
        runs = [
            BatchComparison(pair, prompts[start : start + batch_size], method, _numbered(options, start))
            for method in methods
        ]
        for place in range(len(runs[0].request.prompt_of)):
            yield from _of_prompt(runs, place, start + place, options)


def _numbered(options: dict[str, Any], start: int) -> dict[str, Any]:
    """Options for a batch that begins with prompt `start`: who asks for the number gets that among all."""
    allowed = options.get("prefix_allowed_tokens_fn")
    if allowed is None:
        return options
    return options | {"prefix_allowed_tokens_fn": lambda number, tokens: allowed(start + number, tokens)}


class BatchComparison:
    """A batch of prompts decoded by one method, with the logits that it saw."""

    def __init__(self, pair: Pair, prompts: Sequence[Prompt], method: Method, options: dict[str, Any]) -> None:
        self.pair = pair
        self.method = method
        self.request = Request(pair, list(prompts), method, Settings.given(options), seed=None)
        self.sessions = {session.place: session for session in self.request.sessions}
        recorder = Recorder(pair.target)
        for _ in decode(recorder, self.request.sessions, len(prompts)):
            pass
        self.rows = recorder.rows

    def beams(self, place: int) -> Scored | SpecbeamError:
        if place in self.request.refused:
            return self.request.refused[place]
        found = self.request.result(self.sessions[place])
        if isinstance(found, SpecbeamError):
            return found
        return [(beam.tokens, beam.score) for beam in found[0].beams[: self.method.beams]]


def _of_prompt(runs: list[BatchComparison], place: int, number: int, options: dict[str, Any]) -> Iterator[Comparison]:
    theirs: Scored | None = None
    for run in runs:
        ours = run.beams(place)
        name = run.method.name
        if isinstance(ours, SpecbeamError):
            yield Comparison(number, name, failure=str(ours))
            continue
        session = run.sessions[place]
        given = given_to_transformers(run.pair, session, run.method.beams, options, number)
        if theirs is None:
            theirs = searched(run.pair.target_model, session, given)
        off = max((abs(a - b) for (x, a), (y, b) in zip(ours, theirs, strict=False) if x == y), default=0.0)
        yield Comparison(
            number, name, off, None if same(ours, theirs) else _difference(run, place, theirs, ours, given)
        )


def same(ours: Scored, theirs: Scored) -> bool:
    return [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs] and all(map(_close, ours, theirs))


def _close(one: tuple[list[int], float], other: tuple[list[int], float]) -> bool:
    return math.isclose(one[1], other[1], rel_tol=1e-6, abs_tol=CLOSE)


def given_to_transformers(
    pair: Pair, session: Session, beams: int, options: dict[str, Any], number: int
) -> dict[str, Any]:
    """The arguments of `generate` that mean what `options` mean here."""
    given = {name: value for name, value in options.items() if name not in ("max_length", "temperature")}
    given |= {"num_beams": beams, "num_return_sequences": beams, "do_sample": False}
    given |= {"max_new_tokens": session.limits.max_new_tokens, "eos_token_id": list(session.limits.eos)}
    if not session.limits.eos:
        given["pad_token_id"] = 1  # it would look for an end token to pad with, although nothing is padded
    if given.get("stop_strings"):
        given["tokenizer"] = pair.tokenizer
    if (allowed := given.get("prefix_allowed_tokens_fn")) is not None:
        given["prefix_allowed_tokens_fn"] = lambda _, tokens: allowed(number, tokens)
    return given


def searched(model: Any, session: Session, given: dict[str, Any]) -> Scored:
    """New tokens up to and with their end, and scores, of all beams that transformers finds; best first.

    Where there are fewer texts than beams it fills up with copies of the prompt at -1e9, which are left out.
    """
    ids = torch.tensor([session.prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True, **given
    )
    found: Scored = []
    for row, score in zip(out.sequences[:, len(session.prompt) :], out.sequences_scores.tolist(), strict=True):
        tokens = _up_to_end(row.tolist(), session)
        whole = score * len(tokens) ** session.limits.length_penalty
        if min(score, whole) > -5e8:  # a copy that ended has its score divided, a place that was never filled has not
            found.append((tokens, score))
    return found


def _up_to_end(tokens: list[int], session: Session) -> list[int]:
    limits = session.limits
    for size in range(1, len(tokens) + 1):
        if tokens[size - 1] in limits.eos or limits.stopped_by(tokens[:size]) is not None:
            return tokens[:size]
    return tokens


def _difference(run: BatchComparison, place: int, theirs: Scored, ours: Scored, given: dict[str, Any]) -> Difference:
    model = run.pair.target_model
    session = run.sessions[place]
    rows = run.rows[place]
    beam = _first_that_differs(ours, theirs)
    mine, other = (side[beam][0] if beam < len(side) else [] for side in (ours, theirs))
    step = next((k for k, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
    with EqualsInOrder():
        again = searched(replaying(model, rows), session, given | {"use_cache": False})
    texts = [[*session.prompt, *tokens] for tokens, _ in (*ours, *theirs)]
    return Difference(
        beam,
        None if mine == other else step,
        other,
        mine,
        _gap(model, session.prompt, mine, other, step) if step < min(len(mine), len(other)) else None,
        same(ours, again),
        _apart(model, rows, len(session.prompt)),
        max(_noise(model, text, len(session.prompt)) for text in texts),
    )


def _first_that_differs(ours: Scored, theirs: Scored) -> int:
    """In its tokens; if all tokens are the same, in its score."""
    pairs = list(zip(ours, theirs, strict=False))
    texts = [k for k, (a, b) in enumerate(pairs) if a[0] != b[0]]
    if texts or len(ours) != len(theirs):
        return texts[0] if texts else len(pairs)
    return next(k for k, (a, b) in enumerate(pairs) if not _close(a, b))


def _gap(model: Any, prompt: list[int], mine: list[int], other: list[int], step: int) -> float:
    row = whole(model, [*prompt, *mine[:step]])[-1].float()
    return abs(float(row[mine[step]] - row[other[step]]))


def _apart(model: Any, rows: Rows, start: int) -> float:
    """How far recorded logits are from those of plain forwards."""
    most = 0.0
    for leaf in leaves(rows):
        plain = whole(model, leaf)[start - 1 :]
        seen = [(place, rows[path]) for place in range(len(plain)) if (path := leaf[: start + place]) in rows]
        places = [place for place, _ in seen]
        most = max(most, _distance(plain[places], torch.stack([row for _, row in seen]).to(plain.device)))
    return most


@torch.inference_mode()
def _noise(model: Any, text: list[int], start: int) -> float:
    """How far apart two passes of transformers are: one over the text, and one token by token.

    At least the last place of a logit in the model's type.
    """
    ids = torch.tensor([text], device=model.device)
    plain = model(ids).logits[0, start - 1 : -1]
    out = model(ids[:, :start], use_cache=True)
    rows = [out.logits[0, -1]]
    for place in range(start, ids.shape[1] - 1):
        out = model(ids[:, place : place + 1], past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0, -1])
    last_place = torch.finfo(plain.dtype).eps * float(plain.amax(-1).abs().max())
    return max(_distance(plain, torch.stack(rows)), last_place)


def _distance(plain: torch.Tensor, other: torch.Tensor) -> float:
    """Largest distance between the log-odds of likely tokens."""
    plain = plain.float().log_softmax(-1)
    other = other.float().log_softmax(-1)
    likely = plain > plain.amax(-1, keepdim=True) - LIKELY
    return float((plain - other).abs()[likely].max())

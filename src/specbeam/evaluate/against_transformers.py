"""Does beam search give what transformers gives? Where it does not: is it rounding?"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from specbeam.decode import decode
from specbeam.generation import Prompt, generate
from specbeam.laws import JointLaw, Pairs, candidates
from specbeam.pair import Pair
from specbeam.recipes.method import Method
from specbeam.recipes.search import beam_search
from specbeam.records import Beams
from specbeam.request import Request
from specbeam.session import Session
from specbeam.settings import Settings
from specbeam.verify.search import SearchRule

Scored = list[tuple[list[int], float]]  # new tokens of a beam, and its score
CLOSE = 1e-4  # scores nearer than this are the same


@dataclass(frozen=True)
class Difference:
    """The first difference between the beams of one prompt."""

    beam: int  # rank of the first beam that differs
    step: int | None  # its first token that differs, from 0; None: only its score does
    theirs: list[int]
    ours: list[int]
    gap: float  # smallest distance, in summed log-probability, between a beam that was kept and one that was not
    noise: float  # by how much two correct ways to compute a score of this length may differ

    @property
    def is_rounding(self) -> bool:
        """Whether scores that are off by the noise could have turned the decision."""
        return self.step is not None and self.gap <= 2 * self.noise + 1e-6


@dataclass(frozen=True)
class Comparison:
    """The beams of one prompt by one method beside those of transformers."""

    prompt: int
    method: str
    off: float  # largest distance between the scores of equal beams
    difference: Difference | None  # None: all beams are the same


def comparisons(
    pair: Pair, prompts: Sequence[Prompt], methods: Sequence[Method], batch_size: int = 1, **options: Any
) -> Iterator[Comparison]:
    """Compare with transformers' ``generate(num_beams=W, do_sample=False)``, prompt by prompt, in all beams and scores.

    Args:
        pair: target, and draft if a method drafts with one.
        prompts: texts or token ids.
        methods: `beam_search` or `speculative_beam_search`, all of the same number of beams W.
        batch_size: prompts that are decoded side by side.
        options: as in `generate`; both sides get them.

    Yields:
        For each prompt, one per method. Scores differ if they are further apart than 1e-4 (1e-6 of a large score), and than
        rounding explains in the type of the model.
    """
    found = [generate(pair, prompts, method, batch_size=batch_size, **options) for method in methods]
    for number, (prompt, *answers) in enumerate(zip(prompts, *found, strict=True)):
        theirs = by_transformers(pair, answers[0].prompt, methods[0].beams, options)
        for method, one in zip(methods, answers, strict=True):
            ours = [(beam.tokens, beam.score) for beam in one.beams[: method.beams]]
            yield _compared(pair, prompt, number, theirs, ours, method, options)


def by_transformers(pair: Pair, prompt: list[int], beams: int, options: dict[str, Any]) -> Scored:
    """The new tokens of all beams up to and with their end, and their scores; best first."""
    model = pair.target_model
    ids = torch.tensor([prompt], device=pair.target.device)
    given = {"max_new_tokens": 256, "num_beams": beams, "num_return_sequences": beams, "do_sample": False} | options
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True, **given
    )
    eos = Settings(eos_token_id=options.get("eos_token_id")).eos(model.generation_config.eos_token_id)
    rows = zip(out.sequences, out.sequences_scores.tolist(), strict=True)
    return [(_up_to_end(row[len(prompt) :].tolist(), eos), score) for row, score in rows]


def _up_to_end(tokens: list[int], eos: tuple[int, ...]) -> list[int]:
    ends = [place for place, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0] + 1] if ends else tokens


@dataclass(frozen=True)
class WatchedSearch(SearchRule):
    """Beam search that notes how close each decision was."""

    gaps: list[float] = field(default_factory=list)

    def _candidates(self, session: Session, law: JointLaw, live: Beams) -> Pairs:
        ends = np.array(session.limits.eos, dtype=np.int64)
        pairs = law.best(candidates(self.beams, len(ends)) + 1)
        scores, ended = law.logj_at(pairs), np.isin(pairs % law.vocab, ends)
        going = scores[~ended]
        if len(going) > self.beams:
            self.gaps.append(float(going[self.beams - 1] - going[self.beams]))
        if len(pairs) > self.beams and ended[self.beams - 1 : self.beams + 1].any():  # which of the two may finish
            self.gaps.append(float(scores[self.beams - 1] - scores[self.beams]))
        return pairs[:-1] if len(pairs) > candidates(self.beams, len(ends)) else pairs


def _compared(
    pair: Pair, prompt: Prompt, number: int, theirs: Scored, ours: Scored, method: Method, options: dict[str, Any]
) -> Comparison:
    mine, other = ([tokens for tokens, _ in side] for side in (ours, theirs))
    pairs = [(a, b) for (x, a), (y, b) in zip(ours, theirs, strict=False) if x == y]
    off = max((abs(a - b) for a, b in pairs), default=0.0)
    beam = next((k for k, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
    difference = None
    if mine != other:
        difference = _explained(pair, prompt, beam, mine, other, method, options)
    elif not all(math.isclose(a, b, rel_tol=1e-6, abs_tol=CLOSE) for a, b in pairs):
        difference = _of_scores(pair, prompt, pairs, mine, options)
    return Comparison(number, method.name, off, difference)


def _of_scores(
    pair: Pair, prompt: Prompt, pairs: list[tuple[float, float]], texts: list[list[int]], options: dict[str, Any]
) -> Difference | None:
    """The beam whose scores are furthest apart, unless rounding explains how far."""
    session = _session(pair, prompt, beam_search(len(texts)), options)
    beam = max(range(len(pairs)), key=lambda rank: abs(pairs[rank][0] - pairs[rank][1]))
    gap, noise = abs(pairs[beam][0] - pairs[beam][1]), _noise(pair, session, texts[beam])
    explained = 2 * session.limits.normalised(noise, len(texts[beam]))
    return None if gap <= explained else Difference(beam, None, texts[beam], texts[beam], gap, noise)


def _explained(
    pair: Pair, prompt: Prompt, beam: int, ours: list[list[int]], theirs: list[list[int]], method: Method,
    options: dict[str, Any],
) -> Difference:  # fmt: skip
    mine, other = (texts[beam] if beam < len(texts) else [] for texts in (ours, theirs))
    step = next((k for k, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
    rule = WatchedSearch(method.beams)
    parts = replace(beam_search(method.beams).parts(None), rule=rule)
    watched = replace(beam_search(method.beams), build=lambda target, draft: parts)
    session = _session(pair, prompt, watched, options)
    for _ in decode(pair.target, [session]):
        pass
    normalised = session.limits.normalised
    scores = sorted((normalised(one.loglik, len(one.tokens)), len(one.tokens)) for one in session.hypotheses())[::-1]
    ranks = [
        (better - worse) / normalised(1.0, max(long, length))
        for (better, long), (worse, length) in pairwise(scores[: method.beams + 1])
    ]
    noise = max(_noise(pair, session, tokens) for tokens in (mine, other))
    return Difference(beam, step, other, mine, min([*rule.gaps, *ranks], default=0.0), noise)


def _session(pair: Pair, prompt: Prompt, method: Method, options: dict[str, Any]) -> Session:
    return Request(pair, [prompt], method, Settings(**options), seed=None).sessions[0]


@torch.inference_mode()
def _noise(pair: Pair, session: Session, tokens: list[int]) -> float:
    """How far apart two correct ways to compute the score of a text may be.

    The largest difference of a likely token's log-probability between one forward over the text and forwards token by token,
    at least the last place of a logit in the model's type; times the root of its tokens, whose errors are independent.
    """
    if not tokens:
        return 0.0
    ids = torch.tensor([[*session.prompt, *tokens]], device=pair.target.device)
    start = len(session.prompt)
    logits = pair.target_model(ids).logits[0, start - 1 : -1]
    whole = logits.float().log_softmax(-1)
    out = pair.target_model(ids[:, :start], use_cache=True)
    rows = [out.logits[0, -1]]
    for place in range(start, ids.shape[1] - 1):
        out = pair.target_model(ids[:, place : place + 1], past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0, -1])
    stepwise = torch.stack(rows).float().log_softmax(-1)
    likely = whole > whole.amax(-1, keepdim=True) - 10
    last_place = torch.finfo(logits.dtype).eps * float(logits.abs()[likely].max())
    return math.sqrt(len(tokens)) * max(float((whole - stepwise).abs()[likely].max()), last_place)

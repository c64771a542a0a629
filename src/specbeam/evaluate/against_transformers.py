"""Does beam search give what transformers gives? Where it does not: is it rounding?"""

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

Texts = list[list[int]]


@dataclass(frozen=True)
class Difference:
    """The first difference between the beams of one prompt."""

    prompt: int
    beam: int  # rank of the first beam that differs
    step: int  # its first token that differs, from 0
    theirs: list[int]
    ours: list[int]
    gap: float  # smallest distance in score between a beam that was kept and one that was not, in any step
    noise: float  # by how much two correct ways to compute a score of this length may differ

    @property
    def is_rounding(self) -> bool:
        """Whether scores that are off by the noise could have turned the decision."""
        return self.gap <= 2 * self.noise + 1e-6


def differences(
    pair: Pair, prompts: Sequence[Prompt], method: Method, batch_size: int = 1, **options: Any
) -> Iterator[Difference | None]:
    """Compare `method` with transformers' ``generate(num_beams=method.beams, do_sample=False)``, prompt by prompt.

    Args:
        pair: target, and draft if the method drafts with one.
        prompts: texts or token ids.
        method: `beam_search` or `speculative_beam_search`.
        batch_size: prompts that are decoded side by side.
        options: as in `generate`; both sides get them.

    Yields:
        None where all beams are equal, else the first difference.
    """
    found = generate(pair, prompts, method, batch_size=batch_size, **options)
    for number, (prompt, one) in enumerate(zip(prompts, found, strict=True)):
        ours = [beam.tokens for beam in one.beams[: method.beams]]
        theirs = by_transformers(pair, one.prompt, method.beams, options)
        yield None if ours == theirs else _explained(pair, prompt, number, theirs, ours, method, options)


def by_transformers(pair: Pair, prompt: list[int], beams: int, options: dict[str, Any]) -> Texts:
    """The new tokens of all beams, best first, up to and with their end."""
    model = pair.target_model
    ids = torch.tensor([prompt], device=pair.target.device)
    given = {"max_new_tokens": 256, "num_beams": beams, "num_return_sequences": beams, "do_sample": False} | options
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    eos = Settings(eos_token_id=options.get("eos_token_id")).eos(model.generation_config.eos_token_id)
    return [_up_to_end(row[len(prompt) :].tolist(), eos) for row in out]


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


def _explained(
    pair: Pair, prompt: Prompt, number: int, theirs: Texts, ours: Texts, method: Method, options: dict[str, Any]
) -> Difference:
    beam = next((k for k, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    mine, other = (texts[beam] if beam < len(texts) else [] for texts in (ours, theirs))
    step = next((k for k, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
    rule = WatchedSearch(method.beams)
    parts = replace(beam_search(method.beams).parts(None), rule=rule)
    watched = replace(beam_search(method.beams), build=lambda target, draft: parts)
    session = Request(pair, [prompt], watched, Settings(**options), seed=None).sessions[0]
    for _ in decode(pair.target, [session]):
        pass
    scores = sorted(
        (session.limits.normalised(one.loglik, len(one.tokens)) for one in session.hypotheses()), reverse=True
    )
    ranks = [better - worse for better, worse in pairwise(scores[: method.beams + 1])]
    noise = max(_noise(pair, session, tokens) for tokens in (mine, other))
    return Difference(number, beam, step, other, mine, min([*rule.gaps, *ranks], default=0.0), noise)


@torch.inference_mode()
def _noise(pair: Pair, session: Session, tokens: list[int]) -> float:
    """How far apart two ways to compute the score of a text may be: the largest difference of a likely token's
    log-probability between one forward over the text and forwards token by token, and at least the last place of a logit
    in the model's type, times its tokens.
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
    return len(tokens) * max(float((whole - stepwise).abs()[likely].max()), last_place)

"""A comparison of the beams of speculative decoding with the beams of plain beam sampling under the same seed.

With shared noise both are the same function of the target's logits. A pass over a forest rounds the logits differently
from a pass over one token, so beams may differ where two pairs are nearly tied. Each difference is reported with its
gap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specbeam import Beam, Method, Pair, beam_sampling, decode, generate
from specbeam.core import Beams, Session, path_keys
from specbeam.core.laws import largest_values, law_of_beams, on_host, processed_rows
from specbeam.doors import Prompt, Request, Settings
from specbeam.engines import as_loaded

Path = tuple[int, ...]  # new tokens of a beam


@dataclass(frozen=True)
class BeamsDifference:
    """The first step at which the beams of one prompt differ.

    Attributes:
        prompt: number of the prompt.
        step: number of new tokens before the step.
        plain: beams of plain beam sampling after the step, live and just ended ones.
        other: beams of the method.
        gap: distance between the last pair taken and the first pair left, in log-probability plus noise.
    """

    prompt: int
    step: int
    plain: list[Path]
    other: list[Path]
    gap: float

    @property
    def is_rounding(self) -> bool:
        """Whether float32 rounding of logits explains the difference: the gap is below 1e-3."""
        return self.gap < 1e-3


def differences(
    pair: Pair, prompts: Sequence[Prompt], method: Method, seed: int, batch_size: int = 1, **options: Any
) -> list[BeamsDifference]:
    """Return the first difference of each prompt whose beams differ between `method` and `beam_sampling`.

    Both have the same number of beams and the same seed.

    An exact method has no differences, except by rounding.

    Args:
        method: a method with shared noise, such as `dsbd(width="fixed")`.
        batch_size: number of prompts that `method` decodes at the same time.
        options: as for `specbeam.generate`.
    """
    plain = generate(pair, prompts, beam_sampling(method.beams), seed=seed, **options)
    other = generate(pair, prompts, method, seed=seed, batch_size=batch_size, **options)
    pairs = enumerate(zip(plain, other, strict=True))
    different = [number for number, (a, b) in pairs if _tokens(a.beams) != _tokens(b.beams)]
    return [_first_difference(pair, prompts[number], number, method, seed, options) for number in different]


def _tokens(beams: Sequence[Beam]) -> list[list[int]]:
    return [beam.tokens for beam in beams]


def _first_difference(
    pair: Pair, prompt: Prompt, number: int, method: Method, seed: int, options: dict[str, Any]
) -> BeamsDifference:
    """Decode a prompt again by both methods, and return the first step at which their beams differ."""
    session = _session(pair, prompt, beam_sampling(method.beams), seed, options)
    plain = _history(pair, session)
    other = _history(pair, _session(pair, prompt, method, seed, options))
    steps = zip(plain, other, strict=False)
    last = min(len(plain), len(other)) - 1
    step = next((number for number, (ours, others) in enumerate(steps) if set(ours) != set(others)), last)
    before: list[Path] = [()]
    if step:
        before = [path for path in plain[step - 1] if path[-1] not in session.limits.eos]
    return BeamsDifference(number, step, plain[step], other[step], _gap(pair, session, before, method.beams))


def _session(pair: Pair, prompt: Prompt, method: Method, seed: int, options: dict[str, Any]) -> Session:
    return Request.of(pair, [prompt], method, Settings(**options), seed).sessions[0]


def _history(pair: Pair, session: Session) -> list[list[Path]]:
    """Decode a session, and return the paths of the pairs that each step took."""
    roots: list[Path] = [()]
    steps: list[list[Path]] = []
    for turns in decode(pair.target, [session]):
        for _, turn in turns:
            forest = turn.forest
            for step in turn.verdict.steps:
                heads = [
                    roots[root] + tuple(forest.path(parent))
                    for root, parent in zip(forest.root_of(step.parents), step.parents, strict=True)
                ]
                steps.append([(*head, int(token)) for head, token in zip(heads, step.beams.tokens, strict=True)])
            live = ~turn.verdict.steps[-1].ended
            roots = [path for path, alive in zip(steps[-1], live, strict=True) if alive]
    return steps


def _gap(pair: Pair, session: Session, live: list[Path], beams: int) -> float:
    """Return the distance between the last pair taken and the first one left, by plain forwards of the live paths."""
    rows = []
    scores = []
    keys = []
    for path in live:
        ids = torch.tensor([[*session.prompt, *path]], device=pair.forgetful_target.device)
        with torch.inference_mode(), as_loaded(pair.target_model):
            logits = pair.target_model(ids).logits[0, len(session.prompt) - 1 :].float()
        logp = logits.double().log_softmax(-1)
        scores.append(float(sum(logp[place, token] for place, token in enumerate(path))))
        rows.append(logits[-1])
        keys.append(path_keys(np.uint64(session.dice.key), np.array(path, dtype=np.int64))[-1])
    paths = np.array([[*session.prompt, *path] for path in live])
    numbers = np.arange(len(live))
    beams_now = Beams(numbers, numbers, np.array(scores), np.ones_like(numbers), np.array(keys, dtype=np.uint64))
    processed = processed_rows(on_host(torch.stack(rows)), session.warp, lambda: paths)
    law = law_of_beams(processed, beams_now, session.warp)
    keys = beams_now.keys[:0] if session.warp.greedy else beams_now.keys
    values = largest_values(law, keys, beams + 1)
    return float(values[beams - 1] - values[beams])

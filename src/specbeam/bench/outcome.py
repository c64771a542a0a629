"""What a benchmark sees of a contender."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from specbeam.generation import Prompt, generate
from specbeam.pair import Pair
from specbeam.recipes.method import Method
from specbeam.records import Generation


@dataclass(frozen=True)
class Outcome:
    """New tokens of each prompt's best answer, end token included, and what they cost where the contender tells."""

    tokens: list[list[int]]
    passes: int | None = None  # of the target, summed over prompts
    widths: list[float] = field(default_factory=list)  # mean live beams of each prompt
    peak_kv_tokens: int | None = None  # largest of a prompt


@dataclass(frozen=True)
class Contender:
    """Somebody who answers a batch of prompts."""

    name: str
    run: Callable[[Sequence[Prompt], int], Outcome]  # (prompts, seed)


def specbeam(pair: Pair, name: str, method: Method, **options: Any) -> Contender:
    """A method of ours; all prompts of a call at once."""

    def run(prompts: Sequence[Prompt], seed: int) -> Outcome:
        done = generate(pair, list(prompts), method, seed=seed, batch_size=len(prompts), **options)
        return _outcome(done)

    return Contender(name, run)


def _outcome(done: list[Generation]) -> Outcome:
    reports = [one.report for one in done]
    return Outcome(
        [one.tokens for one in done],
        sum(report.target_passes for report in reports),
        [fmean(report.widths) for report in reports if report.widths],
        max(report.peak_kv_tokens for report in reports),
    )

"""Contenders of a benchmark, and the outcomes of their answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from specbeam import Generation, Method, Pair, generate
from specbeam.core import RowCounts
from specbeam.doors import Prompt


@dataclass(frozen=True)
class Outcome:
    """The best answers to a batch of prompts, and their costs as far as the contender reports them.

    Attributes:
        tokens: new tokens of each prompt's best answer, end token included.
        passes: number of target passes, summed over prompts; None if it is not reported.
        widths: mean number of live beams of each prompt; empty if it is not reported.
        peak_kv_tokens: largest number of tokens stored at once for a prompt; None if it is not reported.
        rows: rows of the target, summed over prompts; None if they are not reported.
    """

    tokens: list[list[int]]
    passes: int | None = None
    widths: list[float] = field(default_factory=list)
    peak_kv_tokens: int | None = None
    rows: RowCounts | None = None


@dataclass(frozen=True)
class Contender:
    """A name, and a function that answers a batch of prompts."""

    name: str
    run: Callable[[Sequence[Prompt], int], Outcome]  # takes prompts and a seed


def specbeam(pair: Pair, name: str, method: Method, **options: Any) -> Contender:
    """Return a contender that runs a method of specbeam. The prompts of a call are decoded as one batch.

    Args:
        options: as for `specbeam.generate`.
    """

    def run(prompts: Sequence[Prompt], seed: int) -> Outcome:
        generations = generate(pair, list(prompts), method, seed=seed, batch_size=len(prompts), **options)
        return _outcome(generations)

    return Contender(name, run)


def _outcome(generations: list[Generation]) -> Outcome:
    reports = [generation.report for generation in generations]
    return Outcome(
        tokens=[generation.tokens for generation in generations],
        passes=sum(report.target_passes for report in reports),
        widths=[fmean(report.widths) for report in reports if report.widths],
        peak_kv_tokens=max(report.peak_kv_tokens for report in reports),
        rows=sum((report.rows for report in reports), RowCounts()),
    )

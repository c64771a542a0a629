"""Tokens per second, side by side: every batch of prompts meets all contenders in turn, so that a busy moment of the machine
meets all of them; rounds are repeated, the first is warm-up, and ratios are taken within a round.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from specbeam.bench.outcome import Contender, Outcome
from specbeam.bench.prompts import PromptRow
from specbeam.evaluate.perplexity import log_likelihoods
from specbeam.evaluate.task import bleu, exact_match
from specbeam.generation import Prompt
from specbeam.measure.energy import EnergyMeter
from specbeam.pair import Pair


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class SpeedLine:
    """One contender."""

    name: str
    batch_size: int
    tokens_per_second: Spread
    ratio: Spread  # to the first contender, round by round
    ms_per_token: float
    joules_per_token: float | None  # None where the machine has no counter
    passes_per_token: float | None  # of the target; None where the contender does not tell
    mean_width: float | None
    logp_per_token: float  # of the answers, under the target's raw law
    quality: dict[str, float]  # BLEU and exact match, where there are references
    peak_kv_tokens: int | None
    memory_mb: float | None  # see `speed`; None where it cannot be read
    tokens: int  # of one round


@dataclass
class Measurements:
    """What one contender did."""

    seconds: list[float] = field(default_factory=list)  # by round
    counts: list[int] = field(default_factory=list)
    joules: list[float | None] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)  # number of the prompt of each answer
    memory_mb: float | None = None

    def begin(self) -> None:
        """A new round."""
        self.seconds.append(0.0)
        self.counts.append(0)
        self.joules.append(0.0)

    def add(self, outcome: Outcome, prompts: list[int], seconds: float, joules: float | None) -> None:
        self.seconds[-1] += seconds
        self.counts[-1] += sum(map(len, outcome.tokens))
        self.joules[-1] = None if joules is None or self.joules[-1] is None else self.joules[-1] + joules
        self.outcomes.append(outcome)
        self.prompts += prompts

    @property
    def rates(self) -> list[float]:
        """Tokens per second, by round."""
        return [count / seconds for count, seconds in zip(self.counts, self.seconds, strict=True)]


def speed(
    pair: Pair,
    contenders: Sequence[Contender],
    rows: Sequence[PromptRow],
    batch_size: int = 1,
    repeats: int = 7,
    told: Callable[[], None] | None = None,
) -> list[SpeedLine]:
    """A line per contender.

    Args:
        pair: whose target scores the answers, and whose tokenizer reads them.
        contenders: ratios are to the first.
        rows: prompts of every round.
        batch_size: prompts that are given at once.
        repeats: rounds that count; one more goes ahead, in which memory is read: its peak above what was there, on the
            GPU that has the target, else what is resident. What a first use keeps is the first contender's.
        told: hears of every batch that all contenders have met.
    """
    prompts = [row.prompt for row in rows]
    batches = in_batches(len(rows), batch_size)
    memory: list[float | None] = []
    for contender in contenders:
        work = partial(_several, contender, prompts, batches[:4])
        device = pair.target_model.device
        memory.append(_gpu_memory_of(work, device) if device.type == "cuda" else _memory_of(work))
    measured = interleaved(contenders, prompts, batches, repeats, told)
    for of, found in zip(measured, memory, strict=True):
        of.memory_mb = found
    first = measured[0]
    return [_line(pair, one, of, first, rows, batch_size) for one, of in zip(contenders, measured, strict=True)]


def in_batches(count: int, batch_size: int) -> list[list[int]]:
    """The numbers of so many prompts, as they are given at once."""
    return [list(range(start, min(start + batch_size, count))) for start in range(0, count, batch_size)]


def interleaved(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    batches: Sequence[list[int]],
    repeats: int,
    told: Callable[[], None] | None = None,
) -> list[Measurements]:
    """What each contender did. A batch meets all of them before the next one comes.

    Args:
        batches: numbers of prompts.
        repeats: rounds, each with the seed of its number; all of them count, so that whoever calls warms up.
        told: hears of every batch that all contenders have met.
    """
    measured = [Measurements() for _ in contenders]
    for number in range(repeats):
        for of in measured:
            of.begin()
        for place, some in enumerate(batches):
            turn = (place + number) % len(contenders)  # nobody is always the first
            for who in [*range(turn, len(contenders)), *range(turn)]:
                with EnergyMeter() as meter:
                    began = time.perf_counter()
                    outcome = _asked(contenders[who], prompts, some, number)
                    seconds = time.perf_counter() - began
                measured[who].add(outcome, some, seconds, meter.joules)
            if told is not None:
                told()
    return measured


def _asked(contender: Contender, prompts: Sequence[Prompt], some: list[int], seed: int) -> Outcome:
    return contender.run([prompts[place] for place in some], seed)


def _several(contender: Contender, prompts: Sequence[Prompt], batches: list[list[int]]) -> None:
    for some in batches:
        _asked(contender, prompts, some, 0)


def _line(
    pair: Pair, one: Contender, of: Measurements, first: Measurements, rows: Sequence[PromptRow], batch_size: int
) -> SpeedLine:
    rates = np.array(of.rates)
    others = np.array(first.rates)
    answers = [tokens for outcome in of.outcomes for tokens in outcome.tokens]
    total = sum(map(len, answers))
    passes = [outcome.passes for outcome in of.outcomes]
    widths = [width for outcome in of.outcomes for width in outcome.widths]
    kept = [outcome.peak_kv_tokens for outcome in of.outcomes if outcome.peak_kv_tokens is not None]
    joules = [value for value in of.joules if value is not None]
    words = pair.tokenizer
    prompts = [list(words(rows[place].prompt)["input_ids"]) for place in of.prompts] if words is not None else []
    return SpeedLine(
        name=one.name,
        batch_size=batch_size,
        tokens_per_second=Spread.of(rates.tolist()),
        ratio=Spread.of((rates / others).tolist()),
        ms_per_token=1e3 * sum(of.seconds) / total,
        joules_per_token=sum(joules) / total if len(joules) == len(of.joules) else None,
        passes_per_token=None if None in passes else sum(value for value in passes if value is not None) / total,
        mean_width=statistics.fmean(widths) if widths else None,
        logp_per_token=sum(log_likelihoods(pair, prompts, answers)) / total,
        quality=_quality(pair, answers, [rows[place].answer for place in of.prompts]),
        peak_kv_tokens=max(kept, default=None),
        memory_mb=of.memory_mb,
        tokens=of.counts[0],
    )


def _quality(pair: Pair, answers: list[list[int]], references: list[str | None]) -> dict[str, float]:
    known = [text for text in references if text is not None]
    if len(known) < len(references) or pair.tokenizer is None:
        return {}
    texts = [pair.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]
    return {"BLEU": bleu(texts, known), "exact match": exact_match(texts, known)}


def _gpu_memory_of(work: Callable[[], object], device: torch.device) -> float:
    """Most memory of tensors on a GPU while it works, above that before, in MB."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6


def _memory_of(work: Callable[[], object]) -> float | None:
    """Largest resident memory while it works, above that before, in MB; None where the system does not tell."""
    before = _resident_mb()
    if before is None:
        work()
        return None
    seen = [before]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            seen.append(_resident_mb() or 0.0)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    work()
    over.set()
    watcher.join()
    return max(seen) - before


def _resident_mb() -> float | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

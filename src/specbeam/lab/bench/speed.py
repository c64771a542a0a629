"""Tokens per second of contenders in one interleaved run.

All contenders answer a batch of prompts one after the other before the next batch comes, so that a busy moment of the
machine affects all of them. Rounds are repeated after a warm-up, and ratios are taken within a round.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from specbeam import Pair
from specbeam.core import RowCounts, resident_memory
from specbeam.doors import EnergyMeter, Prompt, PromptRow
from specbeam.lab.bench.outcome import Contender, Outcome
from specbeam.lab.evaluate.perplexity import Known, exp, log_likelihoods
from specbeam.lab.evaluate.task import bleu, exact_match, has_bleu

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """The median, the smallest and the largest value of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of the values of the rounds, at least one."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class SpeedLine:
    """The figures of one contender.

    Attributes:
        tokens_per_second: speed by round.
        ratio: speed divided by the first contender's, round by round.
        ms_per_token: milliseconds per token over all rounds.
        joules_per_token: None if the machine has no energy counter.
        passes_per_token: target passes per token; None if the contender does not report them.
        mean_width: mean number of live beams over prompts; None if the contender does not report it.
        logp_per_token: log-likelihood of the answers under the target's raw law, in nats per token.
        perplexity: exp of minus that.
        quality: BLEU and exact match by these names; empty without references.
        peak_kv_tokens: most tokens stored at once for a prompt; None if the contender does not report it.
        rows_per_token: rows that the target's passes computed, without prompt rows; None if they are not reported.
        saved_rows_per_token: rows of earlier turns that were reused to decide layers of beams; None as above.
        lazy_layers: share of the layers of beams that were decided without the rows of all live beams; None as above, or
            without layers of beams.
        free_layers: share of the layers of beams that were decided only by rows of earlier turns; None as above.
        memory_mb: memory in MB, see `speed`; None if it cannot be read.
        tokens: number of tokens of one round.
    """

    name: str
    batch_size: int
    tokens_per_second: Spread
    ratio: Spread
    ms_per_token: float
    joules_per_token: float | None
    passes_per_token: float | None
    mean_width: float | None
    logp_per_token: float
    perplexity: float
    quality: dict[str, float]
    peak_kv_tokens: int | None
    rows_per_token: float | None
    saved_rows_per_token: float | None
    lazy_layers: float | None
    free_layers: float | None
    memory_mb: float | None
    tokens: int


@dataclass
class Measurements:
    """The measurements of one contender.

    Attributes:
        seconds: wall time of each round.
        processor_seconds: processor time of each round, of all threads of this process.
        counts: number of new tokens of each round.
        joules: energy of each round; None if there is no counter.
        outcomes: one per batch, of all rounds.
        prompts: number of the prompt of each answer in `outcomes`.
        memory_mb: memory in MB, see `speed`; None if it was not or cannot be read.
    """

    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    joules: list[float | None] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    memory_mb: float | None = None

    def begin(self) -> None:
        """Begin a new round."""
        self.seconds.append(0.0)
        self.processor_seconds.append(0.0)
        self.counts.append(0)
        self.joules.append(0.0)

    def add(
        self, outcome: Outcome, prompts: list[int], seconds: float, processor_seconds: float, joules: float | None
    ) -> None:
        """Add a batch to the current round.

        Args:
            prompts: numbers of the prompts of the batch.
        """
        self.seconds[-1] += seconds
        self.processor_seconds[-1] += processor_seconds
        self.counts[-1] += sum(map(len, outcome.tokens))
        before = self.joules[-1]
        self.joules[-1] = None if joules is None or before is None else before + joules
        self.outcomes.append(outcome)
        self.prompts += prompts

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each round."""
        return [count / seconds for count, seconds in zip(self.counts, self.seconds, strict=True)]

    @property
    def processor_rates(self) -> list[float]:
        """Tokens per second of processor time, of each round."""
        return [count / seconds for count, seconds in zip(self.counts, self.processor_seconds, strict=True)]


def speed(
    pair: Pair,
    contenders: Sequence[Contender],
    rows: Sequence[PromptRow],
    batch_size: int = 1,
    repeats: int = 7,
    on_progress: Callable[[], None] | None = None,
) -> list[SpeedLine]:
    """Measure contenders on the same prompts in interleaved rounds, and return a line of figures per contender.

    Args:
        pair: the pair whose target scores the answers, and whose tokenizer decodes them.
        contenders: ratios are to the first one.
        rows: the prompts of every round.
        batch_size: number of prompts that a contender answers in one call.
        repeats: number of rounds that count. Before them each contender answers at most four batches as warm-up, and
            its memory is read: the peak above the memory in use before, on the target's GPU, or resident memory if it
            has none. Memory that is allocated once and reused counts for the first contender.
        on_progress: called after every batch that all contenders have answered.
    """
    prompts = [row.prompt for row in rows]
    batches = in_batches(len(rows), batch_size)
    memory: list[float | None] = []
    for contender in contenders:
        work = partial(_run_batches, contender, prompts, batches[:4])
        memory.append(memory_of(work, pair.target_model.device))
    measurements = interleaved(contenders, prompts, batches, repeats, on_progress)
    for measured, memory_mb in zip(measurements, memory, strict=True):
        measured.memory_mb = memory_mb
    reference = measurements[0]
    known: Known = {}
    return [
        _line(pair, contender.name, measured, reference, rows, batch_size, known)
        for contender, measured in zip(contenders, measurements, strict=True)
    ]


def in_batches(count: int, batch_size: int) -> list[list[int]]:
    """Split the numbers of `count` prompts into batches; the last one may be smaller."""
    return [list(range(start, min(start + batch_size, count))) for start in range(0, count, batch_size)]


def rotated(values: Sequence[T], number: int) -> list[T]:
    """Return the values rotated by `number`, so that no value always comes first."""
    start = number % max(len(values), 1)
    return [*values[start:], *values[:start]]


def interleaved(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    batches: Sequence[list[int]],
    repeats: int,
    on_progress: Callable[[], None] | None = None,
) -> list[Measurements]:
    """Run all contenders on each batch before the next batch comes, and return their measurements.

    Args:
        batches: the numbers of the prompts of each batch.
        repeats: number of rounds; round k has the seed k. All of them count, so the caller does the warm-up.
        on_progress: called after every batch that all contenders have answered.
    """
    measurements = [Measurements() for _ in contenders]
    for number in range(repeats):
        for measured in measurements:
            measured.begin()
        for place, batch in enumerate(batches):
            for which in rotated(range(len(contenders)), place + number):
                with EnergyMeter() as meter:
                    began = time.perf_counter()
                    began_processor = time.process_time()
                    outcome = _run_batch(contenders[which], prompts, batch, number)
                    seconds = time.perf_counter() - began
                    processor_seconds = time.process_time() - began_processor
                measurements[which].add(outcome, batch, seconds, processor_seconds, meter.joules)
            if on_progress is not None:
                on_progress()
    return measurements


def _run_batch(contender: Contender, prompts: Sequence[Prompt], batch: list[int], seed: int) -> Outcome:
    return contender.run([prompts[place] for place in batch], seed)


def _run_batches(contender: Contender, prompts: Sequence[Prompt], batches: list[list[int]]) -> None:
    for batch in batches:
        _run_batch(contender, prompts, batch, 0)


def _line(
    pair: Pair,
    name: str,
    measured: Measurements,
    reference: Measurements,
    rows: Sequence[PromptRow],
    batch_size: int,
    known: Known,
) -> SpeedLine:
    """Compute the figures of a contender; ratios are to `reference`, the measurements of the first contender.

    Args:
        known: see `log_likelihoods`.
    """
    rates = np.array(measured.rates)
    reference_rates = np.array(reference.rates)
    answers = [tokens for outcome in measured.outcomes for tokens in outcome.tokens]
    total = sum(map(len, answers))
    passes = [outcome.passes for outcome in measured.outcomes if outcome.passes is not None]
    widths = [width for outcome in measured.outcomes for width in outcome.widths]
    rows_of_each = [outcome.rows for outcome in measured.outcomes if outcome.rows is not None]
    counts = sum(rows_of_each, RowCounts()) if len(rows_of_each) == len(measured.outcomes) else None
    peaks = [outcome.peak_kv_tokens for outcome in measured.outcomes if outcome.peak_kv_tokens is not None]
    joules = [value for value in measured.joules if value is not None]
    tokenizer = pair.tokenizer
    prompts: list[list[int]] = []
    if tokenizer is not None:
        prompts = [list(tokenizer(rows[place].prompt)["input_ids"]) for place in measured.prompts]
    logp_per_token = sum(log_likelihoods(pair, prompts, answers, known=known)) / total
    return SpeedLine(
        name=name,
        batch_size=batch_size,
        tokens_per_second=Spread.of(rates.tolist()),
        ratio=Spread.of((rates / reference_rates).tolist()),
        ms_per_token=1e3 * sum(measured.seconds) / total,
        joules_per_token=sum(joules) / total if len(joules) == len(measured.joules) else None,
        passes_per_token=sum(passes) / total if len(passes) == len(measured.outcomes) else None,
        mean_width=statistics.fmean(widths) if widths else None,
        logp_per_token=logp_per_token,
        perplexity=exp(-logp_per_token),
        quality=_quality(pair, answers, [rows[place].answer for place in measured.prompts]),
        peak_kv_tokens=max(peaks, default=None),
        rows_per_token=None if counts is None else counts.scored / total,
        saved_rows_per_token=None if counts is None else counts.saved / total,
        lazy_layers=counts.lazy_layers / counts.layers if counts and counts.layers else None,
        free_layers=counts.free_layers / counts.layers if counts and counts.layers else None,
        memory_mb=measured.memory_mb,
        tokens=measured.counts[0],
    )


def _quality(pair: Pair, answers: list[list[int]], references: list[str | None]) -> dict[str, float]:
    """Return BLEU (0 to 100; if sacrebleu is installed) and the share of exact matches.

    Returns nothing if a reference or the tokenizer is missing.
    """
    known = [text for text in references if text is not None]
    if len(known) < len(references) or pair.tokenizer is None:
        return {}
    texts = [pair.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]
    found = {"BLEU": bleu(texts, known)} if has_bleu() else {}
    return {**found, "exact match": exact_match(texts, known)}


def memory_of(work: Callable[[], object], device: torch.device) -> float | None:
    """Do the work; return the peak memory of a device during it, minus the memory before, in MB; None if unreadable."""
    return _gpu_memory_of(work, device) if device.type == "cuda" else _memory_of(work)


def _gpu_memory_of(work: Callable[[], object], device: torch.device) -> float:
    """Do the work; return the peak GPU memory of tensors during it, minus the memory before, in MB."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6


def _memory_of(work: Callable[[], object]) -> float | None:
    """Do the work; return the peak resident memory during it, minus the memory before, in MB; None if unreadable."""
    before = resident_memory()
    if not before:
        work()
        return None
    samples = [before]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            samples.append(resident_memory())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return (max(samples) - before) / 1e6

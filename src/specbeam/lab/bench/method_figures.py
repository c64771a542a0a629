"""The figures of a method on a task, with 95 % intervals, computed from its answers and their costs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbeam import Generation, Method
from specbeam.lab.evaluate.intervals import interval, ratio_interval, share_interval
from specbeam.lab.evaluate.perplexity import exp, summary
from specbeam.lab.evaluate.task import bleu, bleu_counts, bleu_of, exact_match, hits

METRICS = ("BLEU", "exact match")
# names of the methods that ratios refer to
SAMPLING = "sampling"
SPECULATIVE = "speculative sampling"


@dataclass(frozen=True)
class Task:
    """A list of prompts with one right answer each."""

    name: str
    metric: str  # one of METRICS
    rows: list[tuple[str, str]]  # (prompt, answer)


@dataclass(frozen=True)
class Figure:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class MethodLine:
    """The figures of one method on one task."""

    task: str
    method: str
    lossless: bool
    law: str
    metric: str
    perplexity: Figure  # perplexity of the outputs under the target's raw law (see `Perplexity.perplexity`)
    perplexity_ratio: Figure | None  # relative to plain sampling, prompt by prompt; None if not measured
    quality: Figure
    seconds_per_token: Figure
    joules_per_token: Figure | None  # None if the machine has no energy counter
    tokens_per_pass: Figure  # passes of the target
    tokens_per_pass_ratio: Figure | None  # relative to speculative sampling; None if not measured
    tokens_per_output: float
    repeated: float  # share of 4-grams that occurred before in the same output


@dataclass
class MethodRun:
    """The answers of one method on one task, and their costs: parallel lists with an entry per answer.

    Attributes:
        answers: one per prompt and seed.
        seconds: wall time of each answer.
        prompts: number of the prompt of each answer.
        logp: log-likelihood of each answer under the target, in nats; empty until the answers are scored.
    """

    answers: list[Generation]
    seconds: list[float]
    prompts: list[int]
    logp: list[float]

    def by_prompt(self, values: np.ndarray | Sequence[float]) -> np.ndarray:
        """Return the sum of `values` over the answers to each prompt."""
        return np.bincount(self.prompts, np.asarray(values, dtype=float))

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each answer."""
        return np.array([len(answer.tokens) for answer in self.answers], dtype=float)

    @property
    def means(self) -> np.ndarray:
        """Mean log-likelihood per token of each answer, in nats."""
        return np.array(self.logp) / self.lengths

    @property
    def passes(self) -> np.ndarray:
        """Number of target passes of each answer."""
        return np.array([answer.report.target_passes for answer in self.answers], dtype=float)


def line_of(task: Task, name: str, method: Method, run: MethodRun, runs: dict[str, MethodRun]) -> MethodLine:
    """Compute all figures of one method on a task. Intervals are by bootstrap over prompts.

    Args:
        run: the run of the method; its answers have to be scored.
        runs: the runs of all methods by name, from which those to compare with are taken.
    """
    scores = summary(run.logp, [answer.tokens for answer in run.answers])
    likelihood = _ratio(run, run.means, np.ones(len(run.answers)))
    readings = [answer.report.joules for answer in run.answers]
    joules = None if None in readings else np.array(readings, dtype=float)
    return MethodLine(
        task=task.name,
        method=name,
        lossless=method.lossless,
        law=method.law,
        metric=task.metric,
        perplexity=Figure(*(exp(-x) for x in (likelihood.value, likelihood.high, likelihood.low))),
        perplexity_ratio=_perplexity_ratio(run, runs.get(SAMPLING)),
        quality=_quality(task, run),
        seconds_per_token=_ratio(run, np.array(run.seconds), run.lengths),
        joules_per_token=None if joules is None else _ratio(run, joules, run.lengths),
        tokens_per_pass=_ratio(run, run.lengths, run.passes),
        tokens_per_pass_ratio=_pass_ratio(run, runs.get(SPECULATIVE)),
        tokens_per_output=scores.tokens_per_output,
        repeated=scores.repeated,
    )


def _ratio(run: MethodRun, above: np.ndarray, below: np.ndarray) -> Figure:
    """Return sum(above) / sum(below). The answers to one prompt are resampled together."""
    low, high = ratio_interval(run.by_prompt(above), run.by_prompt(below))
    return Figure(float(above.sum() / below.sum()), low, high)


def _perplexity_ratio(run: MethodRun, plain: MethodRun | None) -> Figure | None:
    """Return the perplexity divided by `plain`'s; None if `plain` is None.

    Both methods answered the same prompts equally often, so their mean log-likelihoods are subtracted prompt by prompt.
    """
    if plain is None:
        return None
    gain = plain.by_prompt(plain.means) - run.by_prompt(run.means)
    count = run.by_prompt(np.ones(len(run.answers)))
    low, high = interval((gain, count), lambda a, b: np.exp(a / b))
    return Figure(float(np.exp(gain.sum() / count.sum())), low, high)


def _pass_ratio(run: MethodRun, speculative: MethodRun | None) -> Figure | None:
    """Return the tokens per pass relative to `speculative`, None if `speculative` is None."""
    if speculative is None:
        return None
    columns = [side.by_prompt(values) for side in (run, speculative) for values in (side.lengths, side.passes)]
    low, high = interval(columns, lambda a, b, c, d: (a / b) / (c / d))
    a, b, c, d = (values.sum() for values in columns)
    return Figure(float((a / b) / (c / d)), low, high)


def _quality(task: Task, run: MethodRun) -> Figure:
    """Return the task's metric: the share of exact matches, or BLEU from 0 to 100."""
    texts = [answer.text for answer in run.answers]
    answers = [task.rows[place][1] for place in run.prompts]
    if task.metric == "exact match":
        correct = run.by_prompt(hits(texts, answers))
        total = run.by_prompt(np.ones(len(texts)))
        return Figure(exact_match(texts, answers), *share_interval(correct, total))
    columns = [run.by_prompt(np.array(column)) for column in zip(*bleu_counts(texts, answers), strict=True)]

    def bleu_of_each(*sums: np.ndarray) -> np.ndarray:
        return np.array([bleu_of(row) for row in zip(*sums, strict=True)])

    low, high = interval(columns, bleu_of_each)
    return Figure(bleu(texts, answers), low, high)

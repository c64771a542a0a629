"""What is told of a method on a task: its figures, with their intervals, from its answers and their costs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbeam.evaluate.intervals import interval, ratio_interval, share_interval
from specbeam.evaluate.perplexity import exp, summary
from specbeam.evaluate.task import bleu, bleu_counts, bleu_of, exact_match, hits
from specbeam.recipes.method import Method
from specbeam.records import Generation

METRICS = ("BLEU", "exact match")
# what others are compared with
SAMPLING = "sampling"
SPECULATIVE = "speculative sampling"


@dataclass(frozen=True)
class Task:
    """Prompts with one right answer each."""

    name: str
    metric: str  # one of METRICS
    rows: list[tuple[str, str]]


@dataclass(frozen=True)
class Figure:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class MethodLine:
    """One method on one task."""

    task: str
    method: str
    lossless: bool
    law: str
    metric: str
    perplexity: Figure  # of the output under the target's raw law; macro
    perplexity_ratio: Figure | None  # to that of plain sampling, prompt by prompt; None: it was not measured
    quality: Figure
    seconds_per_token: Figure
    joules_per_token: Figure | None  # None where the machine has no counter
    tokens_per_pass: Figure
    tokens_per_pass_ratio: Figure | None  # to that of speculative sampling
    tokens_per_output: float
    repeated: float


@dataclass
class MethodRun:
    """What one method did on one task: answers and costs, by prompt and seed."""

    answers: list[Generation]
    seconds: list[float]
    prompts: list[int]  # number of the prompt of each
    logp: list[float]  # log-likelihood of each, once scored

    def by_prompt(self, values: np.ndarray | Sequence[float]) -> np.ndarray:
        """Sums over the answers to each prompt."""
        return np.bincount(self.prompts, np.asarray(values, dtype=float))

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(one.tokens) for one in self.answers], dtype=float)

    @property
    def means(self) -> np.ndarray:
        """log p per token of each answer."""
        return np.array(self.logp) / self.lengths

    @property
    def passes(self) -> np.ndarray:
        return np.array([one.report.target_passes for one in self.answers], dtype=float)


def line_of(task: Task, name: str, method: Method, run: MethodRun, runs: dict[str, MethodRun]) -> MethodLine:
    """All figures of one method. Intervals are by bootstrap over prompts."""
    whole = summary(run.logp, [one.tokens for one in run.answers])
    likelihood = _ratio(run, run.means, np.ones(len(run.answers)))
    joules = [one.report.joules for one in run.answers]
    known = None if None in joules else np.array(joules, dtype=float)
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
        joules_per_token=None if known is None else _ratio(run, known, run.lengths),
        tokens_per_pass=_ratio(run, run.lengths, run.passes),
        tokens_per_pass_ratio=_pass_ratio(run, runs.get(SPECULATIVE)),
        tokens_per_output=whole.tokens_per_output,
        repeated=whole.repeated,
    )


def _ratio(run: MethodRun, above: np.ndarray, below: np.ndarray) -> Figure:
    """Sum over sum; the outputs of one prompt are drawn together."""
    return Figure(float(above.sum() / below.sum()), *ratio_interval(run.by_prompt(above), run.by_prompt(below)))


def _perplexity_ratio(run: MethodRun, plain: MethodRun | None) -> Figure | None:
    """Both answered the same prompts equally often, so differences of means pair up."""
    if plain is None:
        return None
    gain = plain.by_prompt(plain.means) - run.by_prompt(run.means)
    count = run.by_prompt(np.ones(len(run.answers)))
    low, high = interval((gain, count), lambda a, b: np.exp(a / b))
    return Figure(float(np.exp(gain.sum() / count.sum())), low, high)


def _pass_ratio(run: MethodRun, drafted: MethodRun | None) -> Figure | None:
    if drafted is None:
        return None
    columns = [one.by_prompt(values) for one in (run, drafted) for values in (one.lengths, one.passes)]
    low, high = interval(columns, lambda a, b, c, d: (a / b) / (c / d))
    a, b, c, d = (values.sum() for values in columns)
    return Figure(float((a / b) / (c / d)), low, high)


def _quality(task: Task, run: MethodRun) -> Figure:
    texts = [one.text for one in run.answers]
    answers = [task.rows[place][1] for place in run.prompts]
    if task.metric == "exact match":
        right = run.by_prompt(hits(texts, answers))
        asked = run.by_prompt(np.ones(len(texts)))
        return Figure(exact_match(texts, answers), *share_interval(right, asked))
    columns = [run.by_prompt(np.array(column)) for column in zip(*bleu_counts(texts, answers), strict=True)]
    low, high = interval(columns, lambda *sums: np.array([bleu_of(row) for row in zip(*sums, strict=True)]))
    return Figure(bleu(texts, answers), low, high)

"""Which method for what: likelihood and quality of the text against seconds, joules and passes per token, method by method.

One prompt at a time, as a user at a keyboard has it. Every prompt meets all methods one after the other, so that a busy
moment of the machine is shared; the first round is warm-up. Intervals are by bootstrap over prompts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbeam.evaluate.intervals import interval, ratio_interval
from specbeam.evaluate.perplexity import log_likelihoods, summary
from specbeam.evaluate.task import bleu, exact_match
from specbeam.generation import generate
from specbeam.pair import Pair
from specbeam.recipes.beams import beam_sampling, dsbd, greedy, sampling
from specbeam.recipes.joint import mmtad, mtad
from specbeam.recipes.method import Method
from specbeam.recipes.search import beam_search, speculative_beam_search
from specbeam.recipes.sequences import speculative_sampling
from specbeam.records import Generation

QUALITY: dict[str, Callable[[Sequence[str], Sequence[str]], float]] = {"BLEU": bleu, "exact match": exact_match}
SAMPLING, SPECULATIVE = "sampling", "speculative sampling"  # what others are compared with
RESAMPLES = 200  # for metrics that are computed anew each time


@dataclass(frozen=True)
class Contender:
    """A method with the options it runs at."""

    method: Method
    options: dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Prompts with one right answer each."""

    name: str
    metric: str  # a key of QUALITY
    rows: list[tuple[str, str]]


@dataclass(frozen=True)
class Figure:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
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
class Run:
    """What one method did on one task: answers and costs, by prompt and seed."""

    answers: list[Generation]
    seconds: list[float]
    prompts: list[int]  # number of the prompt of each
    logp: list[float]  # log-likelihood of each, once scored

    def by_prompt(self, values: np.ndarray | list[float]) -> np.ndarray:
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


def contenders(beams: int = 4, depth: int = 4, threshold: float = 0.5) -> dict[str, Contender]:
    """One of each kind, at equal draft depth and equal beams."""
    return {
        "greedy": Contender(greedy(), {}),
        SAMPLING: Contender(sampling(), {}),
        SPECULATIVE: Contender(speculative_sampling(depth), {}),
        "beam search": Contender(beam_search(beams), {}),
        "speculative beam search": Contender(speculative_beam_search(beams, beams + 2, depth), {}),
        "beam sampling": Contender(beam_sampling(beams), {}),
        "DSBD": Contender(dsbd(beams, beams + 2, depth, "fixed"), {}),
        "MTAD": Contender(mtad(beams, depth, threshold), {}),
        "MMTAD": Contender(mmtad(beams, depth, threshold), {}),
        "MTAD, temperature 0": Contender(mtad(beams, depth, threshold), {"temperature": 0.0}),
    }


def measure(
    pair: Pair,
    task: Task,
    methods: dict[str, Contender],
    seeds: int = 3,
    max_new_tokens: int = 64,
    told: Callable[[], None] | None = None,
) -> list[Line]:
    """A line per method; `told` hears of every round: one prompt by all methods."""
    runs = {name: Run([], [], [], []) for name in methods}
    _round(pair, methods, task.rows[0][0], 0, 0, max_new_tokens, {name: Run([], [], [], []) for name in methods})
    for number in range(seeds * len(task.rows)):
        seed, place = divmod(number, len(task.rows))
        _round(pair, methods, task.rows[place][0], place, seed, max_new_tokens, runs)
        if told is not None:
            told()
    for run in runs.values():
        run.logp = log_likelihoods(pair, [one.prompt for one in run.answers], [one.tokens for one in run.answers])
    return [_line(task, name, methods[name].method, run, runs) for name, run in runs.items()]


def _round(
    pair: Pair, methods: dict[str, Contender], prompt: str, place: int, seed: int, most: int, runs: dict[str, Run]
) -> None:
    names = [*methods]
    turn = (place + seed) % len(names)  # nobody is always the first
    for name in names[turn:] + names[:turn]:
        one = methods[name]
        began = time.perf_counter()
        (answer,) = generate(pair, prompt, one.method, seed=seed, max_new_tokens=most, **one.options)
        runs[name].seconds.append(time.perf_counter() - began)
        runs[name].answers.append(answer)
        runs[name].prompts.append(place)


def _line(task: Task, name: str, method: Method, run: Run, runs: dict[str, Run]) -> Line:
    whole = summary(run.logp, [one.tokens for one in run.answers])
    likelihood = _ratio(run, run.means, np.ones(len(run.answers)))
    joules = [one.report.joules for one in run.answers]
    known = None if None in joules else np.array(joules, dtype=float)
    return Line(
        task=task.name,
        method=name,
        lossless=method.lossless,
        law=method.law,
        metric=task.metric,
        perplexity=Figure(*(float(np.exp(-x)) for x in (likelihood.value, likelihood.high, likelihood.low))),
        perplexity_ratio=_perplexity_ratio(run, runs.get(SAMPLING)),
        quality=_quality(task, run),
        seconds_per_token=_ratio(run, np.array(run.seconds), run.lengths),
        joules_per_token=None if known is None else _ratio(run, known, run.lengths),
        tokens_per_pass=_ratio(run, run.lengths, run.passes),
        tokens_per_pass_ratio=_pass_ratio(run, runs.get(SPECULATIVE)),
        tokens_per_output=whole.tokens_per_output,
        repeated=whole.repeated,
    )


def _ratio(run: Run, above: np.ndarray, below: np.ndarray) -> Figure:
    """Sum over sum; the outputs of one prompt are drawn together."""
    return Figure(float(above.sum() / below.sum()), *ratio_interval(run.by_prompt(above), run.by_prompt(below)))


def _perplexity_ratio(run: Run, plain: Run | None) -> Figure | None:
    """Both answered the same prompts equally often, so differences of means pair up."""
    if plain is None:
        return None
    gain, count = plain.by_prompt(plain.means) - run.by_prompt(run.means), run.by_prompt(np.ones(len(run.answers)))
    low, high = interval((gain, count), lambda a, b: np.exp(a / b))
    return Figure(float(np.exp(gain.sum() / count.sum())), low, high)


def _pass_ratio(run: Run, drafted: Run | None) -> Figure | None:
    if drafted is None:
        return None
    columns = [one.by_prompt(values) for one in (run, drafted) for values in (one.lengths, one.passes)]
    low, high = interval(columns, lambda a, b, c, d: (a / b) / (c / d))
    a, b, c, d = (values.sum() for values in columns)
    return Figure(float((a / b) / (c / d)), low, high)


def _quality(task: Task, run: Run) -> Figure:
    score = QUALITY[task.metric]
    texts = [one.text for one in run.answers]
    answers = [task.rows[place][1] for place in run.prompts]
    mine = [np.flatnonzero(np.array(run.prompts) == place) for place in range(len(task.rows))]
    rng, values = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        chosen = np.concatenate([mine[place] for place in rng.integers(0, len(mine), len(mine))])
        values.append(score([texts[one] for one in chosen], [answers[one] for one in chosen]))
    low, high = np.quantile(values, [0.025, 0.975])
    return Figure(score(texts, answers), float(low), float(high))

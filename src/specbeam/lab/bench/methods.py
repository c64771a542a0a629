"""A comparison of methods: likelihood and quality of the text against seconds, joules and passes per token.

Prompts are decoded one at a time, as for a single user at a keyboard. All methods answer a prompt one after the other
before the next prompt comes, so that a busy moment of the machine affects all of them. The first round is warm-up.
Intervals are by bootstrap over prompts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specbeam import (
    Method,
    Pair,
    beam_sampling,
    beam_search,
    dsbd,
    generate,
    greedy,
    mmtad,
    mtad,
    sampling,
    speculative_beam_search,
    speculative_sampling,
)
from specbeam.lab.bench.method_figures import SAMPLING, SPECULATIVE, MethodLine, MethodRun, Task, line_of
from specbeam.lab.bench.speed import rotated
from specbeam.lab.evaluate.perplexity import Known, log_likelihoods


@dataclass(frozen=True)
class MethodContender:
    """A method with the options of `generate` that it runs with."""

    method: Method
    options: dict[str, Any]


def contenders(beams: int = 4, depth: int = 4, threshold: float = 0.5) -> dict[str, MethodContender]:
    """Return one method of each kind by name, with equal numbers of beams and equal draft depths.

    Methods that have "auto" in their name choose their own depth or width.

    Args:
        threshold: threshold of MTAD and MMTAD.
    """
    return {
        "greedy": MethodContender(greedy(), {}),
        SAMPLING: MethodContender(sampling(), {}),
        SPECULATIVE: MethodContender(speculative_sampling(depth, controller="fixed"), {}),
        "beam search": MethodContender(beam_search(beams), {}),
        f"speculative beam search, depth {depth}": MethodContender(
            speculative_beam_search(beams, beams + 2, depth), {}
        ),
        "speculative beam search, depth auto": MethodContender(speculative_beam_search(beams), {}),
        "beam sampling": MethodContender(beam_sampling(beams), {}),
        f"DSBD, depth {depth}": MethodContender(dsbd(beams, beams + 2, depth, "fixed"), {}),
        "DSBD, depth auto": MethodContender(dsbd(beams, width="fixed"), {}),
        "DSBD, width auto": MethodContender(dsbd(beams, width="auto"), {}),
        "MTAD": MethodContender(mtad(beams, depth, threshold), {}),
        "MMTAD": MethodContender(mmtad(beams, depth, threshold), {}),
        "MTAD, temperature 0": MethodContender(mtad(beams, depth, threshold), {"temperature": 0.0}),
    }


def measure(
    pair: Pair,
    task: Task,
    methods: dict[str, MethodContender],
    seeds: int = 3,
    max_new_tokens: int = 64,
    on_progress: Callable[[], None] | None = None,
) -> list[MethodLine]:
    """Answer a task by several methods, and return a line of figures per method.

    Args:
        seeds: number of times that each prompt is answered, with the seeds 0, 1, ...
        on_progress: called after every round, in which all methods answer one prompt.
    """
    runs = {name: MethodRun([], [], [], []) for name in methods}
    not_counted = {name: MethodRun([], [], [], []) for name in methods}
    _round(pair, methods, task.rows[0][0], 0, 0, max_new_tokens, not_counted)
    for number in range(seeds * len(task.rows)):
        seed, place = divmod(number, len(task.rows))
        _round(pair, methods, task.rows[place][0], place, seed, max_new_tokens, runs)
        if on_progress is not None:
            on_progress()
    known: Known = {}
    for run in runs.values():
        prompts = [answer.prompt for answer in run.answers]
        outputs = [answer.tokens for answer in run.answers]
        run.logp = log_likelihoods(pair, prompts, outputs, known=known)
    return [line_of(task, name, methods[name].method, run, runs) for name, run in runs.items()]


def _round(
    pair: Pair,
    methods: dict[str, MethodContender],
    prompt: str,
    place: int,
    seed: int,
    max_new_tokens: int,
    runs: dict[str, MethodRun],
) -> None:
    """Answer one prompt by all methods, and append the answers and their costs to `runs`."""
    for name in rotated([*methods], place + seed):
        contender = methods[name]
        began = time.perf_counter()
        (answer,) = generate(
            pair, prompt, contender.method, seed=seed, max_new_tokens=max_new_tokens, **contender.options
        )
        runs[name].seconds.append(time.perf_counter() - began)
        runs[name].answers.append(answer)
        runs[name].prompts.append(place)

"""Which method for what: likelihood and quality of the text against seconds, joules and passes per token, method by method.

One prompt at a time, as a user at a keyboard has it. Every prompt meets all methods one after the other, so that a busy
moment of the machine is shared; the first round is warm-up. Intervals are by bootstrap over prompts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specbeam.bench.method_figures import SAMPLING, SPECULATIVE, MethodLine, MethodRun, Task, line_of
from specbeam.evaluate.perplexity import log_likelihoods
from specbeam.generation import generate
from specbeam.pair import Pair
from specbeam.recipes.beams import beam_sampling, dsbd, greedy, sampling
from specbeam.recipes.joint_beams import mmtad, mtad
from specbeam.recipes.method import Method
from specbeam.recipes.search import beam_search, speculative_beam_search
from specbeam.recipes.sequence import speculative_sampling


@dataclass(frozen=True)
class MethodContender:
    """A method with the options it runs at."""

    method: Method
    options: dict[str, Any]


def contenders(beams: int = 4, depth: int = 4, threshold: float = 0.5) -> dict[str, MethodContender]:
    """One of each kind, at equal beams and equal draft depth; those that are called "auto" choose their own."""
    return {
        "greedy": MethodContender(greedy(), {}),
        SAMPLING: MethodContender(sampling(), {}),
        SPECULATIVE: MethodContender(speculative_sampling(depth), {}),
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
    told: Callable[[], None] | None = None,
) -> list[MethodLine]:
    """A line per method; `told` hears of every round: one prompt by all methods."""
    runs = {name: MethodRun([], [], [], []) for name in methods}
    _round(pair, methods, task.rows[0][0], 0, 0, max_new_tokens, {name: MethodRun([], [], [], []) for name in methods})
    for number in range(seeds * len(task.rows)):
        seed, place = divmod(number, len(task.rows))
        _round(pair, methods, task.rows[place][0], place, seed, max_new_tokens, runs)
        if told is not None:
            told()
    for run in runs.values():
        run.logp = log_likelihoods(pair, [one.prompt for one in run.answers], [one.tokens for one in run.answers])
    return [line_of(task, name, methods[name].method, run, runs) for name, run in runs.items()]


def _round(
    pair: Pair,
    methods: dict[str, MethodContender],
    prompt: str,
    place: int,
    seed: int,
    most: int,
    runs: dict[str, MethodRun],
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

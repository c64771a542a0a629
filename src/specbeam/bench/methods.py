"""Which method for what: likelihood and quality of the text against seconds, joules and passes per token, method by method.

One prompt at a time, as a user at a keyboard has it. Every prompt meets all methods one after the other, so that a busy
moment of the machine is shared; the first round is warm-up. Intervals are by bootstrap over prompts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specbeam.bench.method_figures import SAMPLING, SPECULATIVE, Line, Run, Task, line_of
from specbeam.evaluate.perplexity import log_likelihoods
from specbeam.generation import generate
from specbeam.pair import Pair
from specbeam.recipes.beams import beam_sampling, dsbd, greedy, sampling
from specbeam.recipes.drawn import speculative_sampling
from specbeam.recipes.joint import mmtad, mtad
from specbeam.recipes.method import Method
from specbeam.recipes.search import beam_search, speculative_beam_search


@dataclass(frozen=True)
class Contender:
    """A method with the options it runs at."""

    method: Method
    options: dict[str, Any]


def contenders(beams: int = 4, depth: int = 4, threshold: float = 0.5) -> dict[str, Contender]:
    """One of each kind, at equal beams and equal draft depth; those that are called "auto" choose their own."""
    return {
        "greedy": Contender(greedy(), {}),
        SAMPLING: Contender(sampling(), {}),
        SPECULATIVE: Contender(speculative_sampling(depth), {}),
        "beam search": Contender(beam_search(beams), {}),
        f"speculative beam search, depth {depth}": Contender(speculative_beam_search(beams, beams + 2, depth), {}),
        "speculative beam search, depth auto": Contender(speculative_beam_search(beams), {}),
        "beam sampling": Contender(beam_sampling(beams), {}),
        f"DSBD, depth {depth}": Contender(dsbd(beams, beams + 2, depth, "fixed"), {}),
        "DSBD, depth auto": Contender(dsbd(beams, width="fixed"), {}),
        "DSBD, width auto": Contender(dsbd(beams, width="auto"), {}),
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
    return [line_of(task, name, methods[name].method, run, runs) for name, run in runs.items()]


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

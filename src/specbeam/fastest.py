"""The fastest exact method for this pair, these settings and this machine: by measurement, once, kept on disk."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specbeam.measure import kept_figures as measured
from specbeam.options.settings import Settings
from specbeam.pair import Pair
from specbeam.recipes.beams import sampling
from specbeam.recipes.lookup import prompt_lookup, token_recycling
from specbeam.recipes.method import Method
from specbeam.recipes.sequence import block_verification, opt_tree, rsd_s, sequoia, speculative_sampling, traversal

Measure = Callable[[Method], float]  # tokens per second of a method on some prompts


@dataclass(frozen=True)
class FastestMethod:
    """What was chosen, and the figures behind it."""

    name: str
    tokens_per_second: dict[str, float]
    measured_now: bool


def candidates(has_draft: bool) -> dict[str, Callable[[], Method]]:
    """A short list of exact methods for one sequence, each the best of its kind on some pair (docs/block_efficiency.md)."""
    alone: dict[str, Callable[[], Method]] = {
        "sampling": sampling,
        "prompt_lookup": prompt_lookup,
        "token_recycling depth 3": lambda: token_recycling(3),
    }
    drafted: dict[str, Callable[[], Method]] = {
        "speculative_sampling depth 2": lambda: speculative_sampling(2),
        "speculative_sampling depth 4": lambda: speculative_sampling(4),
        "block_verification depth 4": lambda: block_verification(4),
        "traversal 2,1,1": lambda: traversal((2, 1, 1)),
        "rsd_s 3 x 3": lambda: rsd_s(3, 3),
        "sequoia 10 nodes": lambda: sequoia(10, 4),
        "opt_tree 12 nodes": lambda: opt_tree(12, 4),
    }
    return alone | (drafted if has_draft else {})


def fastest(pair: Pair, settings: Settings, measure: Measure, repeats: int = 3) -> tuple[Method, FastestMethod]:
    """The candidate of most tokens per second; `measure` runs one. Rounds are interleaved and the first is warm-up."""
    made = candidates(pair.draft is not None)
    key = _key(pair, settings)
    known = measured.load("auto", key)
    if known is not None and known["name"] in made:
        return made[known["name"]](), FastestMethod(known["name"], known["tokens_per_second"], measured_now=False)
    methods = {name: make() for name, make in made.items()}
    rounds: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(repeats + 1):
        for name, method in methods.items():
            speed = measure(method)
            if number:
                rounds[name].append(speed)
    speeds = {name: round(statistics.median(values), 2) for name, values in rounds.items()}
    best = max(speeds, key=lambda name: speeds[name])
    measured.keep("auto", key, {"name": best, "tokens_per_second": speeds})
    return methods[best], FastestMethod(best, speeds, measured_now=True)


def tokens_per_second(run: Callable[[], Sequence[object]]) -> float:
    """Speed of a run that returns its tokens."""
    began = time.perf_counter()
    tokens = run()
    return len(tokens) / (time.perf_counter() - began)


def _key(pair: Pair, settings: Settings) -> list[Any]:
    """Names everything that the choice depends on, machine and version aside."""
    models = [measured.model_key(model) for model in (pair.target_model, pair.draft_model)]
    return [
        models,
        [measured.weights_key(model) for model in (pair.target_model, pair.draft_model)],  # acceptance depends on them
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        settings.repetition_penalty,
        settings.no_repeat_ngram_size,
        settings.form_kind
        and [settings.form_kind, settings.grammar_backend],  # not its text: each would be measured anew
    ]

"""The measurement behind the recipe `auto`: the fastest exact method for a pair, settings and machine.

The measurement is made once and stored on disk.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specbeam.core.lm import LM
from specbeam.core.measure import saved_figures as measured
from specbeam.core.measure.saved_figures import ChoiceField, Figures, NumberField, RecordFields
from specbeam.doors.options.settings import Settings
from specbeam.doors.options.table import warper_names
from specbeam.models.heads.lm import HeadLM
from specbeam.models.memory.lm import MemoryLM
from specbeam.models.pair import Pair
from specbeam.models.quantised import rounding_of
from specbeam.models.skipping import SkippingLM
from specbeam.recipes.beams import sampling
from specbeam.recipes.lookup import prompt_lookup, token_recycling
from specbeam.recipes.method import Method
from specbeam.recipes.sequence import block_verification, opt_tree, rsd_s, sequoia, speculative_sampling, traversal

Measure = Callable[[Method], float]  # tokens per second of a method on some prompts


@dataclass(frozen=True)
class FastestMethod:
    """The name of the fastest candidate, and the figures of the choice."""

    name: str
    tokens_per_second: dict[str, float]  # by candidate, medians
    measured_now: bool  # False: the figures were read from disk


def candidates(has_draft: bool) -> dict[str, Callable[[], Method]]:
    """Return a short list of exact methods for one sequence, by name, including those with a draft model if there is one.

    Each is the best of its kind on some pair (docs/block_efficiency.md). Draft models make drafts of a fixed shape; whether
    these pay at all is measured here.
    """
    without_draft: dict[str, Callable[[], Method]] = {
        "sampling": sampling,
        "prompt_lookup": prompt_lookup,
        "token_recycling depth 3": lambda: token_recycling(3),
    }
    with_draft: dict[str, Callable[[], Method]] = {
        "speculative_sampling depth 2": lambda: speculative_sampling(2, controller="fixed"),
        "speculative_sampling depth 4": lambda: speculative_sampling(4, controller="fixed"),
        "block_verification depth 4": lambda: block_verification(4, controller="fixed"),
        "traversal 2,1,1": lambda: traversal((2, 1, 1), controller="fixed"),
        "rsd_s 3 x 3": lambda: rsd_s(3, 3, controller="fixed"),
        "sequoia 10 nodes": lambda: sequoia(10, 4, controller="fixed"),
        "opt_tree 12 nodes": lambda: opt_tree(12, 4, controller="fixed"),
    }
    return without_draft | (with_draft if has_draft else {})


def fastest(pair: Pair, settings: Settings, measure: Measure, repeats: int = 3) -> tuple[Method, FastestMethod]:
    """Return the candidate with the most tokens per second, from disk or by measurement, and the figures of the choice.

    Rounds over all candidates are interleaved; the median of all rounds after the first, a warm-up, counts.

    Args:
        pair: the models.
        settings: the settings of the measurement.
        measure: runs a method and returns its tokens per second.
        repeats: number of rounds after the warm-up.
    """
    recipes = candidates(pair.draft is not None)
    key = _key(pair, settings)
    figures = _figures_of(recipes)
    record = figures.load(key)
    if record is not None:
        return recipes[record["name"]](), FastestMethod(record["name"], record["tokens_per_second"], measured_now=False)
    methods = {name: make() for name, make in recipes.items()}
    rounds: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(repeats + 1):
        for name, method in methods.items():
            speed = measure(method)
            if number:
                rounds[name].append(speed)
    speeds = {name: round(statistics.median(values), 2) for name, values in rounds.items()}
    best = max(speeds, key=lambda name: speeds[name])
    figures.keep(key, {"name": best, "tokens_per_second": speeds})
    return methods[best], FastestMethod(best, speeds, measured_now=True)


def _figures_of(names: Iterable[str]) -> Figures:
    """Return the stored figures of a choice among these candidates."""
    speeds = RecordFields({name: NumberField() for name in names})
    return Figures("auto", RecordFields({"name": ChoiceField(tuple(names)), "tokens_per_second": speeds}))


def tokens_per_second(run: Callable[[], Sequence[object]]) -> float:
    """Return the speed of `run`, which returns the generated tokens."""
    began = time.perf_counter()
    tokens = run()
    return len(tokens) / (time.perf_counter() - began)


def _key(pair: Pair, settings: Settings) -> list[Any]:
    """Return all inputs of the choice except for the machine and the version of specbeam."""
    models = (pair.known("target_model"), pair.known("draft_model"))
    return [
        [measured.model_key(model) for model in models],
        [measured.weights_key(model) for model in models],  # weights determine acceptance
        _head_key(pair),
        str(pair.draft.settings) if isinstance(pair.draft, SkippingLM) else None,
        [[getattr(lm, "engine", None), rounding_of(lm)] for lm in (pair.target, pair.draft)],
        [_memory_key(lm) for lm in (pair.target, pair.draft)],
        [getattr(settings, name) for name in warper_names()],
        settings.repetition_penalty,
        settings.no_repeat_ngram_size,
        settings.guidance_scale,
        # Without the text of a schema or grammar; otherwise methods would be measured for each of them.
        settings.form_kind and [settings.form_kind, settings.grammar_backend],
    ]


def _memory_key(lm: LM | None) -> list[Any] | None:
    """Return a key of a model's memory: its plan and weights; None without memory."""
    if not isinstance(lm, MemoryLM):
        return None
    return [lm.note, asdict(lm.plan), measured.weights_key(lm.recall)]


def _head_key(pair: Pair) -> list[Any] | None:
    """Return a key of the draft head: its description and weights; None without a head."""
    if not isinstance(pair.draft, HeadLM):
        return None
    return [pair.draft.head.described, measured.weights_key(pair.draft.head), pair.draft.engine]

"""Baselines of the search: the best of several whole texts, and beams of steps of fixed width."""

from pathlib import Path
from typing import Any

from specbeam import Method, Pair
from specbeam.apps.search.grow import GrowingTrees, Wish, check_options, given_seed, require_counts, require_odds
from specbeam.apps.search.tree import OPEN, SearchResult
from specbeam.apps.search.value import Value, as_value
from specbeam.models import as_pair
from specbeam.recipes import resolve

WHOLE = 2**30  # maximum number of tokens of a step that is a whole text


def best_of(
    pair: Pair | str | Path,
    prompts: Any,
    value: "Value | str | Path",
    count: int,
    method: Method | str = "sampling",
    *,
    threshold: float | None = None,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    batch_size: int = 32,
    **options: Any,
) -> list[SearchResult]:
    """Draw `count` whole texts for each prompt, and return the text of largest value; "" if no text is finished.

    Args:
        threshold: texts are drawn one after the other until a value reaches this. None: all are drawn.

    Other arguments and errors are those of `lite_search`.
    """
    check_options(best_of, options)
    require_counts(count=count)
    if threshold is not None:
        require_odds(threshold=threshold)
    # a text is a single step: no text contains this separator
    growth = GrowingTrees(
        as_pair(pair), as_value(value), resolve(method), "\0", None, WHOLE, max_new_tokens, given_seed(seed), batch_size,
        options,
    )  # fmt: skip
    growth.begin(prompts)
    wave = count if threshold is None else 1
    for _ in range(0, count, wave):
        wishes = [Wish(number, 0, wave) for number, result in enumerate(growth.results) if not result.ended]
        if not wishes:
            break
        growth.extend(wishes)
        _end_found(growth, threshold)
    _end_exhausted(growth)
    return growth.checked()  # skips the check of `end`: a text may be cut off without a wrong separator


def step_beams(
    pair: Pair | str | Path,
    prompts: Any,
    value: "Value | str | Path",
    width: int,
    children: int,
    method: Method | str = "sampling",
    *,
    separator: str = "\n",
    threshold: float = 0.8,
    step_tokens: int = 64,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    batch_size: int = 32,
    **options: Any,
) -> list[SearchResult]:
    """Search by beams of steps: continue each of the `width` best nodes of a depth `children` times, then the next depth.

    A search ends at a depth with a finished text whose value reaches the threshold, or without open nodes.

    Other arguments and errors are those of `lite_search`.
    """
    check_options(step_beams, options)
    require_counts(width=width, children=children)
    require_odds(threshold=threshold)
    growth = GrowingTrees(
        as_pair(pair), as_value(value), resolve(method), separator, None, step_tokens, max_new_tokens, given_seed(seed),
        batch_size, options,
    )  # fmt: skip
    growth.begin(prompts)
    depth = 0
    while True:
        wishes = []
        for number, result in enumerate(growth.results):
            if result.ended:
                continue
            live = [place for place, node in enumerate(result.nodes) if node.depth == depth and node.status == OPEN]
            live.sort(key=lambda place: -result.nodes[place].value)
            wishes += [Wish(number, place, children) for place in live[:width]]
        if not wishes:
            break
        growth.extend(wishes)
        _end_found(growth, threshold)
        depth += 1
    _end_exhausted(growth)
    return growth.end()


def _end_found(growth: GrowingTrees, threshold: float | None) -> None:
    """End the searches whose answer reaches the threshold."""
    for result in growth.results:
        if not result.ended and threshold is not None and result.value >= threshold:  # not if it is NaN
            result.ended = "value"


def _end_exhausted(growth: GrowingTrees) -> None:
    """End the remaining searches."""
    for result in growth.results:
        if not result.ended:
            result.ended = "exhausted"

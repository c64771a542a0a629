"""What a search is compared with: the best of several whole texts, and beams of steps of a fixed width."""

import math
from typing import Any

from specbeam.pair import Pair
from specbeam.recipes.catalogue import resolve
from specbeam.recipes.method import Method, require_at_least_one
from specbeam.search.grow import GrowingTrees, Wish, given_seed
from specbeam.search.tree import OPEN, SearchResult
from specbeam.search.value import Value

WHOLE = 2**30  # tokens of a step that is a whole text


def best_of(
    pair: Pair,
    prompts: Any,
    value: Value,
    count: int,
    method: Method | str = "sampling",
    *,
    threshold: float | None = None,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    batch_size: int = 32,
    **options: Any,
) -> list[SearchResult]:
    """Draw `count` whole texts for each prompt, and return the one of largest value.

    Args:
        threshold: texts are drawn one after the other, and the first whose value reaches this is the answer. None: all are
            drawn.
        The others are those of `lite_search`.
    """
    require_at_least_one(count=count)
    # texts are one step: a separator that no text holds
    growth = GrowingTrees(
        pair, value, resolve(method), "\0", None, WHOLE, max_new_tokens, given_seed(seed), batch_size, options
    )  # fmt: skip
    growth.begin(prompts)
    wave = count if threshold is None else 1
    for _ in range(0, count, wave):
        wishes = [Wish(number, 0, wave) for number, result in enumerate(growth.results) if not result.ended]
        growth.extend(wishes)
        for result in growth.results:
            if threshold is not None and result.value >= threshold:
                result.ended = "value"
    return growth.results


def step_beams(
    pair: Pair,
    prompts: Any,
    value: Value,
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
    """Search by beams of steps: continue each of the `width` best beginnings of a depth `children` times, and go deeper.

    A search ends at a depth with a finished text whose value reaches the threshold, or where no beginning is left.

    The arguments are those of `lite_search`.
    """
    require_at_least_one(width=width, children=children)
    growth = GrowingTrees(
        pair, value, resolve(method), separator, None, step_tokens, max_new_tokens, given_seed(seed), batch_size, options
    )  # fmt: skip
    growth.begin(prompts)
    depth = 0
    while True:
        wishes = []
        for number, result in enumerate(growth.results):
            if result.ended or result.value >= threshold:
                continue
            live = [place for place, node in enumerate(result.nodes) if node.depth == depth and node.status == OPEN]
            live.sort(key=lambda place: -result.nodes[place].value)
            wishes += [Wish(number, place, children) for place in live[:width]]
        if not wishes:
            break
        growth.extend(wishes)
        depth += 1
    for result in growth.results:
        if not result.ended:
            is_found = not math.isnan(result.value) and result.value >= threshold
            result.ended = "value" if is_found else "exhausted"
    return growth.results

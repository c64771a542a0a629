"""Baselines of the search: the best of several whole texts, beams of steps of fixed width, and Monte Carlo tree search."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from specbeam import Method, Pair
from specbeam.apps.search.grow import (
    GrowingTrees,
    Wish,
    check_options,
    given_seed,
    is_number,
    require_counts,
    require_odds,
)
from specbeam.apps.search.tree import OPEN, SearchResult
from specbeam.apps.search.value import Value, as_value
from specbeam.doors import require
from specbeam.models import as_pair
from specbeam.recipes import resolve

WHOLE = 2**30  # maximum number of tokens of a step that is a whole text
# Arguments of `lite_search` that say how steps are drawn, with their defaults.
_STEPS: dict[str, Any] = {
    "separator": "\n",
    "step_tokens": 64,
    "max_new_tokens": None,
    "seed": None,
    "batch_size": 32,
}


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

    Takes the other arguments of `lite_search`, and raises its errors.
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
    threshold: float = 0.8,
    **options: Any,
) -> list[SearchResult]:
    """Search by beams of steps: continue each of the `width` best nodes of a depth `children` times, then the next depth.

    With a width that no depth reaches, this is breadth-first search. A search ends at a depth with a finished text whose
    value reaches the threshold, or without open nodes.

    Takes the other arguments of `lite_search`, and raises its errors.
    """
    require_counts(width=width, children=children)
    require_odds(threshold=threshold)
    growth = _trees_of(step_beams, pair, value, method, options)
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


def tree_search(
    pair: Pair | str | Path,
    prompts: Any,
    value: "Value | str | Path",
    simulations: int,
    children: int,
    method: Method | str = "sampling",
    *,
    exploration: float = 1.0,
    threshold: float = 0.8,
    **options: Any,
) -> list[SearchResult]:
    """Search by Monte Carlo tree search (MCTS) with a value function in place of rollouts.

    A simulation descends from the root to a node with fewer than `children` draws, draws one step below it, and adds the
    step's value to all nodes above. At each node it takes the child of largest mean value + `exploration` * sqrt(log(visits
    of the node) / visits of the child), among those below which a step can be drawn. A search ends at the first finished
    text whose value reaches the threshold, after `simulations`, or without such a node.

    Args:
        exploration: weight of the second term, at least 0.

    Takes the other arguments of `lite_search`, and raises its errors.
    """
    require_counts(simulations=simulations, children=children)
    require_odds(threshold=threshold)
    require(is_number(exploration) and exploration >= 0, "exploration", exploration, "a number of at least 0")
    growth = _trees_of(tree_search, pair, value, method, options)
    growth.begin(prompts)
    trees = [_Visits(number, result, children, exploration) for number, result in enumerate(growth.results)]
    for _ in range(simulations):
        going = [tree for tree in trees if not tree.result.ended and tree.can_grow(0)]
        if not going:
            break
        for number, node in growth.extend([Wish(tree.number, tree.leaf(), 1) for tree in going]):
            trees[number].add_value(node)
        _end_found(growth, threshold)
    _end_exhausted(growth)
    return growth.end()


@dataclass
class _Visits:
    """The visits of a Monte Carlo tree search to the nodes of a tree.

    Attributes:
        number: number of the prompt.
        children: maximum number of draws at a node.
        exploration: see `tree_search`.
        counts: number of visits, by node.
        sums: sum of the values that were drawn below a node, or at it.
    """

    number: int
    result: SearchResult
    children: int
    exploration: float
    counts: Counter[int] = field(default_factory=Counter)
    sums: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def can_grow(self, number: int) -> bool:
        """Return whether a step can be drawn at a node, or below it."""
        node = self.result.nodes[number]
        if node.status == OPEN and node.draws < self.children:
            return True
        return any(self.can_grow(child) for child in self.result.children(number))

    def leaf(self) -> int:
        """Return the node at which the next step is drawn."""
        number = 0
        while self.result.nodes[number].draws >= self.children:
            live = [child for child in self.result.children(number) if self.can_grow(child)]
            number = max(live, key=partial(self._bound, number))
        return number

    def _bound(self, parent: int, child: int) -> float:
        """Return the upper bound of a child's value by which it is chosen."""
        mean = self.sums[child] / self.counts[child]
        return mean + self.exploration * math.sqrt(math.log(self.counts[parent]) / self.counts[child])

    def add_value(self, drawn: int) -> None:
        """Add the value of a node that was drawn to its sum and those above; 0 if its step was cut off."""
        value = self.result.nodes[drawn].value
        for number in [0, *self.result.path_to(drawn)]:
            self.counts[number] += 1
            self.sums[number] += 0.0 if math.isnan(value) else value


def _trees_of(
    search: Callable[..., Any], pair: Pair | str | Path, value: "Value | str | Path", method: Method | str, given: Any
) -> GrowingTrees:
    """Return the trees of a search by steps without a budget.

    Args:
        given: the arguments of `_STEPS`, and further options of `generate`, by name.
    """
    steps = {name: given.get(name, default) for name, default in _STEPS.items()}
    options = {name: chosen for name, chosen in given.items() if name not in steps}
    check_options(search, options, tuple(_STEPS))
    seed = given_seed(steps.pop("seed"))
    return GrowingTrees(
        as_pair(pair), as_value(value), resolve(method), budget=None, seed=seed, options=options, **steps
    )


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

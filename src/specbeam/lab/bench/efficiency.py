"""Block efficiency at a fixed budget of scored nodes: tokens per pass of the target (the protocol of RSD).

A comparison of trees at equal depth favours wide trees, but the target pays for nodes. So each recipe has several shapes
that fit the budget. The best shape is chosen on separate prompts, because the best of several figures on the reported
prompts would be biased upwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import specbeam as sb
from specbeam import Method, Pair, turns_of
from specbeam.doors import Prompt
from specbeam.errors import BadPrompt, one_of
from specbeam.lab.bench.acceptance import acceptance
from specbeam.lab.bench.tables import colours_of, finish_figure, markdown_table, new_figure, put_legend_right
from specbeam.lab.evaluate.intervals import ratio_interval
from specbeam.lab.words import BUDGETS
from specbeam.models.heads import Head
from specbeam.recipes import paper_of, with_guess

BRANCHING = {
    5: [(2, 1), (5,), (1, 2, 1)],
    10: [(2, 2, 1), (2, 1, 1, 1, 1), (5, 1)],
    21: [(3, 2, 2), (3, 2, 1, 1), (3, *[1] * 6)],
    30: [(2, 2, 2, 2), (3, 3, 1, 1), (3, *[1] * 9)],
}
BEAMS = {
    5: [(1, 5), (2, 2)],
    10: [(2, 5), (3, 3)],
    21: [(3, 7), (4, 5), (7, 3)],
    30: [(3, 10), (5, 6), (6, 5)],
}


@dataclass(frozen=True)
class TreeCell:
    """The efficiency of one recipe at one budget of nodes, with the shape that was best on other prompts."""

    recipe: str
    budget: int
    shape: str
    efficiency: float  # emitted tokens per pass of the target
    low: float  # lower end of the 95 % interval of the efficiency, by bootstrap over prompts
    high: float
    nodes: float  # mean number of nodes scored per pass of the target
    draft_passes: float  # mean number per pass of the target


def contenders(
    budget: int, head: Head | None = None, odds: Sequence[float] | None = None
) -> dict[str, dict[str, Callable[[], Method]]]:
    """Return the shapes of each recipe, as recipe -> shape -> function that makes the method.

    No shape has more nodes than the budget. A recipe may have no shape that fits.

    Args:
        head: the draft head of the pair, which adds the recipe of its paper; `multi_draft` needs a draft model.
        odds: acceptance by rank, for `sequoia`'s tree; None: the recipe's default.
    """
    chains = [length for length in (budget, 8, 5) if length <= budget]
    counts = BRANCHING[budget]
    beams = BEAMS[budget]
    depth = 2 if budget < 14 else 3
    half = min(budget // 2, 8)
    nodes = f"{budget} nodes"
    fixed: dict[str, Any] = {"controller": "fixed"}  # turns never skip drafting, because shapes are compared
    best_and_one = partial(sb.traversal, children="best_and_one")
    hub: dict[str, Callable[[], Method]] = {f"depth {depth}": partial(sb.spechub, depth, **fixed)}
    found: dict[str, dict[str, Callable[[], Method]]] = {
        "speculative_sampling": _each(sb.speculative_sampling, chains, fixed),
        "block_verification": _each(sb.block_verification, chains, fixed),
        "specinfer": _each(sb.specinfer, counts, fixed),
        "rsd_c": _each(sb.rsd_c, counts, fixed),
        "rsd_s": {f"{width} x {depth}": partial(sb.rsd_s, width, depth, **fixed) for width, depth in beams},
        "sequoia": {nodes: partial(sb.sequoia, budget, 8, odds, cost=None, **fixed)},
        "spechub": hub if budget > 5 else {},
        "traversal": _each(sb.traversal, counts, fixed),
        "traversal, best and one": _each(best_and_one, counts, fixed),
        "multi_draft": {f"2 x {half}": partial(sb.multi_draft, [], (1,) * half, **fixed)},
        "opt_tree": {nodes: partial(sb.opt_tree, budget, 8, **fixed)},
        "dyspec": {nodes: partial(sb.dyspec, budget, 8, **fixed)},
        "gsd": {nodes: partial(sb.gsd, 5, 3, 0, budget, **fixed)},
        "propd": {nodes: partial(sb.propd, budget, 6, **fixed)},
        "prompt_lookup": {f"{budget}": partial(sb.prompt_lookup, budget, **fixed)},
        "suffix_match": {f"{budget}": partial(sb.suffix_match, budget, **fixed)},
        "token_recycling": {nodes: partial(sb.token_recycling, 6, None, 8, budget, **fixed)},
    }
    if head is not None:
        del found["multi_draft"]
        found |= of_paper(paper_of(head), budget)
    return found


def _each(make: Callable[..., Method], sizes: Sequence[Any], fixed: dict[str, Any]) -> dict[str, Callable[[], Method]]:
    """Return a shape for each value of the recipe's first argument."""
    return {f"{size}": partial(make, size, **fixed) for size in sizes}


def of_paper(name: str, budget: int) -> dict[str, dict[str, Callable[[], Method]]]:
    """Return the shapes of the recipe for a head, by its name; {} if there is no such recipe."""
    trees: dict[str, tuple[Callable[..., Method], int]] = {
        "eagle": (sb.eagle, 8),
        "fspad": (sb.fspad, 8),
        "mtp": (partial(sb.mtp, top=10), 8),
        "medusa": (sb.medusa, 4),
        "chimera": (sb.chimera, 4),
        "bita": (sb.bita, 3),
        "hidden_transfer": (sb.hidden_transfer, 3),
    }
    if name in trees:
        make, depth = trees[name]
        return {name: {f"{budget} nodes": partial(make, budget, depth, controller="fixed")}}
    if name == "specdiff":
        return {name: {f"{min(budget, 5)}": partial(sb.specdiff, 1, min(budget, 5), controller="fixed")}}
    if name == "eesd":
        return {name: {f"{min(budget, 8)}": partial(sb.eesd, min(budget, 8))}}
    return {}


def efficiency(
    pair: Pair,
    prompts: Sequence[Prompt],
    choosing: Sequence[Prompt],
    budgets: Sequence[int] = BUDGETS,
    seed: int = 0,
    on_progress: Callable[[TreeCell], None] | None = None,
    **options: Any,
) -> list[TreeCell]:
    """Measure each recipe at each budget, with the shape that is best on other prompts; return a cell per recipe and budget.

    Shapes that fit a smaller budget compete in the larger budgets too.

    Args:
        prompts: the reported prompts.
        choosing: the prompts on which shapes are chosen, and acceptance by rank is measured for the trees of `sequoia`. None
            of them may be among `prompts`.
        budgets: numbers of nodes scored per pass; keys of `BRANCHING`.
        on_progress: called with each cell as soon as it is measured.
        options: as for `specbeam.generate`.

    Raises `BadPrompt` if either list of prompts is empty or both share a prompt, and `BadSetting` for a budget without
    shapes.
    """
    for budget in budgets:
        one_of("budget", str(budget), [*map(str, BUDGETS)])
    _check_apart(prompts, choosing)
    head = getattr(pair.draft, "head", None)
    by_rank = acceptance(pair, choosing, seed=seed, **options)
    odds = with_guess(by_rank.odds, by_rank.nodes)
    measure = partial(_cell, pair, seed=seed, options=options)
    cells = list[TreeCell]()
    reported = dict[tuple[str, str], TreeCell]()
    shapes = dict[str, dict[str, Callable[[], Method]]]()  # shapes of each recipe, of all budgets so far
    tried = dict[tuple[str, str], float]()  # efficiency on the prompts for choosing
    for budget in sorted(budgets):
        for recipe, more in contenders(budget, head, odds).items():
            known = shapes.setdefault(recipe, {})
            known |= {shape: make for shape, make in more.items() if shape not in known}
            if not known:
                continue
            best = next(iter(known))
            if len(known) > 1:
                for shape, make in known.items():
                    if (recipe, shape) not in tried:
                        tried[recipe, shape] = measure(choosing, recipe, budget, shape, make()).efficiency
                best = max(known, key=lambda shape: tried[recipe, shape])
            if (recipe, best) not in reported:
                reported[recipe, best] = measure(prompts, recipe, budget, best, known[best]())
            cells.append(replace(reported[recipe, best], budget=budget))
            if on_progress is not None:
                on_progress(cells[-1])
    return cells


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to report, and the prompts to choose shapes on: every second one.

    Raises `BadPrompt` unless there are at least two different prompts. Repeated prompts count once.
    """
    different = list({str(prompt): prompt for prompt in prompts}.values())
    if len(different) < 2:
        raise BadPrompt(
            f"the number of different prompts is {len(different)}; at least 2 are needed, as shapes are chosen on separate "
            "prompts"
        )
    return different[1::2], different[::2]


def _check_apart(prompts: Sequence[Prompt], choosing: Sequence[Prompt]) -> None:
    """Raise `BadPrompt` if either list of prompts is empty, or both share a prompt."""
    if not prompts or not choosing:
        raise BadPrompt(
            f"there are {len(prompts)} prompts to report and {len(choosing)} to choose shapes on; give some of both"
        )
    both = {*map(str, prompts)} & {*map(str, choosing)}
    if both:
        raise BadPrompt(f"{len(both)} prompts are in both lists, such as {min(both)!r}; keep the lists apart")


def _cell(
    pair: Pair,
    prompts: Sequence[Prompt],
    recipe: str,
    budget: int,
    shape: str,
    method: Method,
    *,
    seed: int,
    options: dict[str, Any],
) -> TreeCell:
    """Measure one recipe with one shape."""
    rows = []
    for prompt in prompts:
        turns = list(turns_of(pair, prompt, method, seed=seed, **options))
        emitted = sum(len(turn.verdict.steps) for turn in turns)
        nodes = sum(turn.forest.size - 1 for turn in turns)
        rows.append((emitted, len(turns), nodes, sum(turn.shape.depth for turn in turns)))
    table = np.array(rows, dtype=float)
    emitted, passes, nodes, layers = table.sum(0)
    low, high = ratio_interval(table[:, 0], table[:, 1])
    return TreeCell(
        recipe,
        budget,
        shape,
        efficiency=emitted / passes,
        low=low,
        high=high,
        nodes=nodes / passes,
        draft_passes=layers / passes,
    )


def as_markdown(cells: Sequence[TreeCell]) -> str:
    """Return a table with a row per recipe and a column per budget."""
    budgets = sorted({cell.budget for cell in cells})
    rows = []
    for recipe in dict.fromkeys(cell.recipe for cell in cells):
        row = {cell.budget: cell for cell in cells if cell.recipe == recipe}
        rows.append([f"`{recipe}`", *(_text_of(row.get(budget)) for budget in budgets)])
    return markdown_table(["recipe", *(f"{budget} nodes" for budget in budgets)], rows)


def _text_of(cell: TreeCell | None) -> str:
    if cell is None:
        return ""
    return f"**{cell.efficiency:.2f}** ({cell.low:.2f} to {cell.high:.2f}) {cell.shape}"


def plot(cells: Sequence[TreeCell], path: str | Path) -> None:
    """Write a plot of efficiency against budget to `path`, with a line per recipe and 95 % intervals."""
    figure, axes = new_figure(1, 1, figsize=(9, 6))
    names = list(dict.fromkeys(cell.recipe for cell in cells))
    colours = colours_of("tab20")
    for place, recipe in enumerate(names):
        row = sorted((cell for cell in cells if cell.recipe == recipe), key=lambda cell: cell.budget)
        x = np.array([cell.budget for cell in row]) + 0.12 * (place - len(names) / 2)
        y = np.array([cell.efficiency for cell in row])
        below = y - [cell.low for cell in row]
        above = [cell.high for cell in row] - y
        axes.errorbar(
            x,
            y,
            yerr=np.maximum([below, above], 0),
            marker="o",
            capsize=2,
            label=recipe,
            color=colours(place % 20),
            lw=1.2,
        )
    axes.set_xlabel("nodes scored per pass of the target (budget)")
    axes.set_ylabel("tokens per pass of the target")
    axes.set_xticks(sorted({cell.budget for cell in cells}))
    axes.grid(alpha=0.3)
    put_legend_right(axes)
    finish_figure(figure, path)

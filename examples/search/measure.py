"""Compare LiteSearch with other searches and with the best of n texts: problems solved against tokens drawn.

python train.py   --out MODEL
python measure.py --model MODEL --plot litesearch.png
python measure.py --model CHAT_MODEL --task sums

Every search is led by the exact value of the task: whether the target of the game can still be reached, or the sums so far
are right; or, with --value, by a learnt one of train_value.py.
"""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from task import Task, TaskName, models_in, task_of

import specbeam as sb
from specbeam.apps.search.baselines import best_of, step_beams, tree_search
from specbeam.apps.search.value import Value, classifier_value
from specbeam.doors.prompts import spread
from specbeam.lab.evaluate.intervals import ratio_interval

Search = Callable[..., list[sb.SearchResult]]


def contenders(task: Task, method: str) -> dict[str, dict[str, Search]]:
    """Return the searches, by family and setting."""
    lite = partial(sb.lite_search, budget=2000, children=30, step_tokens=task.step_tokens, method=method)
    beams = partial(step_beams, step_tokens=task.step_tokens, method=method)
    best = partial(best_of, method=method)
    tree = partial(tree_search, step_tokens=task.step_tokens, method=method)
    confidences = (0.5, 0.8, 0.9, 0.97, 0.999, 0.99999)
    return {
        "LiteSearch, step by step": {f"{c:g}": partial(lite, confidence=c) for c in confidences},
        "LiteSearch, all draws of a node": {f"{c:g}": partial(lite, confidence=c, expand="batch") for c in confidences},
        "beams of steps": {
            f"{width} x {children}": partial(beams, width=width, children=children)
            for width, children in ((1, 2), (1, 4), (2, 4), (2, 8), (4, 8))
        },
        "breadth-first search": {f"{children}": partial(beams, width=1000, children=children) for children in (2, 3)},
        "Monte Carlo tree search": {
            f"{simulations} with {children}": partial(tree, simulations=simulations, children=children)
            for simulations, children in ((4, 2), (8, 3), (16, 4), (32, 6), (64, 8))
        },
        "best of n": {f"{n}": partial(best, count=n) for n in (1, 2, 4, 8, 16)},
        "best of n, until one is right": {f"{n}": partial(best, count=n, threshold=0.8) for n in (2, 4, 8, 16, 32)},
    }


@dataclass(frozen=True)
class Cell:
    """What one search has cost and reached, with 95 % intervals by bootstrap over problems."""

    family: str
    setting: str
    solved: float
    low: float
    high: float
    tokens: float  # per problem
    tokens_low: float
    tokens_high: float
    passes: float  # of the target, per problem


def cell(
    pair: sb.Pair, prompts: list[str], task: Task, value_of: Value, family: str, setting: str, search: Search, seed: int
) -> Cell:
    """Run one search on all problems."""
    options = {"max_new_tokens": task.max_new_tokens, "temperature": task.temperature}
    results = search(pair, prompts, value_of, seed=seed, **options)
    solved = np.array([task.is_solved(result.prompt_text + result.text) for result in results], dtype=float)
    tokens = np.array([result.spent for result in results], dtype=float)
    passes = np.array([result.target_passes for result in results], dtype=float)
    ones = np.ones(len(results))
    low, high = ratio_interval(solved, ones)
    tokens_low, tokens_high = ratio_interval(tokens, ones)
    return Cell(
        family, setting, solved.mean(), low, high, tokens.mean(), tokens_low, tokens_high, passes.mean()
    )  # fmt: skip


def plot(cells: list[Cell], path: Path) -> None:
    """Write a plot of games solved against tokens, with a line per family."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    for family in dict.fromkeys(cell.family for cell in cells):
        row = sorted((one for one in cells if one.family == family), key=lambda one: one.tokens)
        x = np.array([one.tokens for one in row])
        y = np.array([one.solved for one in row])
        bars = np.array([[one.solved - one.low for one in row], [one.high - one.solved for one in row]])
        axes.errorbar(x, y, yerr=np.maximum(bars, 0), marker="o", capsize=2, lw=1.3, label=family)
    axes.set_xscale("log")
    axes.set_xlabel("tokens drawn per problem")
    axes.set_ylabel("share of problems solved")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(
    model: Annotated[Path, typer.Option(help="Folder that train.py has written, or of any model.")],
    task_name: Annotated[TaskName, typer.Option("--task", help="The game, or sums for chat models.")] = "countdown",
    games: Annotated[int, typer.Option(help="Number of problems.")] = 120,
    seed: Annotated[int, typer.Option(help="Seed of problems and searches; training has used 0.")] = 1,
    learnt: Annotated[
        Path | None, typer.Option("--value", help="Folder that train_value.py has written; by default the exact value.")
    ] = None,
    settings: Annotated[int, typer.Option(help="Maximum number of settings of each family, evenly spaced.")] = 100,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Also write a plot to this file.")] = None,
) -> None:
    """Print a line of JSON for each search."""
    task = task_of(task_name)
    target, draft = models_in(model)
    pair = sb.load(target, draft)
    prompts = task.prompts(random.Random(10_000 + seed), games, pair.tokenizer)
    method = "speculative_sampling" if draft else "sampling"

    def exact(texts: list[str]) -> list[float]:
        return [task.value(text) for text in texts]

    value_of = exact if learnt is None else classifier_value(learnt, batch_size=256)
    cells = []
    for family, searches in contenders(task, method).items():
        for setting, search in spread([*searches.items()], settings):
            cells.append(cell(pair, prompts, task, value_of, family, setting, search, seed))
            print(json.dumps(asdict(cells[-1])), flush=True)
    if plot_file is not None:
        plot(cells, plot_file)


if __name__ == "__main__":
    typer.run(main)

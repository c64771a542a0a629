"""The comparison of methods as a table and as a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specbeam.doors.render import as_label, save_figure
from specbeam.lab.bench.method_figures import Figure, MethodLine

HEADS = (
    "output perplexity", "against sampling", None, "ms per token", "J per token", "tokens per target pass",
    "against speculative", "tokens", "repeated",
)  # fmt: skip


def as_markdown(lines: Sequence[MethodLine]) -> str:
    """Return a table per task, with 95 % intervals. A star marks methods that change the law of the output."""
    tables = []
    for task in dict.fromkeys(line.task for line in lines):
        rows = [line for line in lines if line.task == task]
        heads = [task, *(head or rows[0].metric for head in HEADS)]
        tables.append("\n".join(["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|", *map(_row, rows)]))
    return "\n\n".join(tables)


def _row(line: MethodLine) -> str:
    """Return the row of a method."""
    cells = (
        line.method + ("" if line.lossless else " *"),
        _with_interval(line.perplexity, 2),
        _change(line.perplexity_ratio),
        _with_interval(line.quality, 1, 100 if line.metric == "exact match" else 1),
        _with_interval(line.seconds_per_token, 1, 1000),
        "no counter" if line.joules_per_token is None else _with_interval(line.joules_per_token, 2),
        _with_interval(line.tokens_per_pass, 2),
        _change(line.tokens_per_pass_ratio),
        f"{line.tokens_per_output:.1f}",
        f"{line.repeated:.1%}",
    )
    return "| " + " | ".join(cells) + " |"


def _with_interval(figure: Figure, digits: int, scale: float = 1) -> str:
    value, low, high = (scale * x for x in (figure.value, figure.low, figure.high))
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _change(ratio: Figure | None) -> str:
    """Return a ratio with its interval as changes in percent, "" if there is none."""
    if ratio is None:
        return ""
    return f"{ratio.value - 1:+.0%} ({ratio.low - 1:+.0%} to {ratio.high - 1:+.0%})"


def plot(lines: Sequence[MethodLine], path: Path) -> None:
    """Write a plot of perplexity and quality of each task against time, and against energy if all methods have it.

    Open marks are methods that change the law of the output.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(line.task for line in lines))
    costs = [("ms per token", "seconds_per_token", 1000)]
    if all(line.joules_per_token is not None for line in lines):
        costs.append(("joules per token", "joules_per_token", 1))
    names = list(dict.fromkeys(line.method for line in lines))
    colours = {name: pyplot.get_cmap("tab20")(place % 20) for place, name in enumerate(names)}
    panels = [(task, cost) for task in tasks for cost in costs]
    figure, every = pyplot.subplots(len(panels), 2, figsize=(10, 3.6 * len(panels) + 1), squeeze=False)
    for (task, (label, cost, scale)), pair in zip(panels, every, strict=True):
        rows = [line for line in lines if line.task == task]
        for axes, value, name in zip(
            pair, ("perplexity", "quality"), ("output perplexity", rows[0].metric), strict=True
        ):
            _points(axes, rows, cost, scale, value, colours)
            axes.set(xlabel=label, ylabel=name)
            axes.set_title(as_label(task), fontsize=10)
    handles, labels = every[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, title="open marks, *: changes the law of the output", loc="lower center", ncol=4, fontsize=9,
        frameon=False,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 1.1 / figure.get_figheight(), 1, 1))
    save_figure(figure, path)
    pyplot.close(figure)


def _points(
    axes: Any, rows: Sequence[MethodLine], cost: str, scale: float, value: str, colours: dict[str, Any]
) -> None:
    for line in rows:
        x = getattr(line, cost)
        y = getattr(line, value)
        axes.errorbar(
            scale * x.value, y.value,
            xerr=[[max(scale * (x.value - x.low), 0)], [max(scale * (x.high - x.value), 0)]],
            yerr=[[max(y.value - y.low, 0)], [max(y.high - y.value, 0)]],
            marker="o", capsize=2, lw=1, color=colours[line.method], label=line.method + ("" if line.lossless else " *"),
            markerfacecolor=colours[line.method] if line.lossless else "white",
        )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.set_xlim(left=0)

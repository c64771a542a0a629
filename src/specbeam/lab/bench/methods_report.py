"""The comparison of methods as a table and as a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specbeam.doors import as_label
from specbeam.lab.bench.method_figures import Figure, MethodLine
from specbeam.lab.bench.tables import colours_of, finish_figure, interval_text, markdown_table, new_figure

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
        tables.append(markdown_table(heads, [_row(line) for line in rows]))
    return "\n\n".join(tables)


def _row(line: MethodLine) -> tuple[str, ...]:
    """Return the row of a method."""
    joules = "no counter"
    if line.joules_per_token is not None:
        joules = _with_interval(line.joules_per_token, 2)
    scale = 100 if line.metric == "exact match" else 1
    return (
        _name(line),
        _with_interval(line.perplexity, 2),
        _change(line.perplexity_ratio),
        _with_interval(line.quality, 1, scale),
        _with_interval(line.seconds_per_token, 1, 1000),
        joules,
        _with_interval(line.tokens_per_pass, 2),
        _change(line.tokens_per_pass_ratio),
        f"{line.tokens_per_output:.1f}",
        f"{line.repeated:.1%}",
    )


def _name(line: MethodLine) -> str:
    return line.method if line.lossless else f"{line.method} *"


def _with_interval(figure: Figure, digits: int, scale: float = 1) -> str:
    return interval_text(scale * figure.value, scale * figure.low, scale * figure.high, f".{digits}f")


def _change(ratio: Figure | None) -> str:
    """Return a ratio with its interval as changes in percent, "" without a ratio."""
    if ratio is None:
        return ""
    return interval_text(ratio.value - 1, ratio.low - 1, ratio.high - 1, "+.0%")


def plot(lines: Sequence[MethodLine], path: Path) -> None:
    """Write a plot of perplexity and quality of each task against time, and against energy if all methods have it.

    Open marks are methods that change the law of the output.
    """
    tasks = list(dict.fromkeys(line.task for line in lines))
    costs = [("ms per token", "seconds_per_token", 1000)]
    if all(line.joules_per_token is not None for line in lines):
        costs.append(("joules per token", "joules_per_token", 1))
    names = list(dict.fromkeys(line.method for line in lines))
    panels = [(task, cost) for task in tasks for cost in costs]
    figure, every = new_figure(len(panels), 2, figsize=(10, 3.6 * len(panels) + 1), squeeze=False)
    palette = colours_of("tab20")
    colours = {name: palette(place % 20) for place, name in enumerate(names)}
    for (task, (label, cost, scale)), pair in zip(panels, every, strict=True):
        rows = [line for line in lines if line.task == task]
        names_of_values = {"perplexity": "output perplexity", "quality": rows[0].metric}
        for axes, (value, name) in zip(pair, names_of_values.items(), strict=True):
            _points(axes, rows, cost, scale, value, colours)
            axes.set(xlabel=label, ylabel=name)
            axes.set_title(as_label(task), fontsize=10)
    handles, labels = every[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, title="open marks, *: changes the law of the output", loc="lower center", ncol=4, fontsize=9,
        frameon=False,
    )  # fmt: skip
    finish_figure(figure, path, rect=(0, 1.1 / figure.get_figheight(), 1, 1))


def _points(
    axes: Any, rows: Sequence[MethodLine], cost: str, scale: float, value: str, colours: dict[str, Any]
) -> None:
    for line in rows:
        x = getattr(line, cost)
        y = getattr(line, value)
        colour = colours[line.method]
        axes.errorbar(
            scale * x.value, y.value, xerr=_bars(x, scale), yerr=_bars(y, 1), marker="o", capsize=2, lw=1, color=colour,
            label=_name(line), markerfacecolor=colour if line.lossless else "white",
        )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.set_xlim(left=0)


def _bars(figure: Figure, scale: float) -> list[list[float]]:
    """Return the lengths of the error bars below and above a figure."""
    below = max(scale * (figure.value - figure.low), 0)
    above = max(scale * (figure.high - figure.value), 0)
    return [[below], [above]]

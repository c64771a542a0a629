"""Tables of figures as Markdown, and plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specbeam.doors import save_figure
from specbeam.lab.bench.speed import Spread


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = []
    for cells in (heads, ["---"] * len(heads), *rows):
        text = " | ".join(cells)
        lines.append(f"| {text} |")
    return "\n".join(lines)


def spread_text(spread: Spread, digits: int, separator: str = "") -> str:
    """Return the median of a spread with the smallest and the largest value, or the value alone if all are equal.

    Args:
        digits: number of decimals.
        separator: between thousands.
    """
    form = f"{separator}.{digits}f"
    if spread.low == spread.high:
        return f"{spread.median:{form}}"
    return interval_text(spread.median, spread.low, spread.high, form)


def interval_text(value: float, low: float, high: float, form: str) -> str:
    """Return a value with its interval, each in a format of Python."""
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def new_figure(rows: int, columns: int, **settings: Any) -> Any:
    """Return a figure of matplotlib and its axes, drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, **settings)


def colours_of(name: str) -> Any:
    """Return a colour map of matplotlib."""
    from matplotlib import pyplot

    return pyplot.get_cmap(name)


def put_legend_right(axes: Any) -> None:
    """Put the legend to the right of the axes."""
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def finish_figure(figure: Any, path: str | Path, **layout: Any) -> None:
    """Lay a figure out, write it to `path` and free it."""
    from matplotlib import pyplot

    figure.tight_layout(**layout)
    save_figure(figure, path)
    pyplot.close(figure)

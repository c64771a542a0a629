"""The costs of passes as tables, as records and as a plot."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specbeam.errors import counted
from specbeam.lab.bench.passes import Fits, PassCell, PassPlan
from specbeam.lab.bench.speed import Spread
from specbeam.lab.bench.tables import (
    colours_of,
    finish_figure,
    markdown_table,
    new_figure,
    put_legend_right,
    spread_text,
)


def as_records(cells: Sequence[PassCell], fitted: Fits) -> list[dict[str, Any]]:
    """Return a record per cell, then a record per fitted line, as dictionaries for JSON."""
    records = [{"record": "cell"} | dataclasses.asdict(cell) for cell in cells]
    for length, fit in fitted.by_length.items():
        records.append({"record": "ms by rows", "length": length} | dataclasses.asdict(fit))
    if fitted.row is not None:
        records.append({"record": "ms of a row by length"} | dataclasses.asdict(fitted.row))
    for beams, fit in fitted.by_beams.items():
        records.append({"record": "ms by length", "beams": beams} | dataclasses.asdict(fit))
    return records


def as_markdown(cells: Sequence[PassCell], fitted: Fits, plan: PassPlan) -> str:
    """Return tables of passes by rows, of the lines fitted to them, of steps of beams, and of the tokens they store.

    Times are medians of the rounds, with the smallest and the largest round.
    """
    at = {(cell.length, cell.rows): cell for cell in cells}
    heads = [f"{length} cached" for length in plan.lengths]
    sizes = []
    for rows in plan.rows:
        costs = [_spread(at[length, rows].pass_ms) for length in plan.lengths]
        sizes.append([str(rows), *costs])
    blocks = [markdown_table(["ms of a pass, by rows", *heads], sizes), *_lines(fitted)]
    turns = []
    stored = []
    for beams in plan.beams:
        row = [at[length, beams] for length in plan.lengths]
        fit = fitted.by_beams.get(beams)
        slope = "" if fit is None else f"{1e3 * fit.slope:.2f}"
        turns.append([counted(beams, "beam"), *(_spread(cell.turn_ms) for cell in row), slope])
        stored.append([counted(beams, "beam"), *(f"{cell.kv_tokens:,} ({cell.kv_mb:,.0f} MB)" for cell in row)])
    if plan.beams:
        blocks.append(markdown_table(["ms of a pass and reordering", *heads, "µs per cached token"], turns))
        blocks.append(markdown_table(["KV tokens stored", *heads], stored))
    return "\n\n".join(blocks)


def _lines(fitted: Fits) -> list[str]:
    """Return a table of the lines by rows and a sentence on the cost of a row; nothing if there are no such lines."""
    if not fitted.by_length:
        return []
    rows = [
        [f"{length}", f"{fit.start:.2f}", f"{fit.knee:.1f}", f"{fit.slope:.3f}", f"{fit.r2:.4f}"]
        for length, fit in fitted.by_length.items()
    ]
    blocks = [markdown_table(["cached tokens", "ms up to the knee", "knee, rows", "ms per further row", "R²"], rows)]
    if fitted.row is not None:
        blocks.append(
            f"A row beyond the knee costs {fitted.row.start:.3f} ms, and {1e3 * fitted.row.slope:.3f} ms more per 1,000 "
            f"cached tokens (R² {fitted.row.r2:.3f})."
        )
    return blocks


def _spread(spread: Spread) -> str:
    if spread.median < 10:
        return spread_text(spread, 2, ",")
    if spread.median < 100:
        return spread_text(spread, 1, ",")
    return spread_text(spread, 0, ",")


def plot(cells: Sequence[PassCell], fitted: Fits, plan: PassPlan, path: Path) -> None:
    """Write a plot with two panels to `path`.

    The left one shows the time of a pass against its rows for each length, with the fitted lines. The right one shows
    the time of a turn against the length for each number of beams.
    """
    figure, (left, right) = new_figure(1, 2, figsize=(14, 5))
    colours = colours_of("viridis")
    colours_of_beams = colours_of("tab10")
    for place, length in enumerate(plan.lengths):
        row = [cell for cell in cells if cell.length == length and cell.rows in plan.rows]
        colour = colours(0.9 - 0.9 * place / max(len(plan.lengths) - 1, 1))
        _points(left, plan.rows, [cell.pass_ms for cell in row], colour, "o", "none", f"{length:,} tokens")
        if length in fitted.by_length:
            fit = fitted.by_length[length]
            bends = sorted({plan.rows[0], fit.knee, plan.rows[-1]})
            left.plot(bends, [fit.at(rows) for rows in bends], color=colour, lw=1)
    left.set(xlabel="rows of a pass", ylabel="ms per pass", xlim=(0, None), ylim=(0, None))
    left.legend(title="in the cache; lines: fits", fontsize=8, title_fontsize=8)
    for place, beams in enumerate(plan.beams):
        row = [cell for cell in cells if cell.rows == beams]
        turns = [cell.turn_ms for cell in row]
        _points(right, plan.lengths, turns, colours_of_beams(place), "o", "-", counted(beams, "beam"))
    right.set(xlabel="tokens in the cache", ylabel="ms per pass and reordering", xscale="log", yscale="log")
    right.set_xticks(plan.lengths, [f"{length:,}" for length in plan.lengths])
    right.minorticks_off()
    put_legend_right(right)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    finish_figure(figure, path)


def _points(
    axes: Any, x: Sequence[int], spreads: Sequence[Spread], colour: Any, marker: str, style: str, label: str
) -> None:
    """Draw spreads as error bars."""
    medians = [spread.median for spread in spreads]
    below = [spread.median - spread.low for spread in spreads]
    above = [spread.high - spread.median for spread in spreads]
    axes.errorbar(
        x, medians, yerr=[below, above],
        marker=marker, ms=4, capsize=2, lw=1.2, elinewidth=0.8, ls=style, color=colour, label=label,
    )  # fmt: skip

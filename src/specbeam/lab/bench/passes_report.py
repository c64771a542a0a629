"""The costs of passes as tables, as records and as a plot."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specbeam.lab.bench.passes import OURS, THEIRS, Fits, PassCell, PassPlan
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
    for (engine, beams), fit in fitted.by_beams.items():
        records.append({"record": "ms by length", "engine": engine, "beams": beams} | dataclasses.asdict(fit))
    return records


def as_markdown(cells: Sequence[PassCell], fitted: Fits, plan: PassPlan) -> str:
    """Return tables of passes by rows, of the lines fitted to them, of steps of beams, and of the tokens they store.

    Times are medians of the rounds, with the smallest and the largest round.
    """
    at = {(cell.engine, cell.length, cell.rows): cell for cell in cells}
    heads = [f"{length} cached" for length in plan.lengths]
    sizes = []
    for rows in plan.rows:
        costs = [_spread(at[OURS, length, rows].pass_ms) for length in plan.lengths]
        sizes.append([str(rows), *costs])
    blocks = [markdown_table(["ms of a pass, by rows", *heads], sizes), *_lines(fitted)]
    if plan.beams:
        turns = _beams(at, plan, lambda cell: _spread(cell.turn_ms) or f"not made, {cell.kv_mb / 1e3:.1f} GB")
        for row, key in zip(turns, _order(plan), strict=True):
            fit = fitted.by_beams.get(key)
            row.append("" if fit is None else f"{1e3 * fit.slope:.2f}")
        blocks.append(markdown_table(["ms of a pass and reordering", *heads, "µs per cached token"], turns))
        stored = _beams(at, plan, lambda cell: f"{cell.kv_tokens:,} ({cell.kv_mb:,.0f} MB)")
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


def _order(plan: PassPlan) -> list[tuple[str, int]]:
    return [(engine, beams) for beams in plan.beams for engine in (OURS, THEIRS)]


def _beams(
    at: dict[tuple[str, int, int], PassCell], plan: PassPlan, text_of: Callable[[PassCell], str]
) -> list[list[str]]:
    """Return a row per number of beams and engine, with a text per length."""
    rows = []
    for engine, beams in _order(plan):
        texts = [text_of(at[engine, length, beams]) for length in plan.lengths]
        rows.append([_label(engine, beams), *texts])
    return rows


def _label(engine: str, beams: int) -> str:
    return f"{engine}, {beams} beam{'s' * (beams > 1)}"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return ""
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
        ours = [cell for cell in cells if cell.engine == OURS and cell.length == length]
        row = [cell for cell in ours if cell.rows in plan.rows]
        colour = colours(0.9 - 0.9 * place / max(len(plan.lengths) - 1, 1))
        _points(left, plan.rows, [cell.pass_ms for cell in row], colour, "o", "none", f"{length:,} tokens")
        if length in fitted.by_length:
            fit = fitted.by_length[length]
            bends = sorted({plan.rows[0], fit.knee, plan.rows[-1]})
            left.plot(bends, [fit.at(rows) for rows in bends], color=colour, lw=1)
    left.set(xlabel="rows of a pass", ylabel="ms per pass", xlim=(0, None), ylim=(0, None))
    left.legend(title="in the cache; lines: fits", fontsize=8, title_fontsize=8)
    for engine, beams in _order(plan):
        row = [cell for cell in cells if (cell.engine, cell.rows) == (engine, beams)]
        colour = colours_of_beams(plan.beams.index(beams))
        style = "-" if engine == OURS else "--"
        _points(right, plan.lengths, [cell.turn_ms for cell in row], colour, "o", style, _label(engine, beams))
    right.set(xlabel="tokens in the cache", ylabel="ms per pass and reordering", xscale="log", yscale="log")
    right.set_xticks(plan.lengths, [f"{length:,}" for length in plan.lengths])
    right.minorticks_off()
    put_legend_right(right)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    finish_figure(figure, path)


def _points(
    axes: Any, x: Sequence[int], spreads: Sequence[Spread | None], colour: Any, marker: str, style: str, label: str
) -> None:
    """Draw the spreads that are known as error bars."""
    places = [place for place, spread in zip(x, spreads, strict=True) if spread is not None]
    known = [spread for spread in spreads if spread is not None]
    if known:
        medians = [spread.median for spread in known]
        below = [spread.median - spread.low for spread in known]
        above = [spread.high - spread.median for spread in known]
        axes.errorbar(
            places, medians, yerr=[below, above],
            marker=marker, ms=4, capsize=2, lw=1.2, elinewidth=0.8, ls=style, color=colour, label=label,
        )  # fmt: skip

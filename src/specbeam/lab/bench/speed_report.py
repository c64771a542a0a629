"""The speeds of contenders as a table and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from specbeam.doors import as_label
from specbeam.lab.bench.speed import SpeedLine
from specbeam.lab.bench.tables import (
    colours_of,
    finish_figure,
    markdown_table,
    new_figure,
    put_legend_right,
    spread_text,
)

SCALES = {"BLEU": 1, "exact match": 100}  # factor of each quality metric in tables


def as_markdown(lines: Sequence[SpeedLine]) -> str:
    """Return a table with a row per contender: medians of the rounds, with the smallest and the largest round."""
    metrics = [name for name in SCALES if all(name in line.quality for line in lines)]
    has_joules = any(line.joules_per_token is not None for line in lines)
    joules_head = ["J per token"] if has_joules else []
    heads = [
        f"{lines[0].batch_size} at once", "tokens/s", "ratio", "ms per token", *joules_head,
        "target passes per token", "rows per token", "rows saved per token", "lazy layers", "layers without a pass",
        "mean width", "perplexity", *metrics, "peak KV tokens", "more memory, MB",
    ]  # fmt: skip
    rows = []
    for line in lines:
        quality = [f"{line.quality[name] * SCALES[name]:.1f}" for name in metrics]
        joules = [_number(line.joules_per_token, 2)] if has_joules else []
        cells = [
            line.name, spread_text(line.tokens_per_second, 1), spread_text(line.ratio, 2), f"{line.ms_per_token:.2f}",
            *joules, _number(line.passes_per_token, 2),
            _number(line.rows_per_token, 2), _number(line.saved_rows_per_token, 2), _share(line.lazy_layers),
            _share(line.free_layers), _number(line.mean_width, 1), f"{line.perplexity:.2f}", *quality,
            _number(line.peak_kv_tokens, 0), _number(line.memory_mb, 0),
        ]  # fmt: skip
        rows.append(cells)
    return markdown_table(heads, rows)


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def plot(lines: Sequence[SpeedLine], path: Path) -> None:
    """Write a plot of quality against speed to `path`: BLEU if there are references, else log p per token."""
    has_bleu = all("BLEU" in line.quality for line in lines)
    figure, axes = new_figure(1, 1, figsize=(8, 5))
    colours = colours_of("tab20")
    for place, line in enumerate(lines):
        speed = line.tokens_per_second
        value = line.quality["BLEU"] if has_bleu else line.logp_per_token
        axes.errorbar(
            speed.median, value, xerr=[[speed.median - speed.low], [speed.high - speed.median]], marker="o", capsize=2,
            label=as_label(line.name), color=colours(place % 20),
        )  # fmt: skip
    axes.set(xlabel="tokens per second", ylabel="BLEU" if has_bleu else "log p per token", xlim=(0, None))
    axes.grid(alpha=0.3)
    put_legend_right(axes)
    finish_figure(figure, path)

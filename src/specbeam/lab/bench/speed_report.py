"""The speeds of contenders as a table and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from specbeam.doors.render import as_label, save_figure
from specbeam.lab.bench.speed import SpeedLine, Spread


def as_markdown(lines: Sequence[SpeedLine]) -> str:
    """Return a table with a row per contender: medians of the rounds, with the smallest and the largest round."""
    metrics = [name for name in ("BLEU", "exact match") if all(name in line.quality for line in lines)]
    has_joules = any(line.joules_per_token is not None for line in lines)
    heads = [
        f"{lines[0].batch_size} at once", "tokens/s", "ratio", "ms per token", *(["J per token"] if has_joules else []),
        "target passes per token", "rows per token", "rows saved per token", "lazy layers", "layers without a pass",
        "mean width", "log p per token", *metrics, "peak KV tokens", "memory, MB",
    ]  # fmt: skip
    rows = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for line in lines:
        quality = [f"{line.quality[name] * (100 if name == 'exact match' else 1):.1f}" for name in metrics]
        cells = [
            line.name, _spread(line.tokens_per_second, 1), _spread(line.ratio, 2), f"{line.ms_per_token:.2f}",
            *([_number(line.joules_per_token, 2)] if has_joules else []), _number(line.passes_per_token, 2),
            _number(line.rows_per_token, 2), _number(line.saved_rows_per_token, 2), _share(line.lazy_layers),
            _share(line.free_layers), _number(line.mean_width, 1), f"{line.logp_per_token:.2f}", *quality,
            "" if line.peak_kv_tokens is None else str(line.peak_kv_tokens), _number(line.memory_mb, 0),
        ]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _spread(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def plot(lines: Sequence[SpeedLine], path: Path) -> None:
    """Write a plot of quality against speed to `path`: BLEU if there are references, else log p per token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    has_bleu = all("BLEU" in line.quality for line in lines)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for place, line in enumerate(lines):
        speed = line.tokens_per_second
        value = line.quality["BLEU"] if has_bleu else line.logp_per_token
        axes.errorbar(
            speed.median, value, xerr=[[speed.median - speed.low], [speed.high - speed.median]], marker="o", capsize=2,
            label=as_label(line.name), color=pyplot.get_cmap("tab20")(place % 20),
        )  # fmt: skip
    axes.set(xlabel="tokens per second", ylabel="BLEU" if has_bleu else "log p per token", xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    save_figure(figure, path)
    pyplot.close(figure)

"""The figures of a paper's experiment as a table, and as a plot of quality against speed with its Pareto front."""

from collections.abc import Sequence
from pathlib import Path

from specbeam.lab.bench.method_figures import Figure
from specbeam.lab.bench.papers import PaperLine
from specbeam.lab.bench.tables import (
    colours_of,
    finish_figure,
    interval_text,
    markdown_table,
    new_figure,
    put_legend_right,
)


def as_markdown(lines: Sequence[PaperLine]) -> str:
    """Return a table per task, with 95 % intervals."""
    tables = []
    for task in dict.fromkeys(line.task for line in lines):
        of_task = [line for line in lines if line.task == task]
        has_joules = any(line.joules_per_token is not None for line in of_task)
        heads = [
            task, *([of_task[0].metric] if of_task[0].metric else []), "tokens/s", "against", "speed ratio",
            "passes per token", *(["J per token"] if has_joules else []), "mean width", "perplexity", "by tokens",
            "tokens", "peak KV tokens", "more memory, MB",
        ]  # fmt: skip
        tables.append(markdown_table(heads, [_row(line, has_joules) for line in of_task]))
    return "\n\n".join(tables)


def _row(line: PaperLine, has_joules: bool) -> list[str]:
    quality = [] if line.quality is None else [_with_interval(line.quality, ".1f", 100)]
    joules = [_number(line.joules_per_token, ".2f")] if has_joules else []
    ratio = "" if line.ratio is None else _with_interval(line.ratio, ".2f")
    return [
        line.contender, *quality, _with_interval(line.speed, ".1f"), "" if line.ratio is None else line.against, ratio,
        f"{line.passes_per_token:.2f}", *joules, f"{line.mean_width:.1f}", f"{line.perplexity:.2f}",
        f"{line.perplexity_of_tokens:.2f}", f"{line.tokens_per_answer:.0f}", f"{line.peak_kv_tokens}",
        _number(line.memory_mb, ".0f"),
    ]  # fmt: skip


def _with_interval(figure: Figure, form: str, scale: float = 1) -> str:
    return interval_text(scale * figure.value, scale * figure.low, scale * figure.high, form)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def value_of(line: PaperLine) -> float:
    """Return the quality of a line for a plot, larger is better: in percent, or minus the perplexity if nobody judged."""
    return -line.perplexity if line.quality is None else 100 * line.quality.value


def pareto_front(lines: Sequence[PaperLine]) -> list[PaperLine]:
    """Return the lines that no other line beats in both quality and speed, by ascending speed."""
    front: list[PaperLine] = []
    for line in sorted(lines, key=lambda one: (-one.speed.value, -value_of(one))):
        if not front or value_of(line) > value_of(front[-1]):
            front.append(line)
    return front[::-1]


def plot(lines: Sequence[PaperLine], path: Path) -> None:
    """Write a plot of quality against speed to `path`: a part per task, a colour per family."""
    tasks = list(dict.fromkeys(line.task for line in lines))
    families = list(dict.fromkeys(line.family for line in lines))
    colours = colours_of("tab10")
    figure, parts = new_figure(1, len(tasks), figsize=(6 * len(tasks), 5), squeeze=False)
    for axes, task in zip(parts[0], tasks, strict=True):
        of_task = [line for line in lines if line.task == task]
        for place, family in enumerate(families):
            own = sorted((line for line in of_task if line.family == family), key=lambda line: line.speed.value)
            axes.plot(
                [line.speed.value for line in own], [value_of(line) for line in own], "o-", linewidth=0.8,
                color=colours(place % 10), label=family,
            )  # fmt: skip
        front = pareto_front(of_task)
        axes.plot(
            [line.speed.value for line in front],
            [value_of(line) for line in front],
            "k--",
            linewidth=0.8,
            label="Pareto front",
        )
        judged = of_task[0].quality is not None
        axes.set(title=task, xlabel="tokens per second", ylabel=f"{of_task[0].metric}, %" if judged else "- perplexity")
        axes.grid(alpha=0.3)
    put_legend_right(parts[0][-1])
    finish_figure(figure, path)

"""The command `specbeam bench cliffs`: speeds by method, option, batch size and kind of prompts."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from specbeam.doors.cli.bench_speed import demo_rows
from specbeam.doors.cli.widening import grown_pair
from specbeam.doors.places import write_output
from specbeam.doors.plain import as_json
from specbeam.errors import BadSetting, one_of
from specbeam.lab.bench.cliffs import KINDS, METHODS, OPTIONS, CliffPlan, SpeedCell, cliffs, contenders_of
from specbeam.lab.bench.cliffs_report import as_markdown
from specbeam.lab.bench.provenance import provenance


def run(
    methods: str | None, options: str | None, batch_sizes: str, prompts: str, rows: int, repeats: int,
    max_new_tokens: int, model: str, draft: str | None, grow: str | None, threads: int | None, markdown: Path | None,
    json: Path | None,
) -> int:  # fmt: skip
    """Measure the table of cliffs, print and write it, and return the exit code."""
    import torch
    from rich.progress import Progress

    from specbeam.doors.cli.screen import Screen

    plan = CliffPlan(
        methods=_words("--methods", methods, list(METHODS)),
        options=_words("--options", options, OPTIONS),
        batch_sizes=_sizes(batch_sizes),
        kinds=_words("--prompts", prompts, KINDS),
        rows=rows,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
    )
    _check(plan)
    if threads is not None:
        torch.set_num_threads(threads)
    pair = grown_pair(model, draft, grow)
    sentences = [row.prompt for row in demo_rows()]
    origin = provenance() | {"vocabulary": str(pair.target.vocab)}
    console = Screen(stderr=True)
    cells: list[SpeedCell] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("cliffs", total=_runs(plan))
        for table in cliffs(pair, plan, sentences, partial(progress.advance, bar)):
            cells += table
            _write(cells, plan, origin, markdown, json)  # after each table, because a long run may be interrupted
    print(_page(cells, plan, origin))
    return 0


def _runs(plan: CliffPlan) -> int:
    """Return the number of batches that contenders answer in all tables, warm-up included."""
    total = 0
    for _, size in plan.tables:
        ours, theirs = contenders_of(plan, size)
        total += (len(ours) + len(theirs)) * plan.runs(size)
    return total


def _page(cells: Sequence[SpeedCell], plan: CliffPlan, origin: dict[str, str]) -> str:
    """Return the page in Markdown, with the provenance of the figures."""
    details = "; ".join(f"{name}: {value}" for name, value in origin.items())
    return (
        f"{as_markdown(cells)}\n\nRatios are taken round by round; median of {plan.repeats} rounds, smallest to largest; "
        f"at most {plan.max_new_tokens} new tokens. {details}"
    )


def _write(
    cells: Sequence[SpeedCell], plan: CliffPlan, origin: dict[str, str], markdown: Path | None, json: Path | None
) -> None:
    """Write the cells to the files that are given: the page in Markdown, a line of JSON per cell."""
    if markdown is not None:
        write_output(markdown, _page(cells, plan, origin) + "\n")
    if json is not None:
        lines = [as_json({**dataclasses.asdict(cell), "provenance": origin}) for cell in cells]
        write_output(json, "\n".join(lines) + "\n")


def _words(name: str, text: str | None, known: Sequence[str]) -> list[str]:
    """Return the words between commas without repetitions; all that are known if `text` is None.

    Raises `BadSetting`, which names the option `name`, if a word is not known.
    """
    if text is None:
        return list(known)
    words = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in words:
        one_of(name, word, known)
    return words


def _sizes(text: str) -> list[int]:
    """Return the numbers between commas without repetitions."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise BadSetting(f"--batch-sizes is {text!r}; it must be numbers like 1,4,16")
    return list(dict.fromkeys(map(int, words)))


def _check(plan: CliffPlan) -> None:
    """Raise an error if a number is below 1."""
    numbers = [("--rows", plan.rows), ("--repeats", plan.repeats), ("--max-new-tokens", plan.max_new_tokens)]
    for name, value in (*numbers, *(("--batch-sizes", size) for size in plan.batch_sizes)):
        if value < 1:
            raise BadSetting(f"{name} is {value}; it must be at least 1")

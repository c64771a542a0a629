"""The command `specbeam bench cliffs`: speeds by method, option, batch size and kind of prompts."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbeam.doors.cli.common import demo_sentences
from specbeam.doors.cli.options import Grow, NewTokens, PairArguments, Rounds, Threads, file_to_write
from specbeam.doors.places import write_output
from specbeam.doors.plain import as_json
from specbeam.errors import BadSetting, one_of

if TYPE_CHECKING:
    from specbeam.lab.bench.cliffs import CliffPlan, SpeedCell


class CliffsArguments(PairArguments):
    """What the command is given."""

    methods: Annotated[
        str | None, typer.Option(help="Methods, separated by commas; by default all that the table has.")
    ] = None
    options: Annotated[
        str | None,
        typer.Option(
            help="Columns of the table, separated by commas: none, stream, audit, and options of generation that it has. "
            "By default all."
        ),
    ] = None
    batch_sizes: Annotated[str, typer.Option(help="Numbers of prompts decoded at once, separated by commas.")] = "1,16"
    kinds: Annotated[
        str,
        typer.Option(
            help="Kinds of prompts, separated by commas: trained (the demo's sentences), random (24 random tokens)."
        ),
    ] = "trained"
    older: Annotated[str | None, typer.Option("--prompts", hidden=True, help="The same as --kinds.")] = None
    rows: Annotated[int, typer.Option(help="Minimum number of prompts per round; batches are always full.")] = 2
    repeats: Rounds = 3
    max_new_tokens: NewTokens = 24
    grow: Grow = None
    threads: Threads = None
    markdown: Annotated[Path | None, file_to_write("Also write the Markdown page to this file.")] = None
    json: Annotated[Path | None, file_to_write("Write a JSON line per cell to this file.")] = None


def cliffs(given: CliffsArguments) -> int:
    """Find where speed falls off: time methods with each option and batch size, beside transformers with the same."""
    import torch
    from rich.progress import Progress

    from specbeam.doors.cli.screen import Screen
    from specbeam.doors.cli.widening import grown_pair
    from specbeam.lab.bench.cliffs import KINDS, METHODS, OPTIONS, CliffPlan
    from specbeam.lab.bench.cliffs import cliffs as measure
    from specbeam.lab.bench.provenance import provenance

    plan = CliffPlan(
        methods=_words("--methods", given.methods, list(METHODS)),
        options=_words("--options", given.options, OPTIONS),
        batch_sizes=_sizes(given.batch_sizes),
        kinds=_words("--prompts", given.older or given.kinds, KINDS),
        rows=given.rows,
        repeats=given.repeats,
        max_new_tokens=given.max_new_tokens,
    )
    _check(plan)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    pair = grown_pair(given.model, given.draft, given.grow)
    origin = provenance() | {"vocabulary": str(pair.target.vocab)}
    console = Screen(stderr=True)
    cells: list[SpeedCell] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("cliffs", total=_runs(plan))
        for table in measure(pair, plan, demo_sentences(), partial(progress.advance, bar)):
            cells += table
            _write(cells, plan, origin, given)  # after each table, because a long run may be interrupted
    print(_page(cells, plan, origin))
    return 0


def _runs(plan: "CliffPlan") -> int:
    """Return the number of batches that contenders answer in all tables, warm-up included."""
    from specbeam.lab.bench.cliffs import contenders_of

    total = 0
    for _, size in plan.tables:
        ours, theirs = contenders_of(plan, size)
        total += (len(ours) + len(theirs)) * plan.runs(size)
    return total


def _page(cells: "Sequence[SpeedCell]", plan: "CliffPlan", origin: dict[str, str]) -> str:
    """Return the page in Markdown, with the provenance of the figures."""
    from specbeam.lab.bench.cliffs_report import as_markdown

    details = "; ".join(f"{name}: {value}" for name, value in origin.items())
    return (
        f"{as_markdown(cells)}\n\nRatios are taken round by round; median of {plan.repeats} rounds, smallest to largest; "
        f"at most {plan.max_new_tokens} new tokens. {details}"
    )


def _write(cells: "Sequence[SpeedCell]", plan: "CliffPlan", origin: dict[str, str], given: CliffsArguments) -> None:
    """Write the cells to the files that are given: the page in Markdown, a line of JSON per cell."""
    if given.markdown is not None:
        write_output(given.markdown, _page(cells, plan, origin) + "\n")
    if given.json is not None:
        lines = [as_json({**dataclasses.asdict(cell), "provenance": origin}) for cell in cells]
        write_output(given.json, "\n".join(lines) + "\n")


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


def _check(plan: "CliffPlan") -> None:
    """Raise an error if a number is below 1."""
    numbers = [("--rows", plan.rows), ("--repeats", plan.repeats), ("--max-new-tokens", plan.max_new_tokens)]
    for name, value in (*numbers, *(("--batch-sizes", size) for size in plan.batch_sizes)):
        if value < 1:
            raise BadSetting(f"{name} is {value}; it must be at least 1")

"""The command `specbeam bench cliffs`: speeds by method, option, batch size and kind of prompts."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbeam.doors.cli.common import demo_sentences, in_one_line
from specbeam.doors.cli.options import Grow, NewTokens, PairArguments, Rounds, file_to_write
from specbeam.doors.cli.reports import print_report
from specbeam.doors.places import write_output
from specbeam.doors.plain import as_json
from specbeam.errors import BadSetting, one_of
from specbeam.lab.words import CLIFF_KINDS, CLIFF_METHODS, CLIFF_OPTIONS, of_rounds

if TYPE_CHECKING:
    from specbeam.lab.bench.cliffs import CliffPlan, SpeedCell


class CliffsArguments(PairArguments):
    """Arguments of the command."""

    methods: Annotated[str | None, typer.Option(help="Methods of the table, separated by commas; by default all.")] = (
        None
    )
    options: Annotated[
        str | None,
        typer.Option(
            help="Columns of the table, separated by commas: none, stream, audit, or options of generation. By default all."
        ),
    ] = None
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,16"
    kinds: Annotated[
        str,
        typer.Option(
            help="Kinds of prompts, separated by commas: trained (the demo's sentences) and random (24 random tokens)."
        ),
    ] = "trained"
    rows: Annotated[
        int, typer.Option(min=1, help="Minimum number of prompts per round, rounded up to full batches.")
    ] = 2
    repeats: Rounds = 3
    max_new_tokens: NewTokens = 24
    grow: Grow = None
    markdown: Annotated[Path | None, file_to_write("Also write the Markdown page to this file.")] = None
    json: Annotated[Path | None, file_to_write("Also write a JSON line per cell to this file.")] = None


def cliffs(given: CliffsArguments) -> int:
    """Time methods with each option and batch size, compared with transformers, to find where speed drops."""
    contents = {
        "methods": _words("--methods", given.methods, list(CLIFF_METHODS)),
        "options": _words("--options", given.options, CLIFF_OPTIONS),
        "batch_sizes": _sizes(given.batch_sizes),
        "kinds": _words("--kinds", given.kinds, CLIFF_KINDS),
    }
    from specbeam.doors.cli.screen import progress_bar
    from specbeam.doors.cli.widening import GrownSizes, grown_pair
    from specbeam.lab.bench.cliffs import CliffPlan
    from specbeam.lab.bench.cliffs import cliffs as measure
    from specbeam.lab.bench.provenance import provenance

    plan = given.make(CliffPlan, **contents)
    pair = grown_pair(given.model, given.draft, GrownSizes(given.grow), engine=given.engine)
    origin = provenance() | {"vocabulary": str(pair.target.vocab)}
    cells: list[SpeedCell] = []
    with progress_bar() as progress:
        bar = progress.add_task("cliffs", total=_runs(plan))
        for table in measure(pair, plan, demo_sentences(), partial(progress.advance, bar)):
            cells += table
            _write(cells, plan, origin, given)  # after each table: a long run may be interrupted
    print_report(_page(cells, plan, origin))
    return 0


def _runs(plan: "CliffPlan") -> int:
    """Return the number of batches of all contenders in all tables, warm-up included."""
    from specbeam.lab.bench.cliffs import contenders_of

    total = 0
    for _, size in plan.tables:
        ours, theirs = contenders_of(plan, size)
        total += (len(ours) + len(theirs)) * plan.runs(size)
    return total


def _page(cells: "Sequence[SpeedCell]", plan: "CliffPlan", origin: dict[str, str]) -> str:
    """Return the page in Markdown, with the provenance of the figures."""
    from specbeam.lab.bench.cliffs_report import as_markdown

    return (
        f"{as_markdown(cells)}\n\nRatios are taken round by round; {of_rounds(plan.repeats)}; "
        f"at most {plan.max_new_tokens} new tokens. {in_one_line(origin)}"
    )


def _write(cells: "Sequence[SpeedCell]", plan: "CliffPlan", origin: dict[str, str], given: CliffsArguments) -> None:
    """Write the cells to the requested files: the page in Markdown, and a line of JSON per cell."""
    if given.markdown is not None:
        write_output(given.markdown, _page(cells, plan, origin) + "\n")
    if given.json is not None:
        lines = [as_json({**dataclasses.asdict(cell), "provenance": origin}) for cell in cells]
        write_output(given.json, "\n".join(lines) + "\n")


def _words(name: str, text: str | None, known: Sequence[str]) -> list[str]:
    """Return the distinct words between commas; all known ones if `text` is None.

    Raises `BadSetting`, which names the option `name`, for an unknown word.
    """
    if text is None:
        return list(known)
    words = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in words:
        one_of(name, word, known)
    return words


def _sizes(text: str) -> list[int]:
    """Return the distinct numbers between commas. Raises `BadSetting` if one is not an integer of at least 1."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise BadSetting(f"--batch-sizes is {text!r}; it must be numbers of at least 1, like 1,4,16")
    return list(dict.fromkeys(map(int, words)))

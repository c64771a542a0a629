"""The command `specbeam bench methods`: a comparison of methods by quality and cost."""

import dataclasses
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specbeam.doors.cli.common import bundled_rows, in_one_line, print_records
from specbeam.doors.cli.options import (
    Compute,
    DraftVocab,
    Grow,
    Json,
    NewTokens,
    PairArguments,
    Plot,
    QuantizeDraft,
    QuantizeTarget,
    checked,
)
from specbeam.doors.cli.reports import print_report
from specbeam.doors.places import require_file
from specbeam.errors import BadPrompt, BadSetting

if TYPE_CHECKING:
    from specbeam.lab.bench.method_figures import Task


def _require_tsv(file: Path) -> None:
    """Raise `MissingFile` if the file of a task cannot be read."""
    require_file(file, "give a TSV with a prompt and its answer per line")


class MethodsBenchArguments(PairArguments):
    """Arguments of the command."""

    file: Annotated[
        list[Path],
        typer.Option(
            "--file",
            "-f",
            callback=checked(_require_tsv),
            help="TSV file of a task: a prompt and its reference answer per line. May be given several times; by default "
            "the bundled tasks.",
        ),
    ] = []
    grow: Grow = None
    quantize: QuantizeTarget = None
    quantize_draft: QuantizeDraft = None
    compute: Compute = None
    draft_vocab: DraftVocab = None
    metric: Annotated[
        Literal["BLEU", "exact match"] | None,
        typer.Option(help="Quality measure for --file: 'BLEU', the default, or 'exact match'."),
    ] = None
    beams: Annotated[int, typer.Option(min=1, help="Number of beams, for methods with beams.")] = 4
    depth: Annotated[
        int, typer.Option(min=1, help="Number of draft layers per pass, except for methods named 'auto'.")
    ] = 4
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Acceptance threshold of MTAD and MMTAD.")] = 0.5
    rows: Annotated[int, typer.Option(min=1, help="Maximum number of prompts per task; the first ones are taken.")] = (
        400
    )
    seeds: Annotated[int, typer.Option(min=1, help="Number of answers per prompt, each with its own seed.")] = 3
    max_new_tokens: NewTokens = 64
    plot: Plot = None
    json: Json = False


def methods(given: MethodsBenchArguments) -> int:
    """Compare methods by perplexity, text quality, and seconds, joules and target passes per token."""
    from rich.markup import escape

    from specbeam.doors.cli.screen import progress_bar
    from specbeam.doors.cli.widening import GrownSizes, grown_pair
    from specbeam.lab.bench.methods import contenders, measure
    from specbeam.lab.bench.methods_report import as_markdown, plot
    from specbeam.lab.bench.provenance import provenance
    from specbeam.lab.evaluate.task import check_bleu

    _check(given)
    tasks = tasks_of(given.file, given.metric or "BLEU") or bundled_tasks()
    if any(task.metric == "BLEU" for task in tasks):
        check_bleu()
    compared = contenders(given.beams, given.depth, given.threshold)
    loading = given.named("quantize", "quantize_draft", "compute", "draft_vocab", "engine")
    loaded = grown_pair(given.model, given.draft, GrownSizes(given.grow), **loading)
    lines = []
    with progress_bar() as progress:
        for task in tasks:
            shortened = dataclasses.replace(task, rows=task.rows[: given.rows])
            bar = progress.add_task(escape(task.name), total=given.seeds * len(shortened.rows))
            step = partial(progress.advance, bar)
            lines += measure(loaded, shortened, compared, given.seeds, given.max_new_tokens, step)
    origin = provenance() | {"vocabulary": str(loaded.target.vocab)}
    if given.json:
        print_records(lines, provenance=origin)
    else:
        print_report(as_markdown(lines))
        print(
            "\n\\* changes the law of the output. 95 % intervals: bootstrap over prompts; Wilson's for 0 % and 100 %."
        )
        print("One prompt at a time.\n")
        print(in_one_line(origin))
    if given.plot is not None:
        plot(lines, given.plot)
    return 0


def _check(given: MethodsBenchArguments) -> None:
    """Raise `BadSetting` for options that are wrong or contradict each other."""
    if given.metric is not None and not given.file:
        raise BadSetting(
            "--metric is for --file, and the bundled tasks have their own metrics; give --file or leave --metric out"
        )


def bundled_tasks() -> "list[Task]":
    """Return the tasks of the bundled pair: German sentences to translate, and words to convert to sounds."""
    from specbeam.lab.bench.method_figures import Task

    words = [(f"<sounds> {' '.join(word)}", sounds) for word, sounds in bundled_rows("words.tsv")]
    return [
        Task("German sentences", "BLEU", bundled_rows("sentences.tsv")),
        Task("letters to sounds", "exact match", words),
    ]


def tasks_of(files: list[Path], metric: str) -> "list[Task]":
    """Return a task per TSV file, named after the file or, if several files have the same name, by its path.

    Raises `BadSetting` if a file is given twice.
    """
    from specbeam.lab.bench.method_figures import Task

    if len({file.resolve() for file in files}) < len(files):
        raise BadSetting("a file is given twice; give each task once")
    stems = Counter(file.stem for file in files)
    return [Task(file.stem if stems[file.stem] == 1 else str(file), metric, _rows(file)) for file in files]


def _rows(file: Path) -> list[tuple[str, str]]:
    """Read the prompts and answers of a TSV file; raise `MissingFile` or `BadPrompt` if it has none."""
    from specbeam.lab.evaluate.lines import lines_of

    rows = []
    for number, line in enumerate(lines_of(file), 1):
        fields = line.split("\t")
        if len(fields) < 2 or not fields[0].strip():
            raise BadPrompt(
                f"{file}, line {number}: found {len(fields)} columns; expected a prompt, a tab and its answer"
            )
        rows.append((fields[0], fields[1]))
    if not rows:
        raise BadPrompt(f"{file} is empty; expected a prompt, a tab and its answer per line")
    return rows

"""The command `specbeam bench methods`: a comparison of methods by quality and cost."""

import dataclasses
from collections import Counter
from functools import partial
from pathlib import Path

from specbeam.doors.cli.common import print_json
from specbeam.doors.cli.widening import grown_pair
from specbeam.doors.places import require_file
from specbeam.errors import BadPrompt, BadSetting, one_of
from specbeam.lab.bench.method_figures import METRICS, Task
from specbeam.lab.bench.methods import contenders, measure
from specbeam.lab.bench.methods_report import as_markdown, plot
from specbeam.lab.bench.pictures import check_picture
from specbeam.lab.bench.provenance import provenance
from specbeam.lab.evaluate.lines import lines_of
from specbeam.lab.evaluate.task import check_bleu
from specbeam.models.pair import BUNDLED


def run(
    pairs: list[Path], model: str, draft: str | None, grow: str | None, metric: str | None,
    shape: tuple[int, int, float], rows: int, seeds: int, max_new_tokens: int, picture: Path | None, json: bool,
) -> int:  # fmt: skip
    """Compare methods on tasks, print a table per task, and return the exit code.

    Args:
        pairs: TSV files of prompts and answers; empty: the bundled tasks.
        shape: beams, draft depth, and threshold of the methods.
    """
    from rich.markup import escape
    from rich.progress import Progress

    from specbeam.doors.cli.screen import Screen

    if metric is not None:
        one_of("--metric", metric, METRICS)
        if not pairs:
            raise BadSetting("--metric is of files, and the bundled tasks have their own; give files or leave it out")
    if picture is not None:
        check_picture(picture)
    if rows < 1 or seeds < 1:
        raise BadSetting(f"--rows is {rows}, --seeds is {seeds}; both must be at least 1")
    tasks = tasks_of(pairs, metric or "BLEU") or bundled_tasks()
    if any(task.metric == "BLEU" for task in tasks):
        check_bleu()
    methods = contenders(*shape)
    loaded = grown_pair(model, draft, grow)
    console = Screen(stderr=True)
    lines = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for task in tasks:
            shortened = dataclasses.replace(task, rows=task.rows[:rows])
            bar = progress.add_task(escape(task.name), total=seeds * len(shortened.rows))
            lines += measure(loaded, shortened, methods, seeds, max_new_tokens, partial(progress.advance, bar))
    origin = provenance() | {"vocabulary": str(loaded.target.vocab)}
    if json:
        for line in lines:
            print_json({**dataclasses.asdict(line), "provenance": origin})
    else:
        print(as_markdown(lines))
        print(
            "\n\\* changes the law of the output. 95 % intervals: bootstrap over prompts, Wilson's for 0 % and 100 %."
        )
        print("One prompt at a time.\n")
        print("; ".join(f"{name}: {value}" for name, value in origin.items()))
    if picture is not None:
        plot(lines, picture)
    return 0


def bundled_tasks() -> list[Task]:
    """Return the tasks of the bundled pair: German sentences to translate, and letters to spell as sounds."""
    words = [(f"<sounds> {' '.join(word)}", sounds) for word, sounds in _rows(BUNDLED / "words.tsv")]
    return [
        Task("German sentences", "BLEU", _rows(BUNDLED / "sentences.tsv")),
        Task("letters to sounds", "exact match", words),
    ]


def tasks_of(files: list[Path], metric: str) -> list[Task]:
    """Return a task per TSV file, named after the file; by its path if several files have the same name.

    Raises `BadSetting` if a file is given twice.
    """
    if len({file.resolve() for file in files}) < len(files):
        raise BadSetting("a file is given twice; give each task once")
    stems = Counter(file.stem for file in files)
    return [Task(file.stem if stems[file.stem] == 1 else str(file), metric, _rows(file)) for file in files]


def _rows(file: Path) -> list[tuple[str, str]]:
    """Read the prompts and answers of a TSV file; raise `MissingFile` or `BadPrompt` if it has none."""
    require_file(file, "give a TSV with a prompt and its answer per line")
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

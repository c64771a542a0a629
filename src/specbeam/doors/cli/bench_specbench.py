"""The command `specbeam bench specbench`: methods on the questions of Spec-Bench, by its statistics and specbeam's."""

import dataclasses
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.common import ProgressBar, check_has_head, in_one_line, method_from, print_json, quiet_load
from specbeam.doors.cli.options import Json, NewTokens, PairArguments, Seed, checked, folder_to_write
from specbeam.doors.method_names import settings_in
from specbeam.doors.places import require_file, writing
from specbeam.errors import BadSetting

if TYPE_CHECKING:
    from specbeam.lab.bench.specbench import SpecBenchSettings
    from specbeam.recipes.method import Method

USUAL = ["speculative_sampling", "traversal", "sequoia", "prompt_lookup", "opt_tree", "token_recycling"]


class SpecBenchArguments(PairArguments):
    """Arguments of the command."""

    questions: Annotated[
        Path,
        typer.Argument(
            help="Spec-Bench's file question.jsonl, plain or .gz.",
            callback=checked(lambda file: require_file(file, "Spec-Bench has it as data/spec_bench/question.jsonl")),
        ),
    ]
    contenders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METHOD]...", help="Methods with their settings, such as 'sequoia budget=21'."),
    ] = None
    each: Annotated[int | None, typer.Option(min=1, help="Maximum number of questions per task; by default all.")] = (
        None
    )
    max_new_tokens: NewTokens = 1024
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0: greedy, as in Spec-Bench.")] = 0.0
    seed: Seed = 0
    processor_time: Annotated[
        bool, typer.Option("--processor-time", help="Measure CPU time instead of elapsed time, for a busy machine.")
    ] = False
    answers: Annotated[
        Path | None,
        folder_to_write("Also write a file per method to this folder, for Spec-Bench's own scripts."),
    ] = None
    json: Json = False


def specbench(given: SpecBenchArguments) -> int:
    """Run methods on the six tasks of Spec-Bench, compared with plain decoding."""
    for name in given.contenders or USUAL:
        settings_in(*_split(name))
    from specbeam.lab.bench.specbench import SpecBenchSettings, lines_of_specbench, read_questions
    from specbeam.lab.bench.specbench import specbench as measure

    methods = {name: method_from(*_split(name)) for name in given.contenders or USUAL}
    for name, method in methods.items():
        check_has_head(method, given.draft)
        if method.beams > 1 and given.temperature == 0 and not method.search:
            raise BadSetting(f"{name} draws beams, and at temperature 0 all beams are equal; give --temperature 1")
    asked = read_questions(given.questions, given.each)
    pair = quiet_load(**given.pair)
    clock = time.process_time if given.processor_time else time.perf_counter
    settings = SpecBenchSettings(given.seed, given.max_new_tokens, given.temperature)
    with ProgressBar() as bar:
        done = 0

        def show(_: object) -> None:
            nonlocal done
            done += 1
            bar.show(done, len(asked))

        replies = measure(pair, asked, methods, settings, clock, show)
    if given.answers is not None:
        _write(given.answers, settings, pair, asked, methods, replies)
    lines = lines_of_specbench(asked, replies)
    if given.json:
        for line in lines:
            print_json(dataclasses.asdict(line))
        return 0
    _show(lines, sum(one.cut for one in replies["plain"]))
    return 0


def _write(
    folder: Path, settings: "SpecBenchSettings", pair: Any, asked: Any, methods: "dict[str, Method]", replies: Any
) -> None:
    """Write a file per method for Spec-Bench's own scripts."""
    from specbeam.lab.bench.specbench import write_answers

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, method in methods.items():
        path = folder / f"{re.sub('[ /]', '_', name)}.jsonl"
        write_answers(path, pair, asked, replies[name], name, method, settings)


def _show(lines: Any, cut: int) -> None:
    """Print the table of all methods and tasks."""
    from rich.table import Table

    from specbeam.doors.cli.screen import Screen
    from specbeam.lab.bench.provenance import provenance

    table = Table("method", "task", box=None, pad_edge=False)
    for head in ("questions", "tokens", "accepted", "their speedup", "speedup", "95 %", "same text"):
        table.add_column(head, justify="right")
    for line in lines:
        table.add_row(
            line.method, line.task, str(line.questions), str(line.tokens), f"{line.accepted:.2f}",
            f"{line.their_speedup:.2f}", f"{line.speedup:.2f}", f"{line.low:.2f} to {line.high:.2f}", f"{line.same:.0%}",
        )  # fmt: skip
    Screen().print(table)
    print(f"{cut} prompts were longer than the models' positions; their beginnings were cut off")
    print(in_one_line(provenance()))


def _split(contender: str) -> tuple[str, list[str]]:
    """Return the name of a method and the settings after it."""
    name, *settings = contender.split()
    return name, settings

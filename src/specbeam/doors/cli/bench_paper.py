"""The command `specbeam bench paper`: the experiments of the papers on any pair."""

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbeam.doors.cli.common import complain, in_one_line, print_records, quiet_load
from specbeam.doors.cli.options import (
    Compute,
    DraftVocab,
    Json,
    PairArguments,
    Plot,
    QuantizeDraft,
    QuantizeTarget,
    Seed,
    SpacedRows,
    checked,
    files_to_read,
    folder_to_write,
)
from specbeam.doors.cli.reports import print_report
from specbeam.doors.options.table import warper_names
from specbeam.doors.places import write_output
from specbeam.errors import BadSetting, MissingFile, one_of
from specbeam.lab.words import PAPERS

if TYPE_CHECKING:
    from specbeam.lab.bench.paper_tasks import PaperTask
    from specbeam.lab.bench.papers import AnswerLog, PaperContender


def _check_paper(name: str) -> None:
    """Raise `BadSetting` for a paper without an experiment."""
    one_of("PAPER", name, PAPERS)


def _check_databases(folder: Path) -> None:
    """Raise `MissingFile` unless there is such a folder."""
    if not folder.is_dir():
        raise MissingFile(f"there is no folder {folder}; give the folder of Spider's databases")


def _check_threshold(value: float) -> None:
    """Raise `BadSetting` unless a threshold is a probability."""
    if not 0 <= value <= 1:
        raise BadSetting(f"--threshold is {value}; it must be 0 to 1")


class PaperArguments(PairArguments):
    """Arguments of the command."""

    paper: Annotated[str, typer.Argument(help="Whose experiment: dsbd, mtad or rsd.", callback=checked(_check_paper))]
    squad: Annotated[
        list[Path],
        files_to_read("SQuAD's development questions: dev-v1.1.json, or lines with id, context, question and answers."),
    ] = []
    spider: Annotated[
        list[Path],
        files_to_read(
            "Spider's development questions, dev.json, or lines with db_id, question and query. They need --tables and "
            "--databases."
        ),
    ] = []
    tables: Annotated[list[Path], files_to_read("Spider's schemas, tables.json.")] = []
    databases: Annotated[
        Path | None,
        typer.Option(
            help="Folder of Spider's databases: NAME.sqlite or NAME/NAME.sqlite.", callback=checked(_check_databases)
        ),
    ] = None
    mt_bench: Annotated[list[Path], files_to_read("MT-bench's question.jsonl.", "--mt-bench")] = []
    quantize: QuantizeTarget = None
    quantize_draft: QuantizeDraft = None
    compute: Compute = None
    draft_vocab: DraftVocab = None
    width: Annotated[list[int], typer.Option(min=1, help="Number of beams. May be given several times.")] = []
    threshold: Annotated[
        list[float],
        typer.Option(
            help="Threshold of dynamic widths, or of MTAD's acceptance. May be given several times.",
            callback=checked(_check_threshold),
        ),
    ] = []
    depth: Annotated[
        list[int], typer.Option(min=1, help="Number of draft layers per pass. May be given several times.")
    ] = []
    law: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUE",
            help="Temperature or truncation of all contenders, such as --law temperature=0.7; replaces the authors'. May be "
            "given several times.",
            callback=checked(lambda text: _law([text])),
        ),
    ] = []
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Number of new tokens; by default the authors' 100 or 128.")
    ] = None
    rows: SpacedRows = 100
    seed: Seed = 0
    out: Annotated[
        Path | None,
        folder_to_write(
            "Also write all answers to this folder, and MT-bench's as its judge reads them. An interrupted run goes on from "
            "there."
        ),
    ] = None
    plot: Plot = None
    json: Json = False


def paper(given: PaperArguments) -> int:
    """Rerun a paper's experiment on a pair: quality against speed, energy, memory and perplexity, by width."""
    _check_tasks(given)
    from specbeam.doors.cli.screen import progress_bar
    from specbeam.lab.bench.paper_report import as_markdown, plot
    from specbeam.lab.bench.papers import AnswerLog, PaperGrid, contenders_of, lines_of_paper, run_paper
    from specbeam.lab.bench.provenance import provenance

    grid = PaperGrid(
        tuple(given.width) or None,
        tuple(given.threshold) or None,
        tuple(given.depth) or None,
        _law(given.law),
        given.max_new_tokens,
        given.seed,
    ).of(given.paper)
    tasks = [task.first(given.rows) for task in _tasks(given)]
    contenders = contenders_of(given.paper, grid)
    settings = {"paper": given.paper, "model": given.model, "draft": given.draft} | dataclasses.asdict(grid)
    settings |= {"questions": {task.name: len(task.questions) for task in tasks}, "engine": given.engine}
    loading = given.named("quantize", "quantize_draft", "compute", "draft_vocab")
    chosen = {name: value for name, value in loading.items() if value is not None}
    settings |= chosen
    log = AnswerLog.of(given.out, settings)
    pair = quiet_load(**given.pair, **chosen)
    if pair.draft is None:
        raise BadSetting("the papers' methods need a draft model; give one with --draft")
    with progress_bar() as progress:
        bar = progress.add_task(given.paper, total=sum(len(task.questions) for task in tasks))
        run_paper(pair, tasks, contenders, grid, log, lambda: progress.advance(bar))
    lines = lines_of_paper(tasks, contenders, log)
    origin = provenance() | {"model": given.model, "draft": given.draft or ""} | chosen
    if given.json:
        print_records(lines, provenance=origin)
    else:
        print_report(as_markdown(lines))
        print(
            "\n95 % intervals by bootstrap over questions; one question at a time. Perplexity: of the answers under the "
            "target, each answer counted once, or 'by tokens'; tokens: per answer; width: live beams, averaged over turns. ",
            end="",
        )
        print(in_one_line(origin))
    for task in tasks:
        count, why = task.left_out
        if count:
            complain(f"note: {count} questions of {task.name} are left out, as {why}")
    _write_for_judge(given.out, tasks, contenders, log)
    if given.plot is not None:
        plot(lines, given.plot)
    return 0


def _law(given: list[str]) -> dict[str, float]:
    """Return the numbers of --law by name. Raises `BadSetting` for other names and values."""
    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        one_of("--law", name, warper_names())
        try:
            found[name] = int(value) if value.isdigit() else float(value)
        except ValueError:
            raise BadSetting(f"--law {text}: {value!r} is no number") from None
    return found


def _check_tasks(given: PaperArguments) -> None:
    """Raise `BadSetting` if there is no task, or if a file is given twice or missing."""
    for name in ("squad", "spider", "tables", "mt_bench"):
        if len(getattr(given, name)) > 1:
            raise BadSetting(f"--{name.replace('_', '-')} is given twice; give one file")
    if given.spider and (not given.tables or given.databases is None):
        raise BadSetting("--spider needs Spider's schemas and databases: give --tables and --databases")
    if not (given.squad or given.spider or given.mt_bench):
        raise BadSetting("there is no task; give --squad, --spider or --mt-bench, with the files of these data sets")


def _tasks(given: PaperArguments) -> "list[PaperTask]":
    """Return the tasks of the command line, which `_check_tasks` has checked."""
    from specbeam.lab.bench.paper_tasks import mt_bench_task, spider_task, squad_task

    found = [squad_task(path) for path in given.squad]
    for path in given.spider:
        assert given.databases is not None
        found.append(spider_task(path, given.tables[0], given.databases))
    found += [mt_bench_task(path) for path in given.mt_bench]
    return found


def _write_for_judge(
    out: Path | None, tasks: "list[PaperTask]", contenders: "list[PaperContender]", log: "AnswerLog"
) -> None:
    """Write a file per contender with the answers that another program judges."""
    from specbeam.lab.bench.papers import answers_for_judge

    for task in tasks:
        if out is None or task.judge is not None:
            continue
        for contender in contenders:
            name = re.sub(r"[^\w.]+", "_", contender.name).strip("_")
            write_output(out / f"{name}.jsonl", answers_for_judge(task, contender, log))

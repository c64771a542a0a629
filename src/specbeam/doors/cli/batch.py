"""The command `specbeam batch`: answers to the prompts of a table, resumable after an interruption."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbeam.apps.jobs.tables import require_place_of_table, require_table
from specbeam.doors.cli.common import INTERRUPTED, ProgressBar, complain, follow_rank_0, method_for, print_json
from specbeam.doors.cli.options import DecodingArguments, Json, checked
from specbeam.doors.options.table import OPTIONS
from specbeam.errors import NotSupported, counted

if TYPE_CHECKING:
    from specbeam.apps.jobs.answering import Work
    from specbeam.apps.jobs.journal import Progress


class BatchArguments(DecodingArguments):
    """Arguments of the command."""

    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="Table of prompts: .jsonl, .csv or .parquet; or .txt, a prompt per line.",
            callback=checked(require_table),
        ),
    ]
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="Table of answers, in one of the same formats.",
            callback=checked(require_place_of_table),
        ),
    ]
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted job; start it if there is none.")] = (
        False
    )
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --resume: retry rows whose answer is an error.")
    ] = False
    drop_answers: Annotated[
        bool,
        typer.Option("--drop-answers", help="With --resume: drop the texts of rows that were changed or removed."),
    ] = False
    seed: Annotated[
        int, typer.Option(help="Random seed; the seed of each row is derived from it and the id of the row.")
    ] = 0
    id_column: Annotated[str, typer.Option(help="Column of ids. Tables without it are numbered from 1.")] = "id"
    prompt_column: Annotated[str, typer.Option(help="Column of prompts: texts, or lists of token ids.")] = "prompt"
    json: Json = False


def batch(given: BatchArguments) -> int:
    """Generate text for a table of prompts. An interrupted job resumes with --resume and gives the same texts."""
    follow_rank_0(given.loading)
    options = given.checked_options()
    from specbeam.apps.jobs.answering import work_of
    from specbeam.apps.jobs.batch import batch as answer_table
    from specbeam.apps.jobs.batch import settings_described
    from specbeam.apps.jobs.journal import Progress
    from specbeam.apps.jobs.rows import Columns
    from specbeam.doors.sources import hears

    languages = given.named("source_language", "target_language")
    chosen = {"method": given.method or "dsbd", "settings": sorted(given.setting), "seed": given.seed}
    usual = {name: option.default for name, option in OPTIONS.items() if option.default is not None}
    described = settings_described({**given.loading, **chosen, **usual, **options, **languages})

    def make_work() -> "Work":
        pair = given.load(options)
        if hears(pair):
            raise NotSupported(f"{given.model} reads audio, and a table has texts; use specbeam transcribe")
        method = method_for(pair, given.method, given.setting)
        return work_of(pair, method, given.seed, given.batch_size, options)

    shown = Progress(0, 0, 0)
    columns = Columns(id=given.id_column, prompt=given.prompt_column)
    with ProgressBar() as bar:

        def show(progress: "Progress") -> None:
            nonlocal shown
            shown = progress
            bar.show(progress.done, progress.rows)

        try:
            shown = answer_table(
                make_work,
                given.source,
                given.out,
                described,
                columns,
                given.resume,
                given.retry_failed,
                given.drop_answers,
                show,
            )
        except KeyboardInterrupt:
            complain(f"interrupted; {shown.done} of {counted(shown.rows, 'row')} saved: continue with --resume")
            return INTERRUPTED
    if given.json:
        print_json(
            {"rows": shown.rows, "failed": shown.failed, "was_finished": shown.was_finished, "out": str(given.out)}
        )
    else:
        retry = (
            "; its column error has them, and --resume --retry-failed decodes these rows again" if shown.failed else ""
        )
        before = ""
        if shown.was_finished:
            before = (
                " was finished before, perhaps by another method or from other prompts; nothing was decoded: delete it to "
                "decode anew"
            )
        print(f"{given.out}{before}: {counted(shown.rows, 'row')}, {shown.failed} of them with an error{retry}")
    return int(shown.failed > 0)

"""The command `specbeam batch`: answers to the prompts of a table, which survive the end of the process."""

from pathlib import Path
from typing import Any

from specbeam.apps.jobs.answering import Work, work_of
from specbeam.apps.jobs.batch import batch, settings_described
from specbeam.apps.jobs.journal import Progress
from specbeam.apps.jobs.rows import Columns
from specbeam.doors.cli.common import (
    ProgressBar,
    check_options,
    complain,
    follow_rank_0,
    method_from,
    print_json,
    quiet_load,
    text_or_file,
)
from specbeam.doors.sources import hears, set_languages
from specbeam.errors import NotSupported


def run(
    source: Path,
    out: Path,
    models: dict[str, Any],
    method_name: str,
    settings: list[str],
    options: dict[str, Any],
    seed: int,
    batch_size: int,
    columns: Columns,
    resume: bool,
    retry_failed: bool,
    json: bool,
    source_language: str | None = None,
    target_language: str | None = None,
) -> int:
    """Decode the rows of a table, and return the exit code: 0, or 1 if rows failed, or 130 after an interrupt.

    Args:
        models: the arguments of `quiet_load`.
        options: as for `specbeam.generate`.
        source_language, target_language: the languages of a multilingual translation model, as its tokenizer names them.
    """
    follow_rank_0(models)
    method = method_from(method_name, settings)
    for name, mark in (("json_schema", "{"), ("grammar", ":")):
        options[name] = text_or_file(options[name], mark, name)
    check_options(options, batch_size)
    languages = {"source_language": source_language, "target_language": target_language}
    described = settings_described(
        {**models, "method": method_name, "settings": sorted(settings), **options, **languages, "seed": seed}
    )
    if not method.lossless:
        complain(f"note: {method.name} is {method.law}")

    def make_work() -> Work:
        pair = quiet_load(**models, sources=True)
        if hears(pair):
            raise NotSupported(f"{models['model']} hears recordings, and a table holds texts; use specbeam transcribe")
        set_languages(pair, options, source_language, target_language)
        return work_of(pair, method, seed, batch_size, options)

    shown = Progress(0, 0, 0)
    with ProgressBar() as bar:

        def show(progress: Progress) -> None:
            nonlocal shown
            shown = progress
            bar.show(progress.done, progress.rows)

        try:
            shown = batch(make_work, source, out, described, columns, resume, retry_failed, show)
        except KeyboardInterrupt:
            complain(f"interrupted; {shown.done} of {shown.rows} rows are kept: go on with --resume")
            return 130
    if json:
        print_json({"rows": shown.rows, "failed": shown.failed, "out": str(out)})
    else:
        print(f"{out}: {shown.rows} rows, {shown.failed} of them with an error")
    return int(shown.failed > 0)

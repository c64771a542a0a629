"""A job from a file to a file: decodes every row once, and goes on where it was ended."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbeam import __version__
from specbeam.apps.jobs.answering import ANSWER_COLUMNS, Work, answer_rows
from specbeam.apps.jobs.journal import Journal, Progress
from specbeam.apps.jobs.rows import USUAL_COLUMNS, Columns, JobRow, row_of
from specbeam.apps.jobs.tables import kind_of, read_table, write_table
from specbeam.core import weights_key, whole
from specbeam.doors import require_place, writing
from specbeam.errors import BadPrompt, BadSetting, SpecbeamError

COMMIT_S = 1.0  # seconds after which an answer is on the disk, and one more step


def batch(
    make_work: Callable[[], Work],
    source: Path,
    out: Path,
    described: dict[str, Any] | None = None,
    columns: Columns = USUAL_COLUMNS,
    resume: bool = False,
    retry_failed: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Decode each row of a table, and write the answers to another one, in the order of the rows.

    Until the job is done, answers are kept in a journal named `out` + ".job". A process that is killed at any moment loses
    the rows in progress, and answers of the last `COMMIT_S` seconds and one step, which are not yet committed. With `resume`
    the next process continues the job; its texts equal those of an undisturbed job, because the seed of a row is made of the
    job's seed and the row's id. Rows that were added or changed since are decoded, too, and the answers to rows that are
    gone are dropped. The journal of a job that is over stays there if rows failed, so that they can be decoded again.

    Args:
        make_work: loads the models; called if there is anything to decode, after the rows were read once.
        source, out: files whose names end in .jsonl (or .jsonl.gz, .jsonl.xz), .csv (the same) or .parquet.
        described: settings that the answers depend on, by name; a job is resumed only if they are the same.
        columns: the names of the columns that are read.
        resume: whether to go on with a job that was begun. If it is over, and no row failed, nothing is done.
        retry_failed: whether rows whose answer is an error are decoded again, also in a finished job.
        on_progress: called when the number of answers has changed.

    Returns:
        The numbers of rows, answers and errors.

    Raises:
        BadSetting: a file has an unknown kind; `out` is there already; the job was begun otherwise, or is under way; rows
            are to be decoded again, and their journal is gone.
        BadPrompt: the table cannot be read, or two rows have one id, or it was changed while the job ran. What is wrong
            with a single row is its answer.
        MissingFile, MissingPackage: there is no table, or no package that reads it.
        CannotWrite: the answers or the journal cannot be written; committed answers are there for `resume`.
    """
    kind = kind_of(out)
    require_place(out)
    if _is_same_file(source, out):
        raise BadSetting(f"{out} is the table of prompts itself; give the answers a file of their own")
    path = out.with_name(out.name + ".job")
    if out.exists() and not path.exists():
        if not resume:
            raise BadSetting(f"{out} is there already; delete it, or give another name")
        found = _count(out)
        if retry_failed and found.failed:
            raise BadSetting(
                f"{found.failed} rows of {out} failed, and its journal {path}, which lists them, is missing; delete the "
                "answers and start again"
            )
        return found
    is_begun = path.exists()
    journal = Journal(path, {"specbeam": __version__, "columns": asdict(columns), **(described or {})}, resume)
    try:
        if out.exists() and not resume:  # another process has written it since
            raise BadSetting(f"{out} is there already; delete it, or give another name")
        journal.note_rows(_rows(source, columns))
        if retry_failed:
            journal.forget_failed()
        progress = journal.progress
        on_progress(progress)
        if progress.done < progress.rows:
            _decode(make_work(), journal, _missing(source, columns, journal), progress, on_progress)
            progress = journal.progress
        if progress.done < progress.rows:
            raise BadPrompt(
                f"{source} was changed while its rows were decoded, and {progress.rows - progress.done} of them have no "
                "answer; go on with --resume"
            )
        types = ANSWER_COLUMNS | {"id": "integer" if journal.has_integer_ids else "text"}
        with writing(out, f"make room, and go on with --resume: the answers are kept in {path}"), whole(out) as part:
            write_table(part, kind, types, _typed(journal.records(), types), out.suffix)
        journal.commit()
    except BaseException:
        if is_begun or _has_answers(journal):
            journal.close()
        else:
            journal.delete()  # nothing is lost, and the corrected command can be run again
        raise
    if progress.failed:
        journal.close()
    else:
        journal.delete()
    return progress


def _is_same_file(source: Path, out: Path) -> bool:
    """Return whether two names stand for one file, whatever links lead to it."""
    if source.resolve() == out.resolve():
        return True
    return source.exists() and out.exists() and source.samefile(out)


def _has_answers(journal: Journal) -> bool:
    """Return whether there may be an answer in a journal; True if the journal cannot be read."""
    try:
        return journal.has_answers
    except SpecbeamError:
        return True


def _decode(
    work: Work,
    journal: Journal,
    rows: Iterator[JobRow],
    progress: Progress,
    on_progress: Callable[[Progress], None],
) -> None:
    models = {"target weights": work.pair.target_model, "draft weights": work.pair.draft_model}
    journal.agree({name: weights_key(model) for name, model in models.items()})
    committed = time.monotonic()

    def commit_by_clock() -> None:
        nonlocal committed
        if time.monotonic() - committed > COMMIT_S:
            journal.commit()
            committed = time.monotonic()

    for row, record in answer_rows(work, rows, commit_by_clock):
        journal.keep(row, record)
        progress = Progress(progress.rows, progress.done + 1, progress.failed + bool(record["error"]))
        on_progress(progress)
        commit_by_clock()
    journal.commit()


def _rows(source: Path, columns: Columns) -> Iterator[JobRow]:
    for number, (fields, error) in enumerate(read_table(source), 1):
        if fields is None:
            yield JobRow(number, None, error=f"BadPrompt: {error}")
        else:
            yield row_of(number, fields, columns)


def _missing(source: Path, columns: Columns, journal: Journal) -> Iterator[JobRow]:
    return (row for row in _rows(source, columns) if not journal.has(row))


def _typed(records: Iterator[dict[str, Any]], types: dict[str, str]) -> Iterator[dict[str, Any]]:
    for record in records:
        if types["id"] == "text" and record["id"] is not None:
            record["id"] = str(record["id"])
        yield record


def _count(out: Path) -> Progress:
    """Return the numbers of rows of a job that is over, read from its answers."""
    rows = 0
    failed = 0
    for fields, error in read_table(out):
        if fields is None or "error" not in fields:
            raise BadPrompt(f"{out} is not a table of answers ({error or 'it has no column error'}); give another name")
        rows += 1
        failed += bool(fields["error"])
    return Progress(rows, rows, failed)


def settings_described(names: dict[str, Any]) -> dict[str, Any]:
    """Return settings as a description of a job holds them: what JSON has no form for as its text."""
    described: dict[str, Any] = json.loads(json.dumps(names, default=str))
    return described

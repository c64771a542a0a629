"""A job from file to file: decodes every row once, and can be resumed."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbeam import __version__
from specbeam.apps.jobs.answering import ANSWER_COLUMNS, Work, answer_rows
from specbeam.apps.jobs.journal import Journal, Progress
from specbeam.apps.jobs.rows import USUAL_COLUMNS, Columns, JobRow, check_columns, row_of, row_seed
from specbeam.apps.jobs.tables import READ_KINDS, WITH_HEADERS, kind_of, read_table, write_table
from specbeam.core import weights_key, whole
from specbeam.doors import require_place, writing
from specbeam.errors import BadPrompt, BadSetting, SpecbeamError

COMMIT_S = 1.0  # seconds between commits


def batch(
    make_work: Callable[[], Work],
    source: Path,
    out: Path,
    described: dict[str, Any] | None = None,
    columns: Columns = USUAL_COLUMNS,
    resume: bool = False,
    retry_failed: bool = False,
    drops_answers: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Decode each row of a table, and write the answers to another table, in the order of the rows.

    Until the job is done, answers are kept in a journal named `out` + ".job". A killed process loses the rows in progress,
    and the answers of the last `COMMIT_S` seconds and one step. With `resume` the next process continues the job and
    writes the same texts as an uninterrupted job, because a row's seed depends only on the job's seed and the row's
    id. It also decodes rows that were added, and failed rows that were changed. The journal of a finished job stays if
    rows failed, so that they can be decoded again.

    Args:
        make_work: loads the models; called after the rows were read once, if there are rows to decode.
        source, out: files whose names end in .jsonl, .csv (both optionally followed by .gz or .xz) or .parquet. A source may
            also be a .txt, with a prompt in each line.
        described: settings that the answers depend on, by name; a job is resumed only with the same settings.
        columns: the names of the columns that are read.
        resume: whether to continue a job. A finished job without failed rows is left as it is; only the ids and, if
            `described` has one, the seeds of its rows are compared.
        retry_failed: whether failed rows are decoded again, also in a finished job.
        drops_answers: whether a job is resumed although rows with texts were changed or removed; their texts are dropped.
        on_progress: called when the number of answers changes.

    Returns:
        The numbers of rows, answers and errors.

    Raises:
        BadSetting: a file has an unknown type; `out` exists; the job has other settings, texts of rows that are not in the
            table, or is running; a finished job has other ids or seeds; `retry_failed` is set, but the journal is missing.
        BadPrompt: the table cannot be read, two rows have the same id, or the table was changed while the job ran. Errors
            of a single row are its answer.
        MissingFile, MissingPackage: the table, or a package that reads it, is missing.
        CannotWrite: the answers or the journal cannot be written; committed answers are kept for `resume`.
    """
    kind = kind_of(out)
    require_place(out)
    if _is_same_file(source, out):
        raise BadSetting(f"{out} is the table of prompts itself; write the answers to another file")
    path = out.with_name(out.name + ".job")
    if out.exists() and not path.exists():
        if not resume:
            raise BadSetting(f"{out} already exists; delete it, or give another name")
        found = _finished(out, _rows(source, columns), (described or {}).get("seed"))
        if retry_failed and found.failed:
            raise BadSetting(
                f"{found.failed} rows of {out} failed, but the journal {path}, which lists them, is missing; delete {out} "
                "and start again"
            )
        return found
    if out.exists() and not resume:
        raise BadSetting(
            f"{out} is written, and its journal {path} remains because rows failed; decode those again with --resume "
            "--retry-failed, or delete both files"
        )
    is_begun = path.exists()
    journal = Journal(path, {"specbeam": __version__, "columns": asdict(columns), **(described or {})}, resume)
    try:
        if out.exists() and not resume:  # written by another process in the meantime
            raise BadSetting(f"{out} already exists; delete it, or give another name")
        journal.note_rows(_rows(source, columns), drops_answers)
        if retry_failed:
            journal.forget_failed()
        progress = journal.progress
        on_progress(progress)
        if progress.done < progress.rows:
            _decode(make_work(), journal, _missing(source, columns, journal), progress, on_progress)
            progress = journal.progress
        if progress.done < progress.rows:
            raise BadPrompt(
                f"{source} was changed while its rows were decoded, and {progress.rows - progress.done} rows have no "
                "answer; continue with --resume"
            )
        types = ANSWER_COLUMNS | {"id": "integer" if journal.has_integer_ids else "text"}
        with writing(out, f"make room, and continue with --resume: the answers are kept in {path}"), whole(out) as part:
            write_table(part, kind, types, _typed(journal.records(), types), out.suffix)
        journal.commit()
    except BaseException:
        if is_begun or _has_answers(journal):
            journal.close()
        else:
            journal.delete()  # has no answers: the corrected command can be run without --resume
        raise
    if progress.failed:
        journal.close()
    else:
        journal.delete()
    return progress


def _is_same_file(source: Path, out: Path) -> bool:
    """Return whether two names refer to the same file, also by links."""
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
    pair = work.pair
    models = {"target weights": pair.known("target_model"), "draft weights": pair.known("draft_model")}
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
        if number == 1 and fields is not None and kind_of(source, READ_KINDS) in WITH_HEADERS:
            check_columns([*fields], columns, str(source))
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


def _finished(out: Path, rows: Iterator[JobRow], seed: int | None) -> Progress:
    """Return the progress of a finished job, read from its answers.

    Args:
        rows: the rows to answer.
        seed: the seed of the job; None if it is unknown.

    Raises:
        BadPrompt: the file is not a table of answers.
        BadSetting: it answers other rows, or has other seeds.
    """
    count = 0
    failed = 0
    advice = f"its journal is gone, so it cannot be continued: delete {out}, or give another name"
    for fields, error in read_table(out):
        if fields is None or "error" not in fields:
            raise BadPrompt(f"{out} is not a table of answers ({error or 'it has no column error'}); give another name")
        count += 1
        failed += bool(fields["error"])
        row = next(rows, None)
        if row is None:
            raise BadSetting(
                f"{out} is finished and has more rows than the table, whose last one is {count - 1}; {advice}"
            )
        found = _as_text(fields.get("id"))
        wanted = _as_text(row.id)
        if found != wanted:
            raise BadSetting(
                f"{out} is finished, and its row {count} has the id {found!r}, where the table has {wanted!r}; {advice}"
            )
        own_seed = _as_text(fields.get("seed"))
        if own_seed and seed is not None and own_seed != str(row_seed(seed, row)):
            raise BadSetting(f"{out} is finished, and its row {count} has another seed than this call; {advice}")
    if next(rows, None) is not None:
        raise BadSetting(f"{out} is finished and has {count} rows, but the table has more; {advice}")
    return Progress(count, count, failed, was_finished=True)


def _as_text(value: Any) -> str:
    return "" if value is None else str(value)


def settings_described(names: dict[str, Any]) -> dict[str, Any]:
    """Return settings as JSON values, for the description of a job; other objects become strings."""
    described: dict[str, Any] = json.loads(json.dumps(names, default=str))
    return described

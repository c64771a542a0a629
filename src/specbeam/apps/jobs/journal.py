"""The journal of a job: its rows and answers, in a database that survives the end of its process."""

import hashlib
import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from specbeam.apps.jobs.rows import JobRow
from specbeam.doors import require_place, writing
from specbeam.errors import BadPrompt, BadSetting, CannotWrite, counted

LOG = logging.getLogger("specbeam.jobs")
APPLICATION = 0x5BEA3  # application id in the header of the file, which distinguishes it from other databases
FORMAT = 1  # raised when the tables change
_TABLES = """
create table job (description text not null, seal text not null);
create table answers (
    name text primary key, digest text not null, failed integer not null, record text not null, seal text not null
)
"""
_ROWS = """
create table rows (
    number integer primary key, name text not null unique, digest text not null, has_integer integer not null
)
"""
_MATCH = "from rows join answers on rows.name = answers.name and rows.digest = answers.digest"
_STALE = f"name not in (select rows.name {_MATCH})"
_ANSWER = "answers.name, answers.digest, failed, record, seal"


class Progress(NamedTuple):
    """The numbers of all rows, of answered rows, and of rows whose answer is an error.

    Attributes:
        was_finished: whether the job was finished before this call, so that its settings are unknown.
    """

    rows: int
    done: int
    failed: int
    was_finished: bool = False


class _Damaged(Exception):
    """The database cannot be read, or a seal in it is wrong."""


BROKEN = (_Damaged, sqlite3.Error, UnicodeDecodeError)  # the last one is for stored bytes that are not UTF-8


class Journal:
    """The journal of one job in SQLite: exactly the committed answers survive the end of the process.

    A row is identified by its name; its answer is valid as long as the row's digest is unchanged. Each answer is stored
    with a seal, a hash of all its fields. In a damaged file, answers with a wrong seal are dropped and their rows decoded
    again; the readable answers are copied to a new file.

    Args:
        path: file of the database, created if it is missing.
        description: settings that the answers depend on besides the rows.
        resume: whether to continue an existing job.

    Raises:
        BadSetting: the job exists and `resume` is False, its answers have another description, another process works on
            it, or the file is not a journal, or is too damaged.
        CannotWrite: the file cannot be opened or written; each method may raise this, for example if the disk is full.
    """

    def __init__(self, path: Path, description: dict[str, Any], resume: bool) -> None:
        self.path = path
        require_place(path)
        if path.exists() and not path.is_file():
            raise CannotWrite(f"{path} is a device or a pipe, but a journal needs a file; give another name")
        if path.exists() and not resume:
            raise BadSetting(f"{path} holds an unfinished job; continue it with --resume, or delete the file")
        given = json.loads(json.dumps(description))
        self._base = _connection(path)
        try:
            self._open(given)
        except BaseException:
            self._base.close()
            raise

    def _open(self, description: dict[str, Any]) -> None:
        with _explained(self.path, BEYOND_HELP):
            self._lock()
            if not self._one("select count(*) from sqlite_master"):
                self._make_tables(description)
            self._check_kind()
            try:
                self._check_seals()
            except BROKEN as error:
                if _is_of_the_system(error):
                    raise
                self._rescue()
            if not self.has_answers:  # a new description is fine: nothing was decoded with the old one
                self._describe(description)
            known = self._description()
            _check_same({name: known.get(name) for name in description}, description, self.path)
        self.commit()

    def _lock(self) -> None:
        """Keep all other processes out until the connection is closed, or the process ends."""
        self._base.execute("pragma locking_mode = exclusive")
        self._base.execute("begin exclusive")

    def _make_tables(self, description: dict[str, Any]) -> None:
        self._base.execute(f"pragma application_id = {APPLICATION}")
        self._base.execute(f"pragma user_version = {FORMAT}")
        for statement in _TABLES.split(";"):
            self._base.execute(statement)
        text = json.dumps(description)
        self._base.execute("insert into job values (?, ?)", [text, _seal(text)])

    def _check_kind(self) -> None:
        """Raise `BadSetting` unless the database is a journal of this format."""
        if self._one("pragma application_id") != APPLICATION:
            raise BadSetting(f"{self.path} is a database other than a journal; move it away, or give another name")
        found = self._one("pragma user_version")
        if found != FORMAT:
            raise BadSetting(
                f"{self.path} is a journal of format {found}, but this version of specbeam writes format {FORMAT}; continue "
                "with the version that wrote it, or delete the file"
            )

    def _check_seals(self) -> None:
        """Raise an error if the file is damaged, or the seal of an answer is wrong."""
        if self._one("pragma integrity_check(1)") != "ok":
            raise _Damaged
        for answer in self._base.execute(f"select {_ANSWER} from answers"):
            if not _is_sealed(answer):
                raise _Damaged

    def _rescue(self) -> None:
        """Replace a damaged file by a new one with the answers that can be read and have the right seal.

        The damaged file stays locked until the new one is locked, so that no other process comes in between.
        """
        description = self._description()
        part = self.path.with_name(self.path.name + ".new")
        beside = [self.path.with_name(self.path.name + end) for end in ("-journal", "-wal", "-shm")]
        with writing(self.path):
            part.unlink(missing_ok=True)
            damaged = self._base
            self._base = _connection(part)
            try:
                self._base.execute("begin exclusive")
                self._make_tables(description)
                places = ", ".join("?" * 5)
                self._base.executemany(f"insert or ignore into answers values ({places})", _readable(damaged))
                kept = self._one("select count(*) from answers")
                self._base.execute("commit")
                self._base.close()
                for path in beside:  # they belong to the damaged file
                    path.unlink(missing_ok=True)
                part.replace(self.path)
                self._base = _connection(self.path)
                self._lock()
            finally:
                damaged.close()
        LOG.warning("%s was damaged: %s answers were recovered, the other rows are decoded again", self.path, kept)

    def _description(self) -> dict[str, Any]:
        """Return the settings that the answers depend on. Raises `BadSetting` if their seal is missing or wrong."""
        try:
            rows = self._base.execute("select description, seal from job").fetchall()
        except BROKEN as error:
            if _is_of_the_system(error):
                raise
            rows = []
        if len(rows) != 1 or _seal(rows[0][0]) != rows[0][1]:
            raise BadSetting(
                f"{self.path} is too damaged to read the settings of the job; delete the file and start again"
            )
        found: dict[str, Any] = json.loads(rows[0][0])
        return found

    def _describe(self, description: dict[str, Any]) -> None:
        text = json.dumps(description)
        self._base.execute("update job set description = ?, seal = ?", [text, _seal(text)])

    def note_rows(self, rows: Iterable[JobRow], drops_answers: bool = False) -> None:
        """Store the current rows. Errors of removed and changed rows are dropped, and texts if `drops_answers` is set.

        Raises:
            BadSetting: a row with a text was removed or changed, as in another table, and `drops_answers` is not set; the
                stored rows and answers stay as they were.
            BadPrompt: two rows have the same id.
        """
        with _explained(self.path):
            self._base.execute("drop table if exists rows")
            self._base.execute(_ROWS)
        for row in rows:
            with _explained(self.path):
                self._note(row)
        with _explained(self.path):
            if not drops_answers:
                self._require_rows_of_texts()
            self._base.execute(f"delete from answers where {_STALE}")
        self.commit()

    def _require_rows_of_texts(self) -> None:
        """Raise `BadSetting`, and forget the uncommitted rows, if a stored text belongs to none of them."""
        lost = self._one(f"select count(*) from answers where not failed and {_STALE}")
        if lost:
            texts = self._one("select count(*) from answers where not failed")
            first = self._one(f"select name from answers where not failed and {_STALE} order by rowid")
            self._base.execute("rollback")
            raise BadSetting(
                f"{lost} of {counted(texts, 'text')} in {self.path} answer rows that were changed or are not in this table "
                f"(the first is {first!r}); give the table of the job, or drop these texts by --drop-answers"
            )

    def _note(self, row: JobRow) -> None:
        noted = [row.number, row.name, row.digest, not isinstance(row.id, str)]
        try:
            self._base.execute("insert into rows values (?, ?, ?, ?)", noted)
        except sqlite3.IntegrityError as error:
            first = self._one("select number from rows where name = ?", row.name)
            self._base.execute("rollback")
            raise BadPrompt(
                f"rows {first} and {row.number} have the same id, {row.name!r}; give all rows different ids, or none"
            ) from error

    def agree(self, further: dict[str, Any]) -> None:
        """Add settings to the description. Raises `BadSetting` if the job has other values for them."""
        with _explained(self.path):
            description = self._description()
            _check_same({name: description.get(name, value) for name, value in further.items()}, further, self.path)
            self._describe(description | further)
        self.commit()

    def forget_failed(self) -> None:
        """Drop the answers of failed rows, so that these are decoded again."""
        with _explained(self.path):
            self._base.execute("delete from answers where failed")
        self.commit()

    def has(self, row: JobRow) -> bool:
        """Return whether there is an answer to a row."""
        with _explained(self.path):
            return self._one("select 1 from answers where name = ? and digest = ?", row.name, row.digest) is not None

    def keep(self, row: JobRow, record: dict[str, Any]) -> None:
        """Store the answer to a row; it is permanent after `commit`."""
        content = (row.name, row.digest, int(bool(record["error"])), json.dumps(record))
        with _explained(self.path):
            self._base.execute("insert or replace into answers values (?, ?, ?, ?, ?)", [*content, _seal(*content)])

    def commit(self) -> None:
        """Commit the stored answers to the disk."""
        with _explained(self.path):
            if self._base.in_transaction:
                self._base.execute("commit")
            self._base.execute("begin")

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the answers in the order of the rows, one at a time.

        Raises `BadSetting` if the seal of an answer is wrong.
        """
        with _explained(self.path):
            found = self._base.execute(f"select {_ANSWER} {_MATCH} order by number")
        while True:
            with _explained(self.path):
                answer = found.fetchone()
                if answer is None:
                    return
                if not _is_sealed(answer):
                    raise _Damaged
            yield json.loads(answer[3])

    @property
    def has_answers(self) -> bool:
        """Whether there is any answer, valid or not."""
        with _explained(self.path):
            return self._one("select 1 from answers limit 1") is not None

    @property
    def has_integer_ids(self) -> bool:
        """Whether all ids are integers."""
        with _explained(self.path):
            return self._one("select 1 from rows where not has_integer limit 1") is None

    @property
    def progress(self) -> Progress:
        """The progress of the job."""
        with _explained(self.path):
            rows = self._one("select count(*) from rows")
            done, failed = self._base.execute(f"select count(*), coalesce(sum(failed), 0) {_MATCH}").fetchone()
        return Progress(rows, done, failed)

    def close(self) -> None:
        """Commit if possible, and release the journal for other processes."""
        with suppress(sqlite3.Error):  # on a full disk only the answers of the last commit are kept
            if self._base.in_transaction:
                self._base.execute("commit")
        self._base.close()

    def delete(self) -> None:
        """Close the journal and delete its file."""
        self.close()
        with writing(self.path):
            self.path.unlink(missing_ok=True)

    def _one(self, statement: str, *values: Any) -> Any:
        """Return the first value of the first row that a statement finds; None if it finds none."""
        row = self._base.execute(statement, values).fetchone()
        return None if row is None else row[0]


def _connection(path: Path) -> sqlite3.Connection:
    with _explained(path):
        base = sqlite3.connect(path, timeout=0, isolation_level=None)
    base.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")  # a damaged text fails the check of its seal
    return base


def _readable(base: sqlite3.Connection) -> Iterator[Sequence[Any]]:
    """Yield the answers of a damaged database with the right seal, read from both ends of the table."""
    for order in ("asc", "desc"):
        try:
            for answer in base.execute(f"select {_ANSWER} from answers order by rowid {order}"):
                if _is_sealed(answer):
                    yield answer
        except BROKEN as error:
            if _is_of_the_system(error):
                raise
            continue
        return


def _is_sealed(answer: Sequence[Any]) -> bool:
    *content, seal = answer
    return bool(_seal(*content) == seal)


def _seal(*content: Any) -> str:
    """Return a hash of values from SQLite: texts and integers, or other types if the file is damaged."""
    return hashlib.blake2b(json.dumps(content, default=repr).encode(), digest_size=16).hexdigest()


# SQLite's error codes for faults of the system, as opposed to a damaged file.
_SYSTEM = (
    "SQLITE_FULL",
    "SQLITE_IOERR",
    "SQLITE_CANTOPEN",
    "SQLITE_READONLY",
    "SQLITE_PERM",
    "SQLITE_NOMEM",
    "SQLITE_NOLFS",
)


def _is_of_the_system(error: Exception) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith((*_SYSTEM, "SQLITE_BUSY", "SQLITE_LOCKED"))


BEYOND_HELP = "it cannot be read; delete it and start again"


@contextmanager
def _explained(path: Path, advice: str = "continue with --resume, which keeps the readable answers") -> Iterator[None]:
    """Replace errors of SQLite by errors that name the journal and give advice.

    Args:
        advice: advice for a damaged file.
    """
    try:
        yield
    except BROKEN as error:
        name = getattr(error, "sqlite_errorname", "")
        found = "" if isinstance(error, UnicodeDecodeError) else " ".join(str(error).split())
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            raise BadSetting(f"another process works on the job in {path}; wait for its end") from error
        if name.startswith(_SYSTEM):
            raise CannotWrite(
                f"the journal {path} cannot be opened or written: {found}; make room or change permissions, and continue "
                "with --resume: no committed answer is lost"
            ) from error
        if name == "SQLITE_NOTADB":
            raise BadSetting(f"{path} is not a journal: {found}; delete it and start again") from error
        why = f" ({found})" if found else ""
        raise BadSetting(f"the journal {path} is damaged{why}; {advice}") from error


def _check_same(kept: dict[str, Any], given: dict[str, Any], path: Path) -> None:
    """Raise `BadSetting` if the settings of a job differ from the given ones."""
    every = sorted({*kept, *given})
    names = [name for name in every if kept.get(name) != given.get(name)]
    if names:
        (name, *_) = names
        raise BadSetting(
            f"the job in {path} has {name} {kept.get(name)!r}, but this call has {given.get(name)!r} (different settings: "
            f"{', '.join(names)}); continue with the same settings, or delete the file"
        )

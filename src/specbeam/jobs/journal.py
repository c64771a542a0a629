"""The journal of a job: which rows there are and which answers, in a database that survives the end of its process."""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from specbeam.errors import BadPrompt, BadSetting
from specbeam.jobs.rows import JobRow

_TABLES = """
create table job (description text not null);
create table answers (name text primary key, digest text not null, failed integer not null, record text not null);
"""
_ROWS = """
create table rows (
    number integer primary key, name text not null unique, digest text not null, has_integer integer not null
)
"""
_MATCH = "from rows join answers on rows.name = answers.name and rows.digest = answers.digest"


class Progress(NamedTuple):
    """The numbers of rows: all, those that have an answer, and those of them whose answer is an error."""

    rows: int
    done: int
    failed: int


class Journal:
    """The journal of one job, kept by SQLite: what was committed is there however the process ends, and no more.

    A row is known by its name, and its answer is valid as long as its digest is the same.

    Args:
        path: of the database; made if it is not there.
        description: what the answers depend on besides the rows.
        resume: whether to go on with a job that was begun.

    Raises:
        BadSetting: a job was begun and `resume` is False, or its answers have another description, or another process
            works on it.
    """

    def __init__(self, path: Path, description: dict[str, Any], resume: bool) -> None:
        self.path = path
        if path.exists() and not resume:
            raise BadSetting(f"{path} holds a job that was begun; go on with --resume, or delete the file")
        self._base = sqlite3.connect(path, timeout=0, isolation_level=None)
        try:
            self._open(description)
        except sqlite3.OperationalError as error:
            self._base.close()
            if "locked" in str(error):
                raise BadSetting(f"another process works on the job in {path}; let it end first") from error
            raise BadSetting(f"{path} cannot be opened or written: {error}") from error
        except sqlite3.DatabaseError as error:
            self._base.close()
            raise BadSetting(f"{path} is no journal of a job: {error}; delete it and begin anew") from error
        except BadSetting:
            self._base.close()
            raise

    def _open(self, description: dict[str, Any]) -> None:
        self._base.execute("pragma locking_mode = exclusive")
        self._base.execute("begin exclusive")
        tables = self._base.execute("select count(*) from sqlite_master where name = 'job'").fetchone()[0]
        if not tables:
            for statement in _TABLES.split(";"):
                self._base.execute(statement)
            self._base.execute("insert into job values (?)", [json.dumps(description)])
        if not self.has_answers:  # so there is nothing that another description would spoil
            self._base.execute("update job set description = ?", [json.dumps(description)])
        (kept,) = self._base.execute("select description from job").fetchone()
        known = json.loads(kept)
        given = json.loads(json.dumps(description))
        _check_same({name: known.get(name) for name in given}, given, self.path)
        self.commit()

    def note_rows(self, rows: Iterable[JobRow]) -> None:
        """Note which rows there are now. Answers to rows that are gone, or have changed, are dropped.

        Raises `BadPrompt` if two rows have one id.
        """
        self._base.execute("drop table if exists rows")
        self._base.execute(_ROWS)
        for row in rows:
            try:
                has_integer = not isinstance(row.id, str)
                self._base.execute(
                    "insert into rows values (?, ?, ?, ?)", [row.number, row.name, row.digest, has_integer]
                )
            except sqlite3.IntegrityError as error:
                (first,) = self._base.execute("select number from rows where name = ?", [row.name]).fetchone()
                self._base.execute("rollback")
                raise BadPrompt(
                    f"rows {first} and {row.number} have the same id, {row.name!r}; give each row its own, or none to any"
                ) from error
        self._base.execute(f"delete from answers where name not in (select rows.name {_MATCH})")
        self.commit()

    def agree(self, further: dict[str, Any]) -> None:
        """Add to the description what is known later. Raises `BadSetting` if the job was begun with something else."""
        (kept,) = self._base.execute("select description from job").fetchone()
        description = json.loads(kept)
        _check_same({name: description.get(name, value) for name, value in further.items()}, further, self.path)
        self._base.execute("update job set description = ?", [json.dumps(description | further)])
        self.commit()

    def forget_failed(self) -> None:
        """Drop the answers that are errors, so that their rows are decoded again."""
        self._base.execute("delete from answers where failed")
        self.commit()

    def has(self, row: JobRow) -> bool:
        """Return whether there is an answer to a row."""
        return self._base.execute("select 1 from answers where name = ?", [row.name]).fetchone() is not None

    def keep(self, row: JobRow, record: dict[str, Any]) -> None:
        """Keep the answer to a row; it is there for good after `commit`."""
        given = [row.name, row.digest, bool(record["error"]), json.dumps(record, ensure_ascii=False)]
        self._base.execute("insert into answers values (?, ?, ?, ?)", given)

    def commit(self) -> None:
        """Write what was kept to the disk."""
        if self._base.in_transaction:
            self._base.execute("commit")
        self._base.execute("begin")

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the answers in the order of the rows, without holding them."""
        for (record,) in self._base.execute(f"select record {_MATCH} order by number"):
            yield json.loads(record)

    @property
    def has_answers(self) -> bool:
        """Whether there is any answer, valid or not."""
        return self._base.execute("select 1 from answers limit 1").fetchone() is not None

    @property
    def has_integer_ids(self) -> bool:
        """Whether no row has an id that is a text."""
        return self._base.execute("select 1 from rows where not has_integer limit 1").fetchone() is None

    @property
    def progress(self) -> Progress:
        """How far the job is."""
        (rows,) = self._base.execute("select count(*) from rows").fetchone()
        done, failed = self._base.execute(f"select count(*), coalesce(sum(failed), 0) {_MATCH}").fetchone()
        return Progress(rows, done, failed)

    def close(self) -> None:
        """Commit, and let other processes work on the job."""
        if self._base.in_transaction:
            self._base.execute("commit")
        self._base.close()

    def delete(self) -> None:
        """Close the journal and delete its file: the job is over."""
        self.close()
        self.path.unlink()


def _check_same(kept: dict[str, Any], given: dict[str, Any], path: Path) -> None:
    """Raise `BadSetting` if a job was begun with other settings: its answers would be of two kinds."""
    names = sorted(name for name in {*kept, *given} if kept.get(name) != given.get(name))
    if names:
        (name, *_) = names
        raise BadSetting(
            f"the job in {path} was begun with {name} {kept.get(name)!r}, and this is {given.get(name)!r} (differing: "
            f"{', '.join(names)}); go on with the same settings, or delete the file"
        )

"""Tables in files, read and written row by row: JSON lines, CSV and Parquet; texts with a prompt per line are read alone."""

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from specbeam.doors import DAMAGE, OPENERS, as_json, require_file, require_place, suffix_of
from specbeam.errors import BadPrompt, BadSetting, MissingFile, MissingPackage

KINDS = (".jsonl", ".csv", ".parquet")
READ_KINDS = (*KINDS, ".txt")
WITH_HEADERS = (".csv", ".parquet")  # every row has all columns
ROWS_AT_ONCE = 256  # rows of Parquet in memory


class TableRow(NamedTuple):
    """The fields of a row, by name; None and an error if it cannot be read."""

    fields: dict[str, Any] | None
    error: str = ""


def kind_of(path: Path, kinds: tuple[str, ...] = KINDS) -> str:
    """Return the type of table in a file, one of `kinds`, by its suffix. Raises `BadSetting` for another suffix."""
    kind = suffix_of(path)
    if kind not in kinds or (kind == ".parquet" and path.suffix in OPENERS):
        raise BadSetting(f"{path} is not a known type of table; its name must end in {', '.join(kinds)}, or .jsonl.gz")
    if kind == ".parquet":
        _pyarrow()
    return kind


def require_table(path: Path) -> str:
    """Return the type of table in a file. Raises the errors of `read_table` that need no reading."""
    wanted = f"give a table of prompts: {', '.join(READ_KINDS)}"
    require_file(path, wanted)
    if not path.is_file():
        raise MissingFile(f"{path} is a pipe or a device, but a table is read twice; {wanted}")
    return kind_of(path, READ_KINDS)


def require_place_of_table(path: Path) -> None:
    """Raise `BadSetting` for an unknown type of table, and `CannotWrite` if the file cannot be written."""
    kind_of(path)
    require_place(path)


def read_table(path: Path) -> Iterator[TableRow]:
    """Yield the rows of a table one at a time. Empty lines are skipped, except in a .txt, where every line is a prompt.

    Raises:
        BadSetting: the suffix of the file is unknown.
        MissingFile: there is no such file.
        MissingPackage: the table is Parquet, and pyarrow is not installed.
        BadPrompt: the file is not a table of this type. A single row that cannot be read has an error instead.
    """
    kind = require_table(path)
    readers: dict[str, Callable[[Path], Iterator[TableRow]]] = {
        ".jsonl": _read_jsonl,
        ".csv": _read_csv,
        ".parquet": _read_parquet,
        ".txt": _read_text,
    }
    return _undamaged(path, readers[kind](path))


def _undamaged(path: Path, rows: Iterator[TableRow]) -> Iterator[TableRow]:
    """Yield rows. Raises `BadPrompt` if the file cannot be unpacked or read to its end."""
    try:
        yield from rows
    except DAMAGE as error:
        raise BadPrompt(
            f"{path} is damaged, or not compressed as its suffix says: {error}; compress it again"
        ) from error
    except OSError as error:
        raise BadPrompt(
            f"{path} cannot be read: {error.strerror or error}; check the disk, or write it again"
        ) from error


def _read_jsonl(path: Path) -> Iterator[TableRow]:
    with OPENERS.get(path.suffix, open)(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:  # also for bytes that are not UTF-8
                why = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                yield TableRow(None, f"line {number} is not JSON: {why}")
                continue
            if isinstance(found, str):
                found = {"prompt": found}
            if isinstance(found, dict):
                yield TableRow(found)
            else:
                yield TableRow(None, f"line {number} is {str(found)[:60]!r}; it must be an object")


def _read_text(path: Path) -> Iterator[TableRow]:
    with OPENERS.get(path.suffix, open)(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield TableRow({"prompt": line.decode("utf-8-sig").rstrip("\r\n")})
            except UnicodeDecodeError:
                yield TableRow(None, f"line {number} is not UTF-8; save the file as UTF-8")


def _read_csv(path: Path) -> Iterator[TableRow]:
    csv.field_size_limit(sys.maxsize)  # a prompt may be longer than the usual 128 KiB
    opener = OPENERS.get(path.suffix, open)
    with opener(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.DictReader(file)
        if not rows.fieldnames:
            raise BadPrompt(f"{path} is empty; its first line must name the columns")
        if len(set(rows.fieldnames)) < len(rows.fieldnames):
            raise BadPrompt(f"{path} names a column twice: {', '.join(rows.fieldnames)}")
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield TableRow(None, f"line {rows.line_num} is not CSV: {error}")
                continue
            yield _checked(row, len(rows.fieldnames))


def _checked(row: dict[str | Any, Any], columns: int) -> TableRow:
    """Return the fields of a row of CSV, or a description of its error."""
    further = row.get(None) or []
    found = columns + len(further) - sum(value is None for value in row.values())
    if found != columns:
        return TableRow(None, f"the row has {found} fields, and the table has {columns} columns")
    try:
        "".join(row.values()).encode("utf-8")
    except UnicodeEncodeError:
        return TableRow(None, "the row is not UTF-8; save the table as UTF-8")
    return TableRow(row)


def _read_parquet(path: Path) -> Iterator[TableRow]:
    arrow, parquet = _pyarrow()
    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise BadPrompt(f"{path} is not Parquet, or damaged: {error}; write it again") from error
    with file:
        batches = iter(file.iter_batches(batch_size=ROWS_AT_ONCE))
        while True:
            try:
                rows = next(batches).to_pylist()
            except StopIteration:
                return
            except (arrow.ArrowException, OSError, ValueError) as error:  # ValueError: a text that is not UTF-8
                raise BadPrompt(f"{path} is damaged: {error}; write it again") from error
            for row in rows:
                yield TableRow(row)


def write_table(
    path: Path, kind: str, columns: dict[str, str], rows: Iterable[dict[str, Any]], packing: str | None = None
) -> None:
    """Write rows to a file one at a time.

    Args:
        kind: one of `KINDS`.
        columns: the type of each column: "text", "integer", "number" or "beams".
        packing: suffix of the compression, ".gz" or ".xz"; any other: none. By default the suffix of the file.
    """
    if kind == ".parquet":
        _write_parquet(path, columns, rows)
        return
    opener = OPENERS.get(path.suffix if packing is None else packing, open)
    with opener(path, "wt", encoding="utf-8", errors="backslashreplace", newline="") as file:
        write = {".jsonl": _write_jsonl, ".csv": _write_csv}[kind]
        write(file, columns, rows)


def _write_jsonl(file: Any, columns: dict[str, str], rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        file.write(as_json(row) + "\n")


def _write_csv(file: Any, columns: dict[str, str], rows: Iterable[dict[str, Any]]) -> None:
    writer = csv.DictWriter(file, list(columns))
    writer.writeheader()
    for row in rows:
        cells = {name: as_json(value) if isinstance(value, list) else value for name, value in row.items()}
        writer.writerow(cells)


def _write_parquet(path: Path, columns: dict[str, str], rows: Iterable[dict[str, Any]]) -> None:
    arrow, parquet = _pyarrow()
    beam = arrow.struct(
        [
            ("text", arrow.string()),
            ("tokens", arrow.list_(arrow.int64())),
            ("score", arrow.float64()),
            ("finish_reason", arrow.string()),
            ("item", arrow.string()),
        ]
    )
    types = {
        "text": arrow.string(),
        "integer": arrow.int64(),
        "number": arrow.float64(),
        "beams": arrow.list_(beam),
    }
    schema = arrow.schema([(name, types[kind]) for name, kind in columns.items()])
    with parquet.ParquetWriter(path, schema) as writer:
        remaining = iter(rows)
        while chunk := list(islice(remaining, ROWS_AT_ONCE)):
            writer.write_table(arrow.Table.from_pylist([_proper(row) for row in chunk], schema))


def _proper(value: Any) -> Any:
    """Return a value with lone surrogates, which UTF-8 cannot encode, replaced by escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_proper(one) for one in value]
    if isinstance(value, dict):
        return {name: _proper(one) for name, one in value.items()}
    return value


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPackage(
            "tables in Parquet need pyarrow: pip install 'specbeam[parquet]', or use .jsonl or .csv"
        ) from error
    return pyarrow, pyarrow.parquet

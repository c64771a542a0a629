"""A grammar of SQL for one database: every text that it generates to its end, SQLite can run on that database."""

import functools
import json
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass


@dataclass(frozen=True)
class Schema:
    """Tables with their columns, and how they refer to each other."""

    columns: dict[str, list[str]]  # of each table
    links: Sequence[tuple[str, str, str, str]] = ()  # (table, column, table referred to, its column)

    def __post_init__(self) -> None:
        if not self.columns or not all(self.columns.values()):
            raise ValueError(f"{self.columns} cannot be asked anything; give tables, each with its columns")
        for table, column, other, key in self.links:
            if column not in self.columns.get(table, ()) or key not in self.columns.get(other, ()):
                raise ValueError(f"{table}.{column} refers to {other}.{key}; one of the two is not in the schema")


SHARED = """
start: query
query: {queries} | single " " SET " " single
single: {singles}
inner: {inners}
end: (" ASC" | " DESC")? (" LIMIT " NUMBER)?
SET: "UNION" | "INTERSECT" | "EXCEPT"
AGGREGATE: "count" | "sum" | "avg" | "min" | "max"
COMPARED: "=" | "!=" | "<" | ">" | "<=" | ">="
NUMBER: /[1-9]?[0-9]{{1,3}}/
TEXT: /'[A-Za-z0-9 ]{{1,12}}'/
LIKED: /'%[A-Za-z]{{1,8}}%'/
"""
# A source is a table or two joined ones; {s} is its name in the grammar.
SOURCE = """
{s}: "SELECT " {s}_items {s}_from {s}_where? ({s}_group | {s}_order)?
{s}_items: "DISTINCT "? {s}_item (", " {s}_item){{0,2}}
{s}_item: {s}_column | AGGREGATE "(" {s}_column ")" | "count(*)"
{s}_column: {columns}
{s}_from: {source}
{s}_where: " WHERE " {s}_test ((" AND " | " OR ") {s}_test)?
{s}_test: {s}_column " " COMPARED " " (NUMBER | TEXT)
  | {s}_column " LIKE " LIKED
  | {s}_column " BETWEEN " NUMBER " AND " NUMBER
  | {s}_column " NOT"? " IN (" inner ")"
{s}_group: " GROUP BY " {s}_column (" HAVING count(*) " COMPARED " " NUMBER)? (" ORDER BY " {s}_item end)?
{s}_order: " ORDER BY " {s}_column end
"""
# What can stand on one side of UNION, and in parentheses: a single column of a table.
SINGLE = """
{s}_single: "SELECT " {s}_column {s}_from {s}_where?
{s}_inner: "SELECT " {s}_column {s}_from (" WHERE " {s}_column " " COMPARED " " (NUMBER | TEXT))?
"""


def grammar_of(schema: Schema) -> str:
    """Lark for queries of at most one join, two conditions and one level of subqueries; each is of bounded length."""
    tables = {f"t{number}": table for number, table in enumerate(schema.columns)}
    rules = [
        SOURCE.format(
            s=name, columns=_either(map(_quoted, schema.columns[table])), source=_literal(f" FROM {_quoted(table)}")
        )
        + SINGLE.format(s=name)
        for name, table in tables.items()
    ]
    for number, link in enumerate(schema.links):
        rules.append(_join(f"j{number}", schema, link))
    names = [*tables, *(f"j{number}" for number in range(len(schema.links)))]
    head = SHARED.format(
        queries=" | ".join(names),
        singles=" | ".join(f"{name}_single" for name in tables),
        inners=" | ".join(f"{name}_inner" for name in tables),
    )
    return head + "".join(rules)


def _join(name: str, schema: Schema, link: tuple[str, str, str, str]) -> str:
    table, column, other, key = link
    columns = [
        f"{alias}.{_quoted(one)}" for alias, side in (("T1", table), ("T2", other)) for one in schema.columns[side]
    ]
    source = f" FROM {_quoted(table)} AS T1 JOIN {_quoted(other)} AS T2 ON T1.{_quoted(column)} = T2.{_quoted(key)}"
    return SOURCE.format(s=name, columns=_either(columns), source=_literal(source))


def _either(texts) -> str:
    return " | ".join(map(_literal, texts))


def _literal(text: str) -> str:
    """As Lark writes it, which is as JSON does."""
    return json.dumps(text, ensure_ascii=False)


@functools.cache
def _quoted(name: str) -> str:
    """In quotes, if SQLite would take the bare name for something else."""
    if re.fullmatch("[A-Za-z_][A-Za-z_0-9]*", name):
        with closing(sqlite3.connect(":memory:")) as database:
            try:
                database.execute(f"CREATE TABLE {name} ({name})")
                database.execute(f"SELECT {name}, max(T1.{name}) FROM {name} AS T1 WHERE {name} = 1 GROUP BY {name}")
            except sqlite3.Error:
                return _in_quotes(name)
        return name
    return _in_quotes(name)


def _in_quotes(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def empty_database(schema: Schema) -> sqlite3.Connection:
    database = sqlite3.connect(":memory:")
    for table, columns in schema.columns.items():
        database.execute(f"CREATE TABLE {_in_quotes(table)} ({', '.join(map(_in_quotes, columns))})")
    return database


def runs(database: sqlite3.Connection, text: str) -> bool:
    """Whether the text asks something that SQLite compiles to a program: it parses, every table and column is there."""
    if not re.match(r"\s*SELECT\b", text, re.IGNORECASE):  # BEGIN and the like compile too
        return False
    try:
        database.execute("EXPLAIN " + text)
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return False
    return True

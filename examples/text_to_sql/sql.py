"""A grammar of SQL for one database: whatever it generates, SQLite can run on that database."""

import functools
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Schema:
    """Tables with their columns, and how they refer to each other."""

    columns: dict[str, list[str]]  # of each table
    links: Sequence[tuple[str, str, str, str]] = ()  # (table, column, table referred to, its column)


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
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@functools.cache
def _quoted(name: str) -> str:
    """In brackets, if SQLite would take the bare name for something else."""
    if re.fullmatch("[A-Za-z_][A-Za-z_0-9]*", name):
        try:
            with sqlite3.connect(":memory:") as database:
                database.execute(f"CREATE TABLE {name} ({name})")
                database.execute(f"SELECT {name}, max(T1.{name}) FROM {name} AS T1 WHERE {name} = 1 GROUP BY {name}")
        except sqlite3.Error:
            return f"[{name}]"
        return name
    return f"[{name}]"


def empty_database(schema: Schema) -> sqlite3.Connection:
    database = sqlite3.connect(":memory:")
    for table, columns in schema.columns.items():
        database.execute(f"CREATE TABLE [{table}] ({', '.join(f'[{column}]' for column in columns)})")
    return database


def runs(database: sqlite3.Connection, text: str) -> bool:
    """Whether SQLite compiles the text to a program: it parses, and every table and column is there."""
    try:
        database.execute("EXPLAIN " + text)
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return False
    return True

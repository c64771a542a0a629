"""Questions and schemas of Spider (Yu et al. 2018), from a folder that holds dev.jsonl and tables.json, packed or not."""

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

from sql import Schema

OPENERS = {".gz": gzip.open, ".xz": lzma.open}


def questions(folder: Path) -> list[tuple[str, str]]:
    """(database, question) of each line."""
    records = map(json.loads, _read(folder, "dev.jsonl").splitlines())
    return [(record["db_id"], record["question"]) for record in records]


def schemas(folder: Path) -> dict[str, Schema]:
    return {entry["db_id"]: schema_of(entry) for entry in json.loads(_read(folder, "tables.json"))}


def schema_of(entry: dict[str, Any]) -> Schema:
    tables, columns = entry["table_names_original"], entry["column_names_original"]
    by_table = {name: [column for table, column in columns if table == number] for number, name in enumerate(tables)}
    links = [
        (tables[columns[one][0]], columns[one][1], tables[columns[other][0]], columns[other][1])
        for one, other in entry["foreign_keys"]
    ]
    own = {name: some for name, some in by_table.items() if some and not name.startswith("sqlite_")}
    return Schema(own, [link for link in links if link[0] in own and link[2] in own])


def _read(folder: Path, name: str) -> str:
    path = next(
        (path for path in sorted(folder.glob(name + "*")) if path.suffix in (".jsonl", ".json", *OPENERS)), None
    )
    if path is None:
        raise SystemExit(f"there is no {name} in {folder}; give the folder of Spider's development questions")
    with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
        return file.read()

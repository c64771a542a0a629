"""The tasks of the papers on beams: SQuAD by exact match, Spider by execution accuracy, and MT-bench's questions.

Prompts have one example before the question, as in the authors' scripts. SQuAD's answer is the text before the first
newline, Spider's the text before the first semicolon.
"""

import json
import re
import sqlite3
import string
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbeam.doors import spread, text_of
from specbeam.errors import BadPrompt, MissingFile

LONGEST_QUERY_S = 5.0
_STEPS = 10_000  # instructions of SQLite between two looks at the clock
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class PaperQuestion:
    """A question: its turns, each a prompt, and what a right answer is."""

    id: str
    turns: tuple[str, ...]
    gold: Any = None


@dataclass(frozen=True)
class PaperTask:
    """A task of a paper.

    Attributes:
        metric: name of the quality of an answer; "" if another program judges.
        is_chat: whether turns are messages of a chat; otherwise they are continued as they are.
        judge: returns 1.0 for a right answer to a question, 0.0 for a wrong one; None if another program judges.
        left_out: number of questions that were left out, with the reason; (0, "") if none were.
    """

    name: str
    metric: str
    questions: tuple[PaperQuestion, ...]
    judge: Callable[[PaperQuestion, str], float] | None
    is_chat: bool = False
    left_out: tuple[int, str] = (0, "")

    def first(self, most: int) -> "PaperTask":
        """Return the task with at most this number of questions, evenly spaced over all."""
        return PaperTask(
            self.name, self.metric, tuple(spread(self.questions, most)), self.judge, self.is_chat, self.left_out
        )


def squad_task(path: Path) -> PaperTask:
    """Return SQuAD's questions: the official JSON, or lines with id, context, question and answers.

    The first question is the example of all prompts. Raises `MissingFile` or `BadPrompt` if there are no questions.
    """
    rows = [
        (str(one["id"]), str(one["context"]), str(one["question"]), [_answer_text(text) for text in one["answers"]])
        for one in _records(path, _flat_squad, "id, context, question and answers")
    ]
    if len(rows) < 2:
        raise BadPrompt(f"{path} holds {len(rows)} questions; it needs at least two, as the first one is the example")
    (_, context, question, answers), *others = rows
    example = f"{_passage(context, question)} {answers[0]}\n\n"
    head = "Answer each question with words of its text.\n\n"
    questions = [
        PaperQuestion(name, (head + example + _passage(context, question),), answers)
        for name, context, question, answers in others
    ]
    return PaperTask("SQuAD", "exact match", tuple(questions), squad_match)


def _passage(context: str, question: str) -> str:
    return f"Text: {context}\nQuestion: {question}\nAnswer:"


def _answer_text(answer: Any) -> str:
    return str(answer["text"] if isinstance(answer, dict) else answer)


def _flat_squad(found: Any) -> list[Any]:
    """Return the questions of SQuAD's own JSON as flat records."""
    if "data" not in found:
        return _listed(found)
    return [
        {"id": one["id"], "context": paragraph["context"], "question": one["question"], "answers": one["answers"]}
        for article in found["data"]
        for paragraph in article["paragraphs"]
        for one in paragraph["qas"]
    ]


def _listed(found: Any) -> list[Any]:
    """Return a list of records, or a single record as a list."""
    return found if isinstance(found, list) else [found]


def squad_match(question: PaperQuestion, text: str) -> float:
    """Return 1.0 if the text before the first newline equals an answer by SQuAD's normalisation, otherwise 0.0."""
    said = _normal(text.lstrip().split("\n")[0])
    return float(any(said == _normal(answer) for answer in question.gold))


def _normal(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and repeated spaces, as SQuAD's script compares it."""
    letters = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", letters).split())


def spider_task(path: Path, tables: Path, databases: Path) -> PaperTask:
    """Return Spider's questions whose database is there.

    Args:
        path: dev.json, or lines with db_id, question and query. The first question is the example of all prompts.
        tables: tables.json, the schemas.
        databases: folder with NAME.sqlite or NAME/NAME.sqlite.

    Raises `MissingFile` or `BadPrompt` if there are no questions.
    """
    schemas = {one["db_id"]: _schema(one) for one in _records(tables, _listed, "db_id, table_names and column_names")}
    rows = [
        (str(one["db_id"]), str(one["question"]), str(one["query"]))
        for one in _records(path, _listed, "db_id, question and query")
    ]
    if not databases.is_dir():
        raise MissingFile(f"there is no folder {databases}; give the folder of Spider's SQLite databases")
    unknown = sorted({name for name, _, _ in rows} - schemas.keys())
    if unknown:
        raise BadPrompt(f"{tables} has no schema of {unknown[0]}, which {path} asks about; give Spider's tables.json")
    if not rows:
        raise BadPrompt(f"{path} holds no questions; give Spider's dev.json")
    (name, question, query), *others = rows
    example = f"{schemas[name]}\nQuestion: {question}\nSQL: {query};\n\n"
    files = {name: _database_of(databases, name) for name in {name for name, _, _ in others}}
    questions = [
        PaperQuestion(
            f"{number}", (f"{example}{schemas[name]}\nQuestion: {question}\nSQL:",), (str(files[name]), query)
        )
        for number, (name, question, query) in enumerate(others, 1)
        if files[name] is not None
    ]
    missing = sorted(name for name, file in files.items() if file is None)
    if not questions:
        raise MissingFile(
            f"{databases} holds none of the databases that {path} asks about, such as {missing[0]}.sqlite"
        )
    left_out = (
        (len(others) - len(questions), f"{len(missing)} databases are not in {databases}") if missing else (0, "")
    )
    return PaperTask("Spider", "execution accuracy", tuple(questions), spider_match, left_out=left_out)


def _database_of(folder: Path, name: str) -> Path | None:
    places = (folder / f"{name}.sqlite", folder / name / f"{name}.sqlite")
    return next((place for place in places if place.is_file()), None)


def _schema(described: Any) -> str:
    """Return the tables of a database with their columns, one table per line."""
    columns: dict[int, list[str]] = {}
    for table, column in described["column_names_original"]:
        columns.setdefault(table, []).append(column)
    lines = [f"Database {described['db_id']}:"]
    for number, table in enumerate(described["table_names_original"]):
        lines.append(f"{table}({', '.join(columns.get(number, []))})")
    return "\n".join(lines)


def spider_match(question: PaperQuestion, text: str) -> float:
    """Return 1.0 if the query before the first semicolon returns the rows of the right query, otherwise 0.0.

    The order of rows counts if the right query orders them. A query that fails, changes the database or runs longer than
    `LONGEST_QUERY_S` is wrong.
    """
    file, query = question.gold
    said = text.split(";")[0].strip().removeprefix("```sql").strip("` \n")
    if not said:
        return 0.0
    expected = rows_of(file, query)
    found = rows_of(file, said)
    if expected is None or found is None:
        return 0.0
    if re.search(r"\border\s+by\b", query, re.IGNORECASE):
        return float(expected == found)
    return float(Counter(expected) == Counter(found))


def rows_of(file: str, query: str) -> list[Any] | None:
    """Return the rows of a query on an SQLite database, which is only read; None if the query fails or takes too long."""
    until = time.monotonic() + LONGEST_QUERY_S
    database = sqlite3.connect(f"{Path(file).resolve().as_uri()}?mode=ro", uri=True)
    try:
        database.text_factory = lambda raw: raw.decode(errors="replace")
        database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        database.set_progress_handler(lambda: int(time.monotonic() > until), _STEPS)
        return database.execute(query).fetchall()
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return None
    finally:
        database.close()


def mt_bench_task(path: Path) -> PaperTask:
    """Return MT-bench's questions of two turns; its own judge scores the answers."""
    questions = [
        PaperQuestion(str(one["question_id"]), tuple(one["turns"]))
        for one in _records(path, _listed, "question_id and turns")
    ]
    if not questions:
        raise BadPrompt(f"{path} holds no questions; give MT-bench's question.jsonl")
    return PaperTask("MT-bench", "", tuple(questions), None, is_chat=True)


def _records(path: Path, flatten: Callable[[Any], list[Any]], wanted: str) -> Sequence[Any]:
    """Return the records of a file, JSON as a whole or line by line; plain, .gz or .xz.

    Raises `MissingFile` if there is no such file, `BadPrompt` if it holds something else.

    Args:
        flatten: returns the records of a file that is one JSON value.
        wanted: the fields of a record, for errors.
    """
    content = text_of(path, f"give a file of records with {wanted}")
    try:
        try:
            found = flatten(json.loads(content))
        except json.JSONDecodeError:
            found = [json.loads(line) for line in content.split("\n") if line.strip()]
        return [dict(one) for one in found]
    except (ValueError, KeyError, TypeError) as error:
        raise BadPrompt(f"{path} does not hold records with {wanted}: {error}") from error

"""Prompts from files in the formats of published data sets, or from data sets by name."""

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbeam.doors.places import DAMAGE, OPENERS, require_file, suffix_of
from specbeam.errors import BadPrompt, MissingPackage, counted

# name of a data set -> (hub id, configuration, split)
KNOWN = {
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "mt_bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
    "squad": ("rajpurkar/squad", None, "validation"),
    "spider": ("xlangai/spider", None, "validation"),
}


TABLES = (".csv", ".parquet", ".json")  # their lines are no prompts


@dataclass(frozen=True)
class PromptRow:
    """A prompt and its reference answer, or None."""

    prompt: str
    answer: str | None = None


def read(source: str, rows: int | None = None, columns: tuple[int, int] = (1, 2)) -> list[PromptRow]:
    """Read the prompts of a file or of a data set.

    Args:
        source: a file, plain or compressed (.gz, .xz): text with a prompt per line, .tsv, or JSON lines of Spec-Bench,
            MT-Bench ("turns"), GSM8K, HumanEval, SQuAD, Spider, or with a "prompt". Or a name in `KNOWN`, which is
            downloaded by `datasets`.
        rows: maximum number of prompts, chosen by `spread`; None: all.
        columns: the columns of prompt and answer in a .tsv, counted from 1.

    Raises:
        MissingFile: there is no such file, and no data set of that name.
        MissingPackage: `datasets` is not installed.
        BadPrompt: a line cannot be read (the error names file and line), or there is no prompt.
    """
    prompts = [row for row in placed_rows(source, columns) if row is not None]
    if not prompts:
        raise BadPrompt(f"{source} has no prompts")
    return prompts if rows is None else spread(prompts, rows)


def placed_rows(source: str, columns: tuple[int, int] = (1, 2)) -> list[PromptRow | None]:
    """Return the prompts of a data set, or one prompt per line of a file (None for a blank line); see `read`."""
    return list(_rows(source, columns))


def spread(rows: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` rows, evenly spaced over all, because published files are often sorted (by length, say)."""
    if count >= len(rows):
        return list(rows)
    return [rows[(2 * place + 1) * len(rows) // (2 * count)] for place in range(count)]


def require_source(source: str) -> bool:
    """Return whether a source of prompts is a file, and not a data set. Raises `MissingFile` if it is neither."""
    path = Path(source)
    if source in KNOWN and not path.is_file():
        return False
    require_file(path, f"give a file, or a name: {', '.join(KNOWN)}")
    return True


def require_lines(path: Path) -> None:
    """Raise `BadPrompt` for a file whose suffix says that its lines are no prompts."""
    if suffix_of(path) in TABLES:
        raise BadPrompt(
            f"{path} has no prompt per line; give a text, .tsv or .jsonl, or decode the table by: specbeam batch "
            f"{path.name} OUT"
        )


def _rows(source: str, columns: tuple[int, int]) -> Iterator[PromptRow | None]:
    if require_source(source):
        yield from _rows_of_file(Path(source), columns)
    else:
        yield from _rows_of_hub(source)


def _rows_of_file(path: Path, columns: tuple[int, int]) -> Iterator[PromptRow | None]:
    """Yield the row of each line; None for a blank line."""
    require_lines(path)
    kind = suffix_of(path)
    with OPENERS.get(path.suffix, open)(path, "rb") as file:
        number = 0
        try:
            for line in io.BufferedReader(file):
                number += 1
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                yield _row_of_line(text, kind, columns) if text.strip() else None
        except UnicodeDecodeError as error:
            raise BadPrompt(f"{path}, line {number}, is not UTF-8: {error.reason} at byte {error.start}") from error
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise BadPrompt(f"{path}, line {number}: {error.args[0] if error.args else error}") from error
        except (OSError, *DAMAGE) as error:
            raise BadPrompt(f"{path} cannot be read after line {number}: {error}") from error


def _row_of_line(text: str, kind: str, columns: tuple[int, int]) -> PromptRow:
    if kind == ".jsonl":
        return of_record(json.loads(text))
    if kind == ".tsv":
        fields = text.split("\t")
        if len(fields) < columns[0]:
            raise ValueError(f"it has {counted(len(fields), 'column')}, and prompts are in column {columns[0]}")
        return PromptRow(fields[columns[0] - 1], fields[columns[1] - 1] if len(fields) >= columns[1] else None)
    return PromptRow(text)


def _text(prompt: Any, is_first_of_turns: bool = False) -> str:
    """Return a prompt. Raises `ValueError` if it is no text.

    Args:
        is_first_of_turns: whether a list holds the turns of a user, of which the first one is the prompt.
    """
    if isinstance(prompt, list) and prompt and (is_first_of_turns or len(prompt) == 1):
        (prompt, *_) = prompt
    if isinstance(prompt, list) and all(isinstance(one, str) for one in prompt):
        raise ValueError(f"the prompt is a list of {len(prompt)}; write each prompt in a line of its own")
    if not isinstance(prompt, str):
        raise ValueError(f"the prompt must be a text, and is {prompt!r} of type {type(prompt).__name__}")
    return prompt


def of_record(record: Any) -> PromptRow:
    """Return the prompt and the answer of a record of any of the known data sets.

    Raises `KeyError` if the record has no prompt.
    """
    if isinstance(record, str):
        return PromptRow(record)
    if isinstance(record, dict):
        record = {name: value for name, value in record.items() if value is not None}
    if "turns" in record:
        return PromptRow(_text(record["turns"], is_first_of_turns=True))
    if "prompt" in record:
        answer = record.get("canonical_solution", record.get("reference", record.get("answer")))
        is_of_mt_bench = "prompt_id" in record
        return PromptRow(_text(record["prompt"], is_of_mt_bench), answer if isinstance(answer, str) else None)
    if "context" in record and "question" in record:
        return PromptRow(
            f"{record['context']}\n\n{record['question']}\n", _first(record.get("answers", record.get("answer")))
        )
    if "question" in record:
        return PromptRow(_text(record["question"]), _first(record.get("query", record.get("answer"))))
    if "text" in record:
        return PromptRow(_text(record["text"]))
    raise KeyError("the record has none of turns, prompt, question, text")


def _first(answer: Any) -> str | None:
    """Return the first answer of a field with a text, a list of texts or a dictionary with them; otherwise None."""
    if isinstance(answer, dict):
        answer = answer.get("text")
    if isinstance(answer, list):
        answer = answer[0] if answer else None
    return answer if isinstance(answer, str) else None


def _rows_of_hub(name: str) -> Iterator[PromptRow]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingPackage(f"{name} needs datasets: pip install datasets, or give a file") from error
    hub_id, configuration, split = KNOWN[name]
    yield from map(of_record, load_dataset(hub_id, configuration, split=split))

"""Prompts for benchmarks: from files as they are published, or by name through `datasets`."""

import gzip
import io
import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbeam.errors import BadPrompt, MissingFile, MissingPackage

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
# name -> (hub id, configuration, split)
KNOWN = {
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "mt_bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
    "squad": ("rajpurkar/squad", None, "validation"),
    "spider": ("xlangai/spider", None, "validation"),
}


@dataclass(frozen=True)
class PromptRow:
    """A prompt, and its right answer if there is one."""

    prompt: str
    answer: str | None = None


def read(source: str, rows: int | None = None, columns: tuple[int, int] = (1, 2)) -> list[PromptRow]:
    """Prompts of a source.

    Args:
        source: a file, plain or packed (.gz, .xz): text with a prompt per line, .tsv, or JSON lines of Spec-Bench, MT-Bench
            ("turns"), GSM8K, HumanEval, SQuAD, Spider, or with a "prompt". Or one of those names, for `datasets` to fetch.
        rows: at most so many, see `spread`.
        columns: of a .tsv: prompt and answer, from 1.

    Raises:
        MissingFile, MissingPackage, BadPrompt: with file and line.
    """
    found = list(_rows(source, columns))
    if not found:
        raise BadPrompt(f"{source} holds no prompts")
    return found if rows is None else spread(found, rows)


def spread(rows: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of them, evenly over the whole: published files are often sorted, by length for example."""
    if count >= len(rows):
        return list(rows)
    return [rows[(2 * place + 1) * len(rows) // (2 * count)] for place in range(count)]


def _rows(source: str, columns: tuple[int, int]) -> Iterator[PromptRow]:
    path = Path(source)
    if path.is_file():
        yield from _of_file(path, columns)
    elif source in KNOWN:
        yield from _of_hub(source)
    else:
        raise MissingFile(f"there is no file {source}; give one, or a name: {', '.join(KNOWN)}")


def _of_file(path: Path, columns: tuple[int, int]) -> Iterator[PromptRow]:
    packed = OPENERS.get(path.suffix)
    kind = path.with_suffix("").suffix if packed else path.suffix
    with (packed or open)(path, "rb") as file:
        for number, line in enumerate(io.TextIOWrapper(file, encoding="utf-8", newline="\n"), 1):
            text = line.rstrip("\r\n")
            if not text.strip():
                continue
            try:
                yield _of_line(text, kind, columns)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise BadPrompt(f"{path}, line {number}: {type(error).__name__}: {error}") from error


def _of_line(text: str, kind: str, columns: tuple[int, int]) -> PromptRow:
    if kind == ".jsonl":
        return of_record(json.loads(text))
    if kind == ".tsv":
        fields = text.split("\t")
        return PromptRow(fields[columns[0] - 1], fields[columns[1] - 1])
    return PromptRow(text)


def of_record(record: Any) -> PromptRow:
    """From a record of any of the known sets. Raises `KeyError` if nothing in it looks like a prompt."""
    if isinstance(record, str):
        return PromptRow(record)
    if "turns" in record:
        return PromptRow(record["turns"][0])
    if "prompt" in record:
        prompt = record["prompt"]
        answer = record.get("canonical_solution", record.get("reference", record.get("answer")))
        return PromptRow(prompt if isinstance(prompt, str) else prompt[0], answer if isinstance(answer, str) else None)
    if "context" in record and "question" in record:
        return PromptRow(
            f"{record['context']}\n\n{record['question']}\n", _first(record.get("answers", record.get("answer")))
        )
    if "question" in record:
        return PromptRow(record["question"], _first(record.get("query", record.get("answer"))))
    raise KeyError("none of turns, prompt, question is in the record")


def _first(answer: Any) -> str | None:
    if isinstance(answer, dict):
        answer = answer.get("text")
    if isinstance(answer, list):
        answer = answer[0] if answer else None
    return answer if isinstance(answer, str) else None


def _of_hub(name: str) -> Iterator[PromptRow]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingPackage(f"{name} is fetched by datasets: pip install datasets, or give a file") from error
    place, configuration, split = KNOWN[name]
    yield from map(of_record, load_dataset(place, configuration, split=split))

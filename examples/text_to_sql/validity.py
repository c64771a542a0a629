"""How much of what a model answers is SQL that runs, with and without the grammar.

    python examples/text_to_sql/validity.py FOLDER_OF_SPIDER --questions 200

The bundled pair translates German and has never seen SQL, so nothing here is about right answers: only about valid ones.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from spider import questions, schemas
from sql import Schema, empty_database, grammar_of, runs

import specbeam as sb


@dataclass
class Tally:
    """Sums over answers."""

    answers: int = 0
    valid: int = 0
    ended: int = 0  # by an end token, not by the limit
    tokens: int = 0
    steps: int = 0
    passes: int = 0

    def add(self, one: sb.Generation, runs: bool) -> None:
        self.answers += 1
        self.valid += runs
        self.ended += one.beams[0].finished
        self.tokens += len(one.tokens)
        self.steps += len(one.report.widths)
        self.passes += one.report.target_passes

    def line(self, name: str) -> str:
        return (
            f"| {name} | {self.valid} of {self.answers} | {self.ended} of {self.answers} | "
            f"{self.tokens / self.answers:.1f} | {self.steps / self.passes:.2f} |"
        )


def main(
    folder: Annotated[Path, typer.Argument(help="holds dev.jsonl and tables.json, packed or not")],
    count: Annotated[int, typer.Option("--questions", help="spread evenly over the development set")] = 200,
    method: str = "dsbd",
    max_new_tokens: int = 600,
    backend: str = "llguidance",
    seed: int = 0,
    show: Annotated[int, typer.Option(help="print this many answers")] = 0,
) -> None:
    pair, chosen = sb.load("bundled"), by_schema(folder, count)
    options = {"method": method, "seed": seed, "max_new_tokens": max_new_tokens}
    print("| | runs | ended | tokens | steps per pass |\n| --- | --- | --- | --- | --- |")
    print(tallied(pair, chosen, options, None, 0).line("without"), flush=True)
    print(tallied(pair, chosen, options, backend, show).line("with the grammar"))


def tallied(
    pair: sb.Pair, chosen: list[tuple[Schema, list[str]]], options: dict[str, Any], backend: str | None, show: int
) -> Tally:
    """Answers to all questions; each database has its own grammar. `backend` None: no grammar."""
    tally = Tally()
    for schema, texts in chosen:
        form = {} if backend is None else {"grammar": grammar_of(schema), "grammar_backend": backend}
        database = empty_database(schema)
        for one in sb.generate(pair, texts, **options, **form):
            if tally.answers < show:
                print(one.text)
            tally.add(one, runs(database, one.text))
    return tally


def by_schema(folder: Path, count: int) -> list[tuple[Schema, list[str]]]:
    """`count` questions, spread evenly over the development set, by the schema that they are about."""
    every, known = questions(folder), schemas(folder)
    chosen = defaultdict(list)
    for number in range(count):
        database, question = every[number * len(every) // count]
        chosen[database].append(question)
    return [(known[database], texts) for database, texts in chosen.items()]


if __name__ == "__main__":
    typer.run(main)

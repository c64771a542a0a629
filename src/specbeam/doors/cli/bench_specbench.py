"""The command `specbeam bench specbench`: Spec-Bench's questions, its numbers and ours."""

import re
import time
from pathlib import Path

from specbeam.doors.cli.common import ProgressBar, method_from, print_json, quiet_load
from specbeam.doors.places import writing
from specbeam.errors import BadSetting
from specbeam.lab.bench.provenance import provenance
from specbeam.lab.bench.specbench import as_records, lines_of_specbench, read_questions, specbench, write_answers

USUAL = ["speculative_sampling", "traversal", "sequoia", "prompt_lookup", "opt_tree", "token_recycling"]


def run(
    questions: Path,
    contenders: list[str],
    model: str,
    draft: str | None,
    each: int | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    threads: int | None,
    processor_time: bool,
    answers: Path | None,
    json: bool,
) -> int:
    """Run the contenders on the questions, print a row per method and task, and return the exit code."""
    import torch
    from rich.table import Table

    from specbeam.doors.cli.screen import Screen

    if threads is not None:
        torch.set_num_threads(threads)
    methods = {name: method_from(*_split(name)) for name in contenders or USUAL}
    for name, method in methods.items():
        if method.beams > 1 and temperature == 0 and not method.search:
            raise BadSetting(f"{name} draws beams, and at temperature 0 they are one; give --temperature 1")
    asked = read_questions(questions, each)
    pair = quiet_load(model, draft)
    clock = time.process_time if processor_time else time.perf_counter
    with ProgressBar() as bar:
        done = 0

        def show(_: object) -> None:
            nonlocal done
            done += 1
            bar.show(done, len(asked))

        replies = specbench(pair, asked, methods, seed, max_new_tokens, temperature, clock, show)
    if answers is not None:
        with writing(answers):
            answers.mkdir(parents=True, exist_ok=True)
        for name, method in methods.items():
            path = answers / f"{re.sub('[ /]', '_', name)}.jsonl"
            write_answers(path, pair, asked, replies[name], name, method, seed, max_new_tokens, temperature)
    lines = lines_of_specbench(asked, replies)
    if json:
        for record in as_records(lines):
            print_json(record)
        return 0
    table = Table("method", "task", box=None, pad_edge=False)
    for head in ("questions", "tokens", "accepted", "their speedup", "speedup", "95 %", "same text"):
        table.add_column(head, justify="right")
    for line in lines:
        table.add_row(
            line.method, line.task, str(line.questions), str(line.tokens), f"{line.accepted:.2f}",
            f"{line.their_speedup:.2f}", f"{line.speedup:.2f}", f"{line.low:.2f} to {line.high:.2f}", f"{line.same:.0%}",
        )  # fmt: skip
    Screen(width=120).print(table)
    cut = sum(one.cut for one in replies["plain"])
    print(f"{cut} prompts were longer than the models have positions, and were cut at their beginning")
    print(", ".join(f"{name} {value}" for name, value in provenance().items()))
    return 0


def _split(contender: str) -> tuple[str, list[str]]:
    """Return the name of a method and its settings, which stand after it."""
    name, *settings = contender.split()
    return name, settings

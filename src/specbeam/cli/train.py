"""The commands `specbeam train ...`: a draft for a target, from prompts alone."""

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from specbeam.cli.common import quiet_load
from specbeam.errors import BadSetting
from specbeam.prompts import read, spread
from specbeam.train.course import Trained
from specbeam.train.draft import train_draft
from specbeam.train.drawing import DrawPlan
from specbeam.train.fitting import Schedule

if TYPE_CHECKING:
    from rich.console import Console


def run_draft(
    model: str,
    files: list[Path],
    columns: str,
    rows: int | None,
    out: Path,
    start: str | None,
    layers: int,
    hidden: int | None,
    draws: DrawPlan,
    schedule: Schedule,
    variation: float,
    threads: int | None,
    json: bool,
) -> int:
    """Train a draft model, print its curve, and return the exit code."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if not files:
        raise BadSetting("--data is missing: a file of prompts, like those that the draft will be used for")
    prompts = [row.prompt for file in files for row in read(str(file), columns=_columns(columns))]
    if rows is not None:
        prompts = spread(prompts, rows)
    if threads is not None:
        torch.set_num_threads(threads)
    target = quiet_load(model, None)
    console = Console(stderr=True, highlight=False)
    looks = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*looks, console=console, disable=not console.is_terminal) as progress:
        bars = {name: progress.add_task(what, total=None) for name, what in _WORK.items()}

        def report(name: str, done: int, total: int) -> None:
            progress.update(bars[name], completed=done, total=total)

        trained = train_draft(
            target, prompts, out, start=start, layers=layers, hidden=hidden, draws=draws, schedule=schedule,
            variation=variation, report=report,
        )  # fmt: skip
    if json:
        for point in trained.curve:
            print(json_format.dumps(asdict(point)))
        return 0
    _print_curve(Console(highlight=False), trained)
    return 0


_WORK = {"drawing": "prompts continued by the target", "training": "files of trees learnt from"}


def _columns(text: str) -> tuple[int, int]:
    """Read "2,1" as the columns of prompt and answer, or "2" as that of the prompt."""
    parts = text.split(",")
    if len(parts) > 2 or not all(part.strip().isdigit() and int(part) >= 1 for part in parts):
        raise BadSetting(f"--columns is {text!r}; it is the number of the prompt's column, counted from 1, as 2")
    return int(parts[0]), int(parts[-1])


def _print_curve(console: "Console", trained: Trained) -> None:
    from rich.table import Table

    table = Table(title=f"{trained.folder}: {trained.weights / 1e6:.2f} M weights")
    for head in ("epochs", "minutes", "loss", "acceptance, held out"):
        table.add_column(head, justify="right")
    for point in trained.curve:
        loss = f"{point.loss:.4f}" if point.loss == point.loss else ""
        table.add_row(str(point.epoch), f"{point.seconds / 60:.1f}", loss, f"{point.acceptance:.4f}")
    console.print(table)
    console.print(
        "acceptance: the mean odds that a draft token is accepted, at beams that the target drew below prompts held out"
    )
    console.print(f'use it: sb.load(target, draft="{trained.folder}"); {trained.folder / "training"} can be deleted')

"""The commands `specbeam train ...`: a draft model, a head or a window for a target, from prompts alone."""

import json as json_format
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam.doors.cli.common import print_json, quiet_load
from specbeam.doors.prompts import read, spread
from specbeam.errors import BadSetting
from specbeam.lab.train.coral import WINDOW, train_coral
from specbeam.lab.train.course import Trained
from specbeam.lab.train.draft import train_draft
from specbeam.lab.train.drawing import DrawPlan
from specbeam.lab.train.fitting import Schedule
from specbeam.lab.train.heads import train_head
from specbeam.lab.train.lessons import Report
from specbeam.models.pair import Pair

if TYPE_CHECKING:
    from specbeam.doors.cli.screen import Screen


@dataclass(frozen=True)
class TrainingOptions:
    """What all commands of training are given."""

    model: str
    files: list[Path]
    columns: str
    rows: int | None
    out: Path
    trees: Path | None
    draws: DrawPlan
    schedule: Schedule
    threads: int | None
    json: bool


def run_draft(options: TrainingOptions, start: str | None, layers: int, hidden: int | None, variation: float) -> int:
    """Train a draft model, print its curve, and return the exit code."""

    def train(target: Pair, prompts: list[str], report: Report) -> Trained:
        return train_draft(
            target, prompts, options.out, trees=options.trees, start=start, layers=layers, hidden=hidden,
            draws=options.draws, schedule=options.schedule, variation=variation, report=report,
        )  # fmt: skip

    return _run(options, train)


def run_head(options: TrainingOptions, kind: str, plan: dict[str, Any]) -> int:
    """Train a head of this kind, print its curve, and return the exit code."""

    def train(target: Pair, prompts: list[str], report: Report) -> Trained:
        return train_head(
            kind, target, prompts, options.out, trees=options.trees, plan=plan, draws=options.draws,
            schedule=options.schedule, report=report,
        )  # fmt: skip

    return _run(options, train)


def run_window(options: TrainingOptions, plan: dict[str, Any]) -> int:
    """Teach a copy of the target a window (COrAL), print its curve, and return the exit code."""

    def train(target: Pair, prompts: list[str], report: Report) -> Trained:
        return train_coral(
            target, prompts, options.out, trees=options.trees, plan=plan, draws=options.draws,
            schedule=options.schedule, report=report,
        )  # fmt: skip

    return _run(options, train, str(options.out), str(options.out / WINDOW))


def _run(
    options: TrainingOptions,
    train: Callable[[Pair, list[str], Report], Trained],
    target_folder: str | None = None,
    draft_folder: str | None = None,
) -> int:
    """Train with progress bars, print the curve, and return the exit code.

    Args:
        target_folder: that of the target that was written; None: the target stays what it was.
        draft_folder: that of what drafts for it; None: the one that is written.
    """
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from specbeam.doors.cli.screen import Screen

    if not options.files:
        raise BadSetting("--data is missing: a file of prompts, like those that the draft will be used for")
    columns = _columns(options.columns)
    prompts = [row.prompt for file in options.files for row in read(str(file), columns=columns)]
    if options.rows is not None:
        prompts = spread(prompts, options.rows)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    target = quiet_load(options.model, None)
    console = Screen(stderr=True)
    looks = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*looks, console=console, disable=not console.is_terminal) as progress:
        bars: dict[str, Any] = {}

        def report(name: str, done: int, total: int) -> None:
            if name not in bars:
                bars[name] = progress.add_task(_WORK[name], total=None)
            progress.update(bars[name], completed=done, total=total)

        trained = train(target, prompts, report)
    if options.json:
        for point in trained.curve:
            print_json(asdict(point))
        return 0
    printed = Screen()
    _print_exits(printed, trained.folder / "training" / "exits.json")
    _print_curve(printed, trained)
    source = "target" if target_folder is None else f'"{target_folder}"'
    loading = f'sb.load({source}, draft="{draft_folder or trained.folder}")'
    printed.print(f"use it: {loading}; {trained.folder / 'training'} can be deleted")
    return 0


_WORK = {
    "drawing": "prompts continued by the target",
    "choosing": "exit layers tried",
    "training": "files of trees learnt from",
}


def _columns(text: str) -> tuple[int, int]:
    """Read "2,1" as the columns of prompt and answer, or "2" as that of the prompt."""
    parts = text.split(",")
    if len(parts) > 2 or not all(part.strip().isdigit() and int(part) >= 1 for part in parts):
        raise BadSetting(f"--columns is {text!r}; it is the number of the prompt's column, counted from 1, as 2")
    return int(parts[0]), int(parts[-1])


def _print_exits(console: "Screen", path: Path) -> None:
    """Print what a short trial has said of exit layers behind several numbers of layers, if there was one."""
    from rich.table import Table

    if not path.exists():
        return
    table = Table(title="exit layers, after a short trial")
    for name in ("behind layers", "acceptance", "draft step, ms", "best depth", "expected speed"):
        table.add_column(name, justify="right")
    for one in json_format.loads(path.read_text()):
        figures = (f"{one['acceptance']:.3f}", f"{1000 * one['draft_s']:.2f}", str(one["depth"]), f"{one['speed']:.2f}")
        table.add_row(str(one["after"]), *figures)
    console.print(table)


def _print_curve(console: "Screen", trained: Trained) -> None:
    from rich.table import Table

    table = Table(title=f"{trained.folder}: {trained.weights / 1e6:.2f} M weights")
    deeper = [f"{depth} deep" for depth in range(2, 2 + len(trained.curve[-1].deeper))]
    for name in ("epochs", "minutes", "loss", "acceptance, held out", *deeper):
        table.add_column(name, justify="right")
    for point in trained.curve:
        loss = f"{point.loss:.4f}" if point.loss == point.loss else ""
        acceptances = [f"{one:.4f}" for one in (point.acceptance, *point.deeper)]
        table.add_row(str(point.epoch), f"{point.seconds / 60:.1f}", loss, *acceptances)
    console.print(table)
    console.print(
        "acceptance: the mean odds that a draft token is accepted, at beams that the target drew below prompts held out"
    )

"""The command `specbeam train hmt`: a memory for a model, from long texts."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specbeam.doors.cli.common import print_json, quiet_load
from specbeam.errors import BadSetting
from specbeam.lab.train.hmt import TrainedMemory, read_documents, train_hmt
from specbeam.lab.train.remembering import MemorySchedule
from specbeam.models.memory.plan import MemoryPlan, segment_of_window

SEGMENT = 222  # tokens of a segment by default: with 32 sensory tokens a window of 256


@dataclass(frozen=True)
class MemoryOptions:
    """What the command is given."""

    model: str
    files: list[Path]
    out: Path
    plan: MemoryPlan
    width: int | None
    schedule: MemorySchedule
    prompt_weight: float
    threads: int | None
    json: bool


def plan_of(
    segment: int | None, window: int | None, sensory: int, memories: int, share: float, recall: Any, query: Any
) -> MemoryPlan:
    """Return the plan by the options of the command."""
    if segment is not None and window is not None:
        raise BadSetting(f"--segment {segment} and --window {window} both say how long segments are; leave one out")
    if window is not None:
        segment = segment_of_window(window, sensory)
    return MemoryPlan(SEGMENT if segment is None else segment, sensory, memories, share, recall, query)


def schedule_of(
    stages: str,
    previous_steps: int,
    batch: int,
    rate: float,
    memory_rate: float,
    frozen: bool,
    loss_on: Any,
    depth: int | None,
    check_every: int,
    seed: int,
) -> MemorySchedule:
    """Return the schedule by the options of the command."""
    return MemorySchedule(
        stages=_stages(stages),
        previous_steps=previous_steps,
        batch=batch,
        rate=rate,
        memory_rate=memory_rate,
        frozen=frozen,
        loss_on=loss_on,
        depth=depth,
        check_every=check_every,
        seed=seed,
    )


def _stages(text: str) -> tuple[tuple[int, int], ...]:
    """Read "2:200,4:300" as numbers of segments and of steps."""
    found = []
    for part in text.split(","):
        segments, _, steps = part.partition(":")
        if not (segments.strip().isdigit() and steps.strip().isdigit()):
            raise BadSetting(f"--stages is {text!r}; it is numbers of segments and of steps, as 2:200,4:300")
        found.append((int(segments), int(steps)))
    return tuple(found)


def run(options: MemoryOptions) -> int:
    """Train with a progress bar, print the curve, and return the exit code."""
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from specbeam.doors.cli.screen import Screen

    if not options.files:
        raise BadSetting("--data is missing: a file of long texts, like those that are to be remembered")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    target = quiet_load(options.model, None)
    documents = read_documents(options.files, target.tokenizer, options.prompt_weight)
    console = Screen(stderr=True)
    looks = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*looks, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("steps", total=None)

        def report(name: str, done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        trained = train_hmt(
            target,
            documents,
            options.out,
            options.plan,
            width=options.width,
            schedule=options.schedule,
            report=report,
        )
    if options.json:
        for point in trained.curve:
            print_json(asdict(point))
        return 0
    _print_curve(trained)
    return 0


def _print_curve(trained: TrainedMemory) -> None:
    from rich.table import Table

    from specbeam.doors.cli.screen import Screen

    console = Screen()
    table = Table(title=f"{trained.folder}: {trained.weights / 1e6:.2f} M weights learnt")
    for name in ("steps", "minutes", "loss", "held out", "later half", "nothing recalled", "answers"):
        table.add_column(name, justify="right")
    for point in trained.curve:
        figures = (point.loss, point.held_out, point.later, point.forgetful, point.answers)
        shown = [f"{one:.4f}" if one == one else "" for one in figures]
        table.add_row(str(point.step), f"{point.seconds / 60:.1f}", *shown)
    console.print(table)
    console.print(
        "held out: surprise of a token of held-out texts, in nats; later half: of those after the tokens of a query; "
        "nothing recalled: by the same weights without memories; answers: those of which each token is the likeliest"
    )
    console.print(f'use it: sb.hmt("{trained.folder}"); {trained.folder / "training"} can be deleted')

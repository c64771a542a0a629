"""The command `specbeam train hmt`: a memory for a model, from long texts."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.arguments import Record
from specbeam.doors.cli.common import print_json, quiet_load
from specbeam.doors.cli.options import Json, Model, Threads, files_to_read, folder_to_write
from specbeam.doors.cli.train import TrainingSeed
from specbeam.errors import BadSetting

if TYPE_CHECKING:
    from specbeam.lab.train.hmt import TrainedMemory
    from specbeam.lab.train.remembering import MemorySchedule
    from specbeam.models.memory.plan import MemoryPlan

SEGMENT = 222  # tokens of a segment by default: with 32 sensory tokens a window of 256


class MemoryArguments(Record):
    """What the command is given."""

    out: Annotated[Path, folder_to_write("Folder to write; a training that was stopped goes on there.", "--out", "-o")]
    model: Model = "bundled"
    data: Annotated[
        list[Path],
        files_to_read(
            "File of long texts: a text, or .jsonl with a 'text' in each line, or a 'prompt' and an 'answer'; plain or "
            "packed. May be given several times.",
            "--data",
            "--file",
            "-f",
        ),
    ] = []
    segment: Annotated[int | None, typer.Option(help="Number of new tokens of a segment; by default 222.")] = None
    window: Annotated[
        int | None,
        typer.Option(help="Number of positions that a segment takes in all, in place of --segment: 2 more than both."),
    ] = None
    sensory: Annotated[int, typer.Option(help="Number of tokens that a segment sees of the one before.")] = 32
    memories: Annotated[int, typer.Option(help="Number of segments whose memories can be recalled.")] = 300
    share: Annotated[float, typer.Option(help="Part of a segment that its query is made of.")] = 0.5
    recall: Annotated[
        str, typer.Option(help="What is recalled: 'attention' (HMT), 'previous' (RMT), or 'initial', which is nothing.")
    ] = "attention"
    query: Annotated[
        str, typer.Option(help="What a query is made of: 'previous_tail', 'refresh', or 'first_half' as in the paper.")
    ] = "refresh"
    width: Annotated[int | None, typer.Option(help="Size of queries and keys; by default that of an embedding.")] = None
    stages: Annotated[str, typer.Option(help="Segments of a text and steps with such, one stage after the other.")] = (
        "2:200,4:300"
    )
    previous_steps: Annotated[
        int, typer.Option(help="Steps before these in which the memory of the segment before is recalled (RMT).")
    ] = 0
    batch: Annotated[int, typer.Option(help="Number of texts of a step.")] = 8
    rate: Annotated[float, typer.Option(help="Learning rate of the model.")] = 1e-5
    memory_rate: Annotated[float, typer.Option(help="Learning rate of the memory.")] = 1e-3
    frozen: Annotated[bool, typer.Option("--frozen", help="Leave the model as it is.")] = False
    loss_on: Annotated[str, typer.Option(help="'all' segments of a text, or the 'last'.")] = "all"
    prompt_weight: Annotated[float, typer.Option(help="Weight of a prompt's tokens; those of answers have 1.")] = 1.0
    depth: Annotated[int | None, typer.Option(help="Segments that gradients go through; by default all.")] = None
    check_every: Annotated[int, typer.Option(help="Steps between two checks on held-out texts.")] = 100
    seed: TrainingSeed = 0
    threads: Threads = None
    json: Json = False

    @property
    def plan(self) -> "MemoryPlan":
        """How texts are read and what is recalled."""
        from specbeam.models.memory.plan import MemoryPlan, segment_of_window

        if self.segment is not None and self.window is not None:
            raise BadSetting(
                f"--segment {self.segment} and --window {self.window} both say how long segments are; leave one out"
            )
        segment = SEGMENT if self.segment is None else self.segment
        if self.window is not None:
            segment = segment_of_window(self.window, self.sensory)
        recall: Any = self.recall
        query: Any = self.query
        return MemoryPlan(segment, self.sensory, self.memories, self.share, recall, query)

    @property
    def schedule(self) -> "MemorySchedule":
        """How it is learnt."""
        from specbeam.lab.train.remembering import MemorySchedule

        loss_on: Any = self.loss_on
        return MemorySchedule(
            stages=_stages(self.stages),
            previous_steps=self.previous_steps,
            batch=self.batch,
            rate=self.rate,
            memory_rate=self.memory_rate,
            frozen=self.frozen,
            loss_on=loss_on,
            depth=self.depth,
            check_every=self.check_every,
            seed=self.seed,
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


def train_memory(given: MemoryArguments) -> int:
    """Train a memory (HMT), with which a model reads texts of any length in segments and recalls earlier ones."""
    plan = given.plan
    schedule = given.schedule
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from specbeam.doors.cli.screen import Screen
    from specbeam.lab.train.hmt import read_documents, train_hmt

    if not given.data:
        raise BadSetting("--data is missing: a file of long texts, like those that are to be remembered")
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    target = quiet_load(given.model, None)
    documents = read_documents(given.data, target.tokenizer, given.prompt_weight)
    console = Screen(stderr=True)
    looks = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*looks, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("steps", total=None)

        def report(name: str, done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        trained = train_hmt(
            target,
            documents,
            given.out,
            plan,
            width=given.width,
            schedule=schedule,
            report=report,
        )
    if given.json:
        for point in trained.curve:
            print_json(asdict(point))
        return 0
    _print_curve(trained)
    return 0


def _print_curve(trained: "TrainedMemory") -> None:
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

"""The command `specbeam train hmt`: training of a memory for a model, from long texts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specbeam.doors.cli.arguments import Record
from specbeam.doors.cli.common import print_records, quiet_load
from specbeam.doors.cli.options import Engine, Json, Model, Threads, files_to_read, folder_to_write
from specbeam.doors.cli.train import TrainingSeed, training_bar
from specbeam.doors.prompts import require_lines
from specbeam.errors import BadSetting

if TYPE_CHECKING:
    from specbeam.lab.train.hmt import TrainedMemory
    from specbeam.lab.train.remembering import MemorySchedule
    from specbeam.models.memory.plan import MemoryPlan

SEGMENT = 222  # tokens of a segment by default: with 32 sensory tokens a window of 256


class MemoryArguments(Record):
    """Arguments of the command."""

    out: Annotated[Path, folder_to_write("Output folder; an interrupted training resumes from it.", "--out", "-o")]
    model: Model = "bundled"
    engine: Engine = "auto"
    data: Annotated[
        list[Path],
        files_to_read(
            "File of long texts: a text, or .jsonl with a 'text', or a 'prompt' and an 'answer', in each line; plain, .gz "
            "or .xz. May be given several times.",
            "--data",
            "--file",
            "-f",
        ),
    ] = []
    segment: Annotated[int | None, typer.Option(min=1, help="Number of new tokens per segment; by default 222.")] = None
    window: Annotated[
        int | None,
        typer.Option(help="Total number of positions per segment, in place of --segment: segment + sensory + 2."),
    ] = None
    sensory: Annotated[
        int, typer.Option(min=0, help="Number of tokens of the previous segment that a segment sees.")
    ] = 32
    memories: Annotated[int, typer.Option(min=1, help="Number of segments with recallable memories.")] = 300
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of a segment used for its query.")] = 0.5
    recall: Annotated[
        Literal["attention", "previous", "initial"],
        typer.Option(help="Recalled memory: 'attention' (HMT), 'previous' (RMT), or 'initial' (none)."),
    ] = "attention"
    query: Annotated[
        Literal["previous_tail", "refresh", "first_half"],
        typer.Option(help="Tokens of the query: 'previous_tail', 'refresh', or 'first_half' as in the paper."),
    ] = "refresh"
    width: Annotated[int | None, typer.Option(help="Size of queries and keys; by default the embedding size.")] = None
    stages: Annotated[str, typer.Option(help="Training stages, each as SEGMENTS_PER_TEXT:STEPS.")] = "2:200,4:300"
    previous_steps: Annotated[
        int, typer.Option(help="Steps before these stages that recall the previous segment's memory (RMT).")
    ] = 0
    batch: Annotated[int, typer.Option(min=1, help="Number of texts per step.")] = 8
    rate: Annotated[float, typer.Option(min=0, help="Learning rate of the model.")] = 1e-5
    memory_rate: Annotated[float, typer.Option(min=0, help="Learning rate of the memory.")] = 1e-3
    frozen: Annotated[bool, typer.Option("--frozen", help="Train the memory only, not the model.")] = False
    loss_on: Annotated[
        Literal["all", "last"], typer.Option(help="Segments in the loss: 'all' of a text, or the 'last' one.")
    ] = "all"
    prompt_weight: Annotated[
        float, typer.Option(help="Weight of prompt tokens in the loss; answer tokens have weight 1.")
    ] = 1.0
    depth: Annotated[
        int | None, typer.Option(min=1, help="Number of segments for backpropagation; by default all.")
    ] = None
    check_every: Annotated[int, typer.Option(min=1, help="Number of steps between evaluations on held-out texts.")] = (
        100
    )
    seed: TrainingSeed = 0
    threads: Threads = None
    json: Json = False

    @property
    def plan(self) -> "MemoryPlan":
        """The plan of segments and memories."""
        from specbeam.models.memory.plan import MemoryPlan, segment_of_window

        if self.segment is not None and self.window is not None:
            raise BadSetting(
                f"--segment {self.segment} and --window {self.window} both set the length of segments; leave one out"
            )
        segment = SEGMENT if self.segment is None else self.segment
        if self.window is not None:
            segment = segment_of_window(self.window, self.sensory)
        return self.make(MemoryPlan, segment=segment)

    @property
    def schedule(self) -> "MemorySchedule":
        """The schedule of the training."""
        from specbeam.lab.train.remembering import MemorySchedule

        return self.make(MemorySchedule, stages=_stages(self.stages))


def _stages(text: str) -> tuple[tuple[int, int], ...]:
    """Return the numbers of segments and steps of each stage, from a text such as "2:200,4:300"."""
    found = []
    for part in text.split(","):
        segments, _, steps = part.partition(":")
        if not (segments.strip().isdigit() and steps.strip().isdigit()):
            raise BadSetting(f"--stages is {text!r}; it must be SEGMENTS:STEPS pairs, such as 2:200,4:300")
        found.append((int(segments), int(steps)))
    return tuple(found)


def train_memory(given: MemoryArguments) -> int:
    """Train a memory (HMT), so that a model can read texts of any length in segments and recall earlier ones."""
    plan = given.plan
    _stages(given.stages)
    if not given.data:
        raise BadSetting("--data is missing; give a file of long texts similar to later ones")
    for file in given.data:
        require_lines(file)
    from specbeam.lab.train.hmt import read_documents, train_hmt

    schedule = given.schedule
    target = quiet_load(given.model, None, engine=given.engine)
    documents = read_documents(given.data, target.tokenizer, given.prompt_weight)
    with training_bar() as progress:
        bar = progress.add_task("steps", total=None)

        def report(name: str, done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        trained = train_hmt(target, documents, given.out, plan, width=given.width, schedule=schedule, report=report)
    if given.json:
        print_records(trained.curve)
        return 0
    _print_curve(trained)
    return 0


def _print_curve(trained: "TrainedMemory") -> None:
    from rich.table import Table

    from specbeam.doors.cli.screen import Screen

    console = Screen()
    table = Table(title=f"{trained.folder}: {trained.weights / 1e6:.2f} M trained weights")
    for name in ("steps", "minutes", "loss", "held out", "later half", "nothing recalled", "answers"):
        table.add_column(name, justify="right")
    for point in trained.curve:
        figures = (point.loss, point.held_out, point.later, point.forgetful, point.answers)
        shown = [f"{one:.4f}" if one == one else "" for one in figures]
        table.add_row(str(point.step), f"{point.seconds / 60:.1f}", *shown)
    console.print(table)
    console.print(
        "held out: nats per token of held-out texts; later half: the same for tokens after those of a query; nothing "
        "recalled: the same weights without memories; answers: share of answers whose tokens are all the likeliest"
    )
    console.print(f'use it: sb.hmt("{trained.folder}"); {trained.folder / "training"} can be deleted')

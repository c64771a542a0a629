"""The commands `specbeam train ...`: a draft model, a head or a window for a target, from prompts alone."""

import json as json_format
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.arguments import Record, add_command, generation, group
from specbeam.doors.cli.common import print_json, quiet_load
from specbeam.doors.cli.options import Json, Model, Threads, folder_to_write
from specbeam.doors.options.head_kinds import DRAFT_SCHEDULE, HEAD_KINDS, HEAD_SCHEDULE, WINDOW_KIND, HeadKind
from specbeam.doors.options.table import OPTIONS
from specbeam.doors.prompts import read, spread
from specbeam.errors import BadSetting

if TYPE_CHECKING:
    from specbeam.doors.cli.screen import Screen
    from specbeam.lab.train.course import Trained
    from specbeam.lab.train.drawing import DrawPlan
    from specbeam.lab.train.fitting import Schedule
    from specbeam.lab.train.lessons import Report
    from specbeam.models.pair import Pair

# Options of the target's draws, by the names of `DrawPlan`: those by which most texts are cut.
OF_DRAWS = tuple(
    name for name, option in OPTIONS.items() if option.warper and option.field and name not in ("temperature", "min_p")
)
TrainingSeed = Annotated[int, typer.Option(help="Seed of draws, batches and first weights.")]


class TrainingArguments(Record):
    """What all commands of training are given.

    Attributes:
        plan: the options of the draft model, head or window, by name.
    """

    out: Annotated[Path, folder_to_write("Folder to write; a training that was stopped goes on there.", "--out", "-o")]
    model: Model = "bundled"
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            "--file",
            "-f",
            help="File of prompts that the target is asked to continue: text with a prompt per line, .tsv, or .jsonl; "
            "plain or packed. May be given several times.",
        ),
    ] = []
    columns: Annotated[str, typer.Option(help="Column of the prompt in a .tsv, counted from 1.")] = "1"
    rows: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of prompts, at even distances; by default all.")
    ] = None
    trees: Annotated[
        Path | None,
        folder_to_write(
            "Folder of what the target draws, which trainings with the same prompts, draws and seed may share; "
            "by default it is in the folder that is written."
        ),
    ] = None
    plan: dict[str, Any] = group({})
    beams: Annotated[int, typer.Option(help="Number of beams that the target draws below each prompt.")] = 4
    temperature: Annotated[float, typer.Option(help="Temperature of these draws.")] = 1.0
    truncation: dict[str, Any] = generation(only=OF_DRAWS)
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens that are drawn below a prompt.")] = 80
    epochs: Annotated[int, typer.Option(help="How often each drawn tree is learnt from.")] = 4
    rate: Annotated[float, typer.Option(help="Learning rate of Muon, for the matrices of the blocks.")] = 0.02
    embedding_rate: Annotated[float, typer.Option(help="Learning rate of Adam, for all other weights.")] = 0.002
    batch_tokens: Annotated[int, typer.Option(help="Number of tokens of a batch.")] = 4_000
    variation: Annotated[
        float, typer.Option(help="Share of total variation in the loss; cross-entropy has the rest.")
    ] = 0.5
    seed: TrainingSeed = 0
    threads: Threads = None
    json: Json = False

    @property
    def draws(self) -> "DrawPlan":
        """How the target draws the texts that are learnt from."""
        from specbeam.lab.train.drawing import DrawPlan

        return DrawPlan(
            self.beams, self.temperature, max_new_tokens=self.max_new_tokens, seed=self.seed, **self.truncation
        )

    @property
    def schedule(self) -> "Schedule":
        """How it is learnt."""
        from specbeam.lab.train.fitting import Schedule

        return Schedule(self.epochs, self.rate, self.embedding_rate, self.batch_tokens, seed=self.seed)


# The options of a head's plan, by their names in `HeadPlan`; `head_kinds.py` says which kinds take them.
PLAN_OPTIONS: dict[str, Any] = {
    "layers": Annotated[int | None, typer.Option(help="Number of layers; by default as is usual for the kind.")],
    "depth": Annotated[int | None, typer.Option(help="Number of drafts, one below the other, that it learns to make.")],
    "inner": Annotated[
        int | None, typer.Option(help="Size of the gated inner layer; by default twice the target's width.")
    ],
    "draft_vocab": Annotated[
        int | None,
        typer.Option(help="Number of tokens that it gives odds to, the target's likeliest; by default 32,000 or all."),
    ],
    "taps": Annotated[
        list[int],
        typer.Option(
            "--tap",
            help="Layer whose incoming hidden states it reads, counted from 0; the number of layers stands for what "
            "leaves the last. May be given several times; by default three of them.",
        ),
    ],
    "rank": Annotated[
        int | None,
        typer.Option(help="Rank of the matrices that make a draft depend on the token above; by default 64."),
    ],
    "regression": Annotated[
        float | None,
        typer.Option(
            help="How much the error of estimated hidden states counts beside that of the laws; by default 10."
        ),
    ],
    "read_out": Annotated[
        str | None,
        typer.Option(
            help="'shared', a map for each depth and one matrix of tokens, or 'own', a matrix of tokens for each depth; "
            "by default 'shared'."
        ),
    ],
    "shown": Annotated[
        float | None,
        typer.Option(
            help="Share of blocks that are learnt with some of their drafts shown, for drafts in several steps; by "
            "default a half."
        ),
    ],
    "prefix": Annotated[int | None, typer.Option(help="Number of soft prompts in each layer; by default 16.")],
    "enters": Annotated[
        int | None,
        typer.Option(
            help="Layer at which rows enter that are made of states there, counted from 0; by default the middle one, or, "
            "where the layers from there on are taught, the last but one."
        ),
    ],
    "exit_layer": Annotated[
        int | None,
        typer.Option(
            help="Number of the target's layers that run before the exit layer; by default the number that promises most "
            "tokens per second, by a short trial and by what passes cost on this machine."
        ),
    ],
    "decay": Annotated[
        float | None,
        typer.Option(help="How much each depth counts in the loss, as a share of the one before; by default 0.8."),
    ],
}
# The options of a new draft model.
DRAFT_OPTIONS: dict[str, Parameter] = {
    "start": Parameter(
        "start",
        Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            str | None, typer.Option(help="Model to go on from: a path or a hub id; by default a new one is made.")
        ],
    ),
    "layers": Parameter(
        "layers",
        Parameter.KEYWORD_ONLY,
        default=2,
        annotation=Annotated[int, typer.Option(help="Number of blocks of a new model.")],
    ),
    "hidden": Parameter(
        "hidden",
        Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            int | None,
            typer.Option(
                help="Size of the hidden states of a new model, a multiple of 64; by default half of the target's."
            ),
        ],
    ),
}


def _record_of(schedule: Any, own: dict[str, Parameter]) -> type[TrainingArguments]:
    """Return the record of a command of training: with options of its own, and the rates and batch that are usual for it."""
    return type("TrainingArgumentsOfKind", (TrainingArguments,), {**schedule, "plan": group(own, _plan_of)})


def _plan_of(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a plan; a list without entries stands for none."""
    return {name: tuple(value) or None if isinstance(value, list) else value for name, value in values.items()}


def train_draft(given: TrainingArguments) -> int:
    """Train a draft model for any target from prompts alone: it learns the target's laws on what the target's beams draw."""

    def train(target: "Pair", prompts: list[str], report: "Report") -> "Trained":
        from specbeam.lab.train.draft import train_draft as trained

        return trained(
            target, prompts, given.out, trees=given.trees, draws=given.draws, schedule=given.schedule,
            variation=given.variation, report=report, **given.plan,
        )  # fmt: skip

    return _run(given, train)


def train_head(kind: str, given: TrainingArguments) -> int:
    """Train a head of this kind, print its curve, and return the exit code."""

    def train(target: "Pair", prompts: list[str], report: "Report") -> "Trained":
        from specbeam.lab.train.heads import train_head as trained

        return trained(
            kind, target, prompts, given.out, trees=given.trees, plan=given.plan | {"variation": given.variation},
            draws=given.draws, schedule=given.schedule, report=report,
        )  # fmt: skip

    return _run(given, train)


def train_window(given: TrainingArguments) -> int:
    """Teach a copy of the target a window (COrAL), print its curve, and return the exit code."""
    from specbeam.lab.train.coral import WINDOW

    def train(target: "Pair", prompts: list[str], report: "Report") -> "Trained":
        from specbeam.lab.train.coral import train_coral

        return train_coral(
            target, prompts, given.out, trees=given.trees, plan=given.plan | {"variation": given.variation},
            draws=given.draws, schedule=given.schedule, report=report,
        )  # fmt: skip

    return _run(given, train, str(given.out), str(given.out / WINDOW))


def add_training(app: typer.Typer) -> None:
    """Add the commands of training to an app: for a draft model, for each kind of head, and for a window."""
    _add(app, "draft", _record_of(DRAFT_SCHEDULE, DRAFT_OPTIONS), train_draft, train_draft.__doc__ or "")
    for kind, known in HEAD_KINDS.items():
        record = _record_of({**HEAD_SCHEDULE, **known.schedule}, _own_options(known))
        _add(app, kind, record, partial(train_head, kind), f"Train {known.about}, for any target from prompts alone.")
    record = _record_of(WINDOW_KIND.schedule, _own_options(WINDOW_KIND))
    about = f"Teach {WINDOW_KIND.about}, from prompts alone: a Llama, Mistral or Qwen2."
    _add(app, "coral", record, train_window, about)


def _own_options(known: HeadKind) -> dict[str, Parameter]:
    """Return the options of a plan that a kind takes."""
    return {
        name: Parameter(name, Parameter.KEYWORD_ONLY, default=[] if name == "taps" else None, annotation=annotation)
        for name, annotation in PLAN_OPTIONS.items()
        if name in known.takes
    }


def _add(
    app: typer.Typer, name: str, record: type[TrainingArguments], train: Callable[[TrainingArguments], int], help: str
) -> None:
    """Add a command of training."""

    def command(given: TrainingArguments) -> int:
        return train(given)

    command.__annotations__["given"] = record
    add_command(app, command, name, help=help)


def _run(
    options: TrainingArguments,
    train: "Callable[[Pair, list[str], Report], Trained]",
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

    if not options.data:
        raise BadSetting("--data is missing: a file of prompts, like those that the draft will be used for")
    columns = _columns(options.columns)
    prompts = [row.prompt for file in options.data for row in read(str(file), columns=columns)]
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


def _print_curve(console: "Screen", trained: "Trained") -> None:
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

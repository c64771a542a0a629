"""The commands `specbeam train ...`: training of draft models, heads and windows for a target, from prompts alone."""

import json as json_format
from collections.abc import Callable, Iterable
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specbeam.doors.cli.arguments import Record, add_command, given_options, group, parameter, parameter_of
from specbeam.doors.cli.common import print_records, quiet_load
from specbeam.doors.cli.options import Engine, Json, Model, Threads, checked, folder_to_write, prompt_files
from specbeam.doors.model_files import check_model
from specbeam.doors.options.head_kinds import (
    DBLLM_SCHEDULE,
    DRAFT_SCHEDULE,
    HEAD_KINDS,
    HEAD_SCHEDULE,
    WINDOW_KIND,
    HeadKind,
)
from specbeam.doors.options.table import OPTIONS
from specbeam.doors.prompts import read, spread
from specbeam.errors import BadSetting

if TYPE_CHECKING:
    from rich.progress import Progress

    from specbeam.doors.cli.screen import Screen
    from specbeam.lab.train.course import Trained
    from specbeam.lab.train.drawing import DrawPlan
    from specbeam.lab.train.fitting import Schedule
    from specbeam.lab.train.lessons import Report
    from specbeam.models.pair import Pair

# Options of generation that `DrawPlan` has under the same names; not set: off.
CUTS = [
    parameter_of(option, panel="Options")
    for name, option in OPTIONS.items()
    if option.warper and option.field and name not in ("temperature", "min_p")
]
TrainingSeed = Annotated[int, typer.Option(help="Random seed of draws, batches and initial weights.")]


class TrainingArguments(Record):
    """Arguments of all training commands.

    Attributes:
        plan: the options of the draft model, head or window, by name.
    """

    out: Annotated[Path, folder_to_write("Output folder; an interrupted training resumes from it.", "--out", "-o")]
    model: Model = "bundled"
    engine: Engine = "auto"
    data: Annotated[
        list[Path],
        prompt_files(
            "File of training prompts: text with a prompt per line, .tsv, or .jsonl; plain, .gz or .xz. May be given "
            "several times.",
            "--data",
            "--file",
            "-f",
        ),
    ] = []
    columns: Annotated[str, typer.Option(help="Column of the prompts in a .tsv, counted from 1.")] = "1"
    rows: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of prompts, evenly spaced over all; by default all.")
    ] = None
    trees: Annotated[
        Path | None,
        folder_to_write(
            "Folder for the texts drawn by the target. Trainings with the same prompts, draws and seed can share it. By "
            "default it is in the output folder."
        ),
    ] = None
    plan: dict[str, Any] = group(())
    beams: Annotated[int, typer.Option(min=1, help="Number of beams that the target draws for each prompt.")] = 4
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature of the draws.")] = 1.0
    cuts: dict[str, Any] = group(CUTS, given_options)
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens drawn per beam.")] = 80
    epochs: Annotated[int, typer.Option(min=1, help="Number of passes over the drawn texts.")] = 4
    rate: Annotated[
        float,
        typer.Option(
            min=0, help="Learning rate of the layers' matrices: of Muon, or of Adam if the matrices are rounded."
        ),
    ] = 0.02
    embedding_rate: Annotated[float, typer.Option(min=0, help="Learning rate of Adam, for all other weights.")] = 0.002
    batch_tokens: Annotated[int, typer.Option(min=1, help="Number of tokens of a batch.")] = 4_000
    variation: Annotated[
        float,
        typer.Option(min=0, max=1, help="Weight of total variation in the loss, in [0, 1]; the rest is cross-entropy."),
    ] = 0.5
    seed: TrainingSeed = 0
    threads: Threads = None
    json: Json = False

    @property
    def draws(self) -> "DrawPlan":
        """The plan of the target's draws."""
        from specbeam.lab.train.drawing import DrawPlan

        return self.make(DrawPlan, **self.cuts)

    @property
    def schedule(self) -> "Schedule":
        """The schedule of the training."""
        from specbeam.lab.train.fitting import Schedule

        return self.make(Schedule)

    @property
    def usual(self) -> dict[str, Any]:
        """The arguments shared by the trainings of heads and windows."""
        return {
            "trees": self.trees,
            "plan": self.plan | {"variation": self.variation},
            "draws": self.draws,
            "schedule": self.schedule,
        }


# The options of a head's plan, by their names in `HeadPlan`; `head_kinds.py` lists those of each kind.
PLAN_OPTIONS: dict[str, Any] = {
    "layers": Annotated[int | None, typer.Option(help="Number of layers; the default depends on the kind.")],
    "depth": Annotated[
        int | None, typer.Option(help="Number of successive draft tokens to learn; the default depends on the kind.")
    ],
    "inner": Annotated[
        int | None, typer.Option(help="Size of the gated inner layer; by default twice the target's hidden size.")
    ],
    "draft_vocab": Annotated[
        int | None,
        typer.Option(help="Vocabulary size of the head: the target's likeliest tokens; by default 32,000 or all."),
    ],
    "taps": Annotated[
        list[int],
        typer.Option(
            "--tap",
            help="Layer whose input states the head reads, counted from 0; the number of layers stands for the output of "
            "the last one. May be given several times; by default three layers.",
        ),
    ],
    "rank": Annotated[
        int | None,
        typer.Option(help="Rank of the matrices for the dependence on the previous draft token; by default 64."),
    ],
    "regression": Annotated[
        float | None,
        typer.Option(help="Weight in the loss of the error of estimated hidden states; by default 10."),
    ],
    "modules": Annotated[
        Literal["both", "sampling", "alignment"] | None,
        typer.Option(
            help="'both', or only feature 'sampling', or only partial 'alignment', to compare them; by default 'both'."
        ),
    ],
    "read_out": Annotated[
        Literal["shared", "own"] | None,
        typer.Option(
            help="'shared': a linear map per depth and a common output matrix; 'own': an output matrix per depth. By "
            "default 'shared'."
        ),
    ],
    "shown": Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of training blocks with some tokens revealed, for drafting in several steps; by default 0.5.",
        ),
    ],
    "prefix": Annotated[int | None, typer.Option(min=0, help="Number of soft prompts in each layer; by default 16.")],
    "enters": Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Layer at which the extra rows enter, counted from 0; by default the middle layer, or the last but one if "
            "the layers after it are trained.",
        ),
    ],
    "behind": Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of tokens behind that each position also learns to predict, its own token included; 0: none. By "
            "default 8.",
        ),
    ],
    "exit_layer": Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of the target's layers before the exit layer; by default the fastest number in a short trial, by "
            "the costs of passes on this machine.",
        ),
    ],
    "decay": Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Weight in the loss of each depth, relative to the previous one; by default 0.8."
        ),
    ],
}
# The options of a new draft model.
DRAFT_OPTIONS = (
    parameter(
        "start",
        Annotated[
            str | None,
            typer.Option(
                help="Model to continue training from: a path or a hub id; by default, a new model.",
                callback=checked(check_model),
            ),
        ],
    ),
    parameter("layers", Annotated[int, typer.Option(min=1, help="Number of layers of a new model.")], 2),
    parameter(
        "hidden",
        Annotated[
            int | None,
            typer.Option(help="Hidden size of a new model, a multiple of 64; by default half of the target's."),
        ],
    ),
)


# The options of a copy of the target with weights of 2 bits.
DBLLM_OPTIONS = (
    parameter(
        "deviation",
        Annotated[
            float,
            typer.Option(
                min=0, help="How much more a law of average uncertainty counts in the loss; 0: all count alike."
            ),
        ],
        1.0,
    ),
    parameter(
        "power", Annotated[float, typer.Option(min=0, help="Exponent of the uncertainty of a law in its weight.")], 1.0
    ),
)


def _record_of(schedule: Any, own: Iterable[Parameter]) -> type[TrainingArguments]:
    """Return the record of a training command with its own options, and with its default rates and batch size."""
    return type("TrainingArgumentsOfKind", (TrainingArguments,), {**schedule, "plan": group(own, _plan_of)})


def _plan_of(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a plan; an empty list stands for None."""
    return {name: tuple(value) or None if isinstance(value, list) else value for name, value in values.items()}


def train_draft(given: TrainingArguments) -> int:
    """Train a draft model for any target from prompts alone, on texts drawn by the target's beams."""

    def train(target: "Pair", prompts: list[str], report: "Report") -> "Trained":
        from specbeam.lab.train.draft import train_draft as trained

        usual = given.named("trees", "draws", "schedule", "variation")
        return trained(target, prompts, given.out, report=report, **usual, **given.plan)

    return _run(given, train)


def train_dbllm(given: TrainingArguments) -> int:
    """Train a copy of the target with layers of 2 bits (DB-LLM), which serves as draft or as target."""

    def train(target: "Pair", prompts: list[str], report: "Report") -> "Trained":
        from specbeam.lab.train.dbllm import DeviationLoss
        from specbeam.lab.train.dbllm import train_dbllm as trained

        loss = DeviationLoss(variation=given.variation, **given.plan)
        return trained(
            target, prompts, given.out, report=report, loss=loss, **given.named("trees", "draws", "schedule")
        )

    return _run(given, train)


def train_head(kind: str, given: TrainingArguments) -> int:
    """Train a head of this kind, print the training curve, and return the exit code."""

    def train(target: "Pair", prompts: list[str], report: "Report") -> "Trained":
        from specbeam.lab.train.heads import train_head as trained

        return trained(kind, target, prompts, given.out, report=report, **given.usual)

    return _run(given, train)


def train_window(given: TrainingArguments) -> int:
    """Train a copy of the target for windows (COrAL), print the training curve, and return the exit code."""
    from specbeam.lab.train.coral import WINDOW

    def train(target: "Pair", prompts: list[str], report: "Report") -> "Trained":
        from specbeam.lab.train.coral import train_coral

        return train_coral(target, prompts, given.out, report=report, **given.usual)

    return _run(given, train, str(given.out), str(given.out / WINDOW))


def add_training(app: typer.Typer) -> None:
    """Add the training commands to an app: for draft models, copies of 2 bits, each kind of head, and windows."""
    _add(app, "draft", _record_of(DRAFT_SCHEDULE, DRAFT_OPTIONS), train_draft, train_draft.__doc__ or "")
    dbllm = _record_of({**DBLLM_SCHEDULE, "variation": 0.0}, DBLLM_OPTIONS)
    _add(app, "dbllm", dbllm, train_dbllm, train_dbllm.__doc__ or "")
    for kind, known in HEAD_KINDS.items():
        record = _record_of({**HEAD_SCHEDULE, **known.schedule}, _own_options(known))
        _add(app, kind, record, partial(train_head, kind), f"Train {known.about}.")
    record = _record_of(WINDOW_KIND.schedule, _own_options(WINDOW_KIND))
    about = f"Train {WINDOW_KIND.about}. The target must be a Llama, Mistral or Qwen2."
    _add(app, "coral", record, train_window, about)


def _own_options(known: HeadKind) -> list[Parameter]:
    """Return the plan options of a kind."""
    taken = [(name, annotation) for name, annotation in PLAN_OPTIONS.items() if name in known.takes]
    return [parameter(name, annotation, [] if name == "taps" else None) for name, annotation in taken]


def _add(
    app: typer.Typer, name: str, record: type[TrainingArguments], train: Callable[[TrainingArguments], int], help: str
) -> None:
    """Add a training command."""

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
    """Train with progress bars, print the training curve, and return the exit code.

    Args:
        target_folder: folder of a changed target; None: the target is unchanged.
        draft_folder: folder of the draft; None: the output folder.
    """
    from specbeam.doors.cli.screen import Screen

    if not options.data:
        raise BadSetting("--data is missing; give a file of prompts similar to those of later texts")
    columns = _columns(options.columns)
    prompts = [row.prompt for file in options.data for row in read(str(file), columns=columns)]
    if options.rows is not None:
        prompts = spread(prompts, options.rows)
    target = quiet_load(options.model, None, engine=options.engine)
    with training_bar() as progress:
        bars: dict[str, Any] = {}

        def report(name: str, done: int, total: int) -> None:
            if name not in bars:
                bars[name] = progress.add_task(_WORK[name], total=None)
            progress.update(bars[name], completed=done, total=total)

        trained = train(target, prompts, report)
    if options.json:
        print_records(trained.curve)
        return 0
    printed = Screen()
    _print_exits(printed, trained.folder / "training" / "exits.json")
    _print_curve(printed, trained)
    source = "target" if target_folder is None else f'"{target_folder}"'
    loading = f'sb.load({source}, draft="{draft_folder or trained.folder}")'
    printed.print(f"use it: {loading}; {trained.folder / 'training'} can be deleted")
    return 0


def training_bar() -> "Progress":
    """Return the progress bar of a training."""
    from specbeam.doors.cli.screen import progress_bar

    return progress_bar(stays=True)


_WORK = {
    "drawing": "prompts continued by the target",
    "choosing": "exit layers tried",
    "training": "files of trees used",
}


def _columns(text: str) -> tuple[int, int]:
    """Return the columns of prompt and answer from a text such as "2,1", or "2" for the prompt alone."""
    parts = text.split(",")
    if len(parts) > 2 or not all(part.strip().isdigit() and int(part) >= 1 for part in parts):
        raise BadSetting(
            f"--columns is {text!r}; it must be the number of the prompt's column, counted from 1, such as 2"
        )
    return int(parts[0]), int(parts[-1])


def _print_exits(console: "Screen", path: Path) -> None:
    """Print the figures of exit layers in the short trial, if there was one."""
    from rich.table import Table

    if not path.exists():
        return
    table = Table(title="exit layers, after a short trial")
    for name in ("layers before", "acceptance", "draft step, ms", "best depth", "expected speed"):
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
        "acceptance: the mean probability that a draft token is accepted, on the target's beams for held-out prompts"
    )

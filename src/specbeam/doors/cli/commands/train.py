"""Commands that train what drafts."""

from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from specbeam.doors.cli.options import (
    Json,
    Model,
    Threads,
    TopK,
    TopP,
    files_to_read,
    folder_to_write,
)
from specbeam.doors.options.head_kinds import DRAFT_SCHEDULE, HEAD_KINDS, WINDOW_KIND, HeadKind

train = typer.Typer(no_args_is_help=True, help="Train what drafts.")


Out = Annotated[Path, folder_to_write("Folder to write; a training that was stopped goes on there.", "--out", "-o")]
TrainingData = Annotated[
    list[Path],
    typer.Option(
        "--data",
        "--file",
        "-f",
        help="File of prompts that the target is asked to continue: text with a prompt per line, .tsv, or .jsonl; "
        "plain or packed. May be given several times.",
    ),
]
TrainingColumn = Annotated[str, typer.Option(help="Column of the prompt in a .tsv, counted from 1.")]
TrainingRows = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of prompts, at even distances; by default all.")
]
DrawnTrees = Annotated[
    Path | None,
    folder_to_write(
        "Folder of what the target draws, which trainings with the same prompts, draws and seed may share; "
        "by default it is in the folder that is written."
    ),
]
DrawnBeams = Annotated[int, typer.Option(help="Number of beams that the target draws below each prompt.")]
DrawnTemperature = Annotated[float, typer.Option(help="Temperature of these draws.")]
DrawnTokens = Annotated[int, typer.Option(help="Maximum number of tokens that are drawn below a prompt.")]
Epochs = Annotated[int, typer.Option(help="How often each drawn tree is learnt from.")]
Rate = Annotated[float, typer.Option(help="Learning rate of Muon, for the matrices of the blocks.")]
EmbeddingRate = Annotated[float, typer.Option(help="Learning rate of Adam, for all other weights.")]
BatchTokens = Annotated[int, typer.Option(help="Number of tokens of a batch.")]
Variation = Annotated[float, typer.Option(help="Share of total variation in the loss; cross-entropy has the rest.")]
TrainingSeed = Annotated[int, typer.Option(help="Seed of draws, batches and first weights.")]


@train.command("draft")
def train_draft(
    out: Out,
    model: Model = "bundled",
    data: TrainingData = [],
    columns: TrainingColumn = "1",
    rows: TrainingRows = None,
    trees: DrawnTrees = None,
    start: Annotated[
        str | None, typer.Option(help="Model to go on from: a path or a hub id; by default a new one is made.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Number of blocks of a new model.")] = 2,
    hidden: Annotated[
        int | None,
        typer.Option(
            help="Size of the hidden states of a new model, a multiple of 64; by default half of the target's."
        ),
    ] = None,
    beams: DrawnBeams = 4,
    temperature: DrawnTemperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    max_new_tokens: DrawnTokens = 80,
    epochs: Epochs = 4,
    rate: Rate = DRAFT_SCHEDULE["rate"],
    embedding_rate: EmbeddingRate = DRAFT_SCHEDULE["embedding_rate"],
    batch_tokens: BatchTokens = DRAFT_SCHEDULE["batch_tokens"],
    variation: Variation = 0.5,
    seed: TrainingSeed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Train a draft model for any target from prompts alone: it learns the target's laws on what the target's beams draw."""
    from specbeam.doors.cli.train import TrainingOptions, run_draft
    from specbeam.lab.train.drawing import DrawPlan
    from specbeam.lab.train.fitting import Schedule

    draws = DrawPlan(beams, temperature, top_k, top_p, max_new_tokens, seed)
    schedule = Schedule(epochs, rate, embedding_rate, batch_tokens, seed=seed)
    options = TrainingOptions(model, data, columns, rows, out, trees, draws, schedule, threads, json)
    raise typer.Exit(run_draft(options, start, layers, hidden, variation))


# The options of a head's plan, by their names in `HeadPlan`; `options/head_kinds.py` says which kinds take them.
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


def _train_head(
    kind: str,
    plan: dict[str, Any],
    out: Out,
    model: Model = "bundled",
    data: TrainingData = [],
    columns: TrainingColumn = "1",
    rows: TrainingRows = None,
    trees: DrawnTrees = None,
    beams: DrawnBeams = 4,
    temperature: DrawnTemperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    max_new_tokens: DrawnTokens = 80,
    epochs: Epochs = 4,
    rate: Rate = 0.02,
    embedding_rate: EmbeddingRate = 0.002,
    batch_tokens: BatchTokens = 4_000,
    variation: Variation = 0.5,
    seed: TrainingSeed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Train a head; of this function's parameters all but the first two are options of each command, see `_add_head`."""
    from specbeam.doors.cli.train import TrainingOptions, run_head, run_window
    from specbeam.lab.train.drawing import DrawPlan
    from specbeam.lab.train.fitting import Schedule

    draws = DrawPlan(beams, temperature, top_k, top_p, max_new_tokens, seed)
    schedule = Schedule(epochs, rate, embedding_rate, batch_tokens, seed=seed)
    options = TrainingOptions(model, data, columns, rows, out, trees, draws, schedule, threads, json)
    chosen = {**plan, "variation": variation}
    raise typer.Exit(run_window(options, chosen) if kind == "coral" else run_head(options, kind, chosen))


def _add_head(kind: str, known: HeadKind, help: str) -> None:
    """Add the command that trains heads of a kind, or a window: with its own options alone, and what is usual for it."""
    common = dict(list(signature(_train_head).parameters.items())[2:])
    for name, value in known.schedule.items():
        common[name] = common[name].replace(default=value)
    own = {
        name: Parameter(name, Parameter.KEYWORD_ONLY, default=[] if name == "taps" else None, annotation=annotation)
        for name, annotation in PLAN_OPTIONS.items()
        if name in known.takes
    }

    def train_head(**given: Any) -> None:
        plan = {name: given.pop(name) for name in own}
        if "taps" in plan:
            plan["taps"] = tuple(plan["taps"]) or None
        _train_head(kind, plan, **given)

    parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in common.values()]
    place = list(common).index("beams")  # the kind's own options stand before those of the draws
    parameters[place:place] = own.values()
    train_head.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    train.command(kind, help=help)(train_head)


for _kind, _known in HEAD_KINDS.items():
    _add_head(_kind, _known, f"Train {_known.about}, for any target from prompts alone.")
_add_head("coral", WINDOW_KIND, f"Teach {WINDOW_KIND.about}, from prompts alone: a Llama, Mistral or Qwen2.")


@train.command("hmt")
def train_memory(
    out: Out,
    model: Model = "bundled",
    data: Annotated[
        list[Path],
        files_to_read(
            "File of long texts: a text, or .jsonl with a 'text' in each line, or a 'prompt' and an 'answer'; plain or "
            "packed. May be given several times.",
            "--data",
            "--file",
            "-f",
        ),
    ] = [],
    segment: Annotated[int | None, typer.Option(help="Number of new tokens of a segment; by default 222.")] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Number of positions that a segment takes in all, in place of --segment: 2 more than both."),
    ] = None,
    sensory: Annotated[int, typer.Option(help="Number of tokens that a segment sees of the one before.")] = 32,
    memories: Annotated[int, typer.Option(help="Number of segments whose memories can be recalled.")] = 300,
    share: Annotated[float, typer.Option(help="Part of a segment that its query is made of.")] = 0.5,
    recall: Annotated[
        str, typer.Option(help="What is recalled: 'attention' (HMT), 'previous' (RMT), or 'initial', which is nothing.")
    ] = "attention",
    query: Annotated[
        str, typer.Option(help="What a query is made of: 'previous_tail', 'refresh', or 'first_half' as in the paper.")
    ] = "refresh",
    width: Annotated[
        int | None, typer.Option(help="Size of queries and keys; by default that of an embedding.")
    ] = None,
    stages: Annotated[
        str, typer.Option(help="Segments of a text and steps with such, one stage after the other.")
    ] = "2:200,4:300",
    previous_steps: Annotated[
        int, typer.Option(help="Steps before these in which the memory of the segment before is recalled (RMT).")
    ] = 0,
    batch: Annotated[int, typer.Option(help="Number of texts of a step.")] = 8,
    rate: Annotated[float, typer.Option(help="Learning rate of the model.")] = 1e-5,
    memory_rate: Annotated[float, typer.Option(help="Learning rate of the memory.")] = 1e-3,
    frozen: Annotated[bool, typer.Option("--frozen", help="Leave the model as it is.")] = False,
    loss_on: Annotated[str, typer.Option(help="'all' segments of a text, or the 'last'.")] = "all",
    prompt_weight: Annotated[float, typer.Option(help="Weight of a prompt's tokens; those of answers have 1.")] = 1.0,
    depth: Annotated[int | None, typer.Option(help="Segments that gradients go through; by default all.")] = None,
    check_every: Annotated[int, typer.Option(help="Steps between two checks on held-out texts.")] = 100,
    seed: TrainingSeed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Train a memory (HMT), with which a model reads texts of any length in segments and recalls earlier ones."""
    from specbeam.doors.cli.train_memory import MemoryOptions, plan_of, run, schedule_of

    plan = plan_of(segment, window, sensory, memories, share, recall, query)
    schedule = schedule_of(stages, previous_steps, batch, rate, memory_rate, frozen, loss_on, depth, check_every, seed)
    raise typer.Exit(run(MemoryOptions(model, data, out, plan, width, schedule, prompt_weight, threads, json)))

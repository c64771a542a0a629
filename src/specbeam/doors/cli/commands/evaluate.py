"""Commands that check and score what methods write."""

from pathlib import Path
from typing import Annotated

import typer

from specbeam.doors.cli.options import (
    DemoPrompts,
    Draft,
    Json,
    MaxNewTokens,
    Model,
    Plot,
    PromptFiles,
    Prompts,
    PromptTexts,
    Settings,
    SpacedRows,
    Temperature,
    TopK,
    TopP,
    existing_files,
)

evaluate = typer.Typer(no_args_is_help=True, help="Check and score the outputs of methods.")


@evaluate.command("harness", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def evaluate_harness(context: typer.Context) -> None:
    """Run lm-evaluation-harness by its own options, with one model more: run --model specbeam --tasks ..."""
    from specbeam.doors.cli.harness import run

    raise typer.Exit(run(context.args))


@evaluate.command("same-beams")
def same_beams(
    prompts: Prompts = None,
    model: Model = "bundled",
    draft: Draft = None,
    setting: Settings = [],
    prompt: PromptTexts = [],
    file: PromptFiles = [],
    seed: Annotated[int, typer.Option(help="Seed of both methods.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Number of prompts that DSBD decodes side by side.")] = 1,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    max_new_tokens: MaxNewTokens = 64,
    json: Json = False,
) -> None:
    """Compare the beams of fixed-width DSBD with those of plain beam sampling under the same seed.

    Each prompt whose beams differ is shown with its gap: the distance between the last pair taken and the first one
    left.
    """
    from specbeam.doors.cli.evaluate import same_beams as run

    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "max_new_tokens": max_new_tokens}
    raise typer.Exit(run([*(prompts or []), *prompt], file, model, draft, setting, seed, batch_size, options, json))


SearchBeams = Annotated[int, typer.Option(help="Number of beams of both searches.")]
FirstRows = Annotated[int, typer.Option(help="Maximum number of prompts: the first ones.")]
EveryOption = Annotated[
    bool,
    typer.Option(
        "--every-option",
        help="Use different search options for each prompt, so that any two values of two options meet somewhere.",
    ),
]
BesideOthers = Annotated[int, typer.Option(help="Number of prompts that specbeam decodes side by side.")]
Dtype = Annotated[str, typer.Option(help="Type of the weights: float32, bfloat16, ...; 'auto' takes the checkpoint's.")]


@evaluate.command("diff")
def diff(
    prompts: Prompts = None,
    model: Model = "bundled",
    draft: Draft = None,
    beams: SearchBeams = 4,
    setting: Settings = [],
    prompt: PromptTexts = [],
    file: PromptFiles = [],
    rows: FirstRows = 1000,
    every_option: EveryOption = False,
    batch_size: BesideOthers = 1,
    max_new_tokens: MaxNewTokens = 64,
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """Run the beam searches of transformers and specbeam; report each difference, and whether rounding explains it."""
    from specbeam.doors.cli.diff import run

    texts = [*(prompts or []), *prompt]
    raise typer.Exit(
        run(model, draft, texts, file, beams, setting, rows, every_option, batch_size, max_new_tokens, dtype, json)
    )


def diff_by_its_older_name(
    model: Annotated[str, typer.Argument(help="Target model.")] = "bundled",
    draft: Draft = None,
    beams: SearchBeams = 4,
    setting: Settings = [],
    prompt: PromptTexts = [],
    file: Annotated[list[Path], typer.Option("--file", "--prompts", "-f", help="File of prompts.")] = [],
    rows: FirstRows = 1000,
    every_option: EveryOption = False,
    batch_size: BesideOthers = 1,
    max_new_tokens: MaxNewTokens = 64,
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """Do what `specbeam evaluate diff` does, with the model as an argument."""
    diff(None, model, draft, beams, setting, prompt, file, rows, every_option, batch_size, max_new_tokens, dtype, json)


@evaluate.command("fuzz")
def fuzz(
    calls: Annotated[int, typer.Option(help="Number of calls in all.")] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same calls.")] = 0,
    world: Annotated[list[str], typer.Option("--world", help="Pair of tiny models, repeatable; default: all.")] = [],
    first: Annotated[int, typer.Option(help="Number of the first call of each pair.")] = 0,
    processes: Annotated[int, typer.Option(help="Number of processes side by side.")] = 1,
    json: Json = False,
) -> None:
    """Make random calls on tiny random models, and check each answer; exit code 1 if a call crashes or hangs.

    The models are of all engines, heads and families. Every answer is held against what must be true of it: its tokens,
    beams, scores, form and report, the same text again, alone, and without drafts.
    """
    from specbeam.doors.cli.fuzz import fuzz as run

    raise typer.Exit(run(calls, seed, world, first, processes, json))


@evaluate.command()
def perplexity(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="JSON lines with 'prompt', 'tokens' or 'text', and perhaps 'reference'.", callback=existing_files
        ),
    ],
    model: Model = "bundled",
    ended: Annotated[
        bool, typer.Option("--ended", help="Outputs that have a text only are complete: score their end token too.")
    ] = False,
    json: Json = False,
) -> None:
    """Score files of outputs by the target's raw probabilities, whatever decoder wrote them.

    `specbeam generate --json` writes such files. Each file gets a row of the table.
    """
    from specbeam.doors.cli.evaluate import perplexity as run

    raise typer.Exit(run(files, model, ended, json))


@evaluate.command()
def theory(
    prompts: DemoPrompts = None,
    model: Model = "bundled",
    draft: Draft = None,
    file: PromptFiles = [],
    depth: Annotated[int, typer.Option(help="Number of draft layers where the length of a draft matters.")] = 4,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    rows: SpacedRows = 60,
    max_new_tokens: MaxNewTokens = 48,
    seed: Annotated[int, typer.Option(help="Seed of the decoding.")] = 0,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Count rejections and accepted tokens, and compare them with what the total variation of the two laws predicts.

    Also how far each rule is from the best one for its drafts.
    """
    from specbeam.doors.cli.evaluate import theory as run

    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "max_new_tokens": max_new_tokens}
    raise typer.Exit(run(prompts or [], file, model, draft, depth, rows, seed, options, plot, json))

"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Option("--model", "-m", help="Target model: a path, a hub id, or 'bundled' for the bundled pair.")
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        help="Draft model or head: a path or a hub id; 'mtp': the modules of multi-token prediction in the target's files; "
        "'int8' or 'int4': the target itself with rounded weights. By default the bundled pair's draft, else none.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Grow = Annotated[
    str | None,
    typer.Option(
        help="Enlarge the target to this many weights (100M, 1B, ...) without changing what it computes. By default not."
    ),
]
QuantizeTarget = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        help="'int8' or 'int4' rounds the target's weights to 8 or 4 bits for specbeam's methods. By default not.",
    ),
]
GrowVocab = Annotated[
    str | None,
    typer.Option(
        help="Enlarge the vocabulary of both models to this many words (128K, ...) without changing any text. By default "
        "not."
    ),
]
MethodName = Annotated[str, typer.Option("--method", help="Decoding method; `specbeam methods` lists them.")]
Settings = Annotated[
    list[str],
    typer.Option("--set", "-s", metavar="NAME=VALUE", help="A setting of the method, e.g. -s beams=4 -s width=fixed."),
]
Prompts = Annotated[list[str] | None, typer.Argument(help="Prompts. Without any they are read from standard input.")]
DemoPrompts = Annotated[list[str] | None, typer.Argument(help="Prompts. Without any the demo's sentences are used.")]
PromptTexts = Annotated[list[str], typer.Option("--prompt", "-p", help="A prompt. May be given several times.")]
PromptFiles = Annotated[
    list[Path],
    typer.Option(
        "--file",
        "-f",
        help="File of prompts: text with one per line, .tsv with the prompt in the first column, or .jsonl; plain, .gz or "
        ".xz. Or a data set: gsm8k, humaneval, mt_bench, squad or spider. May be given several times.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(help="Maximum number of new tokens per answer.")]
Temperature = Annotated[
    float | None,
    typer.Option(help="Sampling temperature; by default the model's own, else 1. With 0 nothing is random."),
]
TopK = Annotated[
    int | None,
    typer.Option(help="Sample among the k likeliest tokens only; by default the model's own setting, else all."),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample among the fewest likeliest tokens with total probability p; by default the model's own, else 1."
    ),
]
SpacedRows = Annotated[int, typer.Option(min=1, help="Maximum number of prompts, taken at even distances from all.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Number of CPU threads; by default as many as torch chooses.")]
StopTexts = Annotated[list[str], typer.Option(help="End an answer after this text. May be given several times.")]
PassRows = Annotated[list[int], typer.Option(help="Number of rows of a pass. May be given several times.")]
Lengths = Annotated[list[int], typer.Option(help="Number of tokens in the KV cache. May be given several times.")]
Plot = Annotated[Path | None, typer.Option(help="Also write a plot to this file.")]
Rounds = Annotated[int, typer.Option(help="Number of rounds that count; a warm-up runs before them.")]

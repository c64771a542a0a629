"""Options that several commands have."""

from pathlib import Path
from typing import Annotated, Any

import typer

from specbeam.doors.cli.arguments import Record
from specbeam.doors.places import require_file, require_folder_place, require_place


def existing_files(files: list[Path] | None) -> list[Path] | None:
    """Return the files of an option. Raises `MissingFile` if one cannot be read."""
    for file in files or []:
        require_file(file)
    return files


def _place(file: Path | None) -> Path | None:
    """Return the file that an option names. Raises `CannotWrite` if it cannot be written."""
    if file is not None:
        require_place(file)
    return file


def _folder_place(folder: Path | None) -> Path | None:
    """Return the folder that an option names. Raises `CannotWrite` if nothing can be written to it."""
    if folder is not None:
        require_folder_place(folder)
    return folder


def files_to_read(help: str, *flags: str) -> Any:
    """Return an option for files that are read, each of which has to be there."""
    return typer.Option(*flags, help=help, callback=existing_files)


def file_to_write(help: str) -> Any:
    """Return an option for a file that is written, whose place is looked at before any model is loaded."""
    return typer.Option(help=help, callback=_place)


def folder_to_write(help: str, *flags: str) -> Any:
    """Return an option for a folder that is written, whose place is looked at before any model is loaded."""
    return typer.Option(*flags, help=help, callback=_folder_place)


Model = Annotated[
    str, typer.Option("--model", "-m", help="Target model: a path, a hub id, or 'bundled' for the bundled pair.")
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        help="Draft model or head: a path or a hub id; 'mtp': the modules of multi-token prediction in the target's files; "
        "'int8', 'int4' or 'fp8': the target itself with rounded weights. By default the bundled pair's draft, else none.",
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
        help="'int8' or 'int4', and 'fp8' on a GPU, round the target's weights to 8 or 4 bits for specbeam's methods. By "
        "default not.",
    ),
]
GrowVocab = Annotated[
    str | None,
    typer.Option(
        help="Enlarge the vocabulary of both models to this many words (128K, ...) without changing any text. By default "
        "not."
    ),
]
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
SpacedRows = Annotated[int, typer.Option(min=1, help="Maximum number of prompts, taken at even distances from all.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Number of CPU threads; by default as many as torch chooses.")]
PassRows = Annotated[list[int], typer.Option(help="Number of rows of a pass. May be given several times.")]
Lengths = Annotated[list[int], typer.Option(help="Number of tokens in the KV cache. May be given several times.")]
Plot = Annotated[Path | None, typer.Option(help="Also write a plot to this file.")]
Rounds = Annotated[int, typer.Option(help="Number of rounds that count; a warm-up runs before them.")]
BatchSize = Annotated[int, typer.Option(help="Number of prompts decoded side by side.")]
Device = Annotated[
    str | None, typer.Option(help="Device of the models: cpu, cuda, ...; by default a GPU if there is one.")
]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="'int8', 'int4' or, on a GPU, 'fp8' rounds the target's weights: faster, with the law of the rounded model; "
        "so do 'torchao-int8', 'bitsandbytes-nf4' and others, see docs/quantised.md. By default not."
    ),
]
KeysAndValues = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help="'bfloat16' keeps the target's keys and values rounded, in half the memory, on a CPU; the law is that of the "
        "target with rounded keys and values, see docs/quantised.md. By default not.",
    ),
]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="Compile with torch.compile those models that transformers runs on a CPU."),
]
TensorParallel = Annotated[
    bool,
    typer.Option(
        "--tensor-parallel",
        help="Spread the target over the processes that torchrun has started: torchrun --nproc-per-node 2 -m specbeam ...",
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(help="Let accelerate place the target's layers on devices, memory and disk: 'auto'. By default not."),
]
SourceLanguage = Annotated[
    str | None,
    typer.Option(help="Language of the prompts for a multilingual translation model, as it names it, like eng_Latn."),
]
TargetLanguage = Annotated[
    str | None, typer.Option(help="Language that such a model is to translate to, like fra_Latn.")
]

MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="Decoding method; `specbeam methods` lists them. By default dsbd, or beam_sampling without a draft.",
    ),
]
NewTokens = Annotated[int, typer.Option(help="Maximum number of new tokens per answer.")]
Seed = Annotated[int, typer.Option(help="Seed of the decoding.")]


class PairArguments(Record):
    """Arguments of a command that loads a target and a draft."""

    model: Model = "bundled"
    draft: Draft = None


class LoadArguments(PairArguments):
    """Arguments of a command that loads models in any way that `specbeam.load` has."""

    device: Device = None
    quantize: Quantize = None
    kv: KeysAndValues = None
    compile: Compile = False
    tensor_parallel: TensorParallel = False
    device_map: DeviceMap = None

    @property
    def loading(self) -> dict[str, Any]:
        """The arguments of `quiet_load`."""
        return {
            "model": self.model,
            "draft": self.draft,
            "device": self.device,
            "quantize": self.quantize,
            "compile": self.compile,
            "tensor_parallel": self.tensor_parallel,
            "device_map": self.device_map,
            "kv": self.kv,
        }


class PromptArguments(Record):
    """Arguments of a command that reads prompts."""

    prompts: Prompts = None
    prompt: PromptTexts = []
    file: PromptFiles = []

    @property
    def texts(self) -> list[str]:
        """The prompts that stand on the command line."""
        return [*(self.prompts or []), *self.prompt]


class DemoPromptArguments(PromptArguments):
    """Arguments of a command that reads prompts, or takes the demo's sentences."""

    prompts: DemoPrompts = None

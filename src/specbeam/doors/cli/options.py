"""Options shared by several commands."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from specbeam.doors.cli.arguments import Record, generation
from specbeam.doors.cli.common import check_method, check_options, quiet_load, with_files
from specbeam.doors.places import require_file, require_folder_place, require_place

if TYPE_CHECKING:
    from specbeam.models.pair import Pair


def existing_files(files: list[Path] | None) -> list[Path] | None:
    """Return the files of an option. Raises `MissingFile` if one cannot be read."""
    for file in files or []:
        require_file(file)
    return files


def _place(file: Path | None) -> Path | None:
    """Return an option's file. Raises `CannotWrite` if it cannot be written."""
    if file is not None:
        require_place(file)
    return file


def _folder_place(folder: Path | None) -> Path | None:
    """Return an option's folder. Raises `CannotWrite` if nothing can be written to it."""
    if folder is not None:
        require_folder_place(folder)
    return folder


def _picture(file: Path | None) -> Path | None:
    """Return the file of a plot. Raises `MissingFile` or `MissingPackage` if the plot cannot be written."""
    if file is not None:
        from specbeam.lab.bench.pictures import check_picture

        check_picture(file)
    return file


def _use_threads(count: int | None) -> int | None:
    """Set the number of torch's CPU threads; None: leave it."""
    if count is not None:
        import torch

        torch.set_num_threads(count)
    return count


def _known_engine(engine: str | None) -> str | None:
    """Return the name of an engine. Raises `BadSetting` if users cannot choose it, before any model is loaded."""
    if engine not in (None, "auto"):
        from specbeam.models.engines import check_engine

        check_engine(engine, {})
    return engine


def files_to_read(help: str, *flags: str) -> Any:
    """Return an option for input files; each must exist."""
    return typer.Option(*flags, help=help, callback=existing_files)


def file_to_write(help: str) -> Any:
    """Return an option for an output file; its path is checked before any model is loaded."""
    return typer.Option(help=help, callback=_place)


def folder_to_write(help: str, *flags: str) -> Any:
    """Return an option for an output folder; its path is checked before any model is loaded."""
    return typer.Option(*flags, help=help, callback=_folder_place)


Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="Target model: a path, a hub id, or 'bundled' for the bundled pair of small models."
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        help="Draft model or draft head: a path or a hub id; 'mtp': the multi-token prediction modules in the target's "
        "files; 'int8', 'int4' or 'fp8': the target itself with rounded weights. By default none; the bundled target "
        "has the bundled draft.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Grow = Annotated[
    str | None,
    typer.Option(help="Enlarge the target to this number of weights (100M, 1B, ...) without changing its outputs."),
]
QuantizeTarget = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        help="Round the target's weights to 8 or 4 bits for specbeam's methods: 'int8', 'int4' or, on a GPU, 'fp8'.",
    ),
]
GrowVocab = Annotated[
    str | None,
    typer.Option(
        help="Enlarge the vocabulary of both models to this number of tokens (128K, ...) without changing any text."
    ),
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        "-s",
        metavar="NAME=VALUE",
        help="Setting of the method, such as -s beams=4. May be given several times.",
    ),
]
Prompts = Annotated[list[str] | None, typer.Argument(help="Prompts; by default, standard input has one per line.")]
DemoPrompts = Annotated[list[str] | None, typer.Argument(help="Prompts; by default, the sentences of `specbeam demo`.")]
PromptTexts = Annotated[list[str], typer.Option("--prompt", "-p", help="Prompt. May be given several times.")]
PromptFiles = Annotated[
    list[Path],
    typer.Option(
        "--file",
        "-f",
        help="File of prompts: text with a prompt per line, .tsv with the prompts in its first column, or .jsonl; plain, "
        ".gz or .xz. Or a data set: gsm8k, humaneval, mt_bench, squad or spider. May be given several times.",
    ),
]
SpacedRows = Annotated[int, typer.Option(min=1, help="Maximum number of prompts, evenly spaced over all.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Number of CPU threads; by default torch's choice.", callback=_use_threads)
]
PassRows = Annotated[list[int], typer.Option(help="Number of rows per pass. May be given several times.")]
Lengths = Annotated[list[int], typer.Option(help="Number of tokens in the KV cache. May be given several times.")]
Plot = Annotated[Path | None, typer.Option(help="Also write a plot to this file.", callback=_picture)]
Rounds = Annotated[int, typer.Option(help="Number of measured rounds, after a warm-up round.")]
BatchSize = Annotated[int, typer.Option(help="Number of prompts decoded together.")]
Device = Annotated[
    str | None, typer.Option(help="Device of the models: cpu, cuda, ...; by default a GPU if available.")
]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="Round the target's weights: 'int8', 'int4' or, on a GPU, 'fp8'; or 'torchao-int8', 'bitsandbytes-nf4' and "
        "others (docs/quantised.md). Texts then have the law of the rounded model."
    ),
]
DraftVocab = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Draft only tokens with ids below this number, such as 32000, which is faster with a large vocabulary. Exact "
        "laws stay the same.",
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        help="Engine of the models: 'gpu' or 'compiled' (specbeam's forwards for GPUs and CPUs), 'plain' (transformers' "
        "own), 'layers'; by default the fastest that fits (docs/models.md).",
        callback=_known_engine,
    ),
]
KeysAndValues = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help="'bfloat16': round the target's KV cache on a CPU, which halves its memory. Texts then have the law of the "
        "target with rounded keys and values (docs/quantised.md).",
    ),
]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="Use torch.compile for models that transformers runs on a CPU."),
]
TensorParallel = Annotated[
    bool,
    typer.Option(
        "--tensor-parallel",
        help="Split the target over the processes of torchrun: torchrun --nproc-per-node 2 -m specbeam ...",
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(help="'auto': let accelerate distribute the target's layers over devices, memory and disk."),
]
SourceLanguage = Annotated[
    str | None,
    typer.Option(
        help="Language of the prompts, for a multilingual translation model; as the model names it, such as eng_Latn."
    ),
]
TargetLanguage = Annotated[
    str | None, typer.Option(help="Language of the answers, for a multilingual translation model; such as fra_Latn.")
]

MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="Decoding method, from `specbeam methods`. By default dsbd, or beam_sampling without a draft.",
    ),
]
NewTokens = Annotated[int, typer.Option(help="Maximum number of new tokens per answer.")]
Seed = Annotated[int, typer.Option(help="Random seed; the same seed gives the same texts.")]


class PairArguments(Record):
    """Arguments of a command that loads a target and a draft."""

    model: Model = "bundled"
    draft: Draft = None
    engine: Engine = "auto"

    @property
    def pair(self) -> dict[str, Any]:
        """The arguments of `quiet_load` that name the models and their engine."""
        return self.named("model", "draft", "engine")


class LoadArguments(PairArguments):
    """Arguments of a command with the options of `specbeam.load`."""

    device: Device = None
    quantize: Quantize = None
    draft_vocab: DraftVocab = None
    kv: KeysAndValues = None
    compile: Compile = False
    tensor_parallel: TensorParallel = False
    device_map: DeviceMap = None

    @property
    def loading(self) -> dict[str, Any]:
        """The arguments of `quiet_load`."""
        return self.named(*get_type_hints(LoadArguments))


class DecodingArguments(LoadArguments):
    """Arguments of a command that generates text with any method and option."""

    method: MethodName = None
    setting: Settings = []
    options: dict[str, Any] = generation()
    source_language: SourceLanguage = None
    target_language: TargetLanguage = None
    batch_size: BatchSize = 32

    def checked_options(self) -> dict[str, Any]:
        """Return the options of generation, checked before any model is loaded, with the content of files."""
        check_method(self.method, self.setting)
        options = with_files(self.options)
        check_options(options, self.batch_size)
        return options

    def load(self, options: dict[str, Any]) -> "Pair":
        """Load the pair, and set its languages in the tokenizer and in `options`."""
        from specbeam.doors.sources import set_languages

        pair = quiet_load(**self.loading, sources=True)
        set_languages(pair, options, self.source_language, self.target_language)
        return pair


class PromptArguments(Record):
    """Arguments of a command that reads prompts."""

    prompts: Prompts = None
    prompt: PromptTexts = []
    file: PromptFiles = []

    @property
    def texts(self) -> list[str]:
        """The prompts of the command line."""
        return [*(self.prompts or []), *self.prompt]


class DemoPromptArguments(PromptArguments):
    """Arguments of a command that reads prompts and by default takes the demo's sentences."""

    prompts: DemoPrompts = None

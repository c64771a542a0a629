"""Options shared by several commands.

The value of an option is checked while the command line is read, before a command imports torch or loads a model: numbers
by typer's ranges; paths and names by callbacks, whose sentences say more than typer's ("there is no file x; give a file, or
a name: gsm8k, ..."; permissions; the near name). A callback imports nothing heavy; a test holds all of them to it.
"""

import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from specbeam.doors.cli.arguments import Record, generation
from specbeam.doors.cli.common import check_method, quiet_load
from specbeam.doors.method_names import method_names, setting_names
from specbeam.doors.model_files import check_languages, check_model, require_place_of_model, require_text_model
from specbeam.doors.options.checks import LARGEST_INTEGER
from specbeam.doors.places import require_file, require_folder_place, require_place, require_suffix
from specbeam.doors.prompts import require_source
from specbeam.engines.choices import (
    check_compute,
    check_device,
    check_engine,
    check_is_model,
    check_kv,
    check_rounding,
    check_what_runs,
)
from specbeam.errors import BadSetting

if TYPE_CHECKING:
    from specbeam.models.pair import Pair


def parameters(text: str, option: str = "--grow") -> int:
    """Return the number in a text such as "100M", "1.5B", "128K" or "5000".

    Raises `BadSetting`, which names the option, for any other text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise BadSetting(f"{option} is {text!r}; it must be a number like 128K, 100M or 1.5B")
    return round(float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}[match[2].upper()])


def checked(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Return a callback for typer that checks the value of an option, or each of its values, and returns it unchanged.

    Args:
        check: raises an error for a wrong value; not called for an option that is not given.
    """

    def callback(value: Any) -> Any:
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if one is not None:
                check(one)
        return value

    return callback


def _check_picture(file: Path) -> None:
    """Raise `MissingFile` or `MissingPackage` if a plot cannot be written."""
    from specbeam.lab.bench.pictures import check_picture

    check_picture(file)


def use_threads(count: int) -> None:
    """Set the number of torch's CPU threads, by the variables that torch reads when it is imported if it is not yet."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)
    else:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(count)


def check_draft(name: str) -> None:
    """Raise an error if a name of a draft is a path at which there is nothing, or an unknown rounding."""
    check_is_model(name)
    require_place_of_model(name)


def complete_method(incomplete: str) -> list[str]:
    """Return the names of methods that begin so, for completion by the shell."""
    return [name for name in method_names() if name.startswith(incomplete)]


def complete_setting(context: typer.Context, incomplete: str) -> list[str]:
    """Return the settings of the method that begin so, for completion by the shell."""
    method = context.params.get("method") or "dsbd"
    return [f"{name}=" for name in setting_names(method) if name.startswith(incomplete)]


def check_address(url: str) -> None:
    """Raise `BadSetting` unless a text may be the address of a server."""
    if not url.startswith(("http://", "https://")):
        raise BadSetting(f"{url!r} is not the address of a server; give it like http://127.0.0.1:8000")


def files_to_read(help: str, *flags: str) -> Any:
    """Return an option for input files; each must exist."""
    return typer.Option(*flags, help=help, callback=checked(require_file))


def prompt_files(help: str, *flags: str) -> Any:
    """Return an option for files of prompts, or names of data sets; each must exist."""
    return typer.Option(*flags, help=help, callback=checked(lambda file: require_source(str(file))))


def file_to_write(help: str, *suffixes: str) -> Any:
    """Return an option for an output file; its path is checked before any model is loaded.

    Args:
        suffixes: the possible suffixes of its name; none: any.
    """

    def check(file: Path) -> None:
        if suffixes:
            require_suffix(file, *suffixes)
        require_place(file)

    return typer.Option(help=help, callback=checked(check))


def folder_to_write(help: str, *flags: str) -> Any:
    """Return an option for an output folder; its path is checked before any model is loaded."""
    return typer.Option(*flags, help=help, callback=checked(require_folder_place))


Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Target model: a path, a hub id, or 'bundled' for the bundled pair of small models.",
        callback=checked(check_model),
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
        callback=checked(check_draft),
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Grow = Annotated[
    str | None,
    typer.Option(
        help="Enlarge the target to this number of weights (100M, 1B, ...) without changing its outputs.",
        callback=checked(parameters),
    ),
]
QuantizeTarget = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        help="Round the target's weights to 8 or 4 bits for specbeam's methods: 'int8', 'int4' or, on a GPU, 'fp8'.",
        callback=checked(partial(check_rounding, option="quantize")),
    ),
]
GrowVocab = Annotated[
    str | None,
    typer.Option(
        help="Enlarge the vocabulary of both models to this number of tokens (128K, ...) without changing any text.",
        callback=checked(partial(parameters, option="--grow-vocab")),
    ),
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        "-s",
        metavar="NAME=VALUE",
        help="Setting of the method, such as -s beams=4. May be given several times.",
        autocompletion=complete_setting,
    ),
]
Prompts = Annotated[list[str] | None, typer.Argument(help="Prompts; by default, standard input has one per line.")]
DemoPrompts = Annotated[list[str] | None, typer.Argument(help="Prompts; by default, the sentences of `specbeam demo`.")]
PromptTexts = Annotated[list[str], typer.Option("--prompt", "-p", help="Prompt. May be given several times.")]
PromptFiles = Annotated[
    list[Path],
    prompt_files(
        "File of prompts: text with a prompt per line, .tsv with the prompts in its first column, or .jsonl; plain, "
        ".gz or .xz. Or a data set: gsm8k, humaneval, mt_bench, squad or spider. May be given several times.",
        "--file",
        "-f",
    ),
]
SpacedRows = Annotated[int, typer.Option(min=1, help="Maximum number of prompts, evenly spaced over all.")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Number of CPU threads; by default torch's choice.", callback=checked(use_threads)),
]
PassRows = Annotated[list[int], typer.Option(min=1, help="Number of rows per pass. May be given several times.")]
Lengths = Annotated[
    list[int], typer.Option(min=1, help="Number of tokens in the KV cache. May be given several times.")
]
Plot = Annotated[Path | None, typer.Option(help="Also write a plot to this file.", callback=checked(_check_picture))]
Rounds = Annotated[int, typer.Option(min=1, help="Number of measured rounds, after a warm-up round.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Number of prompts decoded together.")]
Device = Annotated[
    str | None,
    typer.Option(
        help="Device of the models: cpu, cuda, ...; by default a GPU if available.", callback=checked(check_device)
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="Round the target's weights: 'int8', 'int4' or, on a GPU, 'fp8'; or 'torchao-int8', 'bitsandbytes-nf4' and "
        "others (docs/quantised.md). Texts then have the law of the rounded model.",
        callback=checked(partial(check_rounding, option="quantize")),
    ),
]
QuantizeDraft = Annotated[
    str | None,
    typer.Option(
        help="Round the draft model's weights: 'int8' or 'int4' to read fewer bytes per pass, or another rounding of "
        "--quantize. Exact laws stay the same.",
        callback=checked(partial(check_rounding, option="quantize_draft")),
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
        callback=checked(lambda engine: check_engine(engine, {})),
    ),
]
KeysAndValues = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help="'bfloat16': round the target's KV cache on a CPU, which halves its memory. Texts then have the law of the "
        "target with rounded keys and values (docs/quantised.md).",
        callback=checked(check_kv),
    ),
]
Compute = Annotated[
    str | None,
    typer.Option(
        help="'bfloat16': round rows to bfloat16 before products with matrices on a CPU, for models in bfloat16. Texts then "
        "have the law of the model with these products (docs/quantised.md).",
        callback=checked(lambda compute: check_compute(compute, {})),
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
        callback=checked(setting_names),
        autocompletion=complete_method,
    ),
]
NewTokens = Annotated[int, typer.Option(min=1, max=LARGEST_INTEGER, help="Maximum number of new tokens per answer.")]
Seed = Annotated[int, typer.Option(help="Random seed; the same seed gives the same texts.")]


class PairArguments(Record):
    """Arguments of a command that loads a target and a draft."""

    model: Model = "bundled"
    draft: Draft = None
    engine: Engine = "auto"
    threads: Threads = None

    @property
    def pair(self) -> dict[str, Any]:
        """The arguments of `quiet_load` that name the models and their engine."""
        return self.named("model", "draft", "engine")


class LoadArguments(PairArguments):
    """Arguments of a command with the options of `specbeam.load`."""

    device: Device = None
    quantize: Quantize = None
    quantize_draft: QuantizeDraft = None
    draft_vocab: DraftVocab = None
    kv: KeysAndValues = None
    compute: Compute = None
    compile: Compile = False
    tensor_parallel: TensorParallel = False
    device_map: DeviceMap = None

    @property
    def loading(self) -> dict[str, Any]:
        """The arguments of `quiet_load`."""
        return self.named(*(name for name in get_type_hints(LoadArguments) if name != "threads"))

    def check_what_runs(self) -> None:
        """Raise `BadSetting` if several options choose what runs the models. Imports nothing heavy."""
        check_what_runs(self.engine, self.compute, self.quantize, self.compile, self.device_map, self.tensor_parallel)


class DecodingArguments(LoadArguments):
    """Arguments of a command that generates text with any method and option."""

    method: MethodName = None
    setting: Settings = []
    options: dict[str, Any] = generation()
    source_language: SourceLanguage = None
    target_language: TargetLanguage = None
    batch_size: BatchSize = 32

    def checked_options(self) -> dict[str, Any]:
        """Return a copy of the options of generation, after the checks that need no model."""
        self.check_what_runs()
        require_text_model(self.model)
        check_languages(self.model, self.source_language, self.target_language)
        method = check_method(self.method, self.setting, self.draft)
        from specbeam.doors.options.settings import Settings as GivenSettings
        from specbeam.doors.plan import check_fit

        check_fit(method, GivenSettings.given(self.options))
        return dict(self.options)

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

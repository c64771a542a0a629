"""The command line. Each command is a file that reads arguments, calls one public function and prints its record."""

import os
import sys
from contextlib import suppress
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from specbeam.doors.cli.commands.bench import bench
from specbeam.doors.cli.commands.evaluate import diff_by_its_older_name, evaluate
from specbeam.doors.cli.commands.heads import heads
from specbeam.doors.cli.commands.train import train
from specbeam.doors.cli.options import (
    BatchSize,
    Compile,
    Device,
    DeviceMap,
    Draft,
    Grammar,
    GrammarBackend,
    Json,
    JsonSchema,
    KeysAndValues,
    LengthPenalty,
    Lengths,
    MaxNewTokens,
    MethodName,
    MinP,
    Model,
    MostNewTokens,
    NumReturnSequences,
    PromptFiles,
    Prompts,
    PromptTexts,
    Quantize,
    QuantizeTarget,
    Regex,
    RepetitionPenalty,
    Settings,
    SourceLanguage,
    StopTexts,
    TargetLanguage,
    Temperature,
    TensorParallel,
    TopK,
    TopP,
    file_to_write,
)
from specbeam.doors.cli.serve_options import given_options, option, server_parameters
from specbeam.errors import BadPrompt, SpecbeamError


class Commands(TyperGroup):
    """Commands whose errors reach `main`, those included for which typer has an answer of its own."""

    def invoke(self, context: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(context)
        except BrokenPipeError as error:
            raise ClosedPipe from error
        except EOFError as error:  # typer would say "Aborted"
            raise BadPrompt(f"a file ends too early: {error}") from error


class ClosedPipe(Exception):
    """The reader of standard output is gone."""


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Decode language models with beams at the price of one sequence.",
)


@app.callback()
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Print the version and exit if `--version` is given; otherwise prepare the process for a command."""
    if version:
        from specbeam import __version__

        print(__version__)
        raise typer.Exit
    from specbeam.doors.cli.compiling import showing_compilation

    context.with_resource(showing_compilation())


@app.command()
def generate(
    prompts: Prompts = None,
    model: Model = "bundled",
    draft: Draft = None,
    method: MethodName = "dsbd",
    setting: Settings = [],
    prompt: PromptTexts = [],
    file: PromptFiles = [],
    max_new_tokens: MostNewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    num_return_sequences: NumReturnSequences = 1,
    length_penalty: LengthPenalty = None,
    stop: StopTexts = [],
    json_schema: JsonSchema = None,
    regex: Regex = None,
    grammar: Grammar = None,
    grammar_backend: GrammarBackend = "llguidance",
    source_language: SourceLanguage = None,
    target_language: TargetLanguage = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers; by default random.")] = None,
    batch_size: BatchSize = 32,
    device: Device = None,
    quantize: Quantize = None,
    kv: KeysAndValues = None,
    compile: Compile = False,
    tensor_parallel: TensorParallel = False,
    device_map: DeviceMap = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="Test while decoding that the output has the law that the method declares.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print the time spent in each part of a turn to standard error.")
    ] = False,
    json: Json = False,
) -> None:
    """Answer prompts that are given as arguments, by --prompt, in files, or on standard input."""
    from specbeam.doors.cli.generate import run

    options = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "num_return_sequences": num_return_sequences,
        "length_penalty": length_penalty, "stop_strings": stop or None, "json_schema": json_schema, "regex": regex,
        "grammar": grammar, "grammar_backend": grammar_backend,
    }  # fmt: skip
    models = {
        "model": model, "draft": draft, "device": device, "quantize": quantize, "compile": compile,
        "tensor_parallel": tensor_parallel, "device_map": device_map, "kv": kv,
    }  # fmt: skip
    code = run(
        [*(prompts or []), *prompt], file, models, method, setting, options, seed, batch_size, audit, profile, json,
        source_language, target_language,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def batch(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Table of prompts: .jsonl, .csv or .parquet.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Table of answers, of one of these kinds.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a job that was begun; begin it if there is none.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --resume: decode rows again whose answer is an error.")
    ] = False,
    model: Model = "bundled",
    draft: Draft = None,
    method: MethodName = "dsbd",
    setting: Settings = [],
    max_new_tokens: MostNewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    num_return_sequences: NumReturnSequences = 1,
    length_penalty: LengthPenalty = None,
    stop: StopTexts = [],
    json_schema: JsonSchema = None,
    regex: Regex = None,
    grammar: Grammar = None,
    grammar_backend: GrammarBackend = "llguidance",
    source_language: SourceLanguage = None,
    target_language: TargetLanguage = None,
    seed: Annotated[int, typer.Option(help="With the id of a row, the seed of its text.")] = 0,
    batch_size: BatchSize = 32,
    id_column: Annotated[str, typer.Option(help="Column of ids. Without it rows are numbered from 1.")] = "id",
    prompt_column: Annotated[str, typer.Option(help="Column of prompts: texts, or lists of token ids.")] = "prompt",
    device: Device = None,
    quantize: Quantize = None,
    kv: KeysAndValues = None,
    compile: Compile = False,
    tensor_parallel: TensorParallel = False,
    device_map: DeviceMap = None,
    json: Json = False,
) -> None:
    """Answer the prompts of a table, each once: a job that was killed goes on with --resume, and gives the same texts."""
    from specbeam.apps.jobs.rows import Columns
    from specbeam.doors.cli.batch import run

    options = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "num_return_sequences": num_return_sequences,
        "length_penalty": length_penalty, "stop_strings": stop or None, "json_schema": json_schema, "regex": regex,
        "grammar": grammar, "grammar_backend": grammar_backend,
    }  # fmt: skip
    models = {
        "model": model, "draft": draft, "device": device, "quantize": quantize, "compile": compile,
        "tensor_parallel": tensor_parallel, "device_map": device_map, "kv": kv,
    }  # fmt: skip
    columns = Columns(id=id_column, prompt=prompt_column)
    code = run(
        source, out, models, method, setting, options, seed, batch_size, columns, resume, retry_failed, json,
        source_language, target_language,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def transcribe(
    audio: Annotated[
        list[Path], typer.Argument(help="Files with sound: WAV, FLAC, MP3, OGG, M4A, MP4, WebM and others.")
    ],
    model: Annotated[str, typer.Option("--model", "-m", help="Whisper model: a path or a hub id.")],
    draft: Draft = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Method at temperature 0; by default beam search with 5 beams, with drafts if there is a draft."
        ),
    ] = None,
    setting: Settings = [],
    language: Annotated[
        str | None, typer.Option(help="Language of the speech, like 'de' or 'german'; by default the model detects it.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="'transcribe', or 'translate' for English text; by default the model's own, or 'transcribe'."
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "--initial-prompt",
            help="A text that the model takes for what was said before, for names and spelling.",
        ),
    ] = None,
    condition_on_previous_text: Annotated[
        bool | None,
        typer.Option(
            help="Whether each window has the text before it as its prompt; by default the model's own, or not."
        ),
    ] = None,
    format: Annotated[
        str, typer.Option("--format", "-f", help="Format of the output: text, json, verbose_json, srt or vtt.")
    ] = "text",
    max_line_width: Annotated[
        int | None, typer.Option(help="Maximum number of characters in a line of subtitles.")
    ] = None,
    max_line_count: Annotated[
        int | None, typer.Option(help="Maximum number of lines of a cue; a segment that has more becomes several cues.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for one file per audio; by default all is written to standard output.")
    ] = None,
    timestamps: Annotated[
        bool, typer.Option(help="Whether the model writes timestamps, which cut the text into segments.")
    ] = True,
    temperature: Annotated[
        list[float],
        typer.Option(help="Temperature; if given several times, the next one is for texts that fail a threshold."),
    ] = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
    best_of: Annotated[int, typer.Option(help="Number of texts drawn above temperature 0.")] = 5,
    compression_ratio_threshold: Annotated[
        float | None,
        typer.Option(help="Texts that zlib makes smaller than by this factor are decoded again; by default 2.4."),
    ] = None,
    log_prob_threshold: Annotated[
        float | None,
        typer.Option(
            "--log-prob-threshold",
            "--logprob-threshold",
            help="Texts of less average log-likelihood per token are decoded again; by default the model's own, or -1.",
        ),
    ] = None,
    no_speech_threshold: Annotated[
        float | None,
        typer.Option(
            help="Unlikely texts of windows with more odds of silence are left out; by default the model's own, or 0.6."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Maximum number of tokens per window; by default as many as the model has room for."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text; by default random.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of the models: cpu, cuda, ...; by default a GPU if there is one.")
    ] = None,
    quantize: QuantizeTarget = None,
    kv: KeysAndValues = None,
) -> None:
    """Write down what is said in audio files, by a Whisper model."""
    from specbeam.doors.cli.transcribe import run

    options: dict[str, Any] = {
        "language": language, "task": task, "prompt": prompt, "timestamps": timestamps, "temperature": temperature,
        "best_of": best_of, "seed": seed, "condition_on_previous_text": condition_on_previous_text,
    }  # fmt: skip
    numbers = {
        "compression_ratio_threshold": compression_ratio_threshold, "log_prob_threshold": log_prob_threshold,
        "no_speech_threshold": no_speech_threshold, "max_new_tokens": max_new_tokens,
    }  # fmt: skip
    options.update({name: value for name, value in numbers.items() if value is not None})
    lines = {"max_line_width": max_line_width, "max_line_count": max_line_count}
    loaded = {"device": device, "quantize": quantize, "kv": kv}
    raise typer.Exit(run(audio, model, draft, loaded, method, setting, options, format, lines, output))


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Explain this method.")] = None,
    json: Json = False,
) -> None:
    """List the methods with their output laws, or explain one of them."""
    from specbeam.doors.cli.methods import run

    raise typer.Exit(run(name, json))


@app.command()
def inspect(
    prompts: Annotated[list[str] | None, typer.Argument(help="The prompt to decode.")] = None,
    model: Model = "bundled",
    draft: Draft = None,
    setting: Settings = [],
    prompt: PromptTexts = [],
    file: PromptFiles = [],
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    turn: Annotated[int, typer.Option(help="Number of the turn to draw, counted from 1.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same forest.")] = 0,
    svg: Annotated[Path | None, file_to_write("Also write the picture to this SVG file.")] = None,
    json: Json = False,
) -> None:
    """Draw the forest of one turn of DSBD: which drafts were accepted, rejected or resampled, and with what odds."""
    from specbeam.doors.cli.inspect import run

    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    raise typer.Exit(run([*(prompts or []), *prompt], file, model, draft, setting, options, turn, seed, svg, json))


def _add_serve() -> None:
    """Add the command that serves, with an option for all that can be configured."""

    def serve(config: Path | None, **options: Any) -> None:
        from specbeam.doors.cli.serve import run

        raise typer.Exit(run(config, given_options(options)))

    help = "A YAML file with these options (docs/serve.md); what is given here goes before it."
    file = Parameter("config", Parameter.KEYWORD_ONLY, default=None, annotation=option(Path | None, help))
    serve.__signature__ = Signature([file, *server_parameters()])  # type: ignore[attr-defined]
    app.command("serve", help="Serve OpenAI's API with beams over HTTP, and a page that shows forests.")(serve)


_add_serve()


@app.command()
def chat(
    model: Model = "bundled",
    draft: Draft = None,
    method: Annotated[
        str,
        typer.Option("--method", help="Decoding method; by default speculative_sampling, or sampling without a draft."),
    ] = "",
    setting: Settings = [],
    system: Annotated[str, typer.Option(help="What the model is told before the conversation.")] = "",
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Annotated[int | None, typer.Option(help="Seed of each answer; by default each is drawn anew.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A file with a chat template, if the model has none.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Address of a server that speaks OpenAI's API, in place of a model here.")
    ] = None,
    key: Annotated[str, typer.Option(help="API key of that server.", envvar="SPECBEAM_API_KEY")] = "",
    quantize: QuantizeTarget = None,
) -> None:
    """Talk with a model in the terminal; Ctrl-C ends an answer, Ctrl-D the chat."""
    from specbeam.doors.cli.chat import ChatOptions, run

    given = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    options = {name: value for name, value in given.items() if value is not None}
    chosen = ChatOptions(method, tuple(setting), options, seed)
    raise typer.Exit(run(model, draft, quantize, url, key, chat_template, system, chosen))


@app.command()
def tune(
    model: Model = "bundled",
    draft: Draft = None,
    context: Lengths = [64],
    beams: Annotated[int, typer.Option(help="Number of beams that --explain assumes.")] = 4,
    draft_beams: Annotated[
        int | None, typer.Option(help="Number of draft nodes per layer that --explain assumes; by default beams + 2.")
    ] = None,
    odds: Annotated[
        float, typer.Option(help="Probability that a draft layer passes, which --explain assumes; in (0, 1).")
    ] = 0.6,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the options between which depth='auto' and width='auto' choose.")
    ] = False,
    prompt: PromptTexts = [],
    file: Annotated[
        list[Path],
        typer.Option(
            "--file",
            "-f",
            help="File of prompts like those to come: measures on 30 of them how often the k-th draft tried is accepted, "
            "for sequoia. By default the bundled pair's sentences, for that pair.",
        ),
    ] = [],
    skip_ratio: Annotated[
        float | None,
        typer.Option(
            help="Search on these prompts for the share of the target's sublayers that drafts of swift do without, and keep "
            "what is found for swift with the same ratio and task; such as 0.45."
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Name of the kind of texts that --skip-ratio searches for, as in swift.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure what controllers decide by, and keep it on disk: the time of passes here, and acceptance by rank."""
    from specbeam.doors.cli.tune import run

    skipping = (skip_ratio, task)
    raise typer.Exit(run(model, draft, context, beams, draft_beams, odds, explain, prompt, file, skipping, json))


@app.command()
def demo(
    beams: Annotated[int, typer.Option(help="Number of beams of beam sampling and DSBD.")] = 4,
    seed: Annotated[int, typer.Option(help="The same seed gives the same texts.")] = 0,
    json: Json = False,
) -> None:
    """Translate German sentences by sampling, beam sampling and DSBD side by side, with the bundled pair."""
    from specbeam.doors.cli.demo import run

    raise typer.Exit(run(beams, seed, json))


app.add_typer(evaluate, name="evaluate")
app.command("diff", hidden=True)(diff_by_its_older_name)
app.add_typer(bench, name="bench")
app.add_typer(train, name="train")
app.add_typer(heads, name="heads")


def main() -> None:
    """Run the command line.

    Errors that the user can correct are printed as a sentence on standard error, with exit code 2; so are those of the
    system, of a disk that is full for example. An interrupt gives exit code 130, a closed output pipe 141.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the caller has closed it: nothing is read, and nothing is shown
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except (BrokenPipeError, ClosedPipe):
        _end("", 141)
    except UnicodeEncodeError as error:
        _end(
            f"standard output is in {error.encoding}, which has no {error.object[error.start : error.end]!r}; set "
            "PYTHONIOENCODING=utf-8",
            2,
        )
    except OSError as error:
        _end(_sentence_of(error), 2)
    except SpecbeamError as error:
        _end(str(error), 2)


def _sentence_of(error: OSError) -> str:
    """Return what an error of the system says, and of which file."""
    if isinstance(error, SpecbeamError):
        return str(error)
    what = error.strerror or str(error) or type(error).__name__
    named = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return f"{' and '.join(named)}: {what}" if named else f"{what}: standard output, or another file, cannot be used"


def _end(said: str, code: int) -> NoReturn:
    """Print a message on standard error, and end with an exit code; what standard output has not taken is given up."""
    from specbeam.doors.plain import for_terminal

    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):  # or Python would try again at its end, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError, ValueError):
        if said:
            print(f"specbeam: {for_terminal(said)}", file=sys.stderr, flush=True)
    sys.exit(code)

"""The command line. Each command is a file that reads arguments, calls one public function and prints its record."""

import sys
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from specbeam.cli.options import (
    BatchSize,
    Compile,
    DemoPrompts,
    Device,
    DeviceMap,
    Draft,
    Grammar,
    GrammarBackend,
    Grow,
    GrowVocab,
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
    PassRows,
    Plot,
    PromptFiles,
    Prompts,
    PromptTexts,
    Quantize,
    QuantizeTarget,
    Regex,
    RepetitionPenalty,
    Rounds,
    Settings,
    SourceLanguage,
    SpacedRows,
    StopTexts,
    TargetLanguage,
    Temperature,
    TensorParallel,
    Threads,
    TopK,
    TopP,
)
from specbeam.cli.serve_options import given_options, option, server_parameters
from specbeam.options.head_kinds import DRAFT_SCHEDULE, HEAD_KINDS, WINDOW_KIND, HeadKind

app = typer.Typer(
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
    from specbeam.cli.compiling import showing_compilation

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
    from specbeam.cli.generate import run

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
    from specbeam.cli.batch import run
    from specbeam.jobs.rows import Columns

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
    audio: Annotated[list[Path], typer.Argument(help="Audio files: WAV, FLAC, OGG, MP3 and others.")],
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
    task: Annotated[str, typer.Option(help="'transcribe', or 'translate' for English text.")] = "transcribe",
    prompt: Annotated[
        str | None, typer.Option(help="A text that the model takes for what was said before, for names and spelling.")
    ] = None,
    format: Annotated[
        str, typer.Option("--format", "-f", help="Format of the output: text, json, verbose_json, srt or vtt.")
    ] = "text",
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
        float, typer.Option(help="Texts that zlib makes smaller than by this factor are decoded again.")
    ] = 2.4,
    log_prob_threshold: Annotated[
        float, typer.Option(help="Texts of less average log-likelihood per token are decoded again.")
    ] = -1.0,
    no_speech_threshold: Annotated[
        float, typer.Option(help="Unlikely texts of windows with more probability of silence are left out.")
    ] = 0.6,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Maximum number of tokens per window; by default as many as the model has room for."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text; by default random.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of the models: cpu, cuda, ...; by default a GPU if there is one.")
    ] = None,
) -> None:
    """Write down what is said in audio files, by a Whisper model."""
    from specbeam.cli.transcribe import run

    options = {
        "language": language, "task": task, "prompt": prompt, "timestamps": timestamps, "temperature": temperature,
        "best_of": best_of, "compression_ratio_threshold": compression_ratio_threshold,
        "log_prob_threshold": log_prob_threshold, "no_speech_threshold": no_speech_threshold, "seed": seed,
    }  # fmt: skip
    if max_new_tokens is not None:
        options["max_new_tokens"] = max_new_tokens
    raise typer.Exit(run(audio, model, draft, device, method, setting, options, format, output))


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Explain this method.")] = None,
    json: Json = False,
) -> None:
    """List the methods with their output laws, or explain one of them."""
    from specbeam.cli.methods import run

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
    svg: Annotated[Path | None, typer.Option(help="Also write the picture to this SVG file.")] = None,
    json: Json = False,
) -> None:
    """Draw the forest of one turn of DSBD: which drafts were accepted, rejected or resampled, and with what odds."""
    from specbeam.cli.inspect import run

    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    raise typer.Exit(run([*(prompts or []), *prompt], file, model, draft, setting, options, turn, seed, svg, json))


def _add_serve() -> None:
    """Add the command that serves, with an option for all that can be configured."""

    def serve(config: Path | None, **options: Any) -> None:
        from specbeam.cli.serve import run

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
    from specbeam.cli.chat import ChatOptions, run

    given = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    options = {name: value for name, value in given.items() if value is not None}
    chosen = ChatOptions(method, tuple(setting), options, seed)
    raise typer.Exit(run(model, draft, quantize, url, key, chat_template, system, chosen))


evaluate = typer.Typer(no_args_is_help=True, help="Check and score the outputs of methods.")
app.add_typer(evaluate, name="evaluate")


@evaluate.command("harness", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def evaluate_harness(context: typer.Context) -> None:
    """Run lm-evaluation-harness by its own options, with one model more: run --model specbeam --tasks ..."""
    from specbeam.cli.harness import run

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
    from specbeam.cli.evaluate import same_beams as run

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
    from specbeam.cli.diff import run

    texts = [*(prompts or []), *prompt]
    raise typer.Exit(
        run(model, draft, texts, file, beams, setting, rows, every_option, batch_size, max_new_tokens, dtype, json)
    )


@app.command("diff", hidden=True)
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


@evaluate.command()
def perplexity(
    files: Annotated[
        list[Path], typer.Argument(help="JSON lines with 'prompt', 'tokens' or 'text', and perhaps 'reference'.")
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
    from specbeam.cli.evaluate import perplexity as run

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
    from specbeam.cli.evaluate import theory as run

    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "max_new_tokens": max_new_tokens}
    raise typer.Exit(run(prompts or [], file, model, draft, depth, rows, seed, options, plot, json))


bench = typer.Typer(no_args_is_help=True, help="Measure methods side by side.")
app.add_typer(bench, name="bench")


@bench.command("efficiency")
def block_efficiency(
    prompts: DemoPrompts = None,
    model: Model = "bundled",
    draft: Draft = None,
    prompt: PromptTexts = [],
    file: PromptFiles = [],
    budget: Annotated[
        list[int], typer.Option(help="Number of nodes scored per pass: 5, 10, 21 or 30. May be given several times.")
    ] = [5, 10, 21, 30],
    temperature: Temperature = None,
    rows: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum number of prompts reported, taken at even distances from all. As many others choose the shapes.",
        ),
    ] = 60,
    max_new_tokens: MaxNewTokens = 48,
    seed: Annotated[int, typer.Option(help="Seed of the decoding.")] = 0,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Measure tokens per target pass at a fixed budget of scored nodes, for every method that decodes one sequence.

    The shape of each method, and the acceptance by rank that sequoia plans by, are chosen on other prompts than those
    reported.
    """
    from specbeam.cli.bench import block_efficiency as run

    raise typer.Exit(
        run(
            [*(prompts or []), *prompt], file, model, draft, budget, temperature, rows, max_new_tokens, seed, plot, json
        )
    )


@bench.command()
def acceptance(
    prompts: DemoPrompts = None,
    model: Model = "bundled",
    draft: Draft = None,
    prompt: PromptTexts = [],
    file: PromptFiles = [],
    children: Annotated[int, typer.Option(help="Number of draft tokens tried per step.")] = 8,
    temperature: Temperature = None,
    rows: SpacedRows = 60,
    max_new_tokens: MaxNewTokens = 48,
    seed: Annotated[int, typer.Option(help="Seed of the decoding.")] = 0,
    json: Json = False,
) -> None:
    """Measure how often the k-th draft token tried is the accepted one; `sequoia` plans its tree by these odds."""
    from specbeam.cli.bench import acceptance_by_rank as run

    raise typer.Exit(
        run([*(prompts or []), *prompt], file, model, draft, children, temperature, rows, max_new_tokens, seed, json)
    )


@bench.command("specbench")
def spec_bench(
    questions: Annotated[Path, typer.Argument(help="Spec-Bench's question.jsonl, plain or .gz.")],
    contenders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METHOD]...", help="Methods, each with its settings: 'sequoia budget=21'."),
    ] = None,
    model: Model = "bundled",
    draft: Draft = None,
    each: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of questions of each task; by default all.")
    ] = None,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is Spec-Bench's greedy decoding.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the decoding.")] = 0,
    threads: Threads = None,
    processor_time: Annotated[
        bool, typer.Option("--processor-time", help="Count the processor's time, for a machine with other work.")
    ] = False,
    answers: Annotated[
        Path | None,
        typer.Option(help="Also write a file per method that Spec-Bench's own scripts read to this folder."),
    ] = None,
    json: Json = False,
) -> None:
    """Run methods on Spec-Bench's six tasks beside plain decoding: its statistics, and ours."""
    from specbeam.cli.bench_specbench import run

    code = run(
        questions, contenders or [], model, draft, each, max_new_tokens, temperature, seed, threads, processor_time,
        answers, json,
    )  # fmt: skip
    raise typer.Exit(code)


@bench.command("methods")
def compare(
    older: Annotated[list[Path], typer.Argument(hidden=True, help="The same as --file.")] = [],
    file: Annotated[
        list[Path],
        typer.Option(
            "--file",
            "-f",
            help="TSV file with a prompt and its right answer per line, a task of its own. May be given several times. By "
            "default the bundled tasks.",
        ),
    ] = [],
    model: Model = "bundled",
    draft: Draft = None,
    grow: Grow = None,
    metric: Annotated[
        str | None, typer.Option(help="Quality measure of the files: 'BLEU' (default) or 'exact match'.")
    ] = None,
    beams: Annotated[int, typer.Option(help="Number of beams of the methods that have beams.")] = 4,
    depth: Annotated[int, typer.Option(help="Number of draft layers per pass, except of methods named 'auto'.")] = 4,
    threshold: Annotated[float, typer.Option(help="Acceptance threshold of MTAD and MMTAD.")] = 0.5,
    rows: Annotated[int, typer.Option(help="Maximum number of prompts per task: the first ones.")] = 400,
    seeds: Annotated[int, typer.Option(help="Number of times that each prompt is answered, with different seeds.")] = 3,
    max_new_tokens: MaxNewTokens = 64,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Compare methods: perplexity and quality of the text against seconds, joules and target passes per token."""
    from specbeam.cli.bench_methods import run

    raise typer.Exit(
        run(
            [*older, *file],
            model,
            draft,
            grow,
            metric,
            (beams, depth, threshold),
            rows,
            seeds,
            max_new_tokens,
            plot,
            json,
        )
    )


@bench.command()
def speed(
    contenders: Annotated[
        list[str],
        typer.Argument(
            help="'dsbd beams=4 depth=2', 'transformers/beam_sampling beams=4', 'ctranslate2/beam_search "
            "compute_type=int8', ... Ratios are to the first one. Without any a usual selection runs."
        ),
    ] = [],
    prompt: PromptTexts = [],
    file: PromptFiles = [],
    older: Annotated[list[Path], typer.Option("--prompts", hidden=True, help="The same as --file.")] = [],
    columns: Annotated[
        tuple[int, int], typer.Option(help="Columns of prompt and answer in a .tsv, counted from 1.")
    ] = (1, 2),
    model: Model = "bundled",
    draft: Draft = None,
    grow: Grow = None,
    grow_draft: Annotated[
        str | None, typer.Option(help="Enlarge the draft model in the same way to this many weights. By default not.")
    ] = None,
    grow_vocab: GrowVocab = None,
    quantize: QuantizeTarget = None,
    rows: SpacedRows = 30,
    batch_size: Annotated[
        list[int], typer.Option(help="Number of prompts decoded at once. May be given several times.")
    ] = [1],
    repeats: Rounds = 7,
    threads: Threads = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    max_new_tokens: MaxNewTokens = 64,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Measure tokens per second, quality and memory of methods, transformers and CTranslate2 in one interleaved run."""
    from specbeam.cli.bench_speed import run

    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "max_new_tokens": max_new_tokens}
    raise typer.Exit(
        run(
            contenders,
            prompt,
            [*older, *file],
            columns,
            model,
            draft,
            grow,
            grow_draft,
            grow_vocab,
            quantize,
            rows,
            batch_size,
            repeats,
            threads,
            options,
            plot,
            json,
        )
    )


@bench.command("cliffs")
def speed_cliffs(
    methods: Annotated[
        str | None, typer.Option(help="Methods, separated by commas; by default all that the table has.")
    ] = None,
    options: Annotated[
        str | None,
        typer.Option(
            help="Options of generation, separated by commas: none, top_p, min_p, repetition_penalty, min_new_tokens, "
            "stop_strings, grammar, stream, audit. By default all."
        ),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Numbers of prompts decoded at once, separated by commas.")] = "1,16",
    kinds: Annotated[
        str,
        typer.Option(
            help="Kinds of prompts, separated by commas: trained (the demo's sentences), random (24 random tokens)."
        ),
    ] = "trained",
    older: Annotated[str | None, typer.Option("--prompts", hidden=True, help="The same as --kinds.")] = None,
    rows: Annotated[int, typer.Option(help="Minimum number of prompts per round; batches are always full.")] = 2,
    repeats: Rounds = 3,
    max_new_tokens: MaxNewTokens = 24,
    model: Model = "bundled",
    draft: Draft = None,
    grow: Grow = None,
    threads: Threads = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the Markdown page to this file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write a JSON line per cell to this file.")] = None,
) -> None:
    """Find where speed falls off: time methods with each option and batch size, beside transformers with the same."""
    from specbeam.cli.bench_cliffs import run

    code = run(
        methods, options, batch_sizes, older or kinds, rows, repeats, max_new_tokens, model, draft, grow, threads,
        markdown, json,
    )  # fmt: skip
    raise typer.Exit(code)


@bench.command("serve")
def serving(
    url: Annotated[str, typer.Argument(help="Address of a server that speaks OpenAI's API.")] = "http://127.0.0.1:8000",
    clients: Annotated[int, typer.Option(min=1, help="Number of clients, each with one request at a time.")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="Most requests in all.")] = 100,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds after which no further request is sent; by default all are.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second, at random times (Poisson); by default each client asks again at once."),
    ] = None,
    gone: Annotated[float, typer.Option(help="Share of the requests whose client goes away in the middle.")] = 0.0,
    body: Annotated[str, typer.Option(help="Fields of each request as JSON, like '{\"num_beams\": 4}'.")] = "{}",
    file: PromptFiles = [],
    joined: Annotated[int, typer.Option(min=1, help="Number of prompts that are joined to one: long prompts.")] = 1,
    before: Annotated[str, typer.Option(help="A text that all prompts begin with: shared prefixes.")] = "",
    max_new_tokens: MaxNewTokens = 64,
    stream: Annotated[bool, typer.Option(help="Let answers be streamed.")] = True,
    key: Annotated[str, typer.Option(help="API key.", envvar="SPECBEAM_API_KEY")] = "",
    json: Json = False,
) -> None:
    """Put a load of many clients on a server: requests and tokens per second, and how long clients wait."""
    from specbeam.cli.bench_serve import PromptShape, run

    shape = PromptShape(file, joined, before)
    raise typer.Exit(run(url, clients, requests, seconds, rate, gone, body, shape, max_new_tokens, stream, key, json))


@bench.command("passes")
def pass_cost(
    model: Model = "bundled",
    grow: Grow = None,
    grow_vocab: GrowVocab = None,
    quantize: QuantizeTarget = None,
    rows: PassRows = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128],
    beams: Annotated[
        list[int],
        typer.Option(help="Number of beams of a step, also timed in transformers. May be given several times."),
    ] = [1, 4, 16, 64],
    length: Lengths = [128, 512, 1024, 2048, 4096],
    copies_gb: Annotated[
        float,
        typer.Option(
            help="Memory limit of transformers' copies of the cache, in GB. Sizes above it are left out; 0 leaves out all."
        ),
    ] = 4.0,
    repeats: Rounds = 7,
    threads: Threads = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Time a pass by its rows and by the tokens in the KV cache, and a step of beams beside transformers' cache."""
    from specbeam.cli.bench_passes import run

    raise typer.Exit(
        run(model, grow, grow_vocab, quantize, rows, beams, length, copies_gb, repeats, threads, plot, json)
    )


@bench.command("scale")
def scale(
    measure: Annotated[
        str | None,
        typer.Option(help="A folder of a model whose passes are timed; start it by torchrun to spread them, too."),
    ] = None,
    samples: Annotated[
        list[Path] | None, typer.Option(help="A file that --measure has printed; may be given several times.")
    ] = None,
    rows: Annotated[list[int], typer.Option(help="Rows of a pass that is timed; may be given several times.")] = [
        1,
        20,
    ],
    stored: Annotated[
        int | None,
        typer.Option(help="Number of tokens in the cache; by default 128 for --measure, and 2048 for the table."),
    ] = None,
    repeats: Rounds = 7,
    ranks: Annotated[list[int], typer.Option(help="Devices that hold a target; may be given several times.")] = [
        2,
        4,
        8,
    ],
    devices: Annotated[int, typer.Option(help="Devices in all: as many replicas as they hold.")] = 8,
    beams: Annotated[int, typer.Option(help="Number of beams.")] = 4,
    depth: Annotated[int, typer.Option(help="Draft passes of a turn.")] = 4,
    kept: Annotated[float, typer.Option(help="Layers of text that a turn adds.")] = 3.0,
    requests: Annotated[int, typer.Option(help="Texts side by side in a replica.")] = 1,
    reduce_us: Annotated[float, typer.Option(help="Microseconds of a sum over the devices.")] = 10.0,
    host_ms: Annotated[float, typer.Option(help="Milliseconds of the host in a turn.")] = 2.0,
    json: Json = False,
) -> None:
    """Say what a target costs that is spread over devices: by assumption, or by a fit to passes that were timed here."""
    from specbeam.bench.scale import Cluster, TurnPlan
    from specbeam.cli import bench_scale

    bench_scale.check_given(measure, samples, json)
    if measure is not None:
        raise typer.Exit(bench_scale.measure(measure, rows, 128 if stored is None else stored, repeats))
    if samples:
        raise typer.Exit(bench_scale.check(samples))
    plan = TurnPlan(beams * (depth + 1), depth, kept, 2048 if stored is None else stored, requests)
    cluster = Cluster(reduce_s=1e-6 * reduce_us, host_s=1e-3 * host_ms)
    raise typer.Exit(bench_scale.assume(ranks, devices, beams, plan, cluster, json))


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
    from specbeam.cli.tune import run

    skipping = (skip_ratio, task)
    raise typer.Exit(run(model, draft, context, beams, draft_beams, odds, explain, prompt, file, skipping, json))


@app.command()
def demo(
    beams: Annotated[int, typer.Option(help="Number of beams of beam sampling and DSBD.")] = 4,
    seed: Annotated[int, typer.Option(help="The same seed gives the same texts.")] = 0,
    json: Json = False,
) -> None:
    """Translate German sentences by sampling, beam sampling and DSBD side by side, with the bundled pair."""
    from specbeam.cli.demo import run

    raise typer.Exit(run(beams, seed, json))


train = typer.Typer(no_args_is_help=True, help="Train what drafts.")
app.add_typer(train, name="train")


Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write; a training that was stopped goes on there.")]
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
    typer.Option(
        help="Folder of what the target draws, which trainings with the same prompts, draws and seed may share; "
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
    from specbeam.cli.train import TrainingOptions, run_draft
    from specbeam.train.drawing import DrawPlan
    from specbeam.train.fitting import Schedule

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
    from specbeam.cli.train import TrainingOptions, run_head, run_window
    from specbeam.train.drawing import DrawPlan
    from specbeam.train.fitting import Schedule

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
        typer.Option(
            "--data",
            "--file",
            "-f",
            help="File of long texts: a text, or .jsonl with a 'text' in each line, or a 'prompt' and an 'answer'; plain or "
            "packed. May be given several times.",
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
    from specbeam.cli.train_memory import MemoryOptions, plan_of, run, schedule_of

    plan = plan_of(segment, window, sensory, memories, share, recall, query)
    schedule = schedule_of(stages, previous_steps, batch, rate, memory_rate, frozen, loss_on, depth, check_every, seed)
    raise typer.Exit(run(MemoryOptions(model, data, out, plan, width, schedule, prompt_weight, threads, json)))


heads = typer.Typer(no_args_is_help=True, help="Look at draft heads.")
app.add_typer(heads, name="heads")


@heads.callback()
def _heads() -> None:
    """Look at draft heads."""


@heads.command("inspect")
def inspect_head(
    path: Annotated[
        str, typer.Argument(help="Draft head: a folder or a hub id; 'mtp': the modules in the target's own files.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Its target: a path, a hub id, or 'bundled'; by default what its files name."
        ),
    ] = None,
    probe: Annotated[bool, typer.Option(help="Try the head on words of the target, read in different ways.")] = True,
    json: Json = False,
) -> None:
    """Show what kind of head files hold, how they were read, and how well the head fits its target."""
    from specbeam.cli.heads import run_inspect

    raise typer.Exit(run_inspect(path, model, probe, json))


def main() -> None:
    """Run the command line.

    Errors that the user can correct are printed as one line on standard error, with exit code 2. An interrupt gives
    exit code 130, a closed output pipe 141.
    """
    from specbeam.errors import SpecbeamError

    try:
        app()
    except SpecbeamError as error:
        print(f"specbeam: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("specbeam: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)

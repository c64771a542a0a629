"""The command line. Each command is one file that reads arguments, calls one public function and prints its record."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Decode language models with beams at the price of one sequence.",
)

Model = Annotated[str, typer.Option("--model", "-m", help="Target: a path, a hub id, or 'bundled'.")]
Draft = Annotated[str | None, typer.Option("--draft", "-d", help="Draft: a path or a hub id.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Grow = Annotated[str | None, typer.Option(help="Enlarge the target, as it is, to 100M, 1B, ... weights.")]
MethodName = Annotated[str, typer.Option("--method", help="A recipe; `specbeam methods` lists them.")]
Settings = Annotated[
    list[str],
    typer.Option("--set", "-s", metavar="NAME=VALUE", help="A setting of the method, e.g. -s beams=4 -s width=fixed."),
]


@app.callback()
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and stop.")] = False,
) -> None:
    if version:
        from specbeam import __version__

        print(__version__)
        raise typer.Exit
    # A spinning barrier waits for a descheduled partner at every operator; has to be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from specbeam.cli.compiling import compiling_shown

    context.with_resource(compiling_shown())


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts. None: read standard input.")] = None,
    model: Model = "bundled",
    draft: Draft = None,
    method: MethodName = "dsbd",
    setting: Settings = [],  # noqa: B006
    file: Annotated[
        list[Path],
        typer.Option("--file", "-f", help="A text file, a prompt per line; or .jsonl with a field 'prompt'."),
    ] = [],  # noqa: B006
    max_new_tokens: Annotated[int | None, typer.Option(help="Most new tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: no chance at all.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest only.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest that hold p of the mass.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Draw from those at least p times the likeliest.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: shun what was said.")] = None,
    num_return_sequences: Annotated[int, typer.Option(help="Answers per prompt.")] = 1,
    length_penalty: Annotated[float | None, typer.Option(help="Exponent of the length in a beam's score; 1.")] = None,
    stop: Annotated[list[str], typer.Option(help="Stop after this text.")] = [],  # noqa: B006
    json_schema: Annotated[str | None, typer.Option(help="Answer in JSON like this: a schema or its file.")] = None,
    regex: Annotated[str | None, typer.Option(help="Answer by this regular expression.")] = None,
    grammar: Annotated[str | None, typer.Option(help="Answer by this grammar: Lark, or its file.")] = None,
    grammar_backend: Annotated[str, typer.Option(help="llguidance or xgrammar.")] = "llguidance",
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded side by side.")] = 32,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    quantize: Annotated[str | None, typer.Option(help="int8: the target's weights; another, faster model.")] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="By torch.compile, models that transformers runs on a CPU.")
    ] = False,
    audit: Annotated[
        bool, typer.Option("--audit", help="Test while decoding that the law is the declared one.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time goes.")] = False,
    json: Json = False,
) -> None:
    """Answer prompts given as arguments, in files, or on standard input."""
    from specbeam.cli.generate import run

    options = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "num_return_sequences": num_return_sequences,
        "length_penalty": length_penalty, "stop_strings": stop or None, "json_schema": json_schema, "regex": regex,
        "grammar": grammar, "grammar_backend": grammar_backend,
    }  # fmt: skip
    code = run(
        prompts or [], file, model, draft, device, quantize, compile, method, setting, options, seed, batch_size, audit,
        profile, json,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Explain this one.")] = None,
    json: Json = False,
) -> None:
    """List the methods with their output laws, or explain one."""
    from specbeam.cli.methods import run

    raise typer.Exit(run(name, json))


@app.command()
def inspect(
    prompt: Annotated[str, typer.Argument(help="A prompt.")],
    model: Model = "bundled",
    draft: Draft = None,
    setting: Settings = [],  # noqa: B006
    turn: Annotated[int, typer.Option(help="Which turn to draw, from 1.")] = 1,
    seed: Annotated[int, typer.Option(help="Same seed, same forest.")] = 0,
    svg: Annotated[Path | None, typer.Option(help="Write the picture here too.")] = None,
    json: Json = False,
) -> None:
    """Draw one turn's forest: which drafts were accepted, rejected or resampled, and with what odds."""
    from specbeam.cli.inspect import run

    raise typer.Exit(run(prompt, model, draft, setting, turn, seed, svg, json))


evaluate = typer.Typer(no_args_is_help=True, help="Check and score what methods put out.")
app.add_typer(evaluate, name="evaluate")


@evaluate.command("same-beams")
def same_beams(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts. None: read standard input.")] = None,
    model: Model = "bundled",
    draft: Draft = None,
    setting: Settings = [],  # noqa: B006
    file: Annotated[list[Path], typer.Option("--file", "-f", help="A text file, a prompt per line; or .jsonl.")] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="The seed of both.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Prompts that DSBD decodes side by side.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 64,
    json: Json = False,
) -> None:
    """Compare the beams of fixed-width DSBD with those of plain beam sampling, seed by seed; show the gap at each flip."""
    from specbeam.cli.evaluate import same_beams as run

    raise typer.Exit(run(prompts or [], file, model, draft, setting, seed, batch_size, max_new_tokens, json))


@app.command()
def diff(
    model: Annotated[str, typer.Argument(help="Target: a path, a hub id, or 'bundled'.")] = "bundled",
    draft: Draft = None,
    prompt: Annotated[list[str], typer.Option(help="A prompt. None at all: read standard input.")] = [],  # noqa: B006
    prompts: Annotated[
        list[Path], typer.Option("--prompts", "-f", help="A text file, a prompt per line; or .jsonl.")
    ] = [],  # noqa: B006
    beams: Annotated[int, typer.Option(help="Beams of both.")] = 4,
    setting: Settings = [],  # noqa: B006
    rows: Annotated[int, typer.Option(help="Most prompts.")] = 1000,
    every_option: Annotated[
        bool, typer.Option("--every-option", help="Other options for each prompt; any two values meet on some prompt.")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Prompts that specbeam decodes side by side.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 64,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, ...")] = "auto",
    json: Json = False,
) -> None:
    """Run transformers' beam search and specbeam's; report each difference, and whether it is rounding."""
    from specbeam.cli.diff import run

    raise typer.Exit(
        run(model, draft, prompt, prompts, beams, setting, rows, every_option, batch_size, max_new_tokens, dtype, json)
    )


@evaluate.command()
def perplexity(
    files: Annotated[
        list[Path], typer.Argument(help="Outputs as JSON lines: 'prompt', 'tokens' or 'text', 'reference'.")
    ],
    model: Model = "bundled",
    ended: Annotated[bool, typer.Option("--ended", help="Texts without tokens are complete: score their end.")] = False,
    json: Json = False,
) -> None:
    """Score outputs of any decoder by the target's raw probabilities: what `generate --json` wrote, file beside file."""
    from specbeam.cli.evaluate import perplexity as run

    raise typer.Exit(run(files, model, ended, json))


bench = typer.Typer(no_args_is_help=True, help="Measure methods side by side.")
app.add_typer(bench, name="bench")


@bench.command("efficiency")
def block_efficiency(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts. None: the demo's sentences.")] = None,
    model: Model = "bundled",
    draft: Draft = None,
    file: Annotated[list[Path], typer.Option("--file", "-f", help="A text file, a prompt per line; or .jsonl.")] = [],  # noqa: B006
    budget: Annotated[list[int], typer.Option(help="Scored nodes per pass: 5, 10, 21 or 30.")] = [5, 10, 21, 30],  # noqa: B006
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    rows: Annotated[int, typer.Option(help="Most prompts, evenly over all.")] = 60,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 48,
    seed: int = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
    json: Json = False,
) -> None:
    """Tokens per pass of the target, for every method for one sequence, at a fixed budget of scored nodes."""
    from specbeam.cli.bench import block_efficiency as run

    raise typer.Exit(
        run(prompts or [], file, model, draft, budget, temperature, rows, max_new_tokens, seed, plot, json)
    )


@bench.command()
def acceptance(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts. None: the demo's sentences.")] = None,
    model: Model = "bundled",
    draft: Draft = None,
    file: Annotated[list[Path], typer.Option("--file", "-f", help="A text file, a prompt per line; or .jsonl.")] = [],  # noqa: B006
    children: Annotated[int, typer.Option(help="Draft tokens tried per step.")] = 8,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    rows: Annotated[int, typer.Option(help="Most prompts, evenly over all.")] = 60,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 48,
    seed: int = 0,
    json: Json = False,
) -> None:
    """How often the k-th draft token tried is the accepted one: what `sequoia` plans its tree by."""
    from specbeam.cli.bench import ranks

    raise typer.Exit(ranks(prompts or [], file, model, draft, children, temperature, rows, max_new_tokens, seed, json))


@bench.command("methods")
def compare(
    pairs: Annotated[
        list[Path],
        typer.Argument(help="TSV files: a prompt and its one right answer per line. None: the bundled tasks."),
    ] = [],  # noqa: B006
    model: Model = "bundled",
    draft: Draft = None,
    grow: Grow = None,
    metric: Annotated[str | None, typer.Option(help="Of the files: BLEU (if not said) or 'exact match'.")] = None,
    beams: Annotated[int, typer.Option(help="Beams of all methods that have some.")] = 4,
    depth: Annotated[int, typer.Option(help="Draft tokens per pass, where a method is not said to choose.")] = 4,
    threshold: Annotated[float, typer.Option(help="Of MTAD and MMTAD.")] = 0.5,
    rows: Annotated[int, typer.Option(help="Most prompts of a task.")] = 400,
    seeds: Annotated[int, typer.Option(help="How often each prompt is answered.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 64,
    plot: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
    json: Json = False,
) -> None:
    """Perplexity and quality of the text against seconds, joules and target passes per token, method beside method."""
    from specbeam.cli.bench_methods import run

    raise typer.Exit(
        run(pairs, model, draft, grow, metric, (beams, depth, threshold), rows, seeds, max_new_tokens, plot, json)
    )


@bench.command()
def speed(
    contenders: Annotated[
        list[str],
        typer.Argument(
            help="'dsbd beams=4 depth=2', 'transformers/beam_sampling beams=4', 'ctranslate2/beam_search "
            "compute_type=int8', ...; ratios are to the first. None: the usual ones."
        ),
    ] = [],  # noqa: B006
    prompts: Annotated[
        str | None,
        typer.Option(help="A file (.txt, .tsv, .jsonl, packed or not), or gsm8k, humaneval, mt_bench, squad, spider."),
    ] = None,
    columns: Annotated[tuple[int, int], typer.Option(help="Of a .tsv: prompt and answer.")] = (1, 2),
    model: Model = "bundled",
    draft: Draft = None,
    grow: Grow = None,
    grow_draft: Annotated[str | None, typer.Option(help="Enlarge the draft model likewise.")] = None,
    quantize: Annotated[str | None, typer.Option(help="int8: the target's weights, for specbeam's methods.")] = None,
    rows: Annotated[int, typer.Option(help="Most prompts, evenly over all.")] = 30,
    batch_size: Annotated[list[int], typer.Option(help="Prompts at once.")] = [1],  # noqa: B006
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 7,
    threads: Annotated[int | None, typer.Option(help="Of the arithmetic.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest only.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest that hold p of the mass.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 64,
    plot: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
    json: Json = False,
) -> None:
    """Tokens per second of methods, transformers and CTranslate2, interleaved, with quality and memory beside them."""
    from specbeam.cli.bench_speed import run

    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "max_new_tokens": max_new_tokens}
    raise typer.Exit(
        run(
            contenders,
            prompts,
            columns,
            model,
            draft,
            grow,
            grow_draft,
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
    methods: Annotated[str | None, typer.Option(help="Between commas. None: all of the table.")] = None,
    options: Annotated[
        str | None,
        typer.Option(
            help="Between commas: none, top_p, min_p, repetition_penalty, min_new_tokens, stop_strings, grammar, stream, "
            "audit. None: all."
        ),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Prompts at once, between commas.")] = "1,16",
    prompts: Annotated[str, typer.Option(help="trained: the demo's sentences; random: 24 random tokens.")] = "trained",
    rows: Annotated[int, typer.Option(help="Prompts of a round, at least; batches are always full.")] = 2,
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 24,
    model: Model = "bundled",
    draft: Draft = None,
    grow: Grow = None,
    threads: Annotated[int | None, typer.Option(help="Of the arithmetic.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the page here too.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write a JSON line per cell here.")] = None,
) -> None:
    """Where speed falls off: methods under each option and batch size, beside transformers doing the same."""
    from specbeam.cli.bench_cliffs import run

    code = run(
        methods, options, batch_sizes, prompts, rows, repeats, max_new_tokens, model, draft, grow, threads, markdown, json
    )  # fmt: skip
    raise typer.Exit(code)


@bench.command("passes")
def pass_cost(
    model: Model = "bundled",
    grow: Grow = None,
    rows: Annotated[list[int], typer.Option(help="Rows of a pass.")] = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128],  # noqa: B006
    beams: Annotated[list[int], typer.Option(help="Beams of a step, beside transformers.")] = [1, 4, 16, 64],  # noqa: B006
    length: Annotated[list[int], typer.Option(help="Tokens in the cache.")] = [128, 512, 1024, 2048, 4096],  # noqa: B006
    copies_gb: Annotated[
        float, typer.Option(help="Most that transformers' copies of the cache may take; 0: none.")
    ] = 4.0,
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 7,
    threads: Annotated[int | None, typer.Option(help="Of the arithmetic.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
    json: Json = False,
) -> None:
    """What a pass costs by its rows and by the tokens in the cache, and a step of beams beside transformers' cache."""
    from specbeam.cli.bench_passes import run

    raise typer.Exit(run(model, grow, rows, beams, length, copies_gb, repeats, threads, plot, json))


@app.command()
def tune(
    model: Model = "bundled",
    draft: Draft = None,
    context: Annotated[list[int], typer.Option(help="Tokens in the cache.")] = [64],  # noqa: B006
    beams: Annotated[int, typer.Option(help="For --explain.")] = 4,
    draft_beams: Annotated[int | None, typer.Option(help="For --explain. None: beams + 2.")] = None,
    odds: Annotated[float, typer.Option(help="For --explain: how often a draft layer passes.")] = 0.6,
    explain: Annotated[bool, typer.Option("--explain", help="Show what depth='auto' weighs.")] = False,
    json: Json = False,
) -> None:
    """Measure what a pass of each model costs on this machine, and keep it for depth='auto'."""
    from specbeam.cli.tune import run

    raise typer.Exit(run(model, draft, context, beams, draft_beams, odds, explain, json))


@app.command()
def demo(
    beams: Annotated[int, typer.Option(help="Beams of beam sampling and DSBD.")] = 4,
    seed: Annotated[int, typer.Option(help="Same seed, same texts.")] = 0,
    json: Json = False,
) -> None:
    """Translate German sentences by sampling, beam sampling and DSBD side by side, with the bundled pair."""
    from specbeam.cli.demo import run

    raise typer.Exit(run(beams, seed, json))


def main() -> None:
    """Errors that a user can mend are one line on standard error and exit code 2."""
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

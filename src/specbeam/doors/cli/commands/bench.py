"""Commands that measure methods side by side."""

from pathlib import Path
from typing import Annotated

import typer

from specbeam.doors.cli.options import (
    DemoPrompts,
    Draft,
    Grow,
    GrowVocab,
    Json,
    Lengths,
    MaxNewTokens,
    Model,
    PassRows,
    Plot,
    PromptFiles,
    PromptTexts,
    QuantizeTarget,
    Rounds,
    SpacedRows,
    Temperature,
    Threads,
    TopK,
    TopP,
    file_to_write,
    folder_to_write,
)

bench = typer.Typer(no_args_is_help=True, help="Measure methods side by side.")


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
    from specbeam.doors.cli.bench import block_efficiency as run

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
    children: Annotated[int, typer.Option(min=1, max=1024, help="Number of draft tokens tried per step.")] = 8,
    temperature: Temperature = None,
    rows: SpacedRows = 60,
    max_new_tokens: MaxNewTokens = 48,
    seed: Annotated[int, typer.Option(help="Seed of the decoding.")] = 0,
    json: Json = False,
) -> None:
    """Measure how often the k-th draft token tried is the accepted one; `sequoia` plans its tree by these odds."""
    from specbeam.doors.cli.bench import acceptance_by_rank as run

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
        folder_to_write("Also write a file per method that Spec-Bench's own scripts read to this folder."),
    ] = None,
    json: Json = False,
) -> None:
    """Run methods on Spec-Bench's six tasks beside plain decoding: its statistics, and ours."""
    from specbeam.doors.cli.bench_specbench import run

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
    from specbeam.doors.cli.bench_methods import run

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
    from specbeam.doors.cli.bench_speed import run

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
    markdown: Annotated[Path | None, file_to_write("Also write the Markdown page to this file.")] = None,
    json: Annotated[Path | None, file_to_write("Write a JSON line per cell to this file.")] = None,
) -> None:
    """Find where speed falls off: time methods with each option and batch size, beside transformers with the same."""
    from specbeam.doors.cli.bench_cliffs import run

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
    from specbeam.doors.cli.bench_serve import PromptShape, run

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
    from specbeam.doors.cli.bench_passes import run

    raise typer.Exit(
        run(model, grow, grow_vocab, quantize, rows, beams, length, copies_gb, repeats, threads, plot, json)
    )

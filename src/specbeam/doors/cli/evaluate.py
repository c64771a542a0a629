"""The commands `specbeam evaluate same-beams`, `perplexity` and `theory`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.arguments import Record, generation
from specbeam.doors.cli.bench import texts_of
from specbeam.doors.cli.common import method_from, print_json, print_records, quiet_load
from specbeam.doors.cli.generate import gather
from specbeam.doors.cli.options import (
    DemoPrompts,
    Engine,
    Json,
    Model,
    PairArguments,
    Plot,
    PromptArguments,
    PromptFiles,
    Seed,
    Settings,
    SpacedRows,
    checked,
    files_to_read,
)
from specbeam.doors.cli.reports import print_report
from specbeam.doors.places import require_file
from specbeam.doors.prompts import spread
from specbeam.errors import BadPrompt, BadSetting

if TYPE_CHECKING:
    from specbeam.lab.evaluate.theory import TheoryRow


class SameBeamsArguments(PromptArguments, PairArguments):
    """Arguments of `evaluate same-beams`."""

    setting: Settings = []
    seed: Annotated[int, typer.Option(help="Random seed of both methods.")] = 0
    batch_size: Annotated[int, typer.Option(min=1, help="Number of prompts that DSBD decodes together.")] = 1
    options: dict[str, Any] = generation(without=["num_return_sequences"], max_new_tokens=64)
    json: Json = False


class PerplexityArguments(Record):
    """Arguments of `evaluate perplexity`."""

    files: Annotated[
        list[Path],
        typer.Argument(
            help="JSON lines with 'prompt', 'tokens' or 'text', and optionally 'reference'.",
            callback=checked(require_file),
        ),
    ] = []
    file: Annotated[
        list[Path], files_to_read("The same as an argument. May be given several times.", "--file", "-f")
    ] = []
    model: Model = "bundled"
    engine: Engine = "auto"
    ended: Annotated[
        bool, typer.Option("--ended", help="Outputs given as text are complete: score their end token too.")
    ] = False
    json: Json = False


class TheoryArguments(PairArguments):
    """Arguments of `evaluate theory`."""

    prompts: DemoPrompts = None
    file: PromptFiles = []
    depth: Annotated[int, typer.Option(min=1, help="Number of draft layers, in checks that depend on it.")] = 4
    options: dict[str, Any] = generation(without=["num_return_sequences"], max_new_tokens=48)
    rows: SpacedRows = 60
    seed: Seed = 0
    plot: Plot = None
    json: Json = False


def same_beams(given: SameBeamsArguments) -> int:
    """Compare the beams of DSBD with fixed width and of beam sampling for the same seed.

    Each prompt with different beams is shown with its gap: the distance in score between the last selected pair and the
    first rejected one.
    """
    sources, _ = gather(given.texts, given.file)
    if not sources:
        raise BadPrompt("there is no prompt; give one as an argument, with --file, or on standard input")
    method = method_from("dsbd", ["width=fixed", *given.setting])
    from specbeam.doors.cli.screen import working
    from specbeam.lab.evaluate.same_beams import differences

    pair = quiet_load(**given.pair)
    texts = [source.text for source in sources]
    with working(f"decoding {len(texts)} prompts by both methods"):
        found = differences(pair, texts, method, given.seed, given.batch_size, **given.options)
    for difference in found:
        if given.json:
            print_json(dataclasses.asdict(difference))
        else:
            why = "rounding" if difference.is_rounding else "NOT rounding"
            place = sources[difference.prompt].place
            print(f"{place}, step {difference.step}: beams differ at a gap of {difference.gap:.2g} ({why})")
            for name, paths in (("plain", difference.plain), ("dsbd", difference.other)):
                shown = [pair.tokenizer.decode(path) if pair.tokenizer else str(path) for path in paths]
                print(f"  {name:6} {shown}")
    if not given.json:
        print(f"{len(sources) - len(found)} of {len(sources)} prompts: the same {method.beams} beams")
    return int(any(not difference.is_rounding for difference in found))


def perplexity(given: PerplexityArguments) -> int:
    """Score outputs of any decoder by the target's raw probabilities.

    Each file is a row of the table; `specbeam generate --json` writes such files.
    """
    files = [*given.files, *given.file]
    if not files:
        raise BadSetting("there is no file of outputs; give one as an argument or with --file")
    from rich.table import Table

    from specbeam.doors.cli.screen import Screen, working
    from specbeam.lab.evaluate.outputs import read_outputs
    from specbeam.lab.evaluate.perplexity import perplexity as score
    from specbeam.lab.evaluate.task import bleu, check_bleu, exact_match

    pair = quiet_load(given.model, None, sources=True, engine=given.engine)
    table = Table("outputs", box=None, pad_edge=False)
    heads = ("number", "perplexity", "95 %", "by token", "tokens each", "distinct-2", "repeated", "BLEU", "exact match")
    for head in heads:
        table.add_column(head, justify="right")
    read = {file: read_outputs(file, pair, given.ended) for file in files}
    if any(outputs.references for outputs in read.values()):
        check_bleu()
    for file, outputs in read.items():
        with working(f"scoring {file}"):
            scores = score(pair, outputs.prompts, outputs.tokens, outputs.places)
        metrics = (bleu, exact_match) if outputs.references else ()
        quality = [metric(outputs.texts, outputs.references) for metric in metrics]
        if given.json:
            named = dict(zip(("bleu", "exact_match"), quality, strict=False))
            print_json({"file": str(file), **dataclasses.asdict(scores), **named})
        table.add_row(
            str(file), str(scores.outputs), f"{scores.perplexity:.3f}", f"{scores.low:.3f} to {scores.high:.3f}",
            f"{scores.by_token:.3f}", f"{scores.tokens_per_output:.1f}", f"{scores.distinct_2:.3f}",
            f"{scores.repeated:.1%}", *([f"{quality[0]:.1f}", f"{quality[1]:.1%}"] if quality else ["no references", ""]),
        )  # fmt: skip
    if not given.json:
        Screen().print(table)
        print("Low perplexity alone proves little: compare length, repetition and quality too.")
    return 0


def theory(given: TheoryArguments) -> int:
    """Compare counts of rejections and accepted tokens with predictions from the total variation of the two laws.

    Also compares each rule with the best possible rule for its drafts.
    """
    texts = spread(texts_of(given.prompts or [], given.file), given.rows)
    from specbeam.doors.cli.screen import show_result, working
    from specbeam.lab.evaluate.theory import as_markdown, plot
    from specbeam.lab.evaluate.theory import theory as measure

    pair = quiet_load(**given.pair)

    def on_progress(row: "TheoryRow") -> None:
        show_result(f"{row.check:<26} {row.method:<34} {row.bucket:<11} {row.measured:.3f} of {row.predicted:.3f}")

    with working("counting rejections of all rules"):
        found = measure(pair, texts, given.seed, given.depth, on_progress, **given.options)
    if given.json:
        print_records(found)
    else:
        print_report(as_markdown(found))
    if given.plot is not None:
        plot(found, given.plot)
    return 0

"""The commands `specbeam evaluate same-beams`, `perplexity` and `theory`: checks and scores of outputs and of runs."""

import dataclasses
from pathlib import Path
from typing import Any

from specbeam.doors.cli.bench import texts_of
from specbeam.doors.cli.common import check_options, method_from, print_json, quiet_load
from specbeam.doors.cli.generate import gather
from specbeam.doors.prompts import spread
from specbeam.errors import BadPrompt
from specbeam.lab.bench.pictures import check_picture
from specbeam.lab.evaluate.outputs import read_outputs
from specbeam.lab.evaluate.perplexity import perplexity as score
from specbeam.lab.evaluate.same_beams import differences
from specbeam.lab.evaluate.task import bleu, check_bleu, exact_match
from specbeam.lab.evaluate.theory import TheoryRow, as_markdown, plot
from specbeam.lab.evaluate.theory import theory as measure


def same_beams(
    prompts: list[str], files: list[Path], model: str, draft: str | None, settings: list[str], seed: int,
    batch_size: int, options: dict[str, Any], json: bool,
) -> int:  # fmt: skip
    """Compare the beams of DSBD with those of beam sampling, and print each prompt whose beams differ.

    Returns exit code 1 if beams differ and rounding does not explain it, else 0.
    """
    sources, _ = gather(prompts, files)
    if not sources:
        raise BadPrompt("there is no prompt; give one as an argument, with --file, or on standard input")
    method = method_from("dsbd", ["width=fixed", *settings])
    check_options(options, batch_size)
    pair = quiet_load(model, draft)
    texts = [source.text for source in sources]
    found = differences(pair, texts, method, seed, batch_size, **options)
    for difference in found:
        if json:
            print_json(dataclasses.asdict(difference))
        else:
            why = "rounding" if difference.is_rounding else "NOT rounding"
            place = sources[difference.prompt].place
            print(f"{place}, step {difference.step}: beams differ at a gap of {difference.gap:.2g} ({why})")
            for name, paths in (("plain", difference.plain), ("dsbd", difference.other)):
                shown = [pair.tokenizer.decode(path) if pair.tokenizer else str(path) for path in paths]
                print(f"  {name:6} {shown}")
    if not json:
        print(f"{len(sources) - len(found)} of {len(sources)} prompts: the same {method.beams} beams")
    return int(any(not difference.is_rounding for difference in found))


def perplexity(files: list[Path], model: str, ended: bool, json: bool) -> int:
    """Score files of outputs by the target, print a row per file, and return the exit code."""
    from rich.table import Table

    from specbeam.doors.cli.screen import Screen

    pair = quiet_load(model, None, sources=True)
    table = Table("outputs", box=None, pad_edge=False)
    heads = ("number", "perplexity", "95 %", "by token", "tokens each", "distinct-2", "repeated", "BLEU", "exact match")
    for head in heads:
        table.add_column(head, justify="right")
    read = {file: read_outputs(file, pair, ended) for file in files}
    if any(outputs.references for outputs in read.values()):
        check_bleu()
    for file, outputs in read.items():
        scores = score(pair, outputs.prompts, outputs.tokens, outputs.places)
        metrics = (bleu, exact_match) if outputs.references else ()
        quality = [metric(outputs.texts, outputs.references) for metric in metrics]
        if json:
            named = dict(zip(("bleu", "exact_match"), quality, strict=False))
            print_json({"file": str(file), **dataclasses.asdict(scores), **named})
        table.add_row(
            str(file), str(scores.outputs), f"{scores.perplexity:.3f}", f"{scores.low:.3f} to {scores.high:.3f}",
            f"{scores.by_token:.3f}", f"{scores.tokens_per_output:.1f}", f"{scores.distinct_2:.3f}",
            f"{scores.repeated:.1%}", *([f"{quality[0]:.1f}", f"{quality[1]:.1%}"] if quality else ["no references", ""]),
        )  # fmt: skip
    if not json:
        Screen(width=140).print(table)
        print("Low perplexity alone proves little: look at length, repetition and the quality beside it.")
    return 0


def theory(
    prompts: list[str], files: list[Path], model: str, draft: str | None, depth: int, rows: int, seed: int,
    options: dict[str, Any], picture: Path | None, json: bool,
) -> int:  # fmt: skip
    """Print each figure of the theory of rejections beside what was counted, and return the exit code."""
    from specbeam.doors.cli.screen import Screen

    if picture is not None:
        check_picture(picture)
    check_options(options)
    texts = spread(texts_of(prompts, files), rows)
    pair = quiet_load(model, draft)
    console = Screen(stderr=True)

    def on_progress(row: TheoryRow) -> None:
        console.print(f"{row.check:<26} {row.method:<34} {row.bucket:<11} {row.measured:.3f} of {row.predicted:.3f}")

    found = measure(pair, texts, seed, depth, on_progress, **options)
    if json:
        for row in found:
            print_json(dataclasses.asdict(row))
    else:
        print(as_markdown(found))
    if picture is not None:
        plot(found, picture)
    return 0

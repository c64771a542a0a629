"""`specbeam evaluate`: is the output what it is declared to be?"""

import dataclasses
import json as json_format
from pathlib import Path

from specbeam.cli.common import method_from, quiet_load
from specbeam.cli.generate import gather
from specbeam.errors import BadPrompt
from specbeam.evaluate.outputs import read_outputs
from specbeam.evaluate.perplexity import perplexity as score
from specbeam.evaluate.same_beams import differences
from specbeam.evaluate.task import bleu, check_bleu, exact_match


def same_beams(
    prompts: list[str], files: list[Path], model: str, draft: str | None, settings: list[str], seed: int,
    batch_size: int, max_new_tokens: int, json: bool,
) -> int:  # fmt: skip
    """Exit code 1 if beams differ and rounding does not explain it."""
    asked, _ = gather(prompts, files)
    if not asked:
        raise BadPrompt("there is no prompt; give one as an argument, with --file, or on standard input")
    pair = quiet_load(model, draft)
    method = method_from("dsbd", ["width=fixed", *settings])
    found = differences(pair, [one.text for one in asked], method, seed, batch_size, max_new_tokens=max_new_tokens)
    for one in found:
        if json:
            print(json_format.dumps(dataclasses.asdict(one)))
        else:
            why = "rounding" if one.is_rounding else "NOT rounding"
            print(f"{asked[one.prompt].place}, step {one.step}: beams differ at a gap of {one.gap:.2g} ({why})")
            for name, paths in (("plain", one.plain), ("dsbd", one.other)):
                texts = [pair.tokenizer.decode(path) if pair.tokenizer else str(path) for path in paths]
                print(f"  {name:6} {texts}")
    if not json:
        print(f"{len(asked) - len(found)} of {len(asked)} prompts: the same {method.beams} beams")
    return int(any(not one.is_rounding for one in found))


def perplexity(files: list[Path], model: str, ended: bool, json: bool) -> int:
    from rich.console import Console
    from rich.table import Table

    pair = quiet_load(model, None)
    table = Table("outputs", box=None, pad_edge=False)
    heads = ("number", "perplexity", "95 %", "by token", "tokens each", "distinct-2", "repeated", "BLEU", "exact match")
    for head in heads:
        table.add_column(head, justify="right")
    read = {file: read_outputs(file, pair, ended) for file in files}
    if any(outputs.references for outputs in read.values()):
        check_bleu()
    for file, outputs in read.items():
        found = score(pair, outputs.prompts, outputs.tokens, outputs.places)
        task = (bleu, exact_match) if outputs.references else ()
        quality = [metric(outputs.texts, outputs.references) for metric in task]
        if json:
            named = dict(zip(("bleu", "exact_match"), quality, strict=False))
            print(json_format.dumps({"file": str(file), **dataclasses.asdict(found), **named}))
        table.add_row(
            str(file), str(found.outputs), f"{found.perplexity:.3f}", f"{found.low:.3f} to {found.high:.3f}",
            f"{found.by_token:.3f}", f"{found.tokens_per_output:.1f}", f"{found.distinct_2:.3f}", f"{found.repeated:.1%}",
            *([f"{quality[0]:.1f}", f"{quality[1]:.1%}"] if quality else ["no references", ""]),
        )  # fmt: skip
    if not json:
        Console(width=140).print(table)
        print("Low perplexity alone proves little: look at length, repetition and the task beside it.")
    return 0

"""The command `specbeam bench passes`: the cost of a pass by rows, tokens in the cache, and beams."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.arguments import Record
from specbeam.doors.cli.common import print_json
from specbeam.doors.cli.options import (
    Grow,
    GrowVocab,
    Json,
    Lengths,
    Model,
    PassRows,
    Plot,
    QuantizeTarget,
    Rounds,
    Threads,
)
from specbeam.errors import BadSetting

if TYPE_CHECKING:
    from specbeam.lab.bench.passes import PassPlan
    from specbeam.models.huggingface import HuggingFaceLM


class PassesArguments(Record):
    """What the command is given."""

    model: Model = "bundled"
    grow: Grow = None
    grow_vocab: GrowVocab = None
    quantize: QuantizeTarget = None
    rows: PassRows = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    beams: Annotated[
        list[int],
        typer.Option(help="Number of beams of a step, also timed in transformers. May be given several times."),
    ] = [1, 4, 16, 64]
    length: Lengths = [128, 512, 1024, 2048, 4096]
    copies_gb: Annotated[
        float,
        typer.Option(
            help="Memory limit of transformers' copies of the cache, in GB. Sizes above it are left out; 0 leaves out all."
        ),
    ] = 4.0
    repeats: Rounds = 7
    threads: Threads = None
    plot: Plot = None
    json: Json = False


def passes(given: PassesArguments) -> int:
    """Time a pass by its rows and by the tokens in the KV cache, and a step of beams beside transformers' cache."""
    import torch
    from rich.progress import Progress

    from specbeam.doors.cli.screen import Screen
    from specbeam.lab.bench.passes import fits
    from specbeam.lab.bench.passes import passes as measure
    from specbeam.lab.bench.passes_report import as_markdown, as_records, plot
    from specbeam.lab.bench.pictures import check_picture
    from specbeam.lab.bench.provenance import provenance

    plan = _plan(given)
    if given.plot is not None:
        check_picture(given.plot)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    lm, positions = _model(given, max(plan.lengths) + 1)
    console = Screen(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("passes", total=plan.steps)
        cells = measure(lm, plan, partial(progress.advance, bar))
    fitted = fits(cells, plan)
    origin = provenance() | {"engine": lm.engine, "vocabulary": lm.vocab, "positions": positions}
    origin |= {"engine note": lm.engine_note} if lm.engine_note else {}
    if given.json:
        for record in as_records(cells, fitted):
            print_json({**record, "provenance": origin})
    else:
        print(as_markdown(cells, fitted, plan))
        print(f"\nMedian of {plan.repeats} rounds, smallest to largest; fits are through medians. ", end="")
        print("; ".join(f"{name}: {value}" for name, value in origin.items()))
    if given.plot is not None:
        plot(cells, fitted, plan, given.plot)
    return 0


def _plan(given: PassesArguments) -> "PassPlan":
    """Return the plan of the sizes in ascending order; raise `BadSetting` if one is below 1."""
    from specbeam.lab.bench.passes import PassPlan

    sizes = (("--rows", given.rows), ("--beams", given.beams), ("--length", given.length))
    for name, values in (*sizes, ("--repeats", [given.repeats])):
        for value in values:
            if value < 1:
                raise BadSetting(f"{name} is {value}; it must be at least 1")
    ascending = [tuple(sorted(set(values))) for values in (given.length, given.rows, given.beams)]
    return PassPlan(ascending[0], ascending[1], ascending[2], given.repeats, given.copies_gb)


def _model(given: PassesArguments, needed: int) -> "tuple[HuggingFaceLM, str]":
    """Return a model with at least `needed` positions, and a text on where its positions come from."""
    from specbeam.doors.cli.widening import grown_pair
    from specbeam.lab.bench.widen_model import with_positions
    from specbeam.models.pair import load

    quantize: Any = given.quantize
    pair = grown_pair(given.model, None, given.grow, quantize=quantize, grow_vocab=given.grow_vocab)
    target = pair.forgetful_target
    own = target.max_positions
    if own is None or own >= needed:
        return target, "the model's own"
    longer = with_positions(pair.target_model, needed)
    return load(longer, quantize=quantize).forgetful_target, f"{needed:,}, for timing only; the model's own are {own:,}"

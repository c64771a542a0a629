"""The command `specbeam bench passes`: the cost of a pass by rows, tokens in the cache, and beams."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.arguments import Record
from specbeam.doors.cli.common import in_one_line, print_json
from specbeam.doors.cli.options import (
    Compute,
    Engine,
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
from specbeam.doors.cli.reports import print_report
from specbeam.lab.words import of_rounds

if TYPE_CHECKING:
    from specbeam.lab.bench.passes import PassPlan
    from specbeam.models.huggingface import HuggingFaceLM


StepBeams = Annotated[list[int], typer.Option(min=1, help="Number of beams of a step. May be given several times.")]


class PassesArguments(Record):
    """Arguments of the command."""

    model: Model = "bundled"
    grow: Grow = None
    grow_vocab: GrowVocab = None
    quantize: QuantizeTarget = None
    engine: Engine = "auto"
    compute: Compute = None
    rows: PassRows = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    beams: StepBeams = [1, 4, 16, 64]
    length: Lengths = [128, 512, 1024, 2048, 4096]
    repeats: Rounds = 7
    threads: Threads = None
    plot: Plot = None
    json: Json = False


def passes(given: PassesArguments) -> int:
    """Time passes by rows and cached tokens, and steps of beams."""
    from specbeam.doors.cli.screen import progress_bar
    from specbeam.lab.bench.passes import fits
    from specbeam.lab.bench.passes import passes as measure
    from specbeam.lab.bench.passes_report import as_markdown, as_records, plot
    from specbeam.lab.bench.provenance import provenance

    plan = _plan(given)
    lm, positions = _model(given, max(plan.lengths) + 1)
    with progress_bar() as progress:
        bar = progress.add_task("passes", total=plan.steps)
        cells = measure(lm, plan, partial(progress.advance, bar))
    fitted = fits(cells, plan)
    origin = provenance() | {"engine": lm.engine, "vocabulary": lm.vocab, "positions": positions}
    if lm.engine_note:
        origin["engine note"] = lm.engine_note
    if given.json:
        for record in as_records(cells, fitted):
            print_json({**record, "provenance": origin})
    else:
        print_report(as_markdown(cells, fitted, plan))
        print(f"\nTimes: {of_rounds(plan.repeats)}; fits are through medians. ", end="")
        print(in_one_line(origin))
    if given.plot is not None:
        plot(cells, fitted, plan, given.plot)
    return 0


def _plan(given: PassesArguments) -> "PassPlan":
    """Return the plan, with sizes in ascending order."""
    from specbeam.lab.bench.passes import PassPlan

    lengths, rows, beams = (tuple(sorted(set(sizes))) for sizes in (given.length, given.rows, given.beams))
    return given.make(PassPlan, lengths=lengths, rows=rows, beams=beams)


def _model(given: PassesArguments, needed: int) -> "tuple[HuggingFaceLM, str]":
    """Return a model with at least `needed` positions, and the origin of its positions as text."""
    from specbeam.doors.cli.widening import GrownSizes, grown_pair
    from specbeam.lab.bench.widen_model import with_positions
    from specbeam.models.pair import load

    quantize: Any = given.quantize
    compute: Any = given.compute
    growth = given.make(GrownSizes)
    pair = grown_pair(given.model, None, growth, quantize=quantize, engine=given.engine, compute=compute)
    target = pair.forgetful_target
    own = target.max_positions
    if own is None or own >= needed:
        return target, "the model's own"
    longer = with_positions(pair.target_model, needed)
    engine: Any = given.engine
    timed = load(longer, quantize=quantize, engine=engine, compute=compute).forgetful_target
    return timed, f"{needed:,}, for timing only; the model's own are {own:,}"

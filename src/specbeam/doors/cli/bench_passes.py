"""The command `specbeam bench passes`: the cost of a pass by rows, tokens in the cache, and beams."""

from functools import partial
from pathlib import Path
from typing import Any

from specbeam.doors.cli.common import print_json
from specbeam.doors.cli.widening import grown_pair
from specbeam.errors import BadSetting
from specbeam.lab.bench.passes import PassPlan, fits, passes
from specbeam.lab.bench.passes_report import as_markdown, as_records, plot
from specbeam.lab.bench.pictures import check_picture
from specbeam.lab.bench.provenance import provenance
from specbeam.lab.bench.widen_model import with_positions
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import load


def run(
    model: str, grow: str | None, grow_vocab: str | None, quantize: str | None, rows: list[int], beams: list[int],
    lengths: list[int], copies_gb: float, repeats: int, threads: int | None, picture: Path | None, json: bool,
) -> int:  # fmt: skip
    """Time passes, print tables of their cost, and return the exit code."""
    import torch
    from rich.progress import Progress

    from specbeam.doors.cli.screen import Screen

    plan = _plan(rows, beams, lengths, copies_gb, repeats)
    if picture is not None:
        check_picture(picture)
    if threads is not None:
        torch.set_num_threads(threads)
    lm, positions = _model(model, grow, grow_vocab, quantize, max(plan.lengths) + 1)
    console = Screen(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("passes", total=plan.steps)
        cells = passes(lm, plan, partial(progress.advance, bar))
    fitted = fits(cells, plan)
    origin = provenance() | {"engine": lm.engine, "vocabulary": lm.vocab, "positions": positions}
    origin |= {"engine note": lm.engine_note} if lm.engine_note else {}
    if json:
        for record in as_records(cells, fitted):
            print_json({**record, "provenance": origin})
    else:
        print(as_markdown(cells, fitted, plan))
        print(f"\nMedian of {plan.repeats} rounds, smallest to largest; fits are through medians. ", end="")
        print("; ".join(f"{name}: {value}" for name, value in origin.items()))
    if picture is not None:
        plot(cells, fitted, plan, picture)
    return 0


def _plan(rows: list[int], beams: list[int], lengths: list[int], copies_gb: float, repeats: int) -> PassPlan:
    """Return the plan of these sizes in ascending order; raise `BadSetting` if one is below 1."""
    options = (("--rows", rows), ("--beams", beams), ("--length", lengths), ("--repeats", [repeats]))
    for name, values in options:
        for value in values:
            if value < 1:
                raise BadSetting(f"{name} is {value}; it must be at least 1")
    ascending = [tuple(sorted(set(values))) for values in (lengths, rows, beams)]
    return PassPlan(ascending[0], ascending[1], ascending[2], repeats, copies_gb)


def _model(
    name: str, grow: str | None, grow_vocab: str | None, quantize: Any, needed: int
) -> tuple[HuggingFaceLM, str]:
    """Return a model with at least `needed` positions, and a text on where its positions come from."""
    pair = grown_pair(name, None, grow, quantize=quantize, grow_vocab=grow_vocab)
    target = pair.forgetful_target
    own = target.max_positions
    if own is None or own >= needed:
        return target, "the model's own"
    longer = with_positions(pair.target_model, needed)
    return load(longer, quantize=quantize).forgetful_target, f"{needed:,}, for timing only; the model's own are {own:,}"

"""The command `specbeam bench anchors`: published models beside other programs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbeam.doors.cli.arguments import Record
from specbeam.doors.cli.common import complain, in_one_line, print_records
from specbeam.doors.cli.options import Json, NewTokens, Rounds, checked, files_to_read
from specbeam.doors.cli.reports import print_report
from specbeam.doors.progress import silence_transformers
from specbeam.errors import one_of
from specbeam.lab.words import ANCHOR_BITS, ANCHOR_MODELS, ANCHOR_MODES, ANCHOR_RIVALS, of_rounds

if TYPE_CHECKING:
    from specbeam.lab.bench.anchors import AnchorRow


class AnchorsArguments(Record):
    """Arguments of the command."""

    only: Annotated[
        list[str],
        typer.Option(
            help=f"Model to measure: {', '.join(ANCHOR_MODELS)}. May be given several times; by default all of text.",
            callback=checked(lambda name: one_of("--only", name, ANCHOR_MODELS)),
        ),
    ] = []
    models: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a folder per model, and gguf/NAME.gguf for llama.cpp; by default models come from the hub.",
            exists=True,
            file_okay=False,
        ),
    ] = None
    bits: Annotated[
        list[int],
        typer.Option(
            help="Bits of the weights: 16, 8 or 4. May be given several times; by default all.",
            callback=checked(lambda bits: one_of("--bits", str(bits), [*map(str, ANCHOR_BITS)])),
        ),
    ] = []
    mode: Annotated[
        list[str],
        typer.Option(
            help="greedy or beam_search. May be given several times; by default both.",
            callback=checked(lambda name: one_of("--mode", name, ANCHOR_MODES)),
        ),
    ] = []
    rival: Annotated[
        list[str],
        typer.Option(
            help=f"Program to compare with: {', '.join(ANCHOR_RIVALS)}. May be given several times; by default all.",
            callback=checked(lambda name: one_of("--rival", name, ANCHOR_RIVALS)),
        ),
    ] = []
    audio: Annotated[list[Path], files_to_read("Recording of at most 30 seconds, for whisper-base.")] = []
    beams: Annotated[int, typer.Option(min=1, help="Number of beams of beam_search.")] = 4
    max_new_tokens: NewTokens = 64
    rows: Annotated[int, typer.Option(min=1, max=12, help="Number of prompts of a round.")] = 4
    repeats: Rounds = 5
    threads: Annotated[int, typer.Option(min=1, help="Number of CPU threads of every contender.")] = 1
    json: Json = False


def anchors(given: AnchorsArguments) -> int:
    """Measure published models beside transformers, CTranslate2, llama.cpp and faster-whisper."""
    names = [name for name in ANCHOR_MODELS if name in given.only]
    by_default = [name for name in ANCHOR_MODELS if given.audio or "whisper" not in name]
    from specbeam.doors.cli.screen import progress_bar
    from specbeam.lab.bench.anchors import AnchorPlan
    from specbeam.lab.bench.anchors import anchors as measure
    from specbeam.lab.bench.anchors_report import as_markdown, summary
    from specbeam.lab.bench.provenance import provenance

    plan = AnchorPlan(
        models=given.models,
        anchors=tuple(names or by_default),
        bits=tuple(given.bits) or ANCHOR_BITS,
        modes=tuple(given.mode) or ANCHOR_MODES,
        rivals=tuple(given.rival) or ANCHOR_RIVALS,
        audio=tuple(given.audio),
        beams=given.beams,
        max_new_tokens=given.max_new_tokens,
        rows=given.rows,
        repeats=given.repeats,
        threads=given.threads,
    )
    silence_transformers()
    origin = provenance() | {"threads": str(plan.threads)}
    with progress_bar() as progress:
        bar = progress.add_task("rows", total=len(plan.anchors) * len(plan.bits) * len(plan.modes))

        def on_row(row: "AnchorRow") -> None:
            progress.advance(bar)
            for sentence in row.left_out:
                complain(f"note: {row.anchor}, {row.bits} bits, {row.mode}: {sentence}")
            if given.json:
                print_records([row], provenance=origin)  # at once: a later row may fail

        found = measure(plan, on_row)
    if given.json:
        return 0
    print_report(as_markdown(found, plan.rivals))
    print(
        f"\nRatios of specbeam's speed to that of a rival's fastest setting: {of_rounds(plan.repeats)}; then by processor "
        f"time. {summary(found)}".rstrip(),
        in_one_line(origin),
    )
    return 0

"""The commands `specbeam bench efficiency` and `specbeam bench acceptance`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.arguments import generation
from specbeam.doors.cli.common import demo_sentences, in_one_line, print_records, quiet_load
from specbeam.doors.cli.generate import gather
from specbeam.doors.cli.options import DemoPromptArguments, Json, PairArguments, Plot, Seed, SpacedRows, checked
from specbeam.doors.cli.reports import print_report
from specbeam.doors.prompts import spread
from specbeam.errors import BadPrompt, one_of
from specbeam.lab.words import BUDGETS

if TYPE_CHECKING:
    from specbeam.lab.bench.efficiency import TreeCell


class EfficiencyArguments(DemoPromptArguments, PairArguments):
    """Arguments of `bench efficiency`."""

    budget: Annotated[
        list[int],
        typer.Option(
            help="Nodes scored per pass: 5, 10, 21 or 30. May be given several times.",
            callback=checked(lambda budget: one_of("--budget", str(budget), [*map(str, BUDGETS)])),
        ),
    ] = list(BUDGETS)
    options: dict[str, Any] = generation(without=["num_return_sequences"], max_new_tokens=48)
    rows: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum number of measured prompts, evenly spaced over all. An equal number of other prompts "
            "selects the shapes.",
        ),
    ] = 60
    seed: Seed = 0
    plot: Plot = None
    json: Json = False


class AcceptanceArguments(DemoPromptArguments, PairArguments):
    """Arguments of `bench acceptance`."""

    children: Annotated[int, typer.Option(min=1, max=1024, help="Number of draft tokens per step.")] = 8
    options: dict[str, Any] = generation(without=["num_return_sequences"], max_new_tokens=48)
    rows: SpacedRows = 60
    seed: Seed = 0
    json: Json = False


def acceptance(given: AcceptanceArguments) -> int:
    """Measure how often the first, second, ... draft token tried is accepted; sequoia plans its tree from these numbers."""
    texts = spread(texts_of(given.texts, given.file), given.rows)
    from specbeam.doors.cli.screen import progress_bar
    from specbeam.lab.bench.acceptance import acceptance as measure

    pair = quiet_load(**given.pair)
    with progress_bar() as bar:
        prompts = bar.track(texts, description="prompts")
        measured = measure(pair, prompts, given.children, given.seed, **given.options)
    if given.json:
        print_records([measured])
        return 0
    for place, (odds, error) in enumerate(zip(measured.odds, measured.error, strict=True)):
        print(f"draft {place + 1}: accepted at {odds:.3f} of {measured.nodes} steps (standard error {error:.3f})")
    print(f"use it with --set acceptance={','.join(map(str, measured.odds))}")
    return 0


def texts_of(prompts: list[str], files: list[Path]) -> list[str]:
    """Return the prompts of arguments and files or, without any, the demo's sentences."""
    if not prompts and not files:
        return demo_sentences()
    texts = [prompt.text for prompt in gather(prompts, files)[0]]
    if not texts:
        raise BadPrompt("there is no prompt; give one as an argument or with --file")
    return texts


def efficiency(given: EfficiencyArguments) -> int:
    """Measure tokens per target pass at a fixed budget of scored nodes, for all methods for one sequence.

    The shape of each method, and the acceptance by rank for sequoia, are selected on separate prompts.
    """
    texts = texts_of(given.texts, given.file)
    from specbeam.doors.cli.screen import show_result, working
    from specbeam.lab.bench.efficiency import as_markdown, halves, plot
    from specbeam.lab.bench.efficiency import efficiency as measure
    from specbeam.lab.bench.provenance import provenance

    reported, choosing = halves(spread(texts, 2 * given.rows))
    pair = quiet_load(**given.pair)

    def on_progress(cell: "TreeCell") -> None:
        show_result(f"{cell.budget:3} nodes  {cell.recipe:<24} {cell.efficiency:.2f}  ({cell.shape})")

    with working("measuring all shapes of all methods"):
        cells = measure(pair, reported, choosing, given.budget, given.seed, on_progress, **given.options)
    origin = provenance()
    if given.json:
        print_records(cells, provenance=origin)
    else:
        print_report(as_markdown(cells))
        print(
            "\nTokens per target pass, their 95 % interval by bootstrap over prompts, and a shape chosen on other prompts."
        )
        print(in_one_line(origin))
    if given.plot is not None:
        plot(cells, given.plot)
    return 0

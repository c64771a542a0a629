"""The command `specbeam tune`: pass times on this machine, and acceptance by rank."""

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.common import demo_sentences, print_json, quiet_load
from specbeam.doors.cli.options import Json, Lengths, PairArguments, PromptTexts, prompt_files
from specbeam.doors.prompts import read, spread
from specbeam.errors import BadSetting

if TYPE_CHECKING:
    from specbeam.core.control.cost import CostCurve
    from specbeam.core.control.depth import DepthByCost
    from specbeam.core.control.needs import NodesByNeed
    from specbeam.doors.cli.screen import Screen
    from specbeam.lab.bench.acceptance import Acceptance
    from specbeam.models.pair import Pair

KNOWN = 1e9  # number of layers by which the odds of `--explain` are as good as known


class TuneArguments(PairArguments):
    """Arguments of the command."""

    context: Lengths = [64]
    beams: Annotated[int, typer.Option(min=1, help="Number of beams, for --explain.")] = 4
    draft_beams: Annotated[
        int | None, typer.Option(min=1, help="Number of draft nodes per layer, for --explain; by default beams + 2.")
    ] = None
    odds: Annotated[
        float, typer.Option(help="Probability that a draft layer is accepted, in (0, 1), for --explain.")
    ] = 0.6
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the costs by which depth='auto' chooses drafts and their depth.")
    ] = False
    prompt: PromptTexts = []
    file: Annotated[
        list[Path],
        prompt_files(
            "File of prompts similar to later ones. On 30 of them, tune measures how often the first, second, "
            "... draft tried is accepted, for sequoia. The bundled pair has default prompts.",
            "--file",
            "-f",
        ),
    ] = []
    json: Json = False


@dataclass(frozen=True)
class Measured:
    """The measurements.

    Attributes:
        curves: the cost of a pass, by model and by number of cached tokens.
        by_rank: acceptance by rank; None without prompts or a draft model.
    """

    curves: "dict[str, dict[int, CostCurve]]"
    by_rank: "Acceptance | None"


def tune(given: TuneArguments) -> int:
    """Measure pass times and draft acceptance on this machine, and save them for depth='auto' and sequoia."""
    _check(given)
    texts = _prompts(given.model, given.prompt, given.file)
    from specbeam.recipes.beams import dsbd

    dsbd(given.beams, given.draft_beams, width="fixed")  # raises an error for wrong numbers
    pair = quiet_load(**given.pair)
    models = {"target": pair.forgetful_target} | ({"draft": pair.draft} if _is_model(pair.draft) else {})
    from specbeam.doors.cli.screen import counted

    curves: dict[str, dict[int, CostCurve]] = {name: {} for name in models}
    with counted("passes timed, by model and cached tokens", len(models) * len(given.context)) as advance:
        for name, lm in models.items():
            for context in given.context:
                curves[name][context] = _cost_curve(lm, context)
                advance()
    by_rank = _measured_acceptance(pair, texts)
    measured = Measured(curves, by_rank)
    if given.json:
        print_json(_record(measured))
        return 0
    from specbeam.doors.cli.screen import Screen

    console = Screen()
    _show(console, measured, given.context)
    if given.explain and "draft" in measured.curves:
        target_curve = measured.curves["target"][given.context[0]]
        draft_curve = measured.curves["draft"][given.context[0]]
        width = given.draft_beams
        by_cost = replace(_depth_controller(pair, given.beams, width), target=target_curve, draft=draft_curve)
        by_need = replace(_need_controller(pair, given.beams, width), target=target_curve, draft=draft_curve)
        _explain_needs(console, by_need)
        _explain_depth(console, by_cost, given.odds)
    return 0


def _check(given: TuneArguments) -> None:
    """Raise `BadSetting` for options that are wrong or contradict each other."""
    if not 0 < given.odds < 1:
        raise BadSetting(f"--odds is {given.odds}; it must be a probability in (0, 1)")


def _is_model(draft: object) -> bool:
    """Return whether a draft is a separate model, whose passes can be timed."""
    from specbeam.models.huggingface import HuggingFaceLM

    return isinstance(draft, HuggingFaceLM)


def _record(measured: Measured) -> dict[str, Any]:
    """Return the measurements for JSON."""
    record: dict[str, Any] = {
        name: {context: dataclasses.asdict(curve) for context, curve in by_context.items()}
        for name, by_context in measured.curves.items()
    }
    if measured.by_rank is not None:
        record["acceptance"] = dataclasses.asdict(measured.by_rank)
    return record


def _show(console: "Screen", measured: Measured, contexts: list[int]) -> None:
    """Print the table of passes, and acceptance by rank."""
    from rich.table import Table

    from specbeam.recipes.tuning import costs

    curves = measured.curves
    table = Table(title="milliseconds of a pass, by nodes")
    table.add_column("nodes", justify="right")
    columns = [(name, context) for name in curves for context in contexts]
    for name, context in columns:
        table.add_column(f"{name}, {context} tokens cached", justify="right")
    for place, nodes in enumerate(costs.NODES):
        table.add_row(str(nodes), *(f"{1e3 * curves[name][context].seconds[place]:.2f}" for name, context in columns))
    console.print(table)
    by_rank = measured.by_rank
    if by_rank is not None:
        odds_by_rank = ", ".join(f"{value:.2f}" for value in by_rank.odds)
        console.print(f"acceptance of the first, second, ... draft tried, at {by_rank.nodes} nodes: {odds_by_rank}")


def _prompts(model: str, prompts: list[str], files: list[Path]) -> list[str]:
    """Return up to 30 prompts of arguments and files; by default the demo's sentences for the bundled pair, else none."""
    if prompts or files:
        prompts = [*prompts, *(row.prompt for file in files for row in read(str(file)))]
    else:
        prompts = demo_sentences() if model == "bundled" else []
    return spread(prompts, 30)


def _measured_acceptance(pair: "Pair", prompts: list[str]) -> "Acceptance | None":
    """Measure acceptance by rank and save it for `sequoia`; None without a draft model or prompts."""
    from specbeam.doors.cli.screen import progress_bar
    from specbeam.lab.bench.acceptance import acceptance
    from specbeam.models.huggingface import HuggingFaceLM
    from specbeam.recipes.tuning.acceptance import save_acceptance, with_guess

    if not isinstance(pair.draft, HuggingFaceLM) or not prompts:
        return None
    with progress_bar() as bar:
        counted_prompts = bar.track(prompts, description="acceptance on prompts")
        found = acceptance(pair, counted_prompts, children=5, max_new_tokens=48)
    save_acceptance(pair.forgetful_target, pair.draft, with_guess(found.odds, found.nodes))
    return found


def _cost_curve(lm: Any, context: int) -> "CostCurve":
    """Measure the cost curve of a model. Raises `BadSetting` if it has too few positions."""
    from specbeam.recipes.tuning import costs

    most = lm.max_positions
    if most is not None and context + len(costs.NODES) > most:
        raise BadSetting(f"--context is {context}, but the model has {most} positions")
    return costs.measure(lm, costs.NODES, context)


def _depth_controller(pair: "Pair", beams: int, width: int | None) -> "DepthByCost":
    """Return the controller that chooses the depth of `dsbd` with a fixed width by rejection."""
    from specbeam.core.control.depth import DepthByCost
    from specbeam.recipes.beams import dsbd

    method = dsbd(beams, width, width="fixed", coupling="rejection", depth="auto")
    controller = method.parts(pair.target, pair.draft).controller
    assert isinstance(controller, DepthByCost)
    return controller


def _need_controller(pair: "Pair", beams: int, width: int | None) -> "NodesByNeed":
    """Return the controller for the drafts of `dsbd` with a fixed width."""
    from specbeam.core.control.needs import NodesByNeed
    from specbeam.recipes.beams import dsbd

    controller = dsbd(beams, width, width="fixed").parts(pair.target, pair.draft).controller
    assert isinstance(controller, NodesByNeed)
    return controller


def _explain_needs(console: "Screen", controller: "NodesByNeed") -> None:
    """Print the probabilities of being needed above which scoring a draft pays."""
    from rich.table import Table

    table = Table(
        title=f"{controller.beams} beams of fixed width: a draft is scored if it is needed with at least this probability"
    )
    for head in ("rows so far", "ms of a pass", "probability"):
        table.add_column(head, justify="right")
    thresholds = controller.thresholds()
    shown = [0, *(2**power for power in range(8))]
    for place in shown:
        if place < len(thresholds):
            rows, seconds, odds = thresholds[place]
            table.add_row(str(rows), f"{1e3 * seconds:.2f}", f"{odds:.2f}" if odds < 1 else "never")
    console.print(table)
    console.print(
        "assuming that the rows of all beams are needed; the probability for each draft is estimated while decoding"
    )


def _explain_depth(console: "Screen", controller: "DepthByCost", odds: float) -> None:
    """Print the candidate depths of `depth="auto"` for layers accepted with this probability."""
    from rich.table import Table

    from specbeam.core.control.depth import PassOdds

    seen = PassOdds(8)
    seen.seen[:] = [[odds * KNOWN], [KNOWN]]
    options = controller.options(seen, controller.beams)
    best = max(options, key=lambda option: option.rate)
    table = Table(
        title=f"coupling by rejection: {controller.beams} beams, {controller.layers[0]} draft nodes per layer, a layer is "
        f"accepted with probability {odds:g}"
    )
    for head in ("draft layers", "scored nodes", "layers per turn", "ms per turn", "layers per second"):
        table.add_column(head, justify="right")
    for option in options:
        table.add_row(
            str(option.depth),
            str(option.nodes),
            f"{option.layers:.2f}",
            f"{1e3 * option.seconds:.1f}",
            f"{option.rate:.1f}",
            style="bold green" if option is best else "",
        )
    console.print(table)
    host = controller.host
    console.print(
        f"outside the models: {1e3 * host.turn_s:.2f} ms per turn, {1e3 * host.draft_s:.2f} per drafted layer, "
        f"{1e3 * host.judge_s:.2f} per layer judged"
    )

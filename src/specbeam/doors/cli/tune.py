"""The command `specbeam tune`: the cost of passes on this machine, and the draft shapes that follow from it."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam.core.control.cost import CostCurve
from specbeam.core.control.needs import NodesByNeed
from specbeam.core.control.worth import DepthByCost, PassOdds
from specbeam.doors.cli.bench import demo_sentences
from specbeam.doors.cli.common import print_json, quiet_load
from specbeam.doors.prompts import read, spread
from specbeam.errors import BadSetting
from specbeam.lab.bench.acceptance import Acceptance, acceptance
from specbeam.lab.bench.sublayers import FoundSublayers, best_sublayers
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import Pair
from specbeam.models.skipping import Skipping
from specbeam.recipes.beams import dsbd
from specbeam.recipes.tuning.acceptance import keep_acceptance, with_guess
from specbeam.recipes.tuning.costs import NODES, measure

if TYPE_CHECKING:
    from specbeam.doors.cli.screen import Screen


def run(
    model: str,
    draft: str | None,
    contexts: list[int],
    beams: int,
    width: int | None,
    odds: float,
    explain: bool,
    prompts: list[str],
    files: list[Path],
    skipping: tuple[float | None, str | None],
    json: bool,
) -> int:
    """Measure passes of the models and acceptance by rank, print them, and return the exit code.

    Args:
        contexts: numbers of tokens in the cache.
        width: draft nodes per layer; None: as `dsbd` chooses.
        odds: probability that a draft layer passes, for `explain`.
        prompts, files: prompts on which acceptance by rank is measured; none: the demo's, for the bundled pair.
        skipping: the share of sublayers to search for that drafts do without, and the name of the kind of texts; without
             the share nothing is searched for.
    """
    from rich.table import Table

    from specbeam.doors.cli.screen import Screen

    if not 0 < odds < 1:
        raise BadSetting(f"--odds is {odds}; it is a probability, in (0, 1)")
    if skipping[0] is None and skipping[1] is not None:
        raise BadSetting(
            f"--task {skipping[1]!r} names texts that --skip-ratio searches for; give both, or leave it out"
        )
    for context in contexts:
        if context < 1:
            raise BadSetting(f"--context is {context}; it must be at least 1")
    dsbd(beams, width, width="fixed")  # raises what is wrong with them
    texts = _prompts(model, prompts, files)
    if skipping[0] is not None and not texts:
        raise BadSetting("--skip-ratio searches on prompts; give them with --file")
    pair = quiet_load(model, draft)
    models = {"target": pair.forgetful_target} | (
        {"draft": pair.draft} if isinstance(pair.draft, HuggingFaceLM) else {}
    )
    console = Screen()
    curves = {name: {context: _cost_curve(lm, context) for context in contexts} for name, lm in models.items()}
    by_rank = _measured_acceptance(pair, texts)
    found = _found_sublayers(pair, texts, *skipping)
    if json:
        record: dict[str, Any] = {
            name: {context: dataclasses.asdict(curve) for context, curve in by_context.items()}
            for name, by_context in curves.items()
        }
        if by_rank is not None:
            record["acceptance"] = dataclasses.asdict(by_rank)
        if found is not None:
            record["sublayers"] = {**dataclasses.asdict(found), "skipped": str(found.skipped)}
        print_json(record)
        return 0
    table = Table(title="milliseconds of a pass, by nodes")
    table.add_column("nodes", justify="right")
    columns = [(name, context) for name in curves for context in contexts]
    for name, context in columns:
        table.add_column(f"{name}, {context} tokens cached", justify="right")
    for place, nodes in enumerate(NODES):
        table.add_row(str(nodes), *(f"{1e3 * curves[name][context].seconds[place]:.2f}" for name, context in columns))
    console.print(table)
    if by_rank is not None:
        odds_by_rank = ", ".join(f"{value:.2f}" for value in by_rank.odds)
        console.print(f"acceptance of the first, second, ... draft tried, at {by_rank.nodes} nodes: {odds_by_rank}")
    if found is not None:
        console.print(
            f"without the sublayers {found.skipped} the target takes {found.matchness:.2f} of {found.tokens} of its own "
            f"tokens for the likeliest (at first {found.first:.2f}); {found.tries} sets were tried"
        )
    if explain and "draft" in curves:
        target_curve = curves["target"][contexts[0]]
        draft_curve = curves["draft"][contexts[0]]
        by_cost = replace(_depth_controller(pair, beams, width), target=target_curve, draft=draft_curve)
        by_need = replace(_need_controller(pair, beams, width), target=target_curve, draft=draft_curve)
        _explain_needs(console, by_need)
        _explain_depth(console, by_cost, odds)
    return 0


def _prompts(model: str, prompts: list[str], files: list[Path]) -> list[str]:
    """Return up to 30 of the prompts, given or in files; without any, of the demo for the bundled pair, else none."""
    if prompts or files:
        prompts = [*prompts, *(row.prompt for file in files for row in read(str(file)))]
    else:
        prompts = demo_sentences() if model == "bundled" else []
    return spread(prompts, 30)


def _measured_acceptance(pair: Pair, prompts: list[str]) -> Acceptance | None:
    """Measure acceptance by rank, and keep it for `sequoia`; None without a draft model or without prompts."""
    if not isinstance(pair.draft, HuggingFaceLM) or not prompts:
        return None
    found = acceptance(pair, prompts, children=5, max_new_tokens=48)
    keep_acceptance(pair.forgetful_target, pair.draft, with_guess(found.odds, found.nodes))
    return found


def _found_sublayers(pair: Pair, prompts: list[str], ratio: float | None, task: str | None) -> FoundSublayers | None:
    """Search for sublayers that drafts do without, and keep what is found; None without a share of them."""
    if ratio is None:
        return None
    return best_sublayers(pair, prompts, Skipping("bayes", ratio, task=task))


def _cost_curve(lm: HuggingFaceLM, context: int) -> CostCurve:
    """Measure the cost curve of a model; raise `BadSetting` if its positions do not suffice."""
    most = lm.max_positions
    if most is not None and context + len(NODES) > most:
        raise BadSetting(f"--context is {context}, but the model has {most} positions")
    return measure(lm, NODES, context)


def _depth_controller(pair: Pair, beams: int, width: int | None) -> DepthByCost:
    """Return the controller that chooses the depth of `dsbd` with a fixed width by rejection."""
    method = dsbd(beams, width, width="fixed", coupling="rejection", depth="auto")
    controller = method.parts(pair.target, pair.draft).controller
    assert isinstance(controller, DepthByCost)
    return controller


def _need_controller(pair: Pair, beams: int, width: int | None) -> NodesByNeed:
    """Return the controller that chooses the drafts of `dsbd` with a fixed width."""
    controller = dsbd(beams, width, width="fixed").parts(pair.target, pair.draft).controller
    assert isinstance(controller, NodesByNeed)
    return controller


def _explain_needs(console: "Screen", controller: NodesByNeed) -> None:
    """Print from which odds of being needed a draft is worth its row."""
    from rich.table import Table

    table = Table(
        title=f"{controller.beams} beams of fixed width: the odds of being needed from which a draft is scored"
    )
    for head in ("rows so far", "ms of a pass", "odds"):
        table.add_column(head, justify="right")
    thresholds = controller.thresholds()
    shown = [0, *(2**power for power in range(8))]
    for place in shown:
        if place < len(thresholds):
            rows, seconds, odds = thresholds[place]
            table.add_row(str(rows), f"{1e3 * seconds:.2f}", f"{odds:.2f}" if odds < 1 else "never")
    console.print(table)
    console.print("as if the rows of all beams were needed; how likely drafts are needed is learnt while decoding")


def _explain_depth(console: "Screen", controller: DepthByCost, odds: float) -> None:
    """Print the depths between which `depth="auto"` chooses, if layers pass with these odds."""
    from rich.table import Table

    seen = PassOdds(8)
    seen.seen[:] = [[odds], [1.0]]
    options = controller.options(seen, controller.beams)
    best = max(options, key=lambda option: option.rate)
    table = Table(
        title=f"by rejection: {controller.beams} beams, {controller.layers[0]} draft nodes per layer, a layer passes with "
        f"odds {odds:g}"
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

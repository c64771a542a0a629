"""`specbeam tune`: what passes cost here, and what follows from it."""

import dataclasses
import json as json_format
from dataclasses import replace
from typing import TYPE_CHECKING

from specbeam.cli.common import quiet_load
from specbeam.control.cost import CostCurve
from specbeam.control.worth import DepthByCost, PassOdds, ShapeByValue
from specbeam.errors import BadSetting
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.pair import Pair
from specbeam.recipes.beams import dsbd
from specbeam.tuning.costs import NODES, measure

if TYPE_CHECKING:
    from rich.console import Console


def run(
    model: str,
    draft: str | None,
    contexts: list[int],
    beams: int,
    width: int | None,
    odds: float,
    explain: bool,
    json: bool,
) -> int:
    from rich.console import Console
    from rich.table import Table

    if not 0 < odds < 1:
        raise BadSetting(f"--odds is {odds}; it is a probability, in (0, 1)")
    pair = quiet_load(model, draft)
    models = {"target": pair.target} | ({"draft": pair.draft} if pair.draft is not None else {})
    console = Console(highlight=False)
    measured = {name: {context: _measured(lm, context) for context in contexts} for name, lm in models.items()}
    if json:
        print(
            json_format.dumps(
                {name: {c: dataclasses.asdict(one) for c, one in some.items()} for name, some in measured.items()}
            )
        )
        return 0
    table = Table(title="milliseconds of a pass, by nodes")
    table.add_column("nodes", justify="right")
    columns = [(name, context) for name in measured for context in contexts]
    for name, context in columns:
        table.add_column(f"{name}, {context} tokens before", justify="right")
    for place, nodes in enumerate(NODES):
        table.add_row(str(nodes), *(f"{1e3 * measured[name][context].seconds[place]:.2f}" for name, context in columns))
    console.print(table)
    if explain and "draft" in measured:
        target, drafted = (measured[name][contexts[0]] for name in ("target", "draft"))
        _explain(console, replace(_control(pair, beams, width), target=target, draft=drafted), odds)
        _explain_value(console, replace(_by_value(pair, beams, width), target=target, draft=drafted))
    return 0


def _measured(lm: HuggingFaceLM, context: int) -> CostCurve:
    most = lm.max_positions
    if most is not None and context + len(NODES) > most:
        raise BadSetting(f"--context is {context}, but the model has {most} positions")
    return measure(lm, NODES, context)


def _control(pair: Pair, beams: int, width: int | None) -> DepthByCost:
    """What decides on the depth of `dsbd`."""
    control = dsbd(beams, width, width="fixed").parts(pair.target, pair.draft).controller
    assert isinstance(control, DepthByCost)
    return control


def _by_value(pair: Pair, beams: int, width: int | None) -> ShapeByValue:
    """What decides on the shape of `dsbd` with width="auto"."""
    control = dsbd(beams, width, width="auto").parts(pair.target, pair.draft).controller
    assert isinstance(control, ShapeByValue)
    return control


def _explain_value(console: "Console", control: ShapeByValue) -> None:
    """What each shape promises a session that has seen nothing yet; it learns from its own layers."""
    from rich.table import Table

    rates = control.rates(control.width.values({}), control.width.most)
    best = rates.max()
    table = Table(
        title='width="auto": value per second by draft layers and drafts of each, in layers of one beam, as guessed at first'
    )
    for head in ("draft layers", *map(str, control.sizes)):
        table.add_column(head, justify="right")
    for depth, row in enumerate(rates.tolist()):
        table.add_row(str(depth), *(f"[bold green]{one:.1f}[/]" if one == best else f"{one:.1f}" for one in row))
    console.print(table)
    width = control.width
    console.print(
        f"a layer of w beams is worth 1 + {width.worth:g} log2 w; its width maximises that plus the odds that it passes "
        "times what is behind it"
    )


def _explain(console: "Console", control: DepthByCost, odds: float) -> None:
    """The options that `depth="auto"` weighs, if layers pass with these odds."""
    from rich.table import Table

    seen = PassOdds(8)
    seen.seen[:] = [[odds], [1.0]]
    options = control.options(seen, control.beams)
    best = max(options, key=lambda option: option.rate)
    table = Table(
        title=f"{control.beams} beams, {control.layers[0]} draft nodes per layer, a layer passes with odds {odds:g}"
    )
    for head in ("draft layers", "scored nodes", "layers per turn", "ms per turn", "layers per second"):
        table.add_column(head, justify="right")
    for one in options:
        cells = (str(one.depth), str(one.nodes), f"{one.layers:.2f}", f"{1e3 * one.seconds:.1f}", f"{one.rate:.1f}")
        table.add_row(*cells, style="bold green" if one is best else "")
    console.print(table)
    host = control.host
    console.print(
        f"outside the models: {1e3 * host.turn_s:.2f} ms per turn, {1e3 * host.draft_s:.2f} per drafted layer, "
        f"{1e3 * host.judge_s:.2f} per layer judged"
    )

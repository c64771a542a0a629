"""The command `specbeam bench host`: the cost of decoding on the host, with models that compute nothing."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from specbeam.doors.cli.arguments import Record
from specbeam.doors.cli.common import in_one_line, print_json
from specbeam.doors.cli.options import Json, checked
from specbeam.doors.cli.reports import print_report
from specbeam.errors import one_of
from specbeam.lab.words import HOST_METHODS, of_rounds

if TYPE_CHECKING:
    from specbeam.lab.bench.host import HostFigures, HostPlan


class HostArguments(Record):
    """Arguments of the command."""

    method: Annotated[
        list[str],
        typer.Option(
            "--method",
            help="Method to measure; may be given several times; by default all.",
            callback=checked(lambda name: one_of("--method", name, HOST_METHODS)),
        ),
    ] = []
    vocab: Annotated[int, typer.Option(min=512, help="Number of tokens of the vocabulary.")] = 128_000
    sessions: Annotated[int, typer.Option(min=1, help="Number of texts decoded together.")] = 16
    beams: Annotated[int, typer.Option(min=1, help="Number of beams.")] = 4
    draft_beams: Annotated[int, typer.Option(min=1, help="Number of draft beams of a layer.")] = 6
    depth: Annotated[int, typer.Option(min=1, help="Number of draft layers.")] = 4
    tokens: Annotated[int, typer.Option(min=1, help="Number of new tokens of each text.")] = 96
    rounds: Annotated[int, typer.Option(min=1, help="Number of repetitions, after one that compiles.")] = 7
    json: Json = False


def host(given: HostArguments) -> int:
    """Measure processor time, bytes, launches and allocations of turns outside of the models."""
    from specbeam.doors.cli.screen import progress_bar
    from specbeam.lab.bench.host import HostPlan, host_costs
    from specbeam.lab.bench.provenance import provenance

    plan = HostPlan(
        vocab=given.vocab,
        sessions=given.sessions,
        beams=given.beams,
        draft_beams=given.draft_beams,
        depth=given.depth,
        tokens=given.tokens,
        rounds=given.rounds,
    )
    names = given.method or HOST_METHODS
    with progress_bar() as bar:
        costs = [*bar.track(host_costs(plan, names), len(names), description="methods")]
    origin = provenance()
    if given.json:
        for cost in costs:
            print_json({**dataclasses.asdict(cost), "plan": dataclasses.asdict(plan), "provenance": origin})
    else:
        print_report(_as_markdown(costs, plan))
        print(in_one_line(origin))
    return 0


def _as_markdown(costs: "list[HostFigures]", plan: "HostPlan") -> str:
    """Return the costs as a table with a heading."""
    from specbeam.lab.bench.tables import markdown_table

    rows = []
    for cost in costs:
        spread = f"{cost.lowest_ms:.3f} to {cost.highest_ms:.3f}"
        rows.append(
            [
                f"`{cost.method}`",
                f"{cost.host_ms_per_session_turn:.3f} ({spread})",
                f"{cost.bytes_per_row:.0f}",
                f"{cost.launches_per_turn:.1f}",
                f"{cost.allocations_per_turn:.1f}",
            ]
        )
    heads = ["method", "host ms per session and turn", "bytes per row", "launches per turn", "allocations per turn"]
    table = markdown_table(heads, rows)
    return (
        f"{plan.vocab} tokens, {plan.sessions} texts together, {plan.beams} beams, {plan.draft_beams} draft beams, "
        f"{plan.depth} draft layers, models that compute nothing; {of_rounds(plan.rounds)}\n\n"
        f"{table}\n"
    )

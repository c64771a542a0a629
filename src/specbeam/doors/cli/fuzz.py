"""The command `specbeam evaluate fuzz`: random calls on tiny random models, checked against invariants of the answers."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from specbeam.doors.cli.arguments import Record
from specbeam.doors.cli.common import print_json, say
from specbeam.doors.cli.options import Json, checked
from specbeam.errors import one_of
from specbeam.lab.words import FUZZ_WORLDS

if TYPE_CHECKING:
    from specbeam.lab.fuzz.campaign import Fault, Tally


def _check_world(name: str) -> None:
    """Raise `BadSetting` for an unknown pair of tiny models."""
    one_of("world", name, FUZZ_WORLDS)


class FuzzArguments(Record):
    """Arguments of the command."""

    calls: Annotated[int, typer.Option(min=1, help="Total number of calls.")] = 1000
    seed: Annotated[int, typer.Option(help="The same seed gives the same calls.")] = 0
    world: Annotated[
        list[str],
        typer.Option(
            "--world",
            help="Pair of tiny models. May be given several times; by default all.",
            callback=checked(_check_world),
        ),
    ] = []
    first: Annotated[int, typer.Option(min=0, help="Number of the first call of each pair.")] = 0
    processes: Annotated[int, typer.Option(min=1, help="Number of parallel processes.")] = 1
    json: Json = False


def fuzz(given: FuzzArguments) -> int:
    """Make random calls on tiny random models and check each answer; exit code 1 if a call fails, crashes or hangs.

    The models cover all engines, heads and families. The checks cover tokens, beams, scores, constraints and reports. A
    text must also stay the same when it is repeated, decoded alone, and decoded without drafts.
    """
    from specbeam.doors.cli.screen import progress_bar
    from specbeam.lab.fuzz.campaign import campaign

    with progress_bar() as bar:
        task = bar.add_task("calls", total=given.calls)

        def show(now: "Tally") -> None:
            bar.update(task, completed=now.calls)

        tally = campaign(given.calls, given.seed, given.world, given.first, given.processes, show)
    if given.json:
        print_json(_record(tally, given.seed))
        return int(bool(tally.faults))
    for fault in tally.faults:
        say(_described(fault, given.seed))
    outcomes = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.outcomes.items()))
    chosen = len(given.world) or len(FUZZ_WORLDS)
    print(f"{tally.calls} calls on {chosen} pairs of tiny random models with seed {given.seed}: {outcomes}")
    print(f"Methods that answered: {len(tally.answered_by_method)}. Faults: {len(tally.faults)}.")
    return int(bool(tally.faults))


def _described(fault: "Fault", seed: int) -> str:
    """Return a fault as text, with the command that repeats the call."""
    again = f"specbeam evaluate fuzz --world {fault.world!r} --seed {seed} --first {fault.number} --calls 1"
    return f"{fault.kind.upper()} {fault.world}, call {fault.number}\n  {fault.call}\n  {fault.text}\n  {again}\n"


def _record(tally: "Tally", seed: int) -> dict[str, object]:
    return {
        "seed": seed,
        "calls": tally.calls,
        "outcomes": dict(tally.outcomes),
        "answered_by_method": dict(tally.answered_by_method),
        "refusals": dict(tally.refusals.most_common()),
        "faults": [dataclasses.asdict(fault) for fault in tally.faults],
    }

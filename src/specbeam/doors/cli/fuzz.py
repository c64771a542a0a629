"""The command `specbeam evaluate fuzz`: random calls on tiny random models, and the invariants that answers must hold."""

import dataclasses

from specbeam.doors.cli.common import print_json, say
from specbeam.doors.cli.screen import Screen
from specbeam.lab.fuzz.campaign import Fault, Tally, campaign
from specbeam.lab.fuzz.worlds import WORLDS


def fuzz(calls: int, seed: int, worlds: list[str], first: int, processes: int, json: bool) -> int:
    """Run a campaign, print its faults and a summary, and return the exit code: 1 if there are faults."""
    from rich.progress import Progress

    console = Screen(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("calls", total=calls)
        tally = campaign(calls, seed, worlds, first, processes, lambda now: bar.update(task, completed=now.calls))
    if json:
        print_json(_record(tally, seed))
        return int(bool(tally.faults))
    for fault in tally.faults:
        say(_described(fault, seed))
    outcomes = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.outcomes.items()))
    chosen = len(worlds) or len(WORLDS)
    print(f"{tally.calls} calls on {chosen} pairs of tiny random models with seed {seed}: {outcomes}")
    print(f"Methods that answered: {len(tally.answered_by_method)}. Faults: {len(tally.faults)}.")
    return int(bool(tally.faults))


def _described(fault: Fault, seed: int) -> str:
    """Return a fault as text, with the command that repeats its call."""
    again = f"specbeam evaluate fuzz --world {fault.world!r} --seed {seed} --first {fault.number} --calls 1"
    return f"{fault.kind.upper()} {fault.world}, call {fault.number}\n  {fault.call}\n  {fault.text}\n  {again}\n"


def _record(tally: Tally, seed: int) -> dict[str, object]:
    return {
        "seed": seed,
        "calls": tally.calls,
        "outcomes": dict(tally.outcomes),
        "answered_by_method": dict(tally.answered_by_method),
        "refusals": dict(tally.refusals.most_common()),
        "faults": [dataclasses.asdict(fault) for fault in tally.faults],
    }

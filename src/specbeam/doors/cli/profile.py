"""The option `--profile`: the time spent in each part of a turn."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specbeam.errors import counted

if TYPE_CHECKING:
    from specbeam.core.measure.profiler import Profile
    from specbeam.core.records import Generation

# name of a span -> its work
MEANINGS = {
    "fill/model": "passes that store long prompts between turns",
    "fill": "bookkeeping of prompts that wait to be stored",
    "plan": "depth and width of the draft",
    "draft/model": "passes of the draft model",
    "draft": "laws, draws and bookkeeping of the drafter",
    "score/model": "passes of the target",
    "score": "masks, slots and positions of these passes",
    "verify": "the target's laws and draws, and the verdict on the drafts",
    "settle": "updates of caches and statistics",
}


@contextmanager
def profile_if(wanted: bool) -> "Iterator[list[Generation]]":
    """Time the block if `wanted`, and print a table at its end.

    Yields an empty list for the caller's answers; the table counts their passes and tokens.
    """
    answers: list[Generation] = []
    if not wanted:
        yield answers
        return
    from specbeam.core.measure.profiler import profiled

    began = time.perf_counter()
    with profiled() as profile:
        yield answers
    show(profile, time.perf_counter() - began, answers)


def show(profile: "Profile", whole_s: float, answers: "list[Generation]") -> None:
    """Print milliseconds per target pass of each span on standard error.

    Args:
        whole_s: seconds of the whole run, including work outside the turns.
    """
    from rich.table import Table

    from specbeam.doors.cli.screen import Screen

    passes = max(sum(answer.report.target_passes for answer in answers), 1)
    seconds = dict(profile.seconds)
    seconds["around"] = max(whole_s - sum(seconds.values()), 0.0)
    inside = sum(value for name, value in seconds.items() if name.endswith("/model"))
    tokens = sum(len(answer.tokens) for answer in answers)
    table = Table(title=f"{counted(passes, 'pass')}, {counted(tokens, 'token')}, {whole_s:.2f} s")
    for head, side in (("part", "left"), ("ms per pass", "right"), ("share", "right"), ("", "left")):
        table.add_column(head, justify="right" if side == "right" else "left")
    for name in [*MEANINGS, "around"]:
        value = seconds.get(name, 0.0)
        meaning = MEANINGS.get(name, "tokenizer, the loop itself, output")
        table.add_row(name, f"{1e3 * value / passes:.2f}", f"{value / whole_s:.1%}", meaning)
    turns_s = whole_s - seconds["around"]
    for name, part_s, total_s, meaning in (
        ("outside models", turns_s - inside, turns_s, "of the turns alone"),
        ("", whole_s - inside, whole_s, "of everything"),
    ):
        table.add_row(name, f"{1e3 * part_s / passes:.2f}", f"{part_s / max(total_s, 1e-9):.1%}", meaning, style="bold")
    Screen(stderr=True).print(table)

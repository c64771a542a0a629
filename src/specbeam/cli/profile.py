"""`--profile`: where the time of a turn goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from specbeam.measure.profiler import Profile, profiled
from specbeam.records import Generation

MEANINGS = {
    "fill/model": "passes that store long prompts between turns",
    "fill": "who waits, and for what",
    "plan": "depth and width of the draft",
    "draft/model": "passes of the draft model",
    "draft": "laws and draws of the draft, its bookkeeping",
    "score/model": "passes of the target",
    "score": "masks, slots, positions of these passes",
    "verify": "the target's laws, draws, and what becomes of the drafts",
    "settle": "caches and statistics catch up",
}


@contextmanager
def profile_if(wanted: bool) -> Iterator[list[Generation]]:
    """Time what is done inside, and show it with the answers that were put into the list."""
    answers: list[Generation] = []
    if not wanted:
        yield answers
        return
    began = time.perf_counter()
    with profiled() as profile:
        yield answers
    show(profile, time.perf_counter() - began, answers)


def show(profile: Profile, whole_s: float, answers: list[Generation]) -> None:
    """Milliseconds per pass of the target, on standard error. `whole_s`: of the run, with everything around the turns."""
    from rich.console import Console
    from rich.table import Table

    passes = max(sum(one.report.target_passes for one in answers), 1)
    seconds = dict(profile.seconds)
    seconds["around"] = max(whole_s - sum(seconds.values()), 0.0)
    inside = sum(value for name, value in seconds.items() if name.endswith("/model"))
    table = Table(title=f"{passes} passes, {sum(len(one.tokens) for one in answers)} tokens, {whole_s:.2f} s")
    for head, side in (("part", "left"), ("ms per pass", "right"), ("share", "right"), ("", "left")):
        table.add_column(head, justify="right" if side == "right" else "left")
    for name in [*MEANINGS, "around"]:
        value = seconds.get(name, 0.0)
        meaning = MEANINGS.get(name, "tokenizer, the loop itself, output")
        table.add_row(name, f"{1e3 * value / passes:.2f}", f"{value / whole_s:.1%}", meaning)
    turns_s = whole_s - seconds["around"]
    for name, part, of, meaning in (
        ("outside models", turns_s - inside, turns_s, "of the turns alone"),
        ("", whole_s - inside, whole_s, "of everything"),
    ):
        table.add_row(name, f"{1e3 * part / passes:.2f}", f"{part / max(of, 1e-9):.1%}", meaning, style="bold")
    Console(stderr=True, highlight=False).print(table)

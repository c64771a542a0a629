"""`specbeam inspect`: draw one turn's forest."""

import dataclasses
import json as json_format
from pathlib import Path

from specbeam import render as drawing
from specbeam.cli.common import method_from, quiet_load
from specbeam.errors import BadSetting
from specbeam.generation import turns_of


def run(
    prompt: str, model: str, draft: str | None, settings: list[str], turn: int, seed: int, svg: Path | None, json: bool
) -> int:
    pair = quiet_load(model, draft)
    method = method_from(
        "dsbd", ["trace=true", "depth=4", *settings]
    )  # a depth by cost would draw another forest elsewhere
    turns = list(turns_of(pair, prompt, method, seed=seed))
    if not 1 <= turn <= len(turns):
        raise BadSetting(f"--turn is {turn}, but the generation has turns 1 to {len(turns)}")
    chosen = turns[turn - 1]
    nodes = drawing.picture(chosen, pair.word)
    if svg is not None:
        svg.write_text(drawing.as_svg(nodes), encoding="utf-8")
    if json:
        print(json_format.dumps({"turn": turn, "turns": len(turns), "nodes": [dataclasses.asdict(n) for n in nodes]}))
    else:
        _show(nodes, turn, len(turns), chosen.verdict.accepted, [step.width for step in chosen.verdict.steps])
    return 0


def _show(nodes: list[drawing.Leaf], turn: int, turns: int, accepted: int, widths: list[int]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(
        f"turn {turn} of {turns}: {accepted} layers of drafts accepted in one pass of the target; widths {widths}\n"
    )
    for tree in drawing.as_trees(nodes):
        console.print(tree)
    console.print()
    for fate, meaning in drawing.MEANINGS.items():
        console.print(f"[{drawing.STYLES[fate]}]{drawing.MARKS[fate]}[/] {meaning}")
    console.print("[dim]p, q: odds under the target's and the draft's joint law over all beams[/]")

"""The command `specbeam inspect`: a picture of one turn's forest."""

import dataclasses
from pathlib import Path
from typing import Any

from specbeam.doors import render
from specbeam.doors.cli.common import check_options, method_from, print_json, quiet_load
from specbeam.doors.cli.generate import gather
from specbeam.doors.places import write_output
from specbeam.errors import BadPrompt, BadSetting
from specbeam.generation import turns_of


def run(
    prompts: list[str], files: list[Path], model: str, draft: str | None, settings: list[str], options: dict[str, Any],
    turn: int, seed: int, svg: Path | None, json: bool,
) -> int:  # fmt: skip
    """Draw the forest of a turn of DSBD in the terminal, as JSON or as SVG, and return the exit code."""
    sources, _ = gather(prompts, files)
    if len(sources) != 1:
        raise BadPrompt(f"inspect draws the forest of one prompt, and there are {len(sources)}; give one")
    # With a fixed depth every machine draws the same forest; a depth by cost depends on the machine.
    method = method_from("dsbd", ["trace=true", "depth=4", *settings])
    check_options(options)
    if turn < 1:
        raise BadSetting(f"--turn is {turn}; turns are counted from 1")
    pair = quiet_load(model, draft, sources=True)
    turns = list(turns_of(pair, sources[0].text, method, seed=seed, **options))
    if not 1 <= turn <= len(turns):
        raise BadSetting(f"--turn is {turn}, but the generation has turns 1 to {len(turns)}")
    chosen = turns[turn - 1]
    nodes = render.picture(chosen, pair.word)
    if json:
        print_json({"turn": turn, "turns": len(turns), "nodes": [dataclasses.asdict(n) for n in nodes]})
    else:
        _show(nodes, turn, len(turns), chosen.verdict.accepted, [step.width for step in chosen.verdict.steps])
    if svg is not None:
        write_output(svg, render.as_svg(nodes))
    return 0


def _show(nodes: list[render.Leaf], turn: int, turns: int, accepted: int, widths: list[int]) -> None:
    from rich.text import Text

    from specbeam.doors.cli.screen import Screen

    console = Screen()
    console.print(
        f"turn {turn} of {turns}: {accepted} layers of drafts accepted in one pass of the target; widths {widths}\n"
    )
    for tree in render.as_trees(nodes):
        console.print(tree)
    console.print()
    for fate, meaning in render.MEANINGS.items():
        console.print(Text.assemble((render.MARKS[fate], render.STYLES[fate]), f" {meaning}"))
    console.print("p, q: odds under the target's and the draft's joint law over all beams", style="dim")

"""The command `specbeam inspect`: a picture of one turn's forest."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.arguments import generation
from specbeam.doors.cli.common import method_from, print_json, quiet_load
from specbeam.doors.cli.generate import gather
from specbeam.doors.cli.options import Json, PairArguments, PromptFiles, PromptTexts, Settings, file_to_write
from specbeam.doors.places import write_output
from specbeam.errors import BadPrompt, BadSetting

if TYPE_CHECKING:
    from specbeam.doors.render import Leaf


class InspectArguments(PairArguments):
    """Arguments of the command."""

    prompts: Annotated[list[str] | None, typer.Argument(help="The prompt.")] = None
    prompt: PromptTexts = []
    file: PromptFiles = []
    setting: Settings = []
    options: dict[str, Any] = generation(without=["num_return_sequences"])
    turn: Annotated[int, typer.Option(min=1, help="Number of the turn (target pass) to draw, counted from 1.")] = 1
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same picture.")] = 0
    svg: Annotated[Path | None, file_to_write("Also write the picture to this SVG file.", ".svg")] = None
    json: Json = False


def inspect(given: InspectArguments) -> int:
    """Draw the drafts of one DSBD turn, with their probabilities and whether each was accepted, rejected or resampled."""
    sources, _ = gather([*(given.prompts or []), *given.prompt], given.file)
    if len(sources) != 1:
        raise BadPrompt(f"inspect draws the forest of one prompt, and there are {len(sources)}; give one")
    # A fixed depth gives the same forest on every machine; depth="auto" depends on the machine's speed.
    method = method_from("dsbd", ["trace=true", "depth=4", *given.setting])
    from specbeam.doors import render
    from specbeam.doors.trace import words_of
    from specbeam.generation import turns_of

    pair = quiet_load(**given.pair, sources=True)
    options: Any = given.options
    turns = list(turns_of(pair, sources[0].text, method, seed=given.seed, **options))
    if given.turn > len(turns):
        raise BadSetting(f"--turn is {given.turn}, but the generation has turns 1 to {len(turns)}")
    chosen = turns[given.turn - 1]
    nodes = render.picture(chosen, words_of(pair.tokenizer))
    if given.json:
        leaves = [dataclasses.asdict(node) for node in nodes]
        print_json({"turn": given.turn, "turns": len(turns), "nodes": leaves})
    else:
        widths = [step.width for step in chosen.verdict.steps]
        _show(nodes, f"turn {given.turn} of {len(turns)}", chosen.verdict.accepted, widths)
    if given.svg is not None:
        write_output(given.svg, render.as_svg(nodes))
    return 0


def _show(nodes: "list[Leaf]", turn: str, accepted: int, widths: list[int]) -> None:
    from rich.text import Text

    from specbeam.doors import render
    from specbeam.doors.cli.screen import Screen

    console = Screen()
    console.print(f"{turn}: {accepted} layers of drafts accepted in one pass of the target; widths {widths}\n")
    for tree in render.as_trees(nodes):
        console.print(tree)
    console.print()
    for fate, meaning in render.MEANINGS.items():
        console.print(Text.assemble((render.MARKS[fate], render.STYLES[fate]), f" {meaning}"))
    console.print("p, q: probability under the joint law over all beams, of the target and of the draft", style="dim")

"""`specbeam bench`: figures that can be trusted."""

import dataclasses
import json as json_format
from pathlib import Path

from specbeam.bench.efficiency import Cell, as_markdown, efficiency, plot
from specbeam.cli.common import quiet_load
from specbeam.cli.generate import gather
from specbeam.pair import BUNDLED


def demo_sentences() -> list[str]:
    lines = (BUNDLED / "sentences.tsv").read_text(encoding="utf-8").splitlines()
    return [line.split("\t")[0] for line in lines]


def block_efficiency(
    prompts: list[str], files: list[Path], model: str, draft: str | None, budgets: list[int], temperature: float | None,
    rows: int, max_new_tokens: int, seed: int, picture: Path | None, json: bool,
) -> int:  # fmt: skip
    from rich.console import Console

    asked = [one.text for one in gather(prompts, files)[0]] if prompts or files else demo_sentences()
    pair = quiet_load(model, draft)
    console = Console(stderr=True, highlight=False)

    def told(cell: Cell) -> None:
        console.print(f"{cell.budget:3} nodes  {cell.recipe:<24} {cell.efficiency:.2f}  ({cell.shape})")

    cells = efficiency(pair, asked[:rows], budgets, seed, told, temperature=temperature, max_new_tokens=max_new_tokens)
    if picture is not None:
        plot(cells, str(picture))
    if json:
        for cell in cells:
            print(json_format.dumps(dataclasses.asdict(cell)))
    else:
        print(as_markdown(cells))
    return 0

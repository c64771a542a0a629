"""`specbeam bench`: figures that can be trusted."""

import dataclasses
import json as json_format
from pathlib import Path

from specbeam.bench.acceptance import acceptance
from specbeam.bench.efficiency import TreeCell, as_markdown, efficiency, plot
from specbeam.bench.pictures import check_picture
from specbeam.bench.prompts import spread
from specbeam.cli.common import quiet_load
from specbeam.cli.generate import gather
from specbeam.pair import BUNDLED


def demo_sentences() -> list[str]:
    lines = (BUNDLED / "sentences.tsv").read_text(encoding="utf-8").splitlines()
    return [line.split("\t")[0] for line in lines]


def ranks(
    prompts: list[str], files: list[Path], model: str, draft: str | None, children: int, temperature: float | None,
    rows: int, max_new_tokens: int, seed: int, json: bool,
) -> int:  # fmt: skip
    pair = quiet_load(model, draft)
    options = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    found = acceptance(pair, spread(_asked(prompts, files), rows), children, seed, **options)
    if json:
        print(json_format.dumps(dataclasses.asdict(found)))
        return 0
    for place, (odds, error) in enumerate(zip(found.odds, found.error, strict=True)):
        print(f"child {place + 1}: accepted at {odds:.3f} of {found.nodes} steps (standard error {error:.3f})")
    print(f"use it with --set acceptance={','.join(map(str, found.odds))}")
    return 0


def _asked(prompts: list[str], files: list[Path]) -> list[str]:
    return [one.text for one in gather(prompts, files)[0]] if prompts or files else demo_sentences()


def block_efficiency(
    prompts: list[str], files: list[Path], model: str, draft: str | None, budgets: list[int], temperature: float | None,
    rows: int, max_new_tokens: int, seed: int, picture: Path | None, json: bool,
) -> int:  # fmt: skip
    from rich.console import Console

    if picture is not None:
        check_picture(picture)
    asked = _asked(prompts, files)
    pair = quiet_load(model, draft)
    console = Console(stderr=True, highlight=False)

    def told(cell: TreeCell) -> None:
        console.print(f"{cell.budget:3} nodes  {cell.recipe:<24} {cell.efficiency:.2f}  ({cell.shape})")

    cells = efficiency(
        pair, spread(asked, rows), budgets, seed, told, temperature=temperature, max_new_tokens=max_new_tokens
    )
    if json:
        for cell in cells:
            print(json_format.dumps(dataclasses.asdict(cell)))
    else:
        print(as_markdown(cells))
    if picture is not None:
        plot(cells, str(picture))
    return 0

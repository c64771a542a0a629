"""The commands `specbeam bench efficiency` and `specbeam bench acceptance`."""

import dataclasses
from pathlib import Path

from specbeam.doors.cli.common import check_options, print_json, quiet_load
from specbeam.doors.cli.generate import gather
from specbeam.doors.prompts import spread
from specbeam.errors import BadPrompt
from specbeam.lab.bench.acceptance import acceptance
from specbeam.lab.bench.efficiency import TreeCell, as_markdown, check_budgets, efficiency, halves, plot
from specbeam.lab.bench.head_cost import head_cost
from specbeam.lab.bench.pictures import check_picture
from specbeam.models.pair import BUNDLED


def demo_sentences() -> list[str]:
    """Return the German sentences of the bundled pair."""
    lines = (BUNDLED / "sentences.tsv").read_text(encoding="utf-8").splitlines()
    return [line.split("\t")[0] for line in lines]


def acceptance_by_rank(
    prompts: list[str], files: list[Path], model: str, draft: str | None, children: int, temperature: float | None,
    rows: int, max_new_tokens: int, seed: int, json: bool,
) -> int:  # fmt: skip
    """Print how often the k-th draft token tried is the accepted one; return the exit code."""
    options = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    check_options(options)
    texts = spread(texts_of(prompts, files), rows)
    pair = quiet_load(model, draft)
    measured = acceptance(pair, texts, children, seed, **options)
    if json:
        print_json(dataclasses.asdict(measured))
        return 0
    for place, (odds, error) in enumerate(zip(measured.odds, measured.error, strict=True)):
        print(f"child {place + 1}: accepted at {odds:.3f} of {measured.nodes} steps (standard error {error:.3f})")
    print(f"use it with --set acceptance={','.join(map(str, measured.odds))}")
    return 0


def texts_of(prompts: list[str], files: list[Path]) -> list[str]:
    """Return the prompts of arguments and files; without any, the demo's sentences."""
    if not prompts and not files:
        return demo_sentences()
    texts = [prompt.text for prompt in gather(prompts, files)[0]]
    if not texts:
        raise BadPrompt("there is no prompt; give one as an argument or with --file")
    return texts


def block_efficiency(
    prompts: list[str], files: list[Path], model: str, draft: str | None, budgets: list[int], temperature: float | None,
    rows: int, max_new_tokens: int, seed: int, picture: Path | None, json: bool,
) -> int:  # fmt: skip
    """Print the tokens per target pass of each recipe at each budget of nodes; return the exit code."""
    from specbeam.doors.cli.screen import Screen

    if picture is not None:
        check_picture(picture)
    options = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    check_options(options)
    check_budgets(budgets)
    reported, choosing = halves(spread(texts_of(prompts, files), 2 * rows))
    pair = quiet_load(model, draft)
    console = Screen(stderr=True)

    def on_progress(cell: TreeCell) -> None:
        console.print(f"{cell.budget:3} nodes  {cell.recipe:<24} {cell.efficiency:.2f}  ({cell.shape})")

    cells = efficiency(pair, reported, choosing, budgets, seed, on_progress, **options)
    if json:
        for cell in cells:
            print_json(dataclasses.asdict(cell))
    else:
        print(as_markdown(cells))
        if cost := head_cost(pair):
            print(f"\n{cost}.")
    if picture is not None:
        plot(cells, picture)
    return 0

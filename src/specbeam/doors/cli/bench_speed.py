"""The command `specbeam bench speed`: methods and baselines on the same prompts in one interleaved run."""

import dataclasses
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from specbeam.doors.cli.common import check_options, method_from, print_json
from specbeam.doors.cli.widening import grown_pair
from specbeam.doors.prompts import PromptRow, read, spread
from specbeam.doors.sources import hears
from specbeam.engines.eligibility import reads_sources
from specbeam.errors import BadSetting, NotSupported
from specbeam.lab.bench.baselines import MAKERS
from specbeam.lab.bench.head_cost import head_cost
from specbeam.lab.bench.outcome import Contender, specbeam
from specbeam.lab.bench.pictures import check_picture
from specbeam.lab.bench.provenance import provenance
from specbeam.lab.bench.speed import speed
from specbeam.lab.bench.speed_report import as_markdown, plot
from specbeam.models.pair import BUNDLED, Pair
from specbeam.recipes.heads import paper_of

DEFAULT = [
    "transformers/sampling",
    "transformers/beam_sampling",
    "transformers/beam_search",
    "sampling",
    "speculative_sampling",
    "beam_sampling",
    "dsbd",
    "dsbd width=auto",
    "beam_search",
    "speculative_beam_search",
]


def run(
    contenders: list[str], texts: list[str], files: list[Path], columns: tuple[int, int], model: str, draft: str | None,
    grow: str | None, grow_draft: str | None, grow_vocab: str | None, quantize: str | None, rows: int,
    batch_sizes: list[int], repeats: int, threads: int | None, options: dict[str, Any], picture: Path | None, json: bool,
) -> int:  # fmt: skip
    """Measure contenders, print a table per batch size, and return the exit code."""
    import torch
    from rich.progress import Progress

    from specbeam.doors.cli.screen import Screen

    _check(rows, batch_sizes, repeats, picture)
    check_options(options)
    if threads is not None:
        torch.set_num_threads(threads)
    given = [*map(PromptRow, texts), *(row for file in files for row in read(str(file), None, columns))]
    pair = grown_pair(model, draft, grow, grow_draft, quantize, grow_vocab, sources=True)
    if hears(pair):
        raise NotSupported(
            f"bench speed reads text, and {type(pair.target_model).__name__} hears audio; give a model that reads text "
            "(specbeam transcribe runs this one)"
        )
    if not given and reads_sources(pair.target_model):
        raise BadSetting(
            f"{type(pair.target_model).__name__} reads sources of its own kind; give some by --prompt or --file"
        )
    prompts = spread(given or demo_rows(), rows)
    running = [_contender(pair, text, options) for text in contenders or [*DEFAULT, *_of_head(pair)]]
    console = Screen(stderr=True)
    tables = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for size in batch_sizes:
            bar = progress.add_task(f"{size} at once", total=repeats * -(-len(prompts) // size))
            tables.append(speed(pair, running, prompts, size, repeats, partial(progress.advance, bar)))
    origin = provenance() | {"vocabulary": str(pair.target.vocab)}
    for table in tables:
        if json:
            for line in table:
                print_json({**dataclasses.asdict(line), "provenance": origin})
        else:
            print(as_markdown(table) + "\n")
    if not json:
        print(
            f"Ratios are to {tables[0][0].name}, round by round; median of {repeats} rounds, smallest to largest. ",
            end="",
        )
        print("; ".join(f"{name}: {value}" for name, value in origin.items()))
        if cost := head_cost(pair):
            print(f"{cost}.")
    if picture is not None:
        plot([line for table in tables for line in table], picture)
    return 0


def _check(rows: int, batch_sizes: list[int], repeats: int, picture: Path | None) -> None:
    """Raise an error if a number is below 1 or the plot cannot be written."""
    for name, value in (("--rows", rows), ("--repeats", repeats), *(("--batch-size", size) for size in batch_sizes)):
        if value < 1:
            raise BadSetting(f"{name} is {value}; it must be at least 1")
    if picture is not None:
        check_picture(picture)


def _of_head(pair: Pair) -> list[str]:
    """Return the method of the paper of the pair's draft head, if the draft is one and has any."""
    head = getattr(pair.draft, "head", None)
    name = "" if head is None else paper_of(head)
    return [name] if name else []


def _contender(pair: Pair, text: str, options: dict[str, Any]) -> Contender:
    """Return the contender that a text like "dsbd beams=4" or "transformers/sampling" describes."""
    name, *settings = shlex.split(text)
    engine, _, mode = name.partition("/")
    if not mode:
        return specbeam(pair, text, method_from(name, settings), **_options_for(name, options))
    if engine not in MAKERS:
        raise BadSetting(f"{engine} is no baseline; there are {', '.join(MAKERS)}")
    own_options = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        own_options[key] = _read(value)
    return MAKERS[engine](pair, mode, **own_options, **options)


def _options_for(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are set, without warpers if the method does not sample."""
    warpers = ("temperature", "top_k", "top_p") if name in ("greedy", "beam_search", "speculative_beam_search") else ()
    return {key: value for key, value in options.items() if value is not None and key not in warpers}


def _read(value: str) -> int | str:
    return int(value) if value.isdigit() else value


def demo_rows() -> list[PromptRow]:
    """Return the German sentences of the bundled pair with their translations."""
    lines = (BUNDLED / "sentences.tsv").read_text(encoding="utf-8").splitlines()
    return [PromptRow(*line.split("\t")[:2]) for line in lines]

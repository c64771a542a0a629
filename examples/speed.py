"""The README's speeds: methods and what they replace, in turns on the same sentences; ratios are taken within a round.

python examples/speed.py                            the demo's own sentences
python examples/speed.py --data valid.tsv --rows 30 --repeats 7
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer

import specbeam as sb
from specbeam.doors.prompts import PromptRow, read, spread
from specbeam.errors import MissingPackage
from specbeam.lab.bench.baselines import ctranslate2, transformers
from specbeam.lab.bench.outcome import Contender, specbeam
from specbeam.lab.bench.speed import SpeedLine, speed
from specbeam.lab.bench.widen_model import grown
from specbeam.models.pair import BUNDLED

DRAWN = {"temperature": 1.0, "top_k": 10, "top_p": 0.9, "max_new_tokens": 64}
SEARCHED = {"max_new_tokens": 64}
BEAMS = 4
Duel = tuple[str, Contender, Contender]  # what is said, who is ahead of whom


def main(
    data: Annotated[
        Path | None, typer.Option(help="a TSV of English and German; default: the demo's sentences")
    ] = None,
    rows: Annotated[int, typer.Option(help="sentences for the bundled pair; a third of them for the grown ones")] = 18,
    repeats: Annotated[int, typer.Option(help="rounds that count")] = 5,
    threads: int = 1,
) -> None:
    torch.set_num_threads(threads)
    found = _demo() if data is None else read(str(data), None, (2, 1))
    bundled = sb.load("bundled")
    target = grown(bundled.target_model, 100_000_000)
    print(f"{threads} thread{'s' * (threads > 1)}, one prompt at a time, {BEAMS} beams; median of {repeats} rounds\n")
    print("| | ratio | tokens/s, theirs and ours | BLEU, theirs and ours |\n| --- | --- | --- | --- |")
    sizes: list[tuple[str, sb.Pair, int, Callable[[sb.Pair], Iterator[Duel]]]] = [
        ("8 M", bundled, rows, duels),
        ("100 M", _beside(bundled, target), max(rows // 3, 1), duels),
        ("100 M in int8", _beside(bundled, target, quantize="int8"), max(rows // 3, 1), duels_of_int8),
    ]
    began = time.perf_counter()
    for size, pair, count, against in sizes:
        for what, theirs, ours in against(pair):
            first, second = speed(pair, [theirs, ours], spread(found, count), repeats=repeats)
            print(row(f"{size}: {what}", first, second), flush=True)
    print(f"\n{time.perf_counter() - began:.0f} seconds")


def duels(pair: sb.Pair) -> Iterator[Duel]:
    fixed = sb.dsbd(BEAMS, width="fixed")
    yield "`dsbd`, width fixed, against beam sampling", *_pair(pair, "beam_sampling", fixed, DRAWN)
    yield "`dsbd`, width fixed, against sampling of one sequence", *_pair(pair, "sampling", fixed, DRAWN)
    by_law = sb.dsbd(BEAMS, width="auto")
    yield "`dsbd`, width by the law, against beam sampling", *_pair(pair, "beam_sampling", by_law, DRAWN)
    yield "`beam_search` against beam search", *_pair(pair, "beam_search", sb.beam_search(BEAMS), SEARCHED)
    chain = sb.speculative_sampling(4)
    yield "`speculative_sampling` against assisted decoding", *_pair(pair, "assisted", chain, DRAWN)


def duels_of_int8(pair: sb.Pair) -> Iterator[Duel]:
    for name, method, options in (
        ("dsbd`, width fixed,", sb.dsbd(BEAMS, width="fixed"), DRAWN),
        ("beam_search`", sb.beam_search(BEAMS), SEARCHED),
    ):
        try:
            theirs = ctranslate2(pair, "beam_search", BEAMS, compute_type="int8")
        except MissingPackage as error:
            print(f"| {error} | | | |")
            return
        yield f"`{name} against CTranslate2's beam search in int8", theirs, specbeam(pair, name, method, **options)


def _pair(pair: sb.Pair, mode: str, method: sb.Method, options: dict) -> tuple[Contender, Contender]:
    return transformers(pair, mode, BEAMS, **DRAWN), specbeam(pair, method.name, method, **options)


def _beside(bundled: sb.Pair, target: torch.nn.Module, **how: str) -> sb.Pair:
    return sb.load(target, bundled.draft_model, tokenizer=bundled.tokenizer, **how)


def row(what: str, theirs: SpeedLine, ours: SpeedLine) -> str:
    ratio = ours.ratio
    speeds = f"{theirs.tokens_per_second.median:.1f}, {ours.tokens_per_second.median:.1f}"
    quality = f"{theirs.quality['BLEU']:.1f}, {ours.quality['BLEU']:.1f}"
    return f"| {what} | {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) | {speeds} | {quality} |"


def _demo() -> list[PromptRow]:
    lines = (BUNDLED / "sentences.tsv").read_text(encoding="utf-8").splitlines()
    return [PromptRow(*line.split("\t")[:2]) for line in lines]


if __name__ == "__main__":
    typer.run(main)

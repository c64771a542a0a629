"""The README's figures: the bundled pair on German sentences, by every method.

python examples/figures.py                          the demo's own sentences
python examples/figures.py --data valid.tsv.gz      Tatoeba's held-out pairs (English, then one or more German sentences)
"""

import gzip
import math
import time
from pathlib import Path
from typing import Annotated

import sacrebleu
import typer

import specbeam as sb
from specbeam.models.pair import BUNDLED

SETTINGS = {
    "temperature 1, all tokens": {},
    "temperature 1, top-k 10, top-p 0.9 on the joint law": {"top_k": 10, "top_p": 0.9},
}


def main(
    data: Annotated[Path | None, typer.Option(help="a TSV of pairs; default: the demo's sentences")] = None,
    rows: Annotated[int, typer.Option(help="how many pairs")] = 400,
    beams: int = 4,
    repeats: Annotated[int, typer.Option(help="seeds; figures are means with their standard error")] = 3,
    batch_size: int = 1,
) -> None:
    pairs = read(data)[:rows]
    sources, references = [one for one, _ in pairs], [[english for _, english in pairs]]
    pair = sb.load("bundled")
    print(f"{len(pairs)} sentences, {repeats} seeds, {batch_size} at once; mean ± standard error")
    for name, settings in SETTINGS.items():
        print(f"\n{name}\n")
        table(pair, sources, references, beams, repeats, batch_size, settings)


def table(pair, sources, references, beams, repeats, batch_size, settings) -> None:
    methods = {
        "sampling": sb.sampling(),
        f"beam sampling, {beams} beams": sb.beam_sampling(beams),
        f"DSBD, {beams} beams, 4 draft layers": sb.dsbd(beams, beams + 2, 4, "fixed"),
        f"DSBD, {beams} beams, depth by cost": sb.dsbd(beams, beams + 2, width="fixed"),
        f"DSBD, {beams} beams, dynamic width, 4 layers": sb.dsbd(beams, beams + 2, 4, "dynamic"),
    }
    sb.generate(pair, sources[:8], "dsbd", seed=0, max_new_tokens=16)  # warm up
    found = {name: [] for name in methods}
    for seed in range(repeats):  # interleaved, so that a busy moment of the machine meets every method
        for name, method in methods.items():
            began = time.perf_counter()
            done = sb.generate(pair, sources, method, seed=seed, max_new_tokens=64, batch_size=batch_size, **settings)
            seconds = time.perf_counter() - began
            tokens = sum(len(one.tokens) for one in done)
            widths = [width for one in done for width in one.report.widths]
            found[name].append(
                (
                    sacrebleu.corpus_bleu([one.text for one in done], references).score,
                    sum(one.report.target_passes for one in done) / tokens,
                    tokens / seconds,
                    sum(widths) / len(widths),
                )
            )
    print("| method | BLEU | target passes per token | tokens/s | mean width |\n| --- | --- | --- | --- | --- |")
    for name, runs in found.items():
        print(f"| {name} | " + " | ".join(shown(column) for column in zip(*runs, strict=True)) + " |")


def shown(values: tuple[float, ...]) -> str:
    mean = sum(values) / len(values)
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1) / len(values))
    digits = 1 if mean >= 5 else 2
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def read(data: Path | None) -> list[tuple[str, str]]:
    """(German, English) pairs."""
    if data is None:
        lines = (BUNDLED / "sentences.tsv").read_text(encoding="utf-8").splitlines()
        return [tuple(line.split("\t")) for line in lines]
    with (gzip.open if data.suffix == ".gz" else open)(data, "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    return [(german, english) for english, *germans in rows for german in germans]


if __name__ == "__main__":
    typer.run(main)

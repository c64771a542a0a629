"""The command `specbeam demo`: several methods on German sentences, side by side, with the bundled pair."""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from specbeam.core.records import Generation
from specbeam.doors import render
from specbeam.doors.cli.common import print_json, quiet_load
from specbeam.doors.energy import EnergyMeter
from specbeam.errors import MissingFile
from specbeam.generation import generate, turns_of
from specbeam.models.pair import BUNDLED, Pair
from specbeam.recipes.beams import beam_sampling, dsbd, sampling
from specbeam.recipes.method import Method

SHOWN = 3  # sentences whose translations are printed
LAW: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 10,
    "top_p": 0.9,
}  # options of all methods; they apply to the joint law of the beams


@dataclass(frozen=True)
class DemoLine:
    """The figures of one method, a row of the table."""

    method: str
    bleu: float  # of the sentences, 0 to 100
    words_right: float  # share of the words whose sounds are right
    target_passes_per_token: float
    tokens_per_second: float
    mean_width: float
    joules_per_token: float | None
    law: str


def run(beams: int, seed: int, json: bool) -> int:
    """Run the demo, print texts and a table or JSON, and return the exit code."""
    try:
        import sacrebleu  # noqa: F401
    except ImportError as error:
        raise MissingFile("the demo scores with sacrebleu: pip install sacrebleu") from error
    from specbeam.doors.cli.screen import Screen

    console = Screen(stderr=json)
    console.print("Loading the bundled pair ...")
    pair = quiet_load("bundled", None)
    sentences = _rows("sentences.tsv")
    words = _rows("words.tsv")
    contenders: dict[str, Method] = {
        "sampling": sampling(),
        f"beam sampling {beams}": beam_sampling(beams),
        f"dsbd {beams}, fixed width": dsbd(beams, beams + 2, width="fixed"),
        f"dsbd {beams}, dynamic width": dsbd(beams, beams + 2, width="dynamic"),
    }
    console.print("Warming up; this takes a minute if anything has to be compiled ...")
    for method in contenders.values():
        generate(pair, sentences[0][0], method, seed=seed, max_new_tokens=64, **LAW)
    texts = {}
    lines = []
    for name, method in contenders.items():
        with EnergyMeter() as meter:
            answers, seconds = _translate(pair, method, [source for source, _ in sentences], name, seed, console)
        lines.append(_line(pair, name, method, answers, seconds, meter.joules, sentences, words, seed))
        texts[name] = [answer.text for answer in answers]
    if json:
        for line in lines:
            print_json(dataclasses.asdict(line))
        return 0
    _show(console, sentences, texts, lines)
    _draw(console, pair, sentences[0][0], dsbd(beams, beams + 2, 4, width="fixed", trace=True), seed)
    console.print(
        Text.assemble(
            "\nNext: ",
            ("specbeam generate 'Wo ist mein Hut?'", "bold"),
            ", or give it your own pair: ",
            ("specbeam generate -m TARGET -d DRAFT 'Once upon'", "bold"),
        )
    )
    return 0


def _rows(name: str) -> list[tuple[str, str]]:
    """Read the pairs of prompt and right answer of a bundled file."""
    lines = (BUNDLED / name).read_text(encoding="utf-8").splitlines()
    return [(source, answer) for source, answer in (line.split("\t") for line in lines)]


def _translate(
    pair: Pair, method: Method, sources: list[str], name: str, seed: int, console: Any
) -> tuple[list[Generation], list[float]]:
    """Decode prompts one at a time, as for a single user at a keyboard; return the answers and the seconds of each."""
    from rich.progress import track

    answers = []
    seconds = []
    for source in track(sources, name.ljust(24), console=console, transient=True, disable=not console.is_terminal):
        began = time.perf_counter()
        answer = generate(pair, source, method, seed=seed, max_new_tokens=64, **LAW)[0]
        seconds.append(time.perf_counter() - began)
        answers.append(answer)
    return answers, seconds


def _line(
    pair: Pair, name: str, method: Method, answers: list[Generation], seconds: list[float], joules: float | None,
    sentences: Any, words: Any, seed: int,
) -> DemoLine:  # fmt: skip
    """Compute the figures of a method from its translations, and let it spell the words as sounds."""
    import sacrebleu

    tokens = sum(len(answer.tokens) for answer in answers)
    passes = sum(answer.report.target_passes for answer in answers)
    widths = [width for answer in answers for width in answer.report.widths]
    references = [reference for _, reference in sentences]
    score = sacrebleu.corpus_bleu([answer.text for answer in answers], [references]).score
    word_prompts = ["<sounds> " + " ".join(word) for word, _ in words]
    spoken = generate(pair, word_prompts, method, seed=seed, max_new_tokens=32, **LAW)
    right = sum(answer.text == sounds for answer, (_, sounds) in zip(spoken, words, strict=True))
    return DemoLine(
        method=name,
        bleu=round(score, 1),
        words_right=right / len(words),
        target_passes_per_token=round(passes / tokens, 3),
        tokens_per_second=round(tokens / sum(seconds), 1),
        mean_width=round(sum(widths) / len(widths), 2),
        joules_per_token=None if joules is None else round(joules / tokens, 2),
        law=answers[0].report.law,
    )


def _show(console: Any, sentences: list[tuple[str, str]], texts: dict[str, list[str]], lines: list[DemoLine]) -> None:
    """Print some translations of each method, and the table of figures."""
    from rich.table import Table

    for number in range(SHOWN):
        source, answer = sentences[number]
        console.print(Text.assemble("\n", (source, "bold"), "   ", (f"({answer})", "dim")))
        for name, answers in texts.items():
            console.print(f"  {name:<24} {answers[number]}")
    law = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in LAW.items())
    table = Table(box=None, pad_edge=False, title=f"\n{len(sentences)} German sentences, one at a time; {law}")
    table.add_column("method", no_wrap=True)
    for head in ("BLEU", "words right", "target passes per token", "tokens/s", "mean width", "J/token"):
        table.add_column(head, justify="right")
    for line in lines:
        energy = "-" if line.joules_per_token is None else f"{line.joules_per_token:.2f}"
        table.add_row(
            line.method, f"{line.bleu:.1f}", f"{line.words_right:.0%}", f"{line.target_passes_per_token:.2f}",
            f"{line.tokens_per_second:.0f}", f"{line.mean_width:.1f}", energy,
        )  # fmt: skip
    console.print(table)
    if any(line.joules_per_token is None for line in lines):
        console.print("J/token: this machine has no energy counter that can be read", style="dim")
    for line in lines:
        console.print(f"{line.method}: {line.law}", style="dim")


def _draw(console: Any, pair: Pair, source: str, method: Method, seed: int) -> None:
    """Print the forest of the first turn of a sentence, with a legend."""
    turn = next(iter(turns_of(pair, source, method, seed=seed, **LAW)))
    console.print(Text.assemble("\nThe first turn's forest for ", (source, "bold")))
    for tree in render.as_trees(render.picture(turn, pair.word)):
        console.print(tree)
    legend = [
        Text.assemble((render.MARKS[fate], render.STYLES[fate]), f" {meaning}")
        for fate, meaning in render.MEANINGS.items()
    ]
    console.print(Text("   ").join(legend))

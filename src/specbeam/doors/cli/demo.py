"""The command `specbeam demo`: a comparison of methods on German sentences, with the bundled pair, enlarged and as it is."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.arguments import Record
from specbeam.doors.cli.common import bundled_rows, print_records, quiet_load
from specbeam.doors.cli.demo_grown import WEIGHTS
from specbeam.doors.cli.options import Json, Threads, checked, parameters

if TYPE_CHECKING:
    from specbeam.core.records import Generation
    from specbeam.models.pair import Pair
    from specbeam.recipes.method import Method

SHOWN = 3  # sentences whose translations are printed
# Options of all methods; they apply to the joint law of the beams.
LAW: Mapping[str, Any] = {"temperature": 1.0, "top_k": 10, "top_p": 0.9}


class DemoArguments(Record):
    """Arguments of the command."""

    grow: Annotated[
        str,
        typer.Option(
            help="Number of weights of the enlarged target (100M, 1B, ...); 0: the bundled pair alone.",
            callback=checked(parameters),
        ),
    ] = WEIGHTS
    beams: Annotated[int, typer.Option(min=1, help="Number of beams for beam sampling and DSBD.")] = 4
    seed: Annotated[int, typer.Option(help="The same seed gives the same texts.")] = 0
    threads: Threads = None
    json: Json = False


@dataclass(frozen=True)
class DemoLine:
    """The figures of one method, a row of the table."""

    method: str
    bleu: float | None  # 0 to 100; None without sacrebleu
    words_right: float  # share of the words with correct sounds
    target_passes_per_token: float
    tokens_per_second: float
    mean_width: float
    joules_per_token: float | None
    law: str


@dataclass(frozen=True)
class DemoContender:
    """A method of the table with its answers.

    Attributes:
        name: name in the table.
        answers: translations of the sentences, in order.
        seconds: time of each translation.
        joules: energy of all translations; None without an energy counter.
    """

    name: str
    method: "Method"
    answers: "list[Generation]"
    seconds: list[float]
    joules: float | None


def demo(given: DemoArguments) -> int:
    """Compare one sequence, beams, and beams with drafts: with the bundled target grown to 700 M weights, and as it is."""
    from rich.text import Text

    from specbeam.doors.cli.screen import Screen
    from specbeam.doors.usual import usual_method
    from specbeam.generation import generate
    from specbeam.recipes.beams import beam_sampling, dsbd, sampling

    console = Screen(stderr=given.json)
    if given.grow != "0":
        _demo_grown(given, console)
        console.print(Text("\nThe bundled pair itself, of 8 M weights: a pass costs little more than a draft", "bold"))
    pair = quiet_load("bundled", None)
    sentences = bundled_rows("sentences.tsv")
    words = bundled_rows("words.tsv")
    beams = given.beams
    methods: dict[str, Method] = {
        "sampling": sampling(),
        f"beam sampling {beams}": beam_sampling(beams),
        f"dsbd {beams}, fixed width": usual_method(pair, [f"beams={beams}", f"draft_beams={beams + 2}"]),
        f"dsbd {beams}, dynamic width": dsbd(beams, beams + 2, width="dynamic"),
    }
    console.print("Warming up; this takes a minute if anything has to be compiled ...")
    for method in methods.values():
        generate(pair, sentences[0][0], method, seed=given.seed, max_new_tokens=64, **LAW)
    contenders = [_translate(pair, name, method, sentences, given.seed, console) for name, method in methods.items()]
    lines = [_line(pair, one, sentences, words, given.seed) for one in contenders]
    if given.json:
        print_records(lines)
        return 0
    texts = {one.name: [answer.text for answer in one.answers] for one in contenders}
    _show(console, sentences, texts, lines)
    _draw(console, pair, sentences[0][0], dsbd(beams, beams + 2, 4, width="fixed", trace=True), given.seed)
    console.print(
        Text.assemble(
            "\nNext: ",
            ("specbeam generate 'Wo ist mein Hut?'", "bold"),
            ", or give it your own pair: ",
            ("specbeam generate -m TARGET -d DRAFT 'Once upon'", "bold"),
        )
    )
    return 0


def _demo_grown(given: DemoArguments, console: Any) -> None:
    """Compare beams with and without drafts for the enlarged target."""
    from rich.text import Text

    from specbeam.doors.cli.demo_grown import grown_target, measure, show_grown, ways_of

    weights = parameters(given.grow)
    console.print(Text(f"The bundled target, grown to about {given.grow} weights in bfloat16", "bold"))
    console.print(
        "The added weights change its outputs by rounding alone: it writes what the small model writes, at the price of a "
        "large one.\n"
        "Growing it in a temporary folder ..."
    )
    with grown_target(weights) as pair:
        size = pair.target_model.num_parameters()
        ways = ways_of(pair, given.beams, given.seed, dict(LAW))
        measure(ways, [sentence for sentence, _ in bundled_rows("sentences.tsv")], console.print)
    lines = [way.line(size) for way in ways]
    if given.json:
        print_records(lines)
    show_grown(console, lines, ways[-1].beams == ways[-2].beams)


def _translate(
    pair: "Pair", name: str, method: "Method", sentences: list[tuple[str, str]], seed: int, console: Any
) -> DemoContender:
    """Decode sentences one at a time, as for one user of an interactive program."""
    from rich.progress import track

    from specbeam.doors.energy import EnergyMeter
    from specbeam.generation import generate

    answers = []
    seconds = []
    bar = track(sentences, name.ljust(24), console=console, transient=True, disable=not console.is_terminal)
    with EnergyMeter() as meter:
        for source, _ in bar:
            began = time.perf_counter()
            answer = generate(pair, source, method, seed=seed, max_new_tokens=64, **LAW)[0]
            seconds.append(time.perf_counter() - began)
            answers.append(answer)
    return DemoContender(name, method, answers, seconds, meter.joules)


def _line(
    pair: "Pair", one: DemoContender, sentences: list[tuple[str, str]], words: list[tuple[str, str]], seed: int
) -> DemoLine:
    """Compute the figures of a method from its translations, and from its conversion of words to sounds."""
    from specbeam.generation import generate
    from specbeam.lab.evaluate.task import bleu, has_bleu

    tokens = sum(len(answer.tokens) for answer in one.answers)
    passes = sum(answer.report.target_passes for answer in one.answers)
    widths = [width for answer in one.answers for width in answer.report.widths]
    references = [reference for _, reference in sentences]
    score = round(bleu([answer.text for answer in one.answers], references), 1) if has_bleu() else None
    word_prompts = ["<sounds> " + " ".join(word) for word, _ in words]
    spoken = generate(pair, word_prompts, one.method, seed=seed, max_new_tokens=32, **LAW)
    right = sum(answer.text == sounds for answer, (_, sounds) in zip(spoken, words, strict=True))
    return DemoLine(
        method=one.name,
        bleu=score,
        words_right=right / len(words),
        target_passes_per_token=round(passes / tokens, 3),
        tokens_per_second=round(tokens / sum(one.seconds), 1),
        mean_width=round(sum(widths) / len(widths), 2),
        joules_per_token=None if one.joules is None else round(one.joules / tokens, 2),
        law=one.answers[0].report.law,
    )


def _show(console: Any, sentences: list[tuple[str, str]], texts: dict[str, list[str]], lines: list[DemoLine]) -> None:
    """Print some translations of each method, and the table of figures."""
    from rich.table import Table
    from rich.text import Text

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
        score = "-" if line.bleu is None else f"{line.bleu:.1f}"
        energy = "-" if line.joules_per_token is None else f"{line.joules_per_token:.2f}"
        table.add_row(
            line.method, score, f"{line.words_right:.0%}", f"{line.target_passes_per_token:.2f}",
            f"{line.tokens_per_second:.0f}", f"{line.mean_width:.1f}", energy,
        )  # fmt: skip
    console.print(table)
    if any(line.bleu is None for line in lines):
        console.print("BLEU: sacrebleu is missing: pip install 'specbeam[bench]'", style="dim")
    if any(line.joules_per_token is None for line in lines):
        console.print("J/token: this machine has no readable energy counter", style="dim")
    for line in lines:
        console.print(f"{line.method}: {line.law}", style="dim")


def _draw(console: Any, pair: "Pair", source: str, method: "Method", seed: int) -> None:
    """Print the forest of the first turn of a sentence, with a legend."""
    from rich.text import Text

    from specbeam.doors import render
    from specbeam.generation import turns_of

    turn = next(iter(turns_of(pair, source, method, seed=seed, **LAW)))
    console.print(Text.assemble("\nThe first turn's forest for ", (source, "bold")))
    for tree in render.as_trees(render.picture(turn, pair.word)):
        console.print(tree)
    legend = [
        Text.assemble((render.MARKS[fate], render.STYLES[fate]), f" {meaning}")
        for fate, meaning in render.MEANINGS.items()
    ]
    console.print(Text("   ").join(legend))

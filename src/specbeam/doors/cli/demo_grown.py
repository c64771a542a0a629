"""The first part of the demo: the bundled target, enlarged until a pass costs as much as one of a usual model."""

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam.doors.cli.common import quiet_load

if TYPE_CHECKING:
    from specbeam.models.pair import Pair

WEIGHTS = "700M"  # size of the enlarged target, about
TIMED_S = 45  # seconds for the measurement; at least `LEAST` sentences are measured
LEAST = 3
MOST = 8
NEW_TOKENS = 64


@dataclass(frozen=True)
class GrownLine:
    """The figures of one way to decode with the enlarged target, a row of the table."""

    way: str
    library: str
    target_weights: int
    sentences: int
    tokens_per_second: float
    tokens_per_pass: float | None  # passes of the target; None if the library does not report them


@dataclass
class Way:
    """A way to decode, with its measurements.

    Attributes:
        run: returns the beams of a sentence, best first, and the number of passes, None if unknown.
        beams: the beams of each sentence.
    """

    name: str
    library: str
    run: Callable[[str], tuple[list[list[int]], int | None]]
    beams: list[list[list[int]]] = field(default_factory=list)
    passes: list[int | None] = field(default_factory=list)
    seconds: float = 0.0

    def measure(self, sentence: str) -> None:
        """Decode a sentence, and add its figures."""
        began = time.perf_counter()
        beams, passes = self.run(sentence)
        self.seconds += time.perf_counter() - began
        self.beams.append(beams)
        self.passes.append(passes)

    def line(self, weights: int) -> GrownLine:
        """Return the figures."""
        tokens = sum(len(beams[0]) for beams in self.beams)
        known = [count for count in self.passes if count is not None]
        per_pass = round(tokens / sum(known), 2) if known else None
        speed = round(tokens / self.seconds, 2)
        return GrownLine(self.name, self.library, weights, len(self.beams), speed, per_pass)


@contextmanager
def grown_target(weights: int) -> "Iterator[Pair]":
    """Yield the bundled pair with its target enlarged to about `weights` weights in bfloat16, from temporary files."""
    import torch

    from specbeam.lab.bench.widen_model import grown
    from specbeam.models.checkpoints.folders import BUNDLED

    pair = quiet_load("bundled", None)
    small: Any = copy.deepcopy(pair.target_model).to(torch.bfloat16)
    large = grown(small, weights)
    tokenizer: Any = pair.tokenizer
    with tempfile.TemporaryDirectory(prefix="specbeam-demo-") as folder:
        large.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del large, pair
        gc.collect()
        yield quiet_load(folder, str(Path(BUNDLED) / "draft"))


def ways_of(pair: "Pair", beams: int, seed: int, law: dict[str, Any]) -> list[Way]:
    """Return the ways to decode that the demo compares: one sequence, beams, and beams with drafts."""
    from specbeam.generation import generate
    from specbeam.lab.bench.baselines import transformers
    from specbeam.recipes.beams import beam_sampling, dsbd, sampling

    def own(method: Any) -> Callable[[str], tuple[list[list[int]], int | None]]:
        def run(sentence: str) -> tuple[list[list[int]], int | None]:
            answer = generate(pair, sentence, method, seed=seed, max_new_tokens=NEW_TOKENS, **law)[0]
            return [beam.tokens for beam in answer.beams], answer.report.target_passes

        return run

    def theirs(mode: str) -> Callable[[str], tuple[list[list[int]], int | None]]:
        contender = transformers(pair, mode, beams, max_new_tokens=NEW_TOKENS, **law)
        return lambda sentence: (contender.run([sentence], seed).tokens, None)

    return [
        Way("one sequence", "transformers", theirs("sampling")),
        Way("one sequence", "specbeam", own(sampling())),
        Way(f"{beams} beams", "transformers", theirs("beam_sampling")),
        Way(f"{beams} beams", "specbeam", own(beam_sampling(beams))),
        Way(f"{beams} beams with drafts", "specbeam", own(dsbd(beams))),
    ]


def measure(ways: list[Way], sentences: list[str], tell: Callable[[str], None]) -> None:
    """Decode sentences in all ways, one after the other, so that a busy moment of the machine affects all of them.

    Args:
        tell: prints what is done next.
    """
    for number, way in enumerate(ways, 1):
        tell(f"Warming up {number} of {len(ways)}: {way.name}, {way.library} ...")
        way.run(sentences[0])  # compiles, and reads the weights from the disk
    tell(f"Measuring them in turn, for about {TIMED_S} seconds ...")
    began = time.perf_counter()
    for number, sentence in enumerate(sentences[:MOST]):
        if number >= LEAST and time.perf_counter() - began > TIMED_S:
            return
        for way in ways:
            way.measure(sentence)


def show_grown(console: Any, lines: list[GrownLine], has_same_beams: bool) -> None:
    """Print the table of the enlarged target, and its meaning in a sentence."""
    from rich.table import Table

    _, one, theirs, plain, drafted = (line.tokens_per_second for line in lines)
    size = f"{lines[0].target_weights / 1e6:.0f} M weights"
    title = f"\nTokens per second with {size}; {lines[0].sentences} sentences, one at a time"
    table = Table(box=None, pad_edge=False, title=title)
    table.add_column("", no_wrap=True)
    for head in ("transformers", "specbeam", "target passes per token"):
        table.add_column(head, justify="right")
    for way in dict.fromkeys(line.way for line in lines):
        found = {line.library: line for line in lines if line.way == way}
        other = found.get("transformers")
        own = found["specbeam"]
        passes = "-" if own.tokens_per_pass is None else f"{1 / own.tokens_per_pass:.2f}"
        other_speed = "-" if other is None else f"{other.tokens_per_second:.1f}"
        table.add_row(way, other_speed, f"{own.tokens_per_second:.1f}", passes)
    console.print(table)
    times = {"as one sequence": drafted / one, "as beams in transformers": drafted / theirs}
    others = ", ".join(f"{ratio:.1f} times as fast {name}" for name, ratio in times.items())
    same = "the same beams" if has_same_beams else "NOT the same beams; please report this"
    console.print(f"{lines[-1].way}: {drafted / plain:.1f} times as fast as without, with {same}; {others}.")

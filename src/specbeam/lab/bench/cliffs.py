"""A table of speed by method, option and batch size, compared with transformers, to find where it falls off."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from specbeam import Method, Pair
from specbeam.doors import Prompt, method_from, special_tokens, warper_names
from specbeam.errors import MissingPackage
from specbeam.lab.bench.baselines import transformers
from specbeam.lab.bench.outcome import Contender, Outcome, specbeam
from specbeam.lab.bench.speed import Spread, in_batches, interleaved
from specbeam.lab.words import CLIFF_METHODS, CLIFF_OPTIONS

BEAMS = 4  # number of beams in transformers' modes; the default of our recipes
RANDOM_TOKENS = 24  # length of a random prompt
# A stop string that hardly ever occurs, so that texts keep their length. Every tokenizer has its letters.
RARE_STOP = "qqq"
NO_DIGITS = "[^0-9]*"  # a regular expression that most texts match anyway
CLIFF_SHARE = 0.5  # cells below this share of their method's best speed are cliffs


def _method(text: str) -> Method:
    """Return the method of a row of the table."""
    name, *settings = text.split()
    return method_from(name, settings)


class DiscardingStreamer:
    """A streamer for transformers' `generate` that discards all tokens."""

    def put(self, tokens: object) -> None:
        """Discard the tokens."""

    def end(self) -> None:
        """Do nothing at the end of the text."""


# column of the table -> its arguments of `generate`
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_p": {"top_p": 0.9, "temperature": 0.7},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "min_new_tokens": {},  # half of the maximum
    "stop_strings": {"stop_strings": [RARE_STOP]},
    "grammar": {"regex": NO_DIGITS},
    "stream": {"streamer": DiscardingStreamer()},
    "audit": {"audit": True},
}
SLOWER = "slower"
CLIFF = "cliff"


@dataclass(frozen=True)
class SpeedCell:
    """One method with one option, one kind of prompts and one batch size.

    Attributes:
        replaces: the mode of transformers that the method is compared with.
        ours, theirs: tokens per second in the rounds, of specbeam and of transformers; None if it cannot be measured.
        ratio: `ours` divided by `theirs`, taken within each round; None if one of them is missing.
        why_not_ours, why_not_theirs: a short reason why the figure is missing, "" if it is there.
        message: the full error messages of the contenders that failed, "" if none failed.
        of_best: median of `ours` as a share of the method's best option with the same kind of prompts and batch size.
        flags: "slower" if slower than transformers; "cliff" if below half of the method's best.
    """

    method: str
    option: str
    batch_size: int
    kind: str
    replaces: str
    ours: Spread | None = None
    theirs: Spread | None = None
    ratio: Spread | None = None
    why_not_ours: str = ""
    why_not_theirs: str = ""
    message: str = ""
    of_best: float | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class CliffPlan:
    """The contents of the table, and the amount of measuring.

    Attributes:
        rows: minimum number of prompts in a round. It is rounded up to full batches of `batch_size` prompts.
        repeats: number of rounds that count. Before them each contender answers one batch as warm-up.
    """

    methods: Sequence[str] = tuple(CLIFF_METHODS)
    options: Sequence[str] = CLIFF_OPTIONS
    batch_sizes: Sequence[int] = (1, 16)
    kinds: Sequence[str] = ("trained",)
    rows: int = 2
    repeats: int = 3
    max_new_tokens: int = 24

    @property
    def tables(self) -> list[tuple[str, int]]:
        """The pairs of a kind of prompts and a batch size. Each pair is measured in one interleaved run."""
        return [(kind, size) for kind in self.kinds for size in self.batch_sizes]

    def runs(self, batch_size: int) -> int:
        """Return the number of batches that each contender answers in one table, warm-up included."""
        return 1 + self.repeats * -(-self.rows // batch_size)


@dataclass
class Attempt:
    """A contender that may fail. After its first error it returns empty outcomes, and the other contenders go on.

    Attributes:
        make: makes the contender; called once, at the first run.
        on_progress: called after every run.
        failure: the exception that `make` or a run raised, None if there was none.
        contender: what `make` returned, None before the first run.
    """

    make: Callable[[], Contender]
    on_progress: Callable[[], None] | None = None
    failure: Exception | None = None
    contender: Contender | None = field(default=None, repr=False)

    def run(self, prompts: Sequence[Prompt], seed: int) -> Outcome:
        """Return the contender's outcome, or an outcome without answers if this run or an earlier one failed."""
        outcome = Outcome([])
        if self.failure is None:
            try:
                outcome = self._get_contender().run(prompts, seed)
            except Exception as error:  # another library may raise anything, and the table must continue
                self.failure = error
        if self.on_progress is not None:
            self.on_progress()
        return outcome

    def _get_contender(self) -> Contender:
        if self.contender is None:
            self.contender = self.make()
        return self.contender

    @property
    def why_not(self) -> str:
        """A short reason for the failure, "" if there was none."""
        if self.failure is None:
            return ""
        return "not installed" if isinstance(self.failure, MissingPackage) else type(self.failure).__name__


Key = tuple[str, str]  # (method, option), or (mode of transformers, option)


def replaced_mode(method: str, batch_size: int) -> str:
    """Return the mode of transformers that a method replaces.

    Assisted decoding takes a single prompt, so in larger batches plain sampling is measured instead.
    """
    mode = CLIFF_METHODS[method]
    return "sampling" if mode == "assisted" and batch_size > 1 else mode


def why_not_ours(method: str, option: str, batch_size: int) -> str:
    """Return a short reason why specbeam cannot run a method with an option at this batch size, "" if it can."""
    if _method(method).greedy and option in warper_names():
        return "no draws"
    if option == "stream" and batch_size > 1:
        return "one prompt"
    return ""


def why_not_theirs(mode: str, option: str, batch_size: int) -> str:
    """Return a short reason why a mode of transformers cannot run with an option at this batch size, "" if it can."""
    if option in ("grammar", "audit"):
        return f"no {option}"
    if option == "stream" and batch_size > 1:
        return "one prompt"
    if option == "stream" and mode.startswith("beam"):
        return "no beams"
    if option == "stop_strings" and mode == "assisted":
        return "no stops"  # they need the tokenizer, which transformers does not pass to its assistant
    if mode in ("greedy", "beam_search") and option in warper_names():
        return "no draws"
    return ""


def settings_of(option: str, max_new_tokens: int) -> dict[str, Any]:
    """Return the arguments of `generate` of an option of the table."""
    further = {"min_new_tokens": max(max_new_tokens // 2, 1)} if option == "min_new_tokens" else _ARGUMENTS[option]
    return {"max_new_tokens": max_new_tokens, **further}


def random_prompts(pair: Pair, count: int) -> list[Prompt]:
    """Return `count` prompts of `RANDOM_TOKENS` tokens, drawn uniformly from the vocabulary without its special tokens.

    Every call returns the same prompts.
    """
    special = {*pair.eos} if pair.tokenizer is None else {*pair.eos, *special_tokens(pair.tokenizer)}
    ordinary = [token for token in range(pair.target.vocab) if token not in special]
    dice = np.random.default_rng(0)
    return [dice.choice(ordinary, RANDOM_TOKENS).tolist() for _ in range(count)]


def prompts_of(pair: Pair, kind: str, sentences: Sequence[str], count: int) -> list[Prompt]:
    """Return `count` prompts of a kind, "random" or "trained". Sentences repeat if there are fewer than `count`."""
    if kind == "random":
        return random_prompts(pair, count)
    return [sentences[place % len(sentences)] for place in range(count)]


def cliffs(
    pair: Pair, plan: CliffPlan, sentences: Sequence[str], on_progress: Callable[[], None] | None = None
) -> Iterator[list[SpeedCell]]:
    """Yield the cells of each table as soon as it is measured.

    Args:
        sentences: the prompts of the kind "trained".
        on_progress: called after every batch that a contender has answered.
    """
    for kind, size in plan.tables:
        count = size * -(-plan.rows // size)
        prompts = prompts_of(pair, kind, sentences, count)
        yield flagged(_table(pair, plan, kind, size, prompts, on_progress))


def contenders_of(plan: CliffPlan, batch_size: int) -> tuple[list[Key], list[Key]]:
    """Return the contenders of one table: ours as (method, option), theirs as (mode, option).

    Combinations that cannot run are left out.
    """
    ours: list[Key] = []
    theirs: list[Key] = []
    for option in plan.options:
        for method in plan.methods:
            if why_not_ours(method, option, batch_size):
                continue
            ours.append((method, option))
            mode = replaced_mode(method, batch_size)
            if not why_not_theirs(mode, option, batch_size) and (mode, option) not in theirs:
                theirs.append((mode, option))
    return ours, theirs


def _table(
    pair: Pair,
    plan: CliffPlan,
    kind: str,
    size: int,
    prompts: Sequence[Prompt],
    on_progress: Callable[[], None] | None,
) -> list[SpeedCell]:
    """Measure one kind of prompts with one batch size in one interleaved run, and return the cells without flags."""
    ours, theirs = contenders_of(plan, size)
    attempts: dict[tuple[str, Key], Attempt] = {}
    for option in plan.options:  # contenders with the same option run one after the other, for ratios within a moment
        settings = settings_of(option, plan.max_new_tokens)
        for key in [key for key in theirs if key[1] == option]:
            make = partial(transformers, pair, key[0], BEAMS, **settings)
            attempts["theirs", key] = Attempt(make, on_progress)
        for key in [key for key in ours if key[1] == option]:
            make = partial(specbeam, pair, key[0], _method(key[0]), **settings)
            attempts["ours", key] = Attempt(make, on_progress)
    batches = in_batches(len(prompts), size)
    for attempt in attempts.values():  # the first use compiles
        attempt.run([prompts[place] for place in batches[0]], 0)
    running = [Contender(" ".join(key), attempt.run) for (_, key), attempt in attempts.items()]
    measurements = interleaved(running, prompts, batches, plan.repeats)
    rates = {key: measured.rates for key, measured in zip(attempts, measurements, strict=True)}
    cells = []
    for method in plan.methods:
        for option in plan.options:
            cell = SpeedCell(method, option, size, kind, replaced_mode(method, size))
            cells.append(_with_results(cell, attempts, rates))
    return cells


def _with_results(
    cell: SpeedCell, attempts: dict[tuple[str, Key], Attempt], rates: dict[tuple[str, Key], list[float]]
) -> SpeedCell:
    """Return the cell with its figures, or with the reasons for missing ones."""
    our_key = ("ours", (cell.method, cell.option))
    their_key = ("theirs", (cell.replaces, cell.option))
    us = attempts.get(our_key)
    them = attempts.get(their_key)
    why_ours = why_not_ours(cell.method, cell.option, cell.batch_size) if us is None else us.why_not
    why_theirs = why_not_theirs(cell.replaces, cell.option, cell.batch_size) if them is None else them.why_not
    failures = [side.failure for side in (us, them) if side is not None and side.failure is not None]
    messages = [f"{type(error).__name__}: {error}" for error in failures]
    explained = replace(cell, why_not_ours=why_ours, why_not_theirs=why_theirs, message="; ".join(messages))
    our_rates = [] if why_ours else rates[our_key]
    their_rates = [] if why_theirs else rates[their_key]
    return with_rates(explained, our_rates, their_rates)


def with_rates(cell: SpeedCell, ours: Sequence[float], theirs: Sequence[float]) -> SpeedCell:
    """Return the cell with its speeds and their ratio.

    Args:
        ours, theirs: tokens per second in each round; empty if it cannot be measured.
    """
    ratio = None
    if ours and theirs and min(theirs) > 0:
        ratio = Spread.of([our_rate / their_rate for our_rate, their_rate in zip(ours, theirs, strict=True)])
    return replace(
        cell,
        ours=Spread.of(ours) if ours else None,
        theirs=Spread.of(theirs) if theirs else None,
        ratio=ratio,
    )


def flagged(cells: Sequence[SpeedCell]) -> list[SpeedCell]:
    """Return the cells with their flags, and with their share of the best speed.

    The best speed is taken over all options with the same method, kind of prompts and batch size.
    """
    best: dict[tuple[str, str, int], float] = {}
    for cell in cells:
        if cell.ours is not None:
            row = (cell.method, cell.kind, cell.batch_size)
            best[row] = max(best.get(row, 0.0), cell.ours.median)
    return [_flagged(cell, best.get((cell.method, cell.kind, cell.batch_size), 0.0)) for cell in cells]


def _flagged(cell: SpeedCell, best: float) -> SpeedCell:
    if cell.ours is None:
        return replace(cell, of_best=None, flags=())
    flags = []
    if cell.ratio is not None and cell.ratio.median < 1:
        flags.append(SLOWER)
    if cell.ours.median < CLIFF_SHARE * best:
        flags.append(CLIFF)
    return replace(cell, of_best=cell.ours.median / best if best > 0 else None, flags=tuple(flags))

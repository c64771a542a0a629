"""Where speed falls off: every method under every option, so many prompts at once, beside transformers doing the same."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from specbeam.bench.baselines import transformers
from specbeam.bench.outcome import Contender, Outcome, specbeam
from specbeam.bench.speed import Spread, in_batches, interleaved
from specbeam.errors import MissingPackage
from specbeam.generation import Prompt
from specbeam.pair import Pair
from specbeam.recipes.beams import beam_sampling, dsbd, greedy, sampling
from specbeam.recipes.method import Method
from specbeam.recipes.search import beam_search, speculative_beam_search
from specbeam.recipes.sequence import speculative_sampling

# name -> (recipe, the mode of transformers that it replaces)
METHODS: dict[str, tuple[Callable[[], Method], str]] = {
    "sampling": (sampling, "sampling"),
    "beam_sampling": (beam_sampling, "beam_sampling"),
    "dsbd": (dsbd, "beam_sampling"),
    "dsbd width=fixed": (partial(dsbd, width="fixed"), "beam_sampling"),
    "beam_search": (beam_search, "beam_search"),
    "speculative_beam_search": (speculative_beam_search, "beam_search"),
    "speculative_sampling": (speculative_sampling, "assisted"),
    "greedy": (greedy, "greedy"),
}
OPTIONS = (
    "none", "top_p", "min_p", "repetition_penalty", "min_new_tokens", "stop_strings", "grammar", "stream", "audit"
)  # fmt: skip
KINDS = ("trained", "random")
BEAMS = 4  # of transformers' methods with beams, as the recipes have
RANDOM_TOKENS = 24  # of a random prompt
RARE = "qqq"  # a stop string that hardly comes, so that texts are as long as without it, of what every tokenizer has
NO_DIGITS = "[^0-9]*"  # a regular expression that leaves texts much as they are
STEEP = 0.5  # a cell below this share of its method's best is a cliff
SLOWER = "slower"
CLIFF = "cliff"


@dataclass(frozen=True)
class SpeedCell:
    """One method under one option, with so many prompts of one kind at once.

    Attributes:
        ours, theirs: tokens per second by round; None where that cannot be done.
        ratio: ours to theirs, taken within each round; None where one of them is missing.
        why_not_ours, why_not_theirs: a word on what is missing, "" where nothing is.
        message: what a contender said that broke, in full; "" where none did.
        of_best: median of ours, as a share of the method's best option with these prompts and this batch size.
        flags: "slower" than transformers, and "cliff": below half of the method's best.
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
    """What is measured, and how long.

    Attributes:
        rows: prompts of a round at least; batches are always full, so that 64 at once are 64.
        repeats: rounds that count; one more goes ahead.
    """

    methods: Sequence[str] = tuple(METHODS)
    options: Sequence[str] = OPTIONS
    batch_sizes: Sequence[int] = (1, 16)
    kinds: Sequence[str] = ("trained",)
    rows: int = 2
    repeats: int = 3
    max_new_tokens: int = 24

    @property
    def tables(self) -> list[tuple[str, int]]:
        """Each kind of prompts with each batch size: what is measured in one interleaved run."""
        return [(kind, size) for kind in self.kinds for size in self.batch_sizes]

    def runs(self, batch_size: int) -> int:
        """How often a contender is asked in one table, warm-up included."""
        return 1 + self.repeats * -(-self.rows // batch_size)


class Unread:
    """A streamer of transformers that throws away what it gets."""

    def put(self, tokens: object) -> None:
        """Take tokens."""

    def end(self) -> None:
        """Hear that there are no more."""


@dataclass
class Attempt:
    """A contender that may break: then it answers nothing any more, and the others go on.

    Attributes:
        make: makes the contender; called once, at the first run.
        told: hears of every run.
        failure: what was raised; None as long as nothing was.
    """

    make: Callable[[], Contender]
    told: Callable[[], None] | None = None
    failure: Exception | None = None
    made: Contender | None = field(default=None, repr=False)

    def run(self, prompts: Sequence[Prompt], seed: int) -> Outcome:
        outcome = Outcome([])
        if self.failure is None:
            try:
                outcome = self._made().run(prompts, seed)
            except Exception as error:  # whatever a foreign library raises, the table has to go on
                self.failure = error
        if self.told is not None:
            self.told()
        return outcome

    def _made(self) -> Contender:
        if self.made is None:
            self.made = self.make()
        return self.made

    @property
    def why_not(self) -> str:
        """A word on what was raised."""
        if self.failure is None:
            return ""
        return "not installed" if isinstance(self.failure, MissingPackage) else type(self.failure).__name__


Key = tuple[str, str]  # (method, option), or (mode of transformers, option)


def replaced(method: str, batch_size: int) -> str:
    """The mode of transformers that a method replaces. Assisted decoding takes one prompt; several are sampled plainly."""
    mode = METHODS[method][1]
    return "sampling" if mode == "assisted" and batch_size > 1 else mode


def why_not_ours(method: str, option: str, batch_size: int) -> str:
    """Why there is no such cell; "" where there is one."""
    if METHODS[method][0]().greedy and option in ("top_p", "min_p"):
        return "no draws"
    if option == "stream" and batch_size > 1:
        return "one prompt"
    return ""


def why_not_theirs(mode: str, option: str, batch_size: int) -> str:
    """Why transformers cannot do the same; "" where it can."""
    if option in ("grammar", "audit"):
        return f"no {option}"
    if option == "stream" and batch_size > 1:
        return "one prompt"
    if option == "stream" and mode.startswith("beam"):
        return "no beams"
    if option == "stop_strings" and mode == "assisted":
        return "no stops"  # its assistant is not given the tokenizer that they need
    if mode in ("greedy", "beam_search") and option in ("top_p", "min_p"):
        return "no draws"
    return ""


def settings_of(option: str, max_new_tokens: int) -> dict[str, Any]:
    """The arguments of `generate` that an option stands for."""
    known: dict[str, dict[str, Any]] = {
        "none": {},
        "top_p": {"top_p": 0.9, "temperature": 0.7},
        "min_p": {"min_p": 0.1},
        "repetition_penalty": {"repetition_penalty": 1.2},
        "min_new_tokens": {"min_new_tokens": max(max_new_tokens // 2, 1)},
        "stop_strings": {"stop_strings": [RARE]},
        "grammar": {"regex": NO_DIGITS},
        "stream": {"streamer": Unread()},
        "audit": {"audit": True},
    }
    return {"max_new_tokens": max_new_tokens, **known[option]}


def random_prompts(pair: Pair, count: int) -> list[Prompt]:
    """Prompts of tokens drawn evenly from the vocabulary, without the special ones; the same ones every time."""
    words: Any = pair.tokenizer
    special = set(pair.eos) if words is None else {*pair.eos, *words.all_special_ids}
    ordinary = [token for token in range(pair.target.vocab) if token not in special]
    dice = np.random.default_rng(0)
    return [dice.choice(ordinary, RANDOM_TOKENS).tolist() for _ in range(count)]


def prompts_of(pair: Pair, kind: str, sentences: Sequence[str], count: int) -> list[Prompt]:
    """So many prompts of a kind; sentences come again where there are not enough."""
    if kind == "random":
        return random_prompts(pair, count)
    return [sentences[place % len(sentences)] for place in range(count)]


def cliffs(
    pair: Pair, plan: CliffPlan, sentences: Sequence[str], told: Callable[[], None] | None = None
) -> Iterator[list[SpeedCell]]:
    """Yield the cells of each table as soon as it is measured.

    Args:
        sentences: the prompts of the kind "trained".
        told: hears of every run of every contender.
    """
    for kind, size in plan.tables:
        count = size * -(-plan.rows // size)
        prompts = prompts_of(pair, kind, sentences, count)
        yield flagged(_table(pair, plan, kind, size, prompts, told))


def contenders_of(plan: CliffPlan, batch_size: int) -> tuple[list[Key], list[Key]]:
    """Of one table: ours as (method, option), theirs as (mode, option), without those that cannot be."""
    ours: list[Key] = []
    theirs: list[Key] = []
    for option in plan.options:
        for method in plan.methods:
            if why_not_ours(method, option, batch_size):
                continue
            ours.append((method, option))
            mode = replaced(method, batch_size)
            if not why_not_theirs(mode, option, batch_size) and (mode, option) not in theirs:
                theirs.append((mode, option))
    return ours, theirs


def _table(
    pair: Pair,
    plan: CliffPlan,
    kind: str,
    size: int,
    prompts: Sequence[Prompt],
    told: Callable[[], None] | None,
) -> list[SpeedCell]:
    """The cells of one kind of prompts and one batch size, from one interleaved run."""
    ours, theirs = contenders_of(plan, size)
    attempts: dict[tuple[str, Key], Attempt] = {}
    for option in plan.options:  # those with one option stand side by side, so that a ratio is of neighbours
        settings = settings_of(option, plan.max_new_tokens)
        for key in [one for one in theirs if one[1] == option]:
            attempts["theirs", key] = Attempt(partial(transformers, pair, key[0], BEAMS, **settings), told)
        for key in [one for one in ours if one[1] == option]:
            recipe = METHODS[key[0]][0]
            attempts["ours", key] = Attempt(partial(specbeam, pair, key[0], recipe(), **settings), told)
    batches = in_batches(len(prompts), size)
    for attempt in attempts.values():  # the first use compiles
        attempt.run([prompts[place] for place in batches[0]], 0)
    running = [Contender(" ".join(key), attempt.run) for (_, key), attempt in attempts.items()]
    measured = interleaved(running, prompts, batches, plan.repeats)
    rates = {key: one.rates for key, one in zip(attempts, measured, strict=True)}
    cells = []
    for method in plan.methods:
        for option in plan.options:
            cell = SpeedCell(method, option, size, kind, replaced(method, size))
            cells.append(_filled(cell, attempts, rates))
    return cells


def _filled(
    cell: SpeedCell, attempts: dict[tuple[str, Key], Attempt], rates: dict[tuple[str, Key], list[float]]
) -> SpeedCell:
    """A cell with its figures, or with why there are none."""
    our_key = ("ours", (cell.method, cell.option))
    their_key = ("theirs", (cell.replaces, cell.option))
    us = attempts.get(our_key)
    them = attempts.get(their_key)
    why_ours = why_not_ours(cell.method, cell.option, cell.batch_size) if us is None else us.why_not
    why_theirs = why_not_theirs(cell.replaces, cell.option, cell.batch_size) if them is None else them.why_not
    failures = [one.failure for one in (us, them) if one is not None and one.failure is not None]
    return with_rates(
        replace(
            cell,
            why_not_ours=why_ours,
            why_not_theirs=why_theirs,
            message="; ".join(f"{type(one).__name__}: {one}" for one in failures),
        ),
        [] if why_ours else rates[our_key],
        [] if why_theirs else rates[their_key],
    )


def with_rates(cell: SpeedCell, ours: Sequence[float], theirs: Sequence[float]) -> SpeedCell:
    """A cell with tokens per second of each round; none where that cannot be done."""
    ratio = None
    if ours and theirs and min(theirs) > 0:
        ratio = Spread.of([mine / other for mine, other in zip(ours, theirs, strict=True)])
    return replace(
        cell,
        ours=Spread.of(ours) if ours else None,
        theirs=Spread.of(theirs) if theirs else None,
        ratio=ratio,
    )


def flagged(cells: Sequence[SpeedCell]) -> list[SpeedCell]:
    """The cells with their flags and their share of the best option of the same method, kind and batch size."""
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
    if cell.ours.median < STEEP * best:
        flags.append(CLIFF)
    return replace(cell, of_best=cell.ours.median / best if best > 0 else None, flags=tuple(flags))

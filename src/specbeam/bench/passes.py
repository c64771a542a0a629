"""What a pass of the target costs, by its rows and by the tokens in the cache, and what a step of beams costs beside
transformers, which keeps a copy of the prompt per beam.

In every round all lengths and sizes have their turn, so that a busy moment of the machine meets all of them.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TypeVar

from specbeam.bench.cost_fits import Fit, knee_fit, straight_fit
from specbeam.bench.speed import Spread
from specbeam.bench.transformers_cache import Copies, token_bytes
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.tuning.costs import NODES
from specbeam.tuning.stored_prompt import Context, TurnCost

LENGTHS = (128, 512, 1024, 2048, 4096)
BEAMS = (1, 4, 16, 64)
OURS = "specbeam"
THEIRS = "transformers"
_T = TypeVar("_T")


@dataclass(frozen=True)
class PassPlan:
    """What is measured. Sizes ascend."""

    lengths: tuple[int, ...] = LENGTHS  # tokens in the cache
    rows: tuple[int, ...] = NODES
    beams: tuple[int, ...] = BEAMS
    repeats: int = 7
    copies_gb: float = 4.0  # copies of the cache that take more are not made

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of all passes of ours."""
        return tuple(sorted({*self.rows, *self.beams}))

    @property
    def steps(self) -> int:
        """How often `passes` tells of itself, at most."""
        each = (self.repeats + 1) * len(self.sizes) + self.repeats * len(self.beams)
        return len(self.lengths) * (1 + each)


@dataclass(frozen=True)
class PassCell:
    """One size at one length. Milliseconds: median, smallest and largest of the rounds; None where nothing was measured."""

    engine: str  # OURS or THEIRS
    length: int  # tokens in the cache before the pass
    rows: int  # scored by the pass, one per beam
    pass_ms: Spread | None
    settle_ms: Spread | None  # the way to the next pass: `settle`, `reorder_cache`
    turn_ms: Spread | None  # both
    kv_tokens: int  # stored after the pass
    kv_mb: float


def passes(lm: HuggingFaceLM, plan: PassPlan, told: Callable[[], None] | None = None) -> list[PassCell]:
    """A cell of ours per length and size, and one of theirs per length and number of beams.

    Args:
        lm: whose model and engine are timed; lengths get stores of their own, for a long cache widens those beside it.
        told: hears of every prompt that is stored and of every turn.

    Raises `IndexError` where the model has fewer positions than the longest length plus 1.
    """
    samples: dict[tuple[str, int, int], list[TurnCost]] = {}
    size = token_bytes(lm.model)
    told = told or (lambda: None)
    with ExitStack() as stack:
        timed = dict[tuple[str, int], tuple[Callable[[int], TurnCost], Sequence[int]]]()
        for length in plan.lengths:
            context = Context(HuggingFaceLM(lm.model, engine=lm.engine), length)
            timed[OURS, length] = stack.enter_context(closing(context)).turn, plan.sizes
            if made := _made(plan, size, length):
                timed[THEIRS, length] = Copies(lm.model, length).turn, made
            told()
        for number in range(plan.repeats + 1):  # the first round is warm-up
            for engine, length in _turned([*timed], number):
                turn, sizes = timed[engine, length]
                turn(1)  # what ran before has driven the weights from the CPU's caches
                for rows in _turned(sizes, number) if number or engine == OURS else ():
                    cost = turn(rows)
                    if number:
                        samples.setdefault((engine, length, rows), []).append(cost)
                    told()
    asked = [(OURS, length, rows) for length in plan.lengths for rows in plan.sizes]
    asked += [(THEIRS, length, beams) for length in plan.lengths for beams in plan.beams]
    return [_cell(*key, samples.get(key, []), size) for key in asked]


def _made(plan: PassPlan, size: int, length: int) -> list[int]:
    """Numbers of beams for which there is a copy per beam."""
    return [beams for beams in plan.beams if beams * (length + 1) * size <= 1e9 * plan.copies_gb]


def _turned(values: Sequence[_T], number: int) -> list[_T]:
    """Nobody is always the first."""
    turn = number % max(len(values), 1)
    return [*values[turn:], *values[:turn]]


def _cell(engine: str, length: int, rows: int, costs: list[TurnCost], size: int) -> PassCell:
    if not costs:
        tokens = rows * (length + 1)
        return PassCell(engine, length, rows, None, None, None, tokens, tokens * size / 1e6)
    passed = [1e3 * one.pass_s for one in costs]
    settled = [1e3 * one.settle_s for one in costs]
    both = [sum(pair) for pair in zip(passed, settled, strict=True)]
    tokens = costs[0].kv_tokens
    times = Spread.of(passed), Spread.of(settled), Spread.of(both)
    return PassCell(engine, length, rows, *times, tokens, tokens * size / 1e6)


@dataclass(frozen=True)
class Fits:
    """Lines through the medians, in milliseconds."""

    by_length: dict[int, Fit]  # a pass against its rows, beyond the knee; where four sizes or more were measured
    row: Fit | None  # a row beyond the knee against tokens in the cache
    by_beams: dict[tuple[str, int], Fit]  # a turn against tokens in the cache, for each engine and number of beams


def fits(cells: Sequence[PassCell], plan: PassPlan) -> Fits:
    """Of cells that `passes` made for the plan; what rests on fewer than two lengths is left out."""
    at = {(cell.engine, cell.length, cell.rows): cell for cell in cells}
    by_length = {
        length: knee_fit(plan.rows, [_median(at[OURS, length, rows].pass_ms) for rows in plan.rows])
        for length in (plan.lengths if len(plan.rows) >= 4 else ())
    }
    by_beams = {}
    for engine, beams in [(engine, beams) for beams in plan.beams for engine in (OURS, THEIRS)]:
        known = [length for length in plan.lengths if at[engine, length, beams].turn_ms is not None]
        if len(known) >= 2:
            turns = [_median(at[engine, length, beams].turn_ms) for length in known]
            by_beams[engine, beams] = straight_fit(known, turns)
    row = straight_fit(list(by_length), [fit.slope for fit in by_length.values()]) if len(by_length) >= 2 else None
    return Fits(by_length, row, by_beams)


def _median(spread: Spread | None) -> float:
    assert spread is not None
    return spread.median

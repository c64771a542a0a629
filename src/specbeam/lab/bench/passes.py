"""The cost of a target pass by rows and by cached tokens, and of a step of beams, in specbeam and in transformers.

Transformers keeps a copy of the prompt per beam. Every round times all lengths and sizes, so that a busy moment of the
machine affects all of them.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from specbeam.lab.bench.cost_fits import Fit, knee_fit, straight_fit
from specbeam.lab.bench.speed import Spread, rotated
from specbeam.lab.bench.transformers_cache import CopiedPrompt, token_bytes
from specbeam.models import HuggingFaceLM
from specbeam.recipes import NODES, StoredPrompt, TurnCost

LENGTHS = (128, 512, 1024, 2048, 4096)
BEAMS = (1, 4, 16, 64)
OURS = "specbeam"
THEIRS = "transformers"


@dataclass(frozen=True)
class PassPlan:
    """The sizes to measure, each in ascending order.

    Attributes:
        lengths: numbers of tokens in the cache.
        rows: numbers of rows of a pass.
        beams: numbers of beams of a step that is also timed with transformers' cache.
        repeats: number of rounds that count; a warm-up round runs before them.
        copies_gb: limit in GB (1e9 bytes) on transformers' copies of the cache; sizes that need more are not measured.
    """

    lengths: tuple[int, ...] = LENGTHS
    rows: tuple[int, ...] = NODES
    beams: tuple[int, ...] = BEAMS
    repeats: int = 7
    copies_gb: float = 4.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows of specbeam's passes, from `rows` and `beams`, ascending."""
        return tuple(sorted({*self.rows, *self.beams}))

    @property
    def steps(self) -> int:
        """The largest possible number of calls of `on_progress` by `passes`."""
        each = (self.repeats + 1) * len(self.sizes) + self.repeats * len(self.beams)
        return len(self.lengths) * (1 + each)


@dataclass(frozen=True)
class PassCell:
    """The cost of a pass of one size at one length.

    Times are in milliseconds: median, smallest and largest of the rounds. They are None if nothing was measured.

    Attributes:
        engine: `OURS` or `THEIRS`.
        length: number of tokens in the cache before the pass.
        rows: number of rows that the pass scores, one per beam.
        settle_ms: time between the pass and the next one, in `settle` or in transformers' `reorder_cache`.
        turn_ms: sum of both times.
        kv_tokens: number of tokens stored after the pass.
        kv_mb: the keys and values of these tokens in MB (1e6 bytes).
    """

    engine: str
    length: int
    rows: int
    pass_ms: Spread | None
    settle_ms: Spread | None
    turn_ms: Spread | None
    kv_tokens: int
    kv_mb: float


def passes(lm: HuggingFaceLM, plan: PassPlan, on_progress: Callable[[], None] | None = None) -> list[PassCell]:
    """Time passes of a model with specbeam's cache and with transformers' cache.

    Args:
        lm: the model that is timed, with its engine. Each length gets its own cache store, because a long cache widens
            the others in its store.
        on_progress: called after every prompt that is stored and after every turn that is timed.

    Returns:
        A cell of `OURS` per length and size, then a cell of `THEIRS` per length and number of beams.

    Raises:
        IndexError: the model has fewer positions than the longest length plus 1.
    """
    samples: dict[tuple[str, int, int], list[TurnCost]] = {}
    size = token_bytes(lm.model)
    on_progress = on_progress or (lambda: None)
    with ExitStack() as stack:
        contenders = dict[tuple[str, int], tuple[Callable[[int], TurnCost], Sequence[int]]]()
        for length in plan.lengths:
            prompt = StoredPrompt(HuggingFaceLM(lm.model, engine=lm.engine), length)
            contenders[OURS, length] = (stack.enter_context(closing(prompt)).turn, plan.sizes)
            if beams := _beams_with_copies(plan, size, length):
                contenders[THEIRS, length] = (CopiedPrompt(lm.model, length).turn, beams)
            on_progress()
        for number in range(plan.repeats + 1):  # the first round is warm-up
            for engine, length in rotated([*contenders], number):
                turn, sizes = contenders[engine, length]
                turn(1)  # not timed: the previous contender has evicted the weights from the CPU's caches
                for rows in rotated(sizes, number) if number or engine == OURS else ():
                    cost = turn(rows)
                    if number:
                        samples.setdefault((engine, length, rows), []).append(cost)
                    on_progress()
    keys = [(OURS, length, rows) for length in plan.lengths for rows in plan.sizes]
    keys += [(THEIRS, length, beams) for length in plan.lengths for beams in plan.beams]
    return [_cell(*key, samples.get(key, []), size) for key in keys]


def _beams_with_copies(plan: PassPlan, size: int, length: int) -> list[int]:
    """Return the numbers of beams for which a copy of the cache per beam stays within `copies_gb`.

    Args:
        size: bytes of a token in the cache.
    """
    return [beams for beams in plan.beams if beams * (length + 1) * size <= 1e9 * plan.copies_gb]


def _cell(engine: str, length: int, rows: int, costs: list[TurnCost], size: int) -> PassCell:
    """Return the cell of these samples; no samples mean that the copies would need too much memory."""
    if not costs:
        tokens = rows * (length + 1)
        return PassCell(engine, length, rows, None, None, None, tokens, tokens * size / 1e6)
    pass_ms = [1e3 * cost.pass_s for cost in costs]
    settle_ms = [1e3 * cost.settle_s for cost in costs]
    turn_ms = [sum(pair) for pair in zip(pass_ms, settle_ms, strict=True)]
    tokens = costs[0].kv_tokens
    return PassCell(
        engine,
        length,
        rows,
        pass_ms=Spread.of(pass_ms),
        settle_ms=Spread.of(settle_ms),
        turn_ms=Spread.of(turn_ms),
        kv_tokens=tokens,
        kv_mb=tokens * size / 1e6,
    )


@dataclass(frozen=True)
class Fits:
    """Lines through the medians of measured passes, in milliseconds.

    Attributes:
        by_length: time of a pass as a function of its rows, for each length; empty with fewer than four numbers of
            rows.
        row: time of a row beyond the knee as a function of the tokens in the cache; None with fewer than two lengths.
        by_beams: time of a turn as a function of the tokens in the cache, for each engine and number of beams.
    """

    by_length: dict[int, Fit]
    row: Fit | None
    by_beams: dict[tuple[str, int], Fit]


def fits(cells: Sequence[PassCell], plan: PassPlan) -> Fits:
    """Fit lines to the cells that `passes` returned for the plan.

    Lines over lengths that would rest on fewer than two lengths are left out.
    """
    at = {(cell.engine, cell.length, cell.rows): cell for cell in cells}
    by_length = {}
    if len(plan.rows) >= 4:
        for length in plan.lengths:
            times = [_median(at[OURS, length, rows].pass_ms) for rows in plan.rows]
            by_length[length] = knee_fit(plan.rows, times)
    by_beams = {}
    for engine, beams in [(engine, beams) for beams in plan.beams for engine in (OURS, THEIRS)]:
        measured = [length for length in plan.lengths if at[engine, length, beams].turn_ms is not None]
        if len(measured) >= 2:
            turns = [_median(at[engine, length, beams].turn_ms) for length in measured]
            by_beams[engine, beams] = straight_fit(measured, turns)
    row = None
    if len(by_length) >= 2:
        slopes = [fit.slope for fit in by_length.values()]
        row = straight_fit(list(by_length), slopes)
    return Fits(by_length, row, by_beams)


def _median(spread: Spread | None) -> float:
    assert spread is not None
    return spread.median

"""The cost of a target pass by rows and by cached tokens, and of a step of beams.

Every round times all lengths and sizes, so that a busy moment of the machine affects all of them.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from specbeam.engines import cache_argument
from specbeam.lab.bench.cost_fits import Fit, knee_fit, straight_fit
from specbeam.lab.bench.speed import Spread, rotated
from specbeam.models import HuggingFaceLM
from specbeam.recipes import NODES, StoredPrompt, TurnCost

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = (128, 512, 1024, 2048, 4096)
BEAMS = (1, 4, 16, 64)


@dataclass(frozen=True)
class PassPlan:
    """The sizes to measure, each in ascending order.

    Attributes:
        lengths: numbers of tokens in the cache.
        rows: numbers of rows of a pass.
        beams: numbers of beams of a step.
        repeats: number of rounds that count; a warm-up round runs before them.
    """

    lengths: tuple[int, ...] = LENGTHS
    rows: tuple[int, ...] = NODES
    beams: tuple[int, ...] = BEAMS
    repeats: int = 7

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows of specbeam's passes, from `rows` and `beams`, ascending."""
        return tuple(sorted({*self.rows, *self.beams}))

    @property
    def steps(self) -> int:
        """The number of calls of `on_progress` by `passes`."""
        return len(self.lengths) * (1 + (self.repeats + 1) * len(self.sizes))


@dataclass(frozen=True)
class PassCell:
    """The cost of a pass of one size at one length.

    Times are in milliseconds: median, smallest and largest of the rounds.

    Attributes:
        length: number of tokens in the cache before the pass.
        rows: number of rows that the pass scores, one per beam.
        settle_ms: time between the pass and the next one, in `settle`.
        turn_ms: sum of both times.
        kv_tokens: number of tokens stored after the pass.
        kv_mb: the keys and values of these tokens in MB (1e6 bytes).
    """

    length: int
    rows: int
    pass_ms: Spread
    settle_ms: Spread
    turn_ms: Spread
    kv_tokens: int
    kv_mb: float


def passes(lm: HuggingFaceLM, plan: PassPlan, on_progress: Callable[[], None] | None = None) -> list[PassCell]:
    """Time passes of a model, and return a cell per length and size.

    Args:
        lm: the model that is timed, with its engine. Each length gets its own cache store, because a long cache widens
            the others in its store.
        on_progress: called after every prompt that is stored and after every turn that is timed.

    Raises:
        IndexError: the model has fewer positions than the longest length plus 1.
    """
    samples: dict[tuple[int, int], list[TurnCost]] = {}
    size = token_bytes(lm.model)
    on_progress = on_progress or (lambda: None)
    with ExitStack() as stack:
        prompts: dict[int, StoredPrompt] = {}
        for length in plan.lengths:
            prompt = StoredPrompt(HuggingFaceLM(lm.model, engine=lm.engine), length)
            prompts[length] = stack.enter_context(closing(prompt))
            on_progress()
        for number in range(plan.repeats + 1):  # the first round is warm-up
            for length in rotated([*prompts], number):
                prompts[length].turn(1)  # not timed: the previous one has evicted the weights from the CPU's caches
                for rows in rotated(plan.sizes, number):
                    cost = prompts[length].turn(rows)
                    if number:
                        samples.setdefault((length, rows), []).append(cost)
                    on_progress()
    return [_cell(length, rows, samples[length, rows], size) for length in plan.lengths for rows in plan.sizes]


@torch.inference_mode()
def token_bytes(model: "PreTrainedModel") -> int:
    """Return the number of bytes of the keys and values of one token in all layers."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model.base_model(input_ids=token, **cache_argument(model.base_model, cache))
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _cell(length: int, rows: int, costs: list[TurnCost], size: int) -> PassCell:
    """Return the cell of these samples."""
    pass_ms = [1e3 * cost.pass_s for cost in costs]
    settle_ms = [1e3 * cost.settle_s for cost in costs]
    turn_ms = [sum(pair) for pair in zip(pass_ms, settle_ms, strict=True)]
    tokens = costs[0].kv_tokens
    return PassCell(
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
        by_beams: time of a turn as a function of the tokens in the cache, for each number of beams.
    """

    by_length: dict[int, Fit]
    row: Fit | None
    by_beams: dict[int, Fit]


def fits(cells: Sequence[PassCell], plan: PassPlan) -> Fits:
    """Fit lines to the cells that `passes` returned for the plan.

    Lines over lengths that would rest on fewer than two lengths are left out.
    """
    at = {(cell.length, cell.rows): cell for cell in cells}
    by_length = {}
    if len(plan.rows) >= 4:
        for length in plan.lengths:
            by_length[length] = knee_fit(plan.rows, [at[length, rows].pass_ms.median for rows in plan.rows])
    by_beams = {}
    row = None
    if len(plan.lengths) >= 2:
        for beams in plan.beams:
            turns = [at[length, beams].turn_ms.median for length in plan.lengths]
            by_beams[beams] = straight_fit(plan.lengths, turns)
        if by_length:
            row = straight_fit(list(by_length), [fit.slope for fit in by_length.values()])
    return Fits(by_length, row, by_beams)

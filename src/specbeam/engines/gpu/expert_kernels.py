"""Triton kernels of mixtures of experts: few launches per layer, whatever the rows choose, and nothing read on the host.

1. `choose_experts`: each row chooses its experts by its scores.
2. `grouped_by_expert`: choices are sorted by expert. A choice is a row and one of its experts.
3. `multiplied_by_experts`, twice: products of groups of choices with the matrices of their expert. A launch has programs for
   as many choices of each expert as there are rows, and those without choices end at once. So its size depends on the
   number of rows only, and the launches can be captured in a CUDA graph.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int32
from torch import Tensor
from torch.nn import functional

from specbeam.engines.arrays import RowTensor
from specbeam.engines.families import Architecture
from specbeam.engines.gpu.kernels import activated, step

MOST_ROWS = 4096  # rows whose choices are grouped at once, because each needs `chosen` rows of room
_CHOICES = 2048  # choices that `_group` reads at once


class Experts(NamedTuple):
    """The experts of a layer."""

    router: Float[Tensor, "experts hidden"]
    up: Float[Tensor, "experts outputs hidden"]  # gate and up
    down: Float[Tensor, "experts hidden wide"]


class Choices(NamedTuple):
    """The experts that rows choose, from the first row to the last one."""

    experts: Int32[Tensor, " choices"]
    shares: Float32[Tensor, " choices"]  # weights of the outputs of these experts


class Groups(NamedTuple):
    """Choices sorted by expert, then by row."""

    order: Int32[Tensor, " choices"]  # numbers of the choices
    starts: Int32[Tensor, " edges"]  # the first place of each expert in `order`, and the number of choices


@step
def _choose(
    scores, experts, shares, count, CHOSEN: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, DIVIDES: tl.constexpr
):
    """Write the experts that one row chooses by its scores, and their shares, best first; ties go to the first expert."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    score = tl.load(scores + row.to(tl.int64) * count + at, mask=at < count, other=-float("inf")).to(tl.float32)
    power = tl.exp(score - tl.max(score))
    total = tl.sum(power)
    left = tl.where(at < count, power, -1.0)
    place = tl.arange(0, ROOM)
    own = tl.zeros([ROOM], tl.int32)
    odds = tl.zeros([ROOM], tl.float32)
    for number in range(CHOSEN):
        best = tl.max(left)
        expert = tl.min(tl.where(left == best, at, count - 1))  # count - 1 for NaN, which rows of padding may have
        own = tl.where(place == number, expert, own)
        odds = tl.where(place == number, best, odds)
        left = tl.where(at == expert, -1.0, left)
    odds = odds / (tl.sum(odds) if DIVIDES else total)
    tl.store(experts + row * CHOSEN + place, own, mask=place < CHOSEN)
    tl.store(shares + row * CHOSEN + place, odds, mask=place < CHOSEN)


@step
def _group(experts, order, starts, choices, BLOCK: tl.constexpr):
    """Write the numbers of all choices of one expert to their places in `order`, and the first of these to `starts`."""
    expert = tl.program_id(0)
    before = 0
    own = 0
    for start in range(0, choices, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        found = tl.load(experts + choice, mask=choice < choices, other=2**30)
        before += tl.sum((found < expert).to(tl.int32))
        own += tl.sum((found == expert).to(tl.int32))
    tl.store(starts + expert, before)
    tl.store(starts + expert + 1, before + own)  # the next expert writes the same number
    for start in range(0, choices, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        found = tl.load(experts + choice, mask=choice < choices, other=2**30)
        is_own = (found == expert).to(tl.int32)
        tl.store(order + before + tl.cumsum(is_own) - 1, choice, mask=is_own != 0)
        before += tl.sum(is_own)


@step
def _multiply_by_experts(
    x, matrices, order, starts, shares, out, outputs, width,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, IS_LAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the products of some choices of one expert with some outputs of its matrix, [outputs, width], to `out`.

    A first product reads the row of x of a choice, and writes to the choice's place in the groups. If IS_LAST, it reads from
    there, and writes to the choice's number, weighted by its share.
    """
    expert = tl.program_id(2)
    first = tl.load(starts + expert)
    stop = tl.load(starts + expert + 1)
    place = first + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if first + tl.program_id(1) * ROWS < stop:
        is_real = place < stop
        choice = tl.load(order + place, mask=is_real, other=0)
        source = place if IS_LAST else choice // CHOSEN
        goal = choice if IS_LAST else place
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        is_output = output < outputs
        at = tl.arange(0, WIDTH)
        from_rows = x + source.to(tl.int64)[:, None] * width + at[None, :]
        from_matrix = matrices + (expert.to(tl.int64) * outputs + output)[:, None] * width + at[None, :]
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for start in range(0, width, WIDTH):
            inside = (start + at < width)[None, :]
            numbers = tl.load(from_matrix + start, mask=is_output[:, None] & inside, other=0.0)
            read = tl.load(from_rows + start, mask=is_real[:, None] & inside, other=0.0)
            total = tl.dot(read, tl.trans(numbers), total, input_precision=PRECISION)
        if IS_LAST:
            total *= tl.load(shares + choice, mask=is_real, other=0.0)[:, None]
        here = is_real[:, None] & is_output[None, :]
        tl.store(
            out + goal.to(tl.int64)[:, None] * outputs + output[None, :], total.to(out.dtype.element_ty), mask=here
        )


def mixed_experts(x: RowTensor, experts: Experts, of: Architecture) -> RowTensor:
    """Return the weighted sum of the outputs of each row's experts."""
    mixed = []
    for rows in x.split(MOST_ROWS):
        choices = choose_experts(functional.linear(rows, experts.router), of.chosen, of.divides)
        groups = grouped_by_expert(choices.experts, len(experts.router))
        both = multiplied_by_experts(rows, experts.up, groups, len(rows))
        wide = activated(both, of.activation, of.family.gated)
        outputs = multiplied_by_experts(wide, experts.down, groups, len(rows), choices.shares)
        mixed.append(outputs.view(len(rows), of.chosen, -1).sum(1))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def choose_experts(scores: Float[Tensor, "rows experts"], chosen: int, divides: bool) -> Choices:
    """Return the `chosen` experts of largest probability in the softmax of each row's scores.

    Args:
        divides: whether the probabilities of the chosen experts are divided by their sum.
    """
    rows, count = scores.shape
    experts = torch.empty(rows * chosen, dtype=torch.int32, device=scores.device)
    shares = torch.empty(rows * chosen, dtype=torch.float32, device=scores.device)
    block = triton.next_power_of_2(count)
    _choose[(rows,)](
        scores, experts, shares, count, chosen, triton.next_power_of_2(chosen), block, divides, num_warps=1
    )
    return Choices(experts, shares)


def grouped_by_expert(experts: Int32[Tensor, " choices"], count: int) -> Groups:
    """Return choices sorted by expert.

    Args:
        count: number of experts.
    """
    choices = len(experts)
    order = torch.empty_like(experts)
    starts = experts.new_empty(count + 1)
    block = min(_CHOICES, triton.next_power_of_2(choices))
    _group[(count,)](experts, order, starts, choices, block, num_warps=4)
    return Groups(order, starts)


def multiplied_by_experts(
    x: Float[Tensor, "_ width"],
    matrices: Float[Tensor, "experts outputs width"],
    groups: Groups,
    rows: int,
    shares: Float32[Tensor, " choices"] | None = None,
) -> Float[Tensor, "choices outputs"]:
    """Return the product of each choice with the matrix of its expert, [choices, outputs], summed up in float32.

    Args:
        x: rows, and the products are in the order of `groups`; or, with shares, such products.
        rows: number of rows that chose.
        shares: factors of the products, which are then in the order of the choices.
    """
    experts, outputs, width = matrices.shape
    choices = len(groups.order)
    out = x.new_empty(choices, outputs)
    block_rows = min(64, max(16, triton.next_power_of_2(2 * choices // experts)))
    block_outputs = 32 if block_rows == 16 else 64
    block_width = 256 // x.element_size() if block_rows == 16 else 128 // x.element_size()
    grid = (triton.cdiv(outputs, block_outputs), triton.cdiv(rows, block_rows), experts)
    _multiply_by_experts[grid](
        x, matrices, groups.order, groups.starts, x if shares is None else shares, out, outputs, width, choices // rows,
        block_rows, block_outputs, block_width, shares is not None, "ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
    )  # fmt: skip
    return out

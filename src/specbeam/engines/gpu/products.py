"""Products with the matrices of a model: by cuBLAS without rounding, by a Triton kernel with rounding.

A rounded matrix is in fp8 (e4m3) with a scale for each output. A product with few rows is memory-bound, and fp8 halves
the bytes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from specbeam.engines.arrays import RowTensor
from specbeam.engines.gpu.kernels import step

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
JOINED = 512  # outputs of a program that joins parts


class GpuMatrix(NamedTuple):
    """A matrix of a model, with a factor for each output if it is rounded."""

    numbers: Float[Tensor, "outputs inputs"]
    scales: Float[Tensor, " outputs"] | None = None

    @property
    def bytes(self) -> int:
        """The bytes that a product reads of it."""
        return sum(part.numel() * part.element_size() for part in self if part is not None)


def rounded_matrix(numbers: Float[Tensor, "outputs inputs"]) -> GpuMatrix:
    """Return a copy of a matrix in fp8; a scale maps the largest number of each output to the largest fp8 number.

    Numbers are rounded to nearest, in steps of a sixteenth to an eighth of their size; numbers below the smallest fp8
    number, a 200,000th of the largest, become zero.
    """
    numbers = numbers.detach()
    largest = numbers.abs().amax(1).float()
    scales = torch.where(largest > 0, largest / LARGEST_FP8, 1.0)
    rounded = torch.empty(numbers.shape, dtype=FP8, device=numbers.device)
    for start in range(0, len(numbers), 4096):  # the whole matrix in float32 would take too much memory
        part = slice(start, start + 4096)
        rounded[part] = (numbers[part].float() / scales[part, None]).to(FP8)
    return GpuMatrix(rounded, scales)


@step
def _multiply(
    x, matrix, scales, bias, out, parts, rows, outputs, width, each,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, BIASED: tl.constexpr,
    ADDED: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """Write the products of some rows of x, [rows, width], with some outputs of a matrix, [outputs, width], to `out`.

    If ADDED, the products are added to `out`. If DIVIDED, each of several programs takes `each` inputs, and
    writes its sums to its part of `parts`, [programs, rows, outputs], which `_join_parts` combines.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, WIDTH)
    is_output = output < outputs
    is_row = row < rows
    here = is_row[:, None] & is_output[None, :]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    from_rows = x + row.to(tl.int64)[:, None] * width + at[None, :]
    from_matrix = matrix + output.to(tl.int64)[:, None] * width + at[None, :]
    first = tl.program_id(2) * each
    for start in range(first, tl.minimum(width, first + each), WIDTH):
        if EVEN:
            numbers = tl.load(from_matrix + start, mask=is_output[:, None], other=0.0)
            read = tl.load(from_rows + start, mask=is_row[:, None], other=0.0)
        else:
            inside = (start + at < width)[None, :]
            numbers = tl.load(from_matrix + start, mask=is_output[:, None] & inside, other=0.0)
            read = tl.load(from_rows + start, mask=is_row[:, None] & inside, other=0.0)
        total = tl.dot(read, tl.trans(numbers.to(read.dtype)), total)
    place = row.to(tl.int64)[:, None] * outputs + output[None, :]
    if DIVIDED:
        tl.store(parts + tl.program_id(2).to(tl.int64) * rows * outputs + place, total, mask=here)
    else:
        total *= tl.load(scales + output, mask=is_output, other=0.0)[None, :]
        if BIASED:
            total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if ADDED:
            total += tl.load(out + place, mask=here, other=0.0).to(tl.float32)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=here)


@step
def _join_parts(
    parts, scales, bias, out, rows, outputs, count, BLOCK: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr
):
    """Add up the parts of one row of a product, in their order, and write the sums as `_multiply` does."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = output < outputs
    place = row * outputs + output
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(count):
        total += tl.load(parts + part * rows * outputs + place, mask=is_output, other=0.0)
    total *= tl.load(scales + output, mask=is_output, other=0.0)
    if BIASED:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    if ADDED:
        total += tl.load(out + place, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_output)


class ProductBlocks(NamedTuple):
    """The sizes of the blocks of a product, and the settings of its kernel."""

    rows: int
    outputs: int
    width: int
    warps: int
    stages: int  # blocks that are read ahead
    parts: int = 1  # programs that share the inputs of a block of outputs


def blocks_for(rows: int, outputs: int, width: int) -> ProductBlocks:
    """Return the blocks with which a product was fastest on an H100.

    Products with few rows use narrow strips of outputs, and matrices with few outputs are split into parts, so that all
    multiprocessors read at once.
    """
    is_wide = outputs > 8192
    if rows <= 16:
        return ProductBlocks(16, 32, 256, 4, 3, 1 if is_wide else min(4, max(1, width // 2048)))
    if rows <= 32:
        return ProductBlocks(32, 64, 256, 4, 3, 1 if is_wide else 4)
    if rows <= 64:
        return ProductBlocks(64, 128, 128, 4, 3) if is_wide else ProductBlocks(64, 64, 128, 4, 4, 4)
    return ProductBlocks(128, 128, 64, 8, 3)


def multiplied(
    x: RowTensor,
    matrix: GpuMatrix,
    bias: Float[Tensor, " outputs"] | None = None,
    add_to: Float[Tensor, "rows outputs"] | None = None,
    blocks: ProductBlocks | None = None,
) -> Float[Tensor, "rows outputs"]:
    """Return the products of rows with a matrix, summed up in float32.

    Args:
        bias: added to each row.
        add_to: a tensor to which the products are added in place; it is returned.
        blocks: None: those of `blocks_for`.
    """
    if matrix.scales is None:
        return _by_library(x, matrix.numbers, bias, add_to)
    rows, width = x.shape
    outputs = len(matrix.numbers)
    of = blocks or blocks_for(rows, outputs, width)
    out = x.new_empty(rows, outputs) if add_to is None else add_to
    each = of.width * triton.cdiv(width, of.width * of.parts)
    count = triton.cdiv(width, each)
    parts = out if count == 1 else x.new_empty(count, rows, outputs, dtype=torch.float32)
    has = bias is not None, add_to is not None
    _multiply[(triton.cdiv(outputs, of.outputs), triton.cdiv(rows, of.rows), count)](
        x, matrix.numbers, matrix.scales, x if bias is None else bias, out, parts, rows, outputs, width, each,
        of.rows, of.outputs, of.width, width % of.width == 0, *has, count > 1, num_warps=of.warps, num_stages=of.stages,
    )  # fmt: skip
    if count > 1:
        _join_parts[(rows, triton.cdiv(outputs, JOINED))](
            parts, matrix.scales, x if bias is None else bias, out, rows, outputs, count, JOINED, *has, num_warps=4
        )
    return out


def _by_library(x: Tensor, matrix: Tensor, bias: Tensor | None, add_to: Tensor | None) -> Tensor:
    if add_to is None:
        return functional.linear(x, matrix, bias)
    if bias is None:
        return add_to.addmm_(x, matrix.t())
    return add_to.add_(functional.linear(x, matrix, bias))

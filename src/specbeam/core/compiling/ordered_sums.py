"""Sums of float32 numbers that are the same on every processor.

Number k of a row is added to partial sum k % 32. The 32 partial sums are computed in parallel, in vector registers of
any width; then the upper half is added to the lower half until one number is left. A compiler would otherwise add the
numbers one by one, or in an order that depends on the processor.

`sum_of_shares` adds integers, whose sum is the same in every order.
"""

from typing import Any

import numpy as np

from specbeam.core.compiling.compiler import AVAILABLE, Array, compiled

if AVAILABLE:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    from specbeam.core.compiling.compiler import chosen_for

_SIDE_BY_SIDE = 32  # partial sums
_WORD = 4  # bytes of a number
# Added to a share, it leaves the nearest multiple of `_SHARE_UNIT` in the last bits.
_SHARE_ROUNDING = np.float64(1.5 * 2.0**12)
_SHARE_START = _SHARE_ROUNDING.view(np.int64)
_SHARE_UNIT = 2.0**-40


def sum_of(x: Array) -> Array:
    """Return the sum of float32[n]. Zeros after the last number do not change it."""
    parts = np.zeros(_SIDE_BY_SIDE, dtype=np.float32)
    for start in range(0, len(x), _SIDE_BY_SIDE):
        block = x[start : start + _SIDE_BY_SIDE]
        parts[: len(block)] += block
    while len(parts) > 1:
        half = len(parts) // 2
        parts = parts[:half] + parts[half:]
    return parts[0]


def sum_of_squares(x: Array) -> Array:
    """Return the sum of the rounded squares of float32[n]. Zeros at the end do not change it."""
    return sum_of(x * x)


@compiled
def sum_of_shares(x: Array) -> float:
    """Return the sum of float32[n], n below 2^20, numbers from 0 to 1, each rounded to a multiple of 2^-40.

    Neither the order of the numbers nor zeros among them change a bit of it.
    """
    total = np.int64(0)
    for place in range(len(x)):
        rounded = np.float64(x[place] + _SHARE_ROUNDING)
        total += rounded.view(np.int64) - _SHARE_START
    return total * _SHARE_UNIT


if AVAILABLE:

    class _Sum:
        """Writes the LLVM code of a sum over one row."""

        def __init__(self, builder: Any, squared: bool) -> None:
            self.builder = builder
            self.squared = squared
            self.index = ir.IntType(64)
            self.block = ir.VectorType(ir.FloatType(), _SIDE_BY_SIDE)

        def written(self, row: Any, length: Any) -> Any:
            """Write the code at the builder's position; return the sum. `row` is a pointer to `length` numbers."""
            b = self.builder
            zeros = ir.Constant(self.block, [0.0] * _SIDE_BY_SIDE)
            block_length = self._number(_SIDE_BY_SIDE)
            blocks = b.sdiv(length, block_length)
            sums = cgutils.alloca_once_value(b, zeros)  # LLVM keeps them in registers
            with cgutils.for_range(b, blocks) as loop:
                block = b.load(self._place(row, b.mul(loop.index, block_length)), align=_WORD)
                b.store(self._added(b.load(sums), block), sums)
            whole = b.mul(blocks, block_length)
            with b.if_then(b.icmp_signed("<", whole, length)):
                block = self._cut_block(row, whole, b.sub(length, whole), zeros)
                b.store(self._added(b.load(sums), block), sums)
            return self._total(b.load(sums))

        def _added(self, parts: Any, block: Any) -> Any:
            """Return the partial sums plus a block, or plus its squares."""
            b = self.builder
            return b.fadd(parts, b.fmul(block, block) if self.squared else block)

        def _cut_block(self, row: Any, start: Any, count: Any, zeros: Any) -> Any:
            """Load the first `count` numbers of a block; the others are 0 without reading their memory."""
            b = self.builder
            words = ir.VectorType(ir.IntType(32), _SIDE_BY_SIDE)
            places = ir.Constant(words, list(range(_SIDE_BY_SIDE)))
            lane = b.insert_element(ir.Constant(words, ir.Undefined), b.trunc(count, ir.IntType(32)), ir.IntType(32)(0))
            counts = b.shuffle_vector(lane, ir.Constant(words, ir.Undefined), ir.Constant(words, [0] * _SIDE_BY_SIDE))
            mask = b.icmp_signed("<", places, counts)
            pointer = self._place(row, start)
            kind = ir.FunctionType(self.block, [pointer.type, ir.IntType(32), mask.type, self.block])
            load = cgutils.get_or_insert_function(b.module, kind, f"llvm.masked.load.v{_SIDE_BY_SIDE}f32.p0")
            return b.call(load, [pointer, ir.IntType(32)(_WORD), mask, zeros])

        def _total(self, parts: Any) -> Any:
            """Add the upper half to the lower half until one number is left; return it."""
            b = self.builder
            half = _SIDE_BY_SIDE // 2
            while half:
                nothing = ir.Constant(parts.type, ir.Undefined)
                lower = ir.Constant(ir.VectorType(ir.IntType(32), half), list(range(half)))
                upper = ir.Constant(ir.VectorType(ir.IntType(32), half), list(range(half, 2 * half)))
                parts = b.fadd(b.shuffle_vector(parts, nothing, lower), b.shuffle_vector(parts, nothing, upper))
                half //= 2
            return b.extract_element(parts, ir.IntType(32)(0))

        def _place(self, row: Any, start: Any) -> Any:
            return self.builder.bitcast(self.builder.gep(row, [start]), self.block.as_pointer())

        def _number(self, n: int) -> Any:
            return ir.Constant(self.index, n)

    def _compiled_sum(squared: bool) -> Any:
        """Return the intrinsic of a sum."""

        @intrinsic
        def total(typing: Any, x: Any) -> Any:
            if not (isinstance(x, types.Array) and x.layout == "C" and x.ndim == 1 and x.dtype == types.float32):
                raise TypeError(f"ordered sums take contiguous float32[n], found {x}")

            def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                row = context.make_array(signature.args[0])(context, builder, args[0])
                length = builder.extract_value(row.shape, 0)
                return _Sum(builder, squared).written(row.data, length)

            return types.float32(x), code

        return total

    _sum_of = _compiled_sum(False)
    _sum_of_squares = _compiled_sum(True)

    @chosen_for(sum_of)
    def _compiled_sum_of(x: Any) -> Any:
        return lambda x: _sum_of(x)

    @chosen_for(sum_of_squares)
    def _compiled_sum_of_squares(x: Any) -> Any:
        return lambda x: _sum_of_squares(x)

"""LLVM code for numba: the odds of queries that lie side by side, given their scores of all keys, one key after the other.

Each query has a lane of its own, so nothing is added up across lanes, and the sum of a query goes over the keys in order.
"""

from typing import Any

import numpy as np

from specbeam.core import compiling
from specbeam.engines.cpu.curves import LEAST, LN2_HEAD, LN2_REST, LOG2E
from specbeam.engines.cpu.sums import WIDTH

# exp(y) is 2^n exp(f) with the whole number n nearest to y / log(2), and f = y - n log(2), by a polynomial of degree 6.
_OF_EXP = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)  # from the highest power on
_BIAS = 127
_FRACTION = 23

if compiling.AVAILABLE:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic
else:
    write_odds: Any = None  # never called without numba


class _Odds:
    """A writer of the LLVM code, at the builder's position; see `write_odds`."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.index = ir.IntType(64)
        self.floats = ir.VectorType(ir.FloatType(), WIDTH)
        self.words = ir.VectorType(ir.IntType(32), WIDTH)

    def write(self, scores: Any, count: Any, totals: Any) -> None:
        """Write the loop that finds the largest scores, and the one that makes odds of them and adds these up."""
        b = self.builder
        top = cgutils.alloca_once_value(
            b, self._loaded(scores, ir.Constant(self.index, 0))
        )  # LLVM keeps it in registers
        with cgutils.for_range(b, count) as loop:
            score = self._loaded(scores, loop.index)
            known = b.load(top)
            b.store(b.select(b.fcmp_ordered(">", score, known), score, known), top)
        largest = b.load(top)
        sums = cgutils.alloca_once_value(b, self._all(0.0))
        with cgutils.for_range(b, count) as loop:
            odds = self._exponential(b.fsub(self._loaded(scores, loop.index), largest))
            b.store(odds, self._place(scores, loop.index), align=4)
            b.store(b.fadd(b.load(sums), odds), sums)
        b.store(b.load(sums), self._place(totals, ir.Constant(self.index, 0)), align=4)

    def _exponential(self, y: Any) -> Any:
        """Return exp(y) for y up to 0, with a relative error below 2e-7."""
        b = self.builder
        least = self._all(LEAST)
        y = b.select(b.fcmp_ordered("<", y, least), least, y)
        whole = self._called("floor", self._fused(y, self._all(LOG2E), self._all(0.5)))
        minus = b.fneg(whole)
        f = self._fused(minus, self._all(LN2_REST), self._fused(minus, self._all(LN2_HEAD), y))
        first, *others = _OF_EXP
        found = self._all(first)
        for factor in others:
            found = self._fused(f, found, self._all(factor))
        exponent = b.add(b.fptosi(whole, self.words), self._all_words(_BIAS))
        scale = b.bitcast(b.shl(exponent, self._all_words(_FRACTION)), self.floats)
        return b.fmul(found, scale)

    def _fused(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, rounded once."""
        return self._called("fma", a, b, c)

    def _called(self, name: str, *given: Any) -> Any:
        """Return what a function of LLVM makes of registers."""
        kind = ir.FunctionType(self.floats, [self.floats] * len(given))
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.{name}.v{WIDTH}f32")
        return self.builder.call(function, given)

    def _loaded(self, array: Any, number: Any) -> Any:
        return self.builder.load(self._place(array, number), align=4)

    def _place(self, array: Any, number: Any) -> Any:
        """Return a pointer to the lanes of this number in an array."""
        b = self.builder
        start = b.mul(number, ir.Constant(self.index, WIDTH))
        return b.bitcast(b.gep(array, [start]), self.floats.as_pointer())

    def _all(self, number: float | np.float32) -> Any:
        return ir.Constant(self.floats, [float(number)] * WIDTH)

    def _all_words(self, number: int) -> Any:
        return ir.Constant(self.words, [number] * WIDTH)


if compiling.AVAILABLE:

    @intrinsic
    def write_odds(typing: Any, scores: Any, count: Any, totals: Any) -> Any:
        """Replace the scores of `WIDTH` queries by exp(score - largest score of the query), and write the sums of these.

        Args:
            scores: float32[keys, WIDTH], contiguous; of the first `count` keys, at least one, the others are left alone.
            totals: float32[WIDTH], written.
        """

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointers = [
                context.make_array(signature.args[place])(context, builder, args[place]).data for place in (0, 2)
            ]
            _Odds(builder).write(pointers[0], args[1], pointers[1])
            return context.get_dummy_value()

        return types.void(scores, types.int64, totals), code

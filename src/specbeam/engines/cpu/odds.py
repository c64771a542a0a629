"""LLVM code for numba: softmax numerators of `WIDTH` queries side by side, given their scores, key after key.

Each query has its own lane, so no sum crosses lanes, and the sum of a query runs over the keys in order.
"""

from typing import Any

import numpy as np

from specbeam.core import compiling
from specbeam.engines.cpu.curves import LEAST, LN2_HEAD, LN2_REST, LOG2E
from specbeam.engines.cpu.llvm import CodeWriter, Value, constant
from specbeam.engines.cpu.sums import WIDTH

# exp(y) is 2^n exp(f) with the whole number n nearest to y / log(2), and f = y - n log(2), by a polynomial of degree 6.
_OF_EXP = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)  # from the highest power down
_BIAS = 127
_FRACTION = 23

if compiling.AVAILABLE:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    from specbeam.engines.cpu.llvm import FLOAT, WORD
else:
    write_odds: Any = None  # never called without numba


class _Odds(CodeWriter):
    """A writer of the LLVM code; see `write_odds`."""

    def write(self, scores: Any, count: Any, totals: Any) -> None:
        """Write a loop that finds the largest scores, and another that replaces scores by exponentials and sums them."""
        b = self.builder
        keys = Value(b, count)
        first = self._lanes(scores, self.index(0))
        with self.rounds(keys, 1, [first]) as loop:
            score = self._lanes(scores, loop.at)
            (known,) = loop.carried
            is_larger = b.fcmp_ordered(">", score.register, known.register)
            loop.carried = [Value(b, b.select(is_larger, score.register, known.register))]
        (largest,) = loop.carried
        with self.rounds(keys, 1, [self._all(0.0)]) as loop:
            odds = self._exponential(self._lanes(scores, loop.at) - largest)
            self.store(odds, scores, loop.at * WIDTH)
            loop.carried = [loop.carried[0] + odds]
        self.store(loop.carried[0], totals, self.index(0))

    def _exponential(self, y: Value) -> Value:
        """Return exp(y) for y up to 0, with a relative error below 2e-7."""
        b = self.builder
        least = self._all(LEAST)
        is_small = b.fcmp_ordered("<", y.register, least.register)
        y = Value(b, b.select(is_small, least.register, y.register))
        halves = self.fused(y, self._all(LOG2E), self._all(0.5))
        whole = Value(b, self.call(f"llvm.floor.v{WIDTH}f32", y.kind, halves.register))
        f = self.fused(-whole, self._all(LN2_REST), self.fused(-whole, self._all(LN2_HEAD), y))
        first, *others = _OF_EXP
        found = self._all(first)
        for factor in others:
            found = self.fused(f, found, self._all(factor))
        exponent = Value(b, b.fptosi(whole.register, ir.VectorType(WORD, WIDTH)))
        scale = (exponent + _BIAS << _FRACTION).seen_as(y.kind)
        return found * scale

    def _lanes(self, array: Any, number: Value) -> Value:
        return self.loaded(array, number * WIDTH, ir.VectorType(FLOAT, WIDTH))

    def _all(self, number: float | np.float32) -> Value:
        return constant(self.builder, ir.VectorType(FLOAT, WIDTH), float(number))


if compiling.AVAILABLE:

    @intrinsic
    def write_odds(typing: Any, scores: Any, count: Any, totals: Any) -> Any:
        """Replace the scores of `WIDTH` queries by exp(score - largest score of the query), and write the sums of these.

        Args:
            scores: float32[keys, WIDTH], contiguous; only the first `count` keys, at least one, are read and replaced.
            totals: float32[WIDTH], written.
        """

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointers = [
                context.make_array(signature.args[place])(context, builder, args[place]).data for place in (0, 2)
            ]
            _Odds(builder).write(pointers[0], args[1], pointers[1])
            return context.get_dummy_value()

        return types.void(scores, types.int64, totals), code

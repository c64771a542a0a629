"""Multiply-adds that round once on every processor; for plain a * b + c the compiler decides."""

from typing import Any

import numpy as np

from specbeam.core.compiling.compiler import AVAILABLE, Array

if AVAILABLE:
    from numba import types
    from numba.extending import intrinsic

    from specbeam.core.compiling.compiler import chosen_for


def fused(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c of float32 numbers, rounded once. In Python, the float64 sum is rounded first."""
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


def fused_doubles(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c of float64 numbers, rounded once. In Python, the product is rounded, too."""
    return a * b + c


if AVAILABLE:

    def _compiled_fma(kind: Any) -> Any:
        """Return the intrinsic of a multiply-add of numbers of this type."""

        @intrinsic
        def multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
            def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                return builder.fma(*args)

            return kind(kind, kind, kind), code

        return multiply_add

    _fused = _compiled_fma(types.float32)
    _fused_doubles = _compiled_fma(types.float64)

    @chosen_for(fused_doubles)
    def _compiled_fused_doubles(a: Any, b: Any, c: Any) -> Any:
        return lambda a, b, c: _fused_doubles(a, b, c)

    @chosen_for(fused)
    def _compiled_fused(a: Any, b: Any, c: Any) -> Any:
        return lambda a, b, c: _fused(a, b, c)

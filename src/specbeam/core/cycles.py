"""The processor's cycle counter, with which compiled steps measure times."""

import platform
import time
from typing import Any

from specbeam.core.steps import AVAILABLE, compiled_as

if AVAILABLE:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

READABLE = platform.machine().lower() in ("x86_64", "amd64")  # on other processors compiled steps get 0


def cycles() -> int:
    """Return a count of ticks of constant length; only differences between counts are meaningful."""
    return time.perf_counter_ns()


if AVAILABLE:

    @intrinsic
    def _read(typing: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if not READABLE:
                return ir.Constant(ir.IntType(64), 0)
            kind = ir.FunctionType(ir.IntType(64), [])
            return builder.call(builder.module.declare_intrinsic("llvm.readcyclecounter", [], kind), [])

        return types.int64(), code

    @compiled_as(cycles)
    def _compiled_cycles() -> Any:
        return lambda: _read()

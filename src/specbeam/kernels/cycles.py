"""The processor's clock, for loops that tell where their time goes."""

import platform
from typing import Any

from specbeam.kernels.compiling import AVAILABLE

if AVAILABLE:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic
else:

    def intrinsic(function: Any) -> Any:
        return function


TICKS = platform.machine().lower() in (
    "x86_64",
    "amd64",
)  # elsewhere a program may not read the counter, and dies of it


@intrinsic
def cycles(typing: Any) -> Any:
    """Ticks of constant length, of which only differences mean something; 0 where there are none to be read."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not TICKS:
            return ir.Constant(ir.IntType(64), 0)
        kind = ir.FunctionType(ir.IntType(64), [])
        return builder.call(builder.module.declare_intrinsic("llvm.readcyclecounter", [], kind), [])

    return types.int64(), code

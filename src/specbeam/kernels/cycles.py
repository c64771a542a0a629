"""The processor's clock, for loops that tell where their time goes."""

from typing import Any

from specbeam.kernels.compiling import AVAILABLE

if AVAILABLE:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic
else:

    def intrinsic(function: Any) -> Any:
        return function


@intrinsic
def cycles(typing: Any) -> Any:
    """Ticks of constant length; only differences mean something."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [])
        return builder.call(builder.module.declare_intrinsic("llvm.readcyclecounter", [], kind), [])

    return types.int64(), code

"""Atomic operations, addresses as arrays, and the pause of a spinning thread."""

from typing import Any

from specbeam.core.compiling.compiler import AVAILABLE

if AVAILABLE:
    import numba
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    carray: Any = numba.carray
else:
    carray = None  # never called without numba
    load_shared: Any = None
    store_shared: Any = None
    add_shared: Any = None
    pointer_to: Any = None
    pause: Any = None

if AVAILABLE:
    _WORD = ir.IntType(64)
    _ALIGN = 8

    def _place(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        """Return the address of an element of an int64 array; the first arguments are the array and the index."""
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.gep(data, [args[1]])

    @intrinsic
    def load_shared(typing: Any, array: Any, place: Any) -> Any:
        """Atomically load array[place] of an int64 array, with sequential consistency."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load_atomic(_place(context, builder, signature, args), "seq_cst", _ALIGN)

        return types.int64(array, types.int64), code

    @intrinsic
    def store_shared(typing: Any, array: Any, place: Any, value: Any) -> Any:
        """Atomically store into array[place] of an int64 array, with sequential consistency."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store_atomic(args[2], _place(context, builder, signature, args), "seq_cst", _ALIGN)
            return context.get_dummy_value()

        return types.void(array, types.int64, types.int64), code

    @intrinsic
    def add_shared(typing: Any, array: Any, place: Any, value: Any) -> Any:
        """Atomically add to array[place] of an int64 array, and return the previous value."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            where = _place(context, builder, signature, args)
            return builder.atomic_rmw("add", where, args[2], "seq_cst")

        return types.int64(array, types.int64, types.int64), code

    @intrinsic
    def pointer_to(typing: Any, address: Any) -> Any:
        """Return an address as the pointer that `numba.carray` takes."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

        return types.voidptr(types.int64), code

    @intrinsic
    def pause(typing: Any) -> Any:
        """Pause a spinning thread for about ten cycles; does nothing on processors other than x86."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if context.codegen().target_data is not None and "x86" in builder.module.triple:
                kind = ir.FunctionType(ir.VoidType(), [])
                name = "llvm.x86.sse2.pause"
                known = builder.module.globals.get(name)
                builder.call(known or ir.Function(builder.module, kind, name), [])
            return context.get_dummy_value()

        return types.void(), code

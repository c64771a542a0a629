"""How loops are compiled, and on how many threads they run."""

import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any

try:
    import numba
except ImportError:
    numba = None
else:
    try:
        from specbeam.kernels.kept import Kept
        from specbeam.kernels.linking import call_where_it_stands, calling, open_for_python
    except ImportError:
        warnings.warn(
            f"numba {numba.__version__} is too old for specbeam's steps, which need 0.62 (pip install 'numba>=0.62'); "
            "Python runs their source, which is much slower",
            stacklevel=2,
        )
        numba = None

if numba is not None:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

AVAILABLE = numba is not None and os.environ.get("SPECBEAM_KERNELS") != "off"
Array = Any  # numba finds the types by itself
BLOCK = 64  # values that are looked at together


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiled at the first call and kept on disk. `unwrap`: tests wrap functions into type checks.

    What lets Python call a form of it is compiled for those forms alone that Python calls (`kernels.linking`).
    """
    if not AVAILABLE:
        return function
    source = inspect.unwrap(function)
    fixed = {"nogil": True, "error_model": "numpy", "boundscheck": False, "no_cfunc_wrapper": True}
    made = numba.njit(no_cpython_wrapper=True, **fixed, **options)(source)
    made._cache = Kept(source)
    door = numba.njit(**fixed)(calling(made))
    door._cache = Kept(door.py_func)
    call_where_it_stands(made)
    open_for_python(made, door)
    return made


def compiled_in_any_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """Sums may be reordered, so that they become vector instructions; NaN stays NaN."""
    return compiled(function, fastmath={"reassoc", "nsz", "contract"})


def compiled_loosely(function: Callable[..., Any]) -> Callable[..., Any]:
    """Sums may be reordered, so that they become vector instructions; NaN must not come in."""
    return compiled(function, fastmath={"reassoc", "nsz", "contract", "nnan"})


def start_threads() -> int:
    """Most threads that compiled loops may use. To be called before any loop that may be spread: what spreads it is looked
    up when the loop is read from disk.
    """
    numba.get_num_threads()
    return int(numba.config.NUMBA_NUM_THREADS)


def use_threads(count: int) -> None:
    """At most `start_threads()`, for loops that are compiled for several."""
    numba.set_num_threads(count)


def address_of(function: Any, *arguments: Any) -> int:
    """Where a compiled loop stands, in the form that it has for arguments like these; for `call_at`. Loops that call a long
    loop by its address are compiled without it, and it is compiled once.
    """
    kinds = tuple(numba.typeof(one) for one in arguments)
    function.compile(kinds)
    made = function.overloads[kinds]
    return int(made.library.get_pointer_to_function(made.fndesc.mangled_name))


if AVAILABLE:

    @intrinsic
    def call_at(typing: Any, address: Any, arguments: Any) -> Any:
        """Call a loop that gives nothing back. The tuple of arguments must have the very types that its address was asked
        for with: nobody checks.
        """

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args[1].types
            convention = context.call_conv
            kind = convention.get_function_type(types.none, kinds).as_pointer()
            values = [builder.extract_value(args[1], place) for place in range(len(kinds))]
            status, _ = convention.call_function(builder, builder.inttoptr(args[0], kind), types.none, kinds, values)
            with builder.if_then(status.is_error):
                convention.return_status_propagate(builder, status)
            return context.get_dummy_value()

        return types.void(types.intp, arguments), code

    @intrinsic
    def call_c(typing: Any, address: Any, arguments: Any) -> Any:
        """Call a C function that takes 64-bit integers or pointers alone; gives the int that it returns."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            whole = ir.IntType(64)
            values = []
            for place, kind in enumerate(signature.args[1].types):
                values.append(context.cast(builder, builder.extract_value(args[1], place), kind, types.int64))
            function = ir.FunctionType(ir.IntType(32), [whole] * len(values))
            return builder.call(builder.inttoptr(args[0], function.as_pointer()), values)

        return types.int32(types.intp, arguments), code

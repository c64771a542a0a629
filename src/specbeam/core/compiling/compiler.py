"""The decorators that compile functions with numba, calls by address, and the number of threads."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from specbeam.core.errors import warn

try:
    import numba
except ImportError:
    numba = None
else:
    try:
        from specbeam.core.compiling.borrowed import borrow, views_of
        from specbeam.core.compiling.code_cache import CodeCache, compile_in_turn
        from specbeam.core.compiling.linking import (
            PythonEntry,
            add_python_entry,
            calling,
            link_by_name,
            take_any_number,
        )
        from specbeam.core.compiling.ownership import StepCompiler
    except ImportError:
        warn(
            f"numba {numba.__version__} is too old for specbeam's steps, which need 0.63 (pip install 'numba>=0.63'); "
            "Python runs their source, which is much slower",
        )
        numba = None

if numba is not None:
    from llvmlite import ir
    from llvmlite.binding import ffi
    from numba import types
    from numba.extending import intrinsic, overload

    # vLLM reads the `__dict__` of every object of every loaded module, and llvmlite's library takes any name for one of its
    # C functions.
    getattr(ffi.lib, "_fntab", {}).setdefault("__dict__", {})

AVAILABLE = numba is not None and not numba.config.DISABLE_JIT and os.environ.get("SPECBEAM_KERNELS") != "off"
Array = Any  # numba infers the types
BLOCK = 64  # number of values that are summed or compared at a time
Compiled = TypeVar("Compiled", bound=Callable[..., Any])  # a compiled function has the signature of its source
Record = TypeVar("Record", bound=type)
# Count references to arrays even in functions that are first compiled for an uncounted caller; see
# `compiling.uncounted`.
_COUNTED = {"_nrt": True}
_BORROWED: set[type] = set()


def compiled(function: Compiled, **options: Any) -> Compiled:
    """Return the function compiled by numba; without numba, the function itself without overflow warnings.

    numba compiles one form of a function per combination of argument types, at the first call with these types, and the code
    is cached on disk. Entries for calls from Python are compiled only for forms that Python calls (see `compiling.linking`).

    Args:
        options: further options of `numba.njit`.
    """
    if not AVAILABLE:
        return np.errstate(all="ignore")(function)
    source = inspect.unwrap(function)  # tests wrap functions into type checks
    fixed = {"nogil": True, "error_model": "numpy", "boundscheck": False, "no_cfunc_wrapper": True, **_COUNTED}
    fixed["pipeline_class"] = StepCompiler
    made = numba.njit(no_cpython_wrapper=True, **{**fixed, **options})(source)
    made._cache = CodeCache(source)
    link_by_name(made)
    take_any_number(made)
    compile_in_turn(made)

    def make_entry() -> Any:
        entry = numba.njit(**fixed)(calling(made))
        entry._cache = CodeCache(entry.py_func, made._cache if source.__closure__ else None)
        compile_in_turn(entry)
        return entry

    add_python_entry(made, PythonEntry(make_entry))
    return cast(Compiled, made)


def borrowed(record: Record) -> Record:
    """Make compiled functions take records of this NamedTuple as one address, and return it; see `compiling.borrowed`.

    For records that Python makes and compiled functions only read. The contents of their arrays may change.
    """
    if AVAILABLE:
        borrow(record)
        _BORROWED.add(record)
    return record


def is_borrowed(record: object) -> bool:
    """Return whether compiled functions take a record as one address."""
    return type(record) in _BORROWED


def borrowed_views(record: type) -> Callable[..., Any]:
    """Return a function that makes records of a borrowed class; in compiled functions only from views of borrowed arrays."""
    return views_of(record) if AVAILABLE else record


def compiled_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that only compiled functions can call, by forms made with `numba.extending.overload`."""

    @functools.wraps(function)
    def refuse(*arguments: Any) -> Any:
        raise NotImplementedError(f"{function.__name__} has only compiled forms; call it from a compiled function")

    return refuse


def compiled_loosely(function: Compiled) -> Compiled:
    """Return the function compiled so that sums may be reordered into vector instructions; inputs must not hold NaN."""
    return compiled(function, fastmath={"reassoc", "nsz", "contract", "nnan"})


def most_threads() -> int:
    """Return the maximum number of threads of compiled functions: the available processors, or NUMBA_NUM_THREADS."""
    return int(numba.config.NUMBA_NUM_THREADS)


def address_of(function: Any, *arguments: Any) -> int:
    """Return the address of a compiled function's form for the types of these arguments, for `call_at`.

    Callers do not compile a callee that they call by address, so a long function is compiled only once.
    """
    kinds = tuple(numba.typeof(argument) for argument in arguments)
    function.compile(kinds)
    made = function.overloads[kinds]
    return int(made.library.get_pointer_to_function(made.fndesc.mangled_name))


if AVAILABLE:

    def chosen_for(function: Callable[..., Any]) -> Any:
        """Return `numba.extending.overload` of `function`, without the C entry that numba compiles for each overload."""
        options = {"no_cfunc_wrapper": True, "pipeline_class": StepCompiler, **_COUNTED}
        return overload(function, strict=False, jit_options=options)

    @intrinsic
    def call_at(typing: Any, address: Any, arguments: Any) -> Any:
        """Call the compiled function at an address; the function must return nothing.

        The arguments must have exactly the types that were passed to `address_of`: they are not checked.
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
        """Call the C function at an address with 64-bit integers or pointers; return its int result."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            int64 = ir.IntType(64)
            values = []
            for place, kind in enumerate(signature.args[1].types):
                values.append(context.cast(builder, builder.extract_value(args[1], place), kind, types.int64))
            function = ir.FunctionType(ir.IntType(32), [int64] * len(values))
            return builder.call(builder.inttoptr(args[0], function.as_pointer()), values)

        return types.int32(types.intp, arguments), code

"""Compiled functions without reference counts, for functions that neither make nor return arrays.

numba counts a reference for each row view of an array and for each array passed to a separate function. Each count is an
atomic operation, as long as sixteen multiplications: a fifth of the time in the layers of a small model. The caller of such
a function owns its arrays and keeps them alive during the call.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from specbeam.core.compiling.compiler import AVAILABLE, compiled

if AVAILABLE:
    from numba.extending import overload

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


def compiled_without_counts(function: Compiled) -> Compiled:
    """Return the function compiled like `compiled`, but without reference counts; numba refuses to make arrays in it.

    Its callees may make arrays, but must not return them, because they would never be freed.
    """
    return compiled(function, _nrt=False)


def chosen_without_counts(function: Callable[..., Any]) -> Any:
    """Return `chosen_for(function)` for overloads without reference counts."""
    return overload(function, strict=False, jit_options={"no_cfunc_wrapper": True, "_nrt": False})

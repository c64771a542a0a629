"""Compiled functions that count no references to arrays, for those that make no array and return none.

numba counts a reference whenever a row is taken of an array, or an array is given to a function that stands by itself. Each
count locks a line of memory, for about as long as sixteen numbers are multiplied: in the layers of a small model this was
a fifth of the time. The arrays of such a function belong to its caller, who keeps them until it is over.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from specbeam.core.compiling.compiler import AVAILABLE, compiled

if AVAILABLE:
    from numba.extending import overload

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


def compiled_without_counts(function: Compiled) -> Compiled:
    """Return the function compiled as `compiled` does it, but without counts; numba refuses to make arrays in it.

    What it calls may make arrays of its own. It must not get any of them back, as nobody would free it.
    """
    return compiled(function, _nrt=False)


def chosen_without_counts(function: Callable[..., Any]) -> Any:
    """Return what `chosen_for` does, for choices among functions that count no references."""
    return overload(function, strict=False, jit_options={"no_cfunc_wrapper": True, "_nrt": False})

"""Steps: pure functions of arrays, written once. Python runs their source in proofs, numba compiles it for users."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

from specbeam.core.compiling.compiler import AVAILABLE, BLOCK, Array, Compiled, borrowed, compiled

if AVAILABLE:
    from specbeam.core.compiling.compiler import chosen_for
    from specbeam.core.compiling.linking import calling

__all__ = ["AVAILABLE", "BLOCK", "Array", "borrowed", "compiled_as", "open_step", "step"]

step = compiled


def compiled_as(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for the function that chooses what compiled steps run in place of `function`.

    The decorated function takes the numba types of the arguments and returns what numba compiles for them, a function or a
    step. So a step can call something that depends on the types of its arguments, or that Python and compiled code do in
    different ways, such as looking at an object. Only the choices that occur are compiled.
    """

    def decorate(choose: Callable[..., Any]) -> Callable[..., Any]:
        if not AVAILABLE:
            return choose

        @functools.wraps(inspect.unwrap(choose))
        def chosen(*kinds: Any) -> Any:
            body = choose(*kinds)
            if hasattr(body, "py_func"):
                return calling(body)
            return inspect.unwrap(body)  # tests wrap functions into type checks

        chosen_for(function)(chosen)
        return choose

    return decorate


def open_step(function: Compiled) -> Compiled:
    """Return a step of which compiled steps run the compiled form, while Python runs its source.

    For steps that pass on what may be a Python object, such as the rows of a turn that go through logits processors.
    """
    source = cast(Compiled, inspect.unwrap(function))
    compiled_as(source)(lambda *kinds: source)
    return source

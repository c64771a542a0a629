"""Repeated calls from Python with the same argument types, which are checked only at the first call.

At every call numba determines the types of all arguments to choose the compiled form. For a record of a few hundred arrays
this takes three times as long as reading it.
"""

from collections.abc import Callable
from typing import Any

from specbeam.core.compiling.compiler import AVAILABLE

if AVAILABLE:
    from numba._dispatcher import compute_fingerprint


class Repeated:
    """A compiled function for one caller that always passes the same argument types, except for a few arguments.

    The caller must guarantee this: arguments of other types are read as if they had the types of the first call. Without
    numba the function is called normally.

    Args:
        function: the compiled function.
        changing: the arguments whose types are checked at every call.
    """

    def __init__(self, function: Callable[..., Any], changing: slice) -> None:
        self.function = function
        self.changing = changing
        self.forms: dict[Any, Callable[..., Any]] = {}
        self.is_compiled = AVAILABLE and hasattr(function, "python_entry")

    def __call__(self, *arguments: Any) -> Any:
        if not self.is_compiled:
            return self.function(*arguments)
        kinds = compute_fingerprint(arguments[self.changing])
        form = self.forms.get(kinds)
        if form is None:
            form = self.forms[kinds] = form_for(self.function, arguments)
        return form(*arguments)


def form_for(function: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """Return the entry point of a compiled function for exactly the types of these arguments."""
    known: dict[Any, Callable[..., Any]] = vars(function).setdefault("python_forms", {})
    kinds = compute_fingerprint(arguments)
    form = known.get(kinds)
    if form is None:
        types = tuple(function.typeof_pyval(argument) for argument in arguments)
        function.python_entry.compile(types)
        form = known[kinds] = function.python_entry.overloads[types].entry_point
    return form

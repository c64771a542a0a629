"""Calls that Python makes again and again with arguments of the same types, at which numba then looks once.

At every call numba finds out the types of all arguments, to choose the compiled form. For a record of a few hundred arrays
this takes three times as long as reading it.
"""

from collections.abc import Callable
from typing import Any

from specbeam.core.compiling.compiler import AVAILABLE

if AVAILABLE:
    from numba._dispatcher import compute_fingerprint


class Repeated:
    """A compiled function, called as it is itself, by one caller whose arguments keep their types but for a few.

    The caller vouches for it: an argument of another type would be read as if it were of the type of the first call. A
    function that Python runs is just called.

    Args:
        function: the compiled function.
        changing: the arguments at whose types is looked at every call.
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
    """Return what Python calls of a compiled function for arguments of the types of these, and of no others."""
    known: dict[Any, Callable[..., Any]] = vars(function).setdefault("python_forms", {})
    kinds = compute_fingerprint(arguments)
    form = known.get(kinds)
    if form is None:
        types = tuple(function.typeof_pyval(argument) for argument in arguments)
        function.python_entry.compile(types)
        form = known[kinds] = function.python_entry.overloads[types].entry_point
    return form

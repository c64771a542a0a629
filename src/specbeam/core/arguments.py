"""Errors for unknown keyword arguments of a function, with the names that were probably meant."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

from specbeam.core.errors import BadSetting
from specbeam.core.names import hint

Given = ParamSpec("Given")
Found = TypeVar("Found")


def refusing_unknown(
    what: str,
    aliases: Mapping[str, str] | None = None,
    inside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Callable[[Callable[Given, Found]], Callable[Given, Found]]:
    """Return a decorator that makes a function raise `BadSetting`, with the known names, for an unknown keyword argument.

    Args:
        what: the word for an argument in messages, such as "setting".
        aliases: known names by their names in other libraries.
        inside: makes the context in which the function runs.
    """

    def decorate(function: Callable[Given, Found]) -> Callable[Given, Found]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @wraps(function)
        def checked(*given: Given.args, **named: Given.kwargs) -> Found:
            for name in named:
                if name not in known:
                    near = hint(name, known, aliases)
                    names = ", ".join(known) or "none"
                    raise BadSetting(f"{function.__name__}() has no {what} {name}{near}; it has {names}")
            with inside():
                return function(*given, **named)

        return checked

    return decorate

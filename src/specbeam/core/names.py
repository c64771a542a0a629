"""Unknown names, and the known ones that were probably meant."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

from specbeam.core.errors import BadSetting

Given = ParamSpec("Given")
Found = TypeVar("Found")

# Settings of methods by their names in transformers, vLLM and papers.
SETTINGS_ELSEWHERE = {
    "num_beams": "beams",
    "beam_width": "beams",
    "beam_size": "beams",
    "num_assistant_tokens": "depth",
    "num_speculative_tokens": "depth",
    "gamma": "depth",
    "draft_tokens": "depth",
}


def nearest(name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """Return the known name most similar to an unknown one; "" if none is similar.

    Args:
        aliases: known names by their names in other libraries.
    """
    names = [*known]
    meant = (aliases or {}).get(name, "")
    if meant in names:
        return meant
    near = difflib.get_close_matches(name, names, 1)
    return near[0] if near else ""


def hint(name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """Return " (did you mean ...?)" for a message about an unknown name, or ""; see `nearest`."""
    meant = nearest(name, known, aliases)
    return f" (did you mean {meant}?)" if meant else ""


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

"""The argument of transformers' forwards for cached keys and values, whose name changed in 5.24."""

import inspect
from functools import cache
from typing import Any

NAMES = ("cache", "past_key_values")  # since 5.24, and before


def cache_argument(module: Any, held: Any) -> dict[str, Any]:
    """Return the argument with which a model or a layer of transformers reads and extends a cache.

    Args:
        held: the cache; None: none.
    """
    return {_name_in(type(module).forward): held}


@cache
def _name_in(forward: Any) -> str:
    new, old = NAMES
    return new if new in inspect.signature(forward).parameters else old


def cache_of(output: Any) -> Any:
    """Return the cache in the output of a model."""
    new, old = NAMES
    return getattr(output, new if hasattr(output, new) else old)

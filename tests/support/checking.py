"""The type checker of the test run: beartype, for which a number out of an array is a number.

Steps run as Python source in most tests, and take their numbers from arrays: numba has one type for both kinds.
"""

import functools
import inspect
import os
from typing import Any

import jaxtyping
import numpy as np
import typer
from beartype import BeartypeConf, BeartypeHintOverrides, beartype

NUMBERS = BeartypeHintOverrides(
    {
        bool: bool | np.bool_,
        int: int | np.integer,
        float: float | int | np.floating | np.integer,
        typer.Context: Any,  # typer hands on the class that it is derived from
    }
)
checked = beartype(conf=BeartypeConf(hint_overrides=NUMBERS))
FIRST, EVERY = 50, 200  # calls of each function that are checked: so many at first, then one of so many
FIRST_INNER = 5  # the first ones of a function that is made anew in each call of another one
_jaxtyped = jaxtyping.jaxtyped
_CALLS = {}  # number of calls of each inner function, in a list, by its code: of all that were made of it together


def sample_calls():
    """Let `jaxtyped` check some calls of each function: a check costs ten times what many of the functions cost.

    What checks a function is made when its first call is checked: this takes milliseconds, and many are never called.
    """
    jaxtyping.jaxtyped = _sampled


def _sampled(*, typechecker):
    def decorate(one):
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            return one  # frameworks tell them by their kind, which a wrapper would not have
        if not inspect.isclass(one):
            return _now_and_then(one, functools.partial(_jaxtyped, one, typechecker=typechecker))
        plain = one.__dict__.get("__init__")
        one = _jaxtyped(one, typechecker=typechecker)
        strict = one.__init__
        if plain is not None and strict is not plain:
            one.__init__ = _now_and_then(plain, lambda: strict)
        return one

    return decorate


def _now_and_then(plain, make_strict):
    code = getattr(plain, "__code__", None)
    is_inner = code is not None and "<locals>" in plain.__qualname__
    first = FIRST_INNER if is_inner else FIRST
    calls = _CALLS.setdefault(code, [0]) if is_inner else [0]
    strict = None

    @functools.wraps(plain)
    def call(*args, **named):
        nonlocal strict
        calls[0] += 1
        if calls[0] > first and calls[0] % EVERY:
            return plain(*args, **named)
        if strict is None:
            strict = make_strict()
        return strict(*args, **named)

    return call


def refused(match: str):
    """A wrong value for one of a fixed set of words: under the type checker of the test run, that finds it first."""
    import pytest
    from jaxtyping import TypeCheckError

    import specbeam as sb

    if os.environ.get("SPECBEAM_TYPES") == "off":
        return pytest.raises(sb.SpecbeamError, match=match)
    return pytest.raises((sb.SpecbeamError, TypeCheckError), match=f"{match}|Type-check error")

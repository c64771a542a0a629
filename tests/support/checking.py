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
_jaxtyped = jaxtyping.jaxtyped


def sample_calls():
    """Let `jaxtyped` check some calls of each function: a check costs ten times what many of the functions cost."""
    jaxtyping.jaxtyped = _sampled


def _sampled(*, typechecker):
    def decorate(one):
        if not inspect.isclass(one):
            return _now_and_then(one, _jaxtyped(one, typechecker=typechecker))
        plain = one.__dict__.get("__init__")
        one = _jaxtyped(one, typechecker=typechecker)
        if plain is not None and one.__init__ is not plain:
            one.__init__ = _now_and_then(plain, one.__init__)
        return one

    return decorate


def _now_and_then(plain, strict):
    calls = 0

    @functools.wraps(plain)
    def call(*args, **named):
        nonlocal calls
        calls += 1
        return (strict if calls <= FIRST or calls % EVERY == 0 else plain)(*args, **named)

    return call


def refused(match: str):
    """A wrong value for one of a fixed set of words: under the type checker of the test run, that finds it first."""
    import pytest
    from jaxtyping import TypeCheckError

    import specbeam as sb

    if os.environ.get("SPECBEAM_TYPES") == "off":
        return pytest.raises(sb.SpecbeamError, match=match)
    return pytest.raises((sb.SpecbeamError, TypeCheckError), match=f"{match}|Type-check error")

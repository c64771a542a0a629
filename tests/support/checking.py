"""The type checker of the test run: beartype, for which a number out of an array is a number.

Steps run as Python source in most tests, and take their numbers from arrays: numba has one type for both kinds.
"""

import builtins
import functools
import inspect
import os
from types import FunctionType
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
FIRST = 50  # calls of each function that are checked
FIRST_INNER, EVERY = (
    5,
    200,
)  # the first ones of a function that is made anew in each call of another one, then one of so many
_jaxtyped = jaxtyping.jaxtyped
_CALLS = {}  # number of calls of each inner function, in a list, by its code: of all that were made of it together
_FIRST_CALLS = []  # of the functions that are made once, by the number in their code


def sample_calls():
    """Let `jaxtyped` check some calls of each function: a check costs ten times what many of the functions cost.

    What checks a function is made when its first call is checked: this takes milliseconds, and many are never called.
    """
    jaxtyping.jaxtyped = _sampled


def _sampled(*, typechecker):
    def decorate(one):
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            return one  # frameworks tell them by their kind, which a wrapper would not have
        if inspect.isfunction(one) and not one.__code__.co_freevars and "<locals>" not in one.__qualname__:
            return _at_first(one, typechecker)
        if not inspect.isclass(one):
            return _now_and_then(one, functools.partial(_jaxtyped, one, typechecker=typechecker))
        plain = one.__dict__.get("__init__")
        one = _jaxtyped(one, typechecker=typechecker)
        strict = one.__init__
        if plain is not None and strict is not plain:
            one.__init__ = _now_and_then(plain, lambda: strict)
        return one

    return decorate


class FirstCalls:
    """The first calls of a function, which are checked.

    Until then the function has the code of `_code_of`, and afterwards its own: a wrapper around it would cost more than many
    of the functions, which are called millions of times.
    """

    def __init__(self, plain, make_strict):
        self.plain = plain
        self.made = plain.__code__, plain.__defaults__, plain.__kwdefaults__
        self.whole = FunctionType(plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__)
        functools.update_wrapper(self.whole, plain)
        del self.whole.__wrapped__
        self.whole.__kwdefaults__ = plain.__kwdefaults__
        self.make_strict = make_strict
        self.strict = None
        self.calls = 0
        plain.__code__ = _code_of(len(_FIRST_CALLS), plain.__code__)
        plain.__defaults__ = None
        plain.__kwdefaults__ = None
        plain.__wrapped__ = self.whole
        _FIRST_CALLS.append(self)

    def call(self, args, named):
        self.calls += 1
        if self.calls > FIRST:
            self.plain.__code__, self.plain.__defaults__, self.plain.__kwdefaults__ = self.made
            return self.whole(*args, **named)
        if self.strict is None:
            self.strict = self.make_strict(self.whole)
        return self.strict(*args, **named)


def _code_of(number, code):
    """The code of a function that hands its arguments to the `FirstCalls` of this number."""
    names = {}
    exec(f"def call(*args, **named): return specbeam_first_calls({number}, args, named)", names)
    return names["call"].__code__.replace(
        co_name=code.co_name, co_filename=code.co_filename, co_firstlineno=code.co_firstlineno
    )


builtins.specbeam_first_calls = lambda number, args, named: _FIRST_CALLS[number].call(args, named)


def _at_first(plain, typechecker):
    FirstCalls(plain, functools.partial(_jaxtyped, typechecker=typechecker))
    return plain


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

"""The source of steps, in place of what is compiled of it."""

import sys
from contextlib import contextmanager

import numpy as np
import pytest

from specbeam.core.steps import AVAILABLE

if AVAILABLE:
    from numba.core.dispatcher import Dispatcher

needs_numba = pytest.mark.skipif(not AVAILABLE, reason="needs numba")
_INSIDE = [0]


def source_of(step):
    """The source of one step, as a Python function."""
    return getattr(step, "py_func", step)


@contextmanager
def source_of_steps(compiled_from="-"):
    """Let all steps of the package run as Python while the context lasts, but those of packages with this name.

    Engines for CPUs have compiled forms only.
    """
    if not AVAILABLE or _INSIDE[0]:
        with np.errstate(all="ignore"):
            yield
        return
    compiled = [
        (place, name, value)
        for place in _places_of_steps()
        for name, value in list(place.items())
        if isinstance(value, Dispatcher) and not value.py_func.__module__.startswith(compiled_from)
    ]
    for place, name, value in compiled:
        place[name] = value.py_func
    _INSIDE[0] += 1
    try:
        with np.errstate(all="ignore"):  # as compiled code does it
            yield
    finally:
        _INSIDE[0] -= 1
        for place, name, value in compiled:
            place[name] = value


def _places_of_steps():
    """The names of each module, and each table of steps that has a name there."""
    places = []
    for key, module in list(sys.modules.items()):
        if key.startswith(("specbeam.", "tests.")):
            tables = [
                value for name, value in vars(module).items() if type(value) is dict and not name.startswith("__")
            ]
            places += [vars(module), *tables]
    return places

"""The source of steps, in place of what is compiled of it."""

import sys
from contextlib import contextmanager

import numpy as np

from specbeam.core.steps import AVAILABLE

if AVAILABLE:
    from numba.core.dispatcher import Dispatcher

_INSIDE = [0]


def source_of(step):
    """The source of one step, as a Python function."""
    return getattr(step, "py_func", step)


@contextmanager
def source_of_steps():
    """Let all steps of the package run as Python while the context lasts."""
    if not AVAILABLE or _INSIDE[0]:
        with np.errstate(all="ignore"):
            yield
        return
    compiled = [
        (module, name, value)
        for key, module in list(sys.modules.items())
        if key.startswith(("specbeam.", "tests."))
        for name, value in list(vars(module).items())
        if isinstance(value, Dispatcher)
    ]
    for module, name, value in compiled:
        setattr(module, name, value.py_func)
    _INSIDE[0] += 1
    try:
        with np.errstate(all="ignore"):  # as compiled code does it
            yield
    finally:
        _INSIDE[0] -= 1
        for module, name, value in compiled:
            setattr(module, name, value)

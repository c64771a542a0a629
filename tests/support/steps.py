"""The source of steps, in place of what is compiled of it."""

import pkgutil
import sys
from contextlib import contextmanager
from functools import cache
from importlib import import_module

import numpy as np
import pytest

import specbeam.core
import specbeam.recipes
from specbeam.core.steps import AVAILABLE, Verb

if AVAILABLE:
    from numba.core.dispatcher import Dispatcher

    from specbeam.core.compiling.linking import _FUNCTIONS

needs_numba = pytest.mark.skipif(not AVAILABLE, reason="needs numba")
_INSIDE = [0]
_COMPILED_ONLY = "specbeam.core.compiling.held"  # writes records to memory for compiled code


def source_of(step):
    """The source of one step, as a Python function."""
    return getattr(step, "py_func", step)


@contextmanager
def source_of_steps(compiled_from="-"):
    """Let all steps run as Python while the context lasts, of whatever module, but those of packages with this name.

    Engines for CPUs have compiled forms only. A patch of a step that begins inside the context must end inside it, or it
    would put the Python function back for all tests that follow. Steps must be imported before, or they would run compiled
    among those that do not.
    """
    if not AVAILABLE or _INSIDE[0]:
        with np.errstate(all="ignore"):
            yield
        return
    _import_steps()
    known = len(_FUNCTIONS)
    sources = _SOURCES.setdefault(compiled_from, _Sources(compiled_from))
    replaced = []
    for place, name in _names_of_steps():
        value = place.get(name)
        source = sources[value] if isinstance(value, Dispatcher) else None
        if source is not None:
            place[name] = source
            replaced.append((place, name, value, source))
    _INSIDE[0] += 1
    try:
        with np.errstate(all="ignore"):  # as compiled code does it
            yield
    finally:
        _INSIDE[0] -= 1
        patched = [name for place, name, _, source in replaced if place[name] is not source]
        for place, name, value, _ in replaced:
            place[name] = value
        late = sorted({module for module, _ in [*_FUNCTIONS][known:]})
        assert not late, (
            f"{', '.join(late)} was imported inside `source_of_steps`, and its steps ran compiled: import it before"
        )
        assert not patched, f"patches of {patched} outlive `source_of_steps`: undo them before it ends"


class _Sources(dict):
    """The Python function of each step, by the step; None for steps that run compiled."""

    def __init__(self, compiled_from):
        super().__init__()
        self.compiled_from = compiled_from

    def __missing__(self, value):
        runs_compiled = value.py_func.__module__.startswith(self.compiled_from)
        self[value] = None if runs_compiled else value.py_func
        return self[value]


_SOURCES: dict = {}
_FOUND: list = [None, []]  # what `_names_of_steps` found last, and when


def _names_of_steps():
    """The names of steps, each with the dictionary that it is in; looked for anew only if there are other names since.

    To look through all modules takes as long as a session of a table does.
    """
    state = (len(sys.modules), sum(map(len, _FOUND[1])))
    if state != _FOUND[0]:
        _FOUND[1] = _places_of_steps()
        _FOUND[0] = (len(sys.modules), sum(map(len, _FOUND[1])))
        known = {name for _, name in _FUNCTIONS}  # a test may have put something else in place of a step for now
        _STEPS[:] = [
            (place, name)
            for place in _FOUND[1]
            for name, value in place.items()
            if isinstance(value, Dispatcher) or (isinstance(name, str) and name in known)
        ]
    return _STEPS


_STEPS: list = []


@cache
def _import_steps():
    """Import the modules of the core and of the recipes, which are otherwise imported when they are first needed."""
    for package in (specbeam.core, specbeam.recipes):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            import_module(module.name)


def _places_of_steps():
    """The names of each module, and each table of steps that has a name there."""
    places = []
    others = {module for module, _ in _FUNCTIONS}  # somebody's own
    for key, module in list(sys.modules.items()):
        if key != _COMPILED_ONLY and (key.startswith(("specbeam.", "tests.")) or key in others):
            tables = [
                value for name, value in vars(module).items() if type(value) is dict and not name.startswith("__")
            ]
            places += [vars(module), *tables]
            for value in vars(module).values():
                if isinstance(value, Verb) and value._steps not in places:
                    places += [value._steps, vars(value)]
    return places

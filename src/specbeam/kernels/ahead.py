"""Processes that compile ahead: what a first text needs, on the processors that wait while this process compiles.

They share with this process nothing but the files of kept code: a form that one of them has kept is loaded where it would
have been compiled, and a form that one of them is compiling is waited for (`kernels.claims`). So they may end at any time.
"""

import atexit
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from specbeam.kernels.claims import LOCKS

MOST = 8  # processes: more find nothing to do
_PAUSE = 0.02  # seconds between two looks at what is ready
_PATIENCE = 60.0  # seconds without anything to do after which a process ends
_OPEN, _TAKEN, _DONE = range(3)
_PROGRAM = "import sys, json; given = json.loads(sys.stdin.readline()); sys.path[:] = given[0]; "
_PROGRAM += "from specbeam.kernels.ahead import work; work(given[1])"
_BEGUN: list[Any] = []  # the processes that were begun, at most once in a process


def processes_wanted() -> int:
    """Return how many processes may compile at once, with this one: SPECBEAM_COMPILERS, or one for each processor."""
    asked = os.environ.get("SPECBEAM_COMPILERS", "")
    if asked.isdecimal():
        return int(asked)
    from numba import config  # knows which processors this process may use

    return min(int(config.NUMBA_NUM_THREADS), MOST)


def begin(function: Callable[..., Any]) -> None:
    """Begin processes that compile ahead, when the first form is missing and a first text needs its function."""
    if _BEGUN or not LOCKS or not sys.executable:
        return
    if (function.__module__, function.__qualname__.removeprefix("call_")) not in _names():
        return
    others = processes_wanted() - 1
    _BEGUN.append(None)
    if others < 1:
        return
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "SPECBEAM_COMPILERS": "1", "OMP_NUM_THREADS": "1"},
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps([sys.path, others]).encode() + b"\n")
        process.stdin.flush()  # and left open: its end says that this process has ended
    except OSError:
        return
    _BEGUN.append(process)
    atexit.register(_end, process)


def _end(process: Any) -> None:
    """End the processes that compile ahead."""
    process.stdin.close()
    process.kill()
    process.wait()


@cache
def _names() -> frozenset[tuple[str, str]]:
    from specbeam.kernels.form_list import PLACE, names_in

    return names_in(PLACE.read_text()) if PLACE.exists() else frozenset()


def work(processes: int) -> None:
    """Compile the forms of the list, in several processes, until all are kept.

    They end when the process at the other end of stdin does.
    """
    from specbeam.kernels.form_list import PLACE, forms_in

    forms = forms_in(PLACE.read_text())
    for form in forms:
        form.function()  # imports its module
    states = mmap.mmap(-1, len(forms))  # _OPEN, _TAKEN or _DONE; all processes see it
    for _ in range(processes - 1):
        if os.fork() == 0:
            break
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _compile_all(forms, states)


def _leave_with_parent() -> None:
    os.read(0, 1)
    os._exit(0)


def _compile_all(forms: list[Any], states: Any) -> None:
    """Compile one form after the other whose needs are kept, those first that most others wait for."""
    heights = _heights(forms)
    order = sorted(range(len(forms)), key=lambda number: -heights[number])
    latest = time.monotonic() + _PATIENCE
    while any(state != _DONE for state in states[:]) and time.monotonic() < latest:
        for number in order:
            ready = states[number] == _OPEN and all(states[need] == _DONE for need in forms[number].needs)
            if ready and _compile(forms[number], number, states):
                latest = time.monotonic() + _PATIENCE
                break
        else:
            time.sleep(_PAUSE)


def _compile(form: Any, number: int, states: Any) -> bool:
    """Compile a form, or find that it is kept. Returns False if another process is at it."""
    function = form.function()
    if not function._cache.keeps(form.kinds, function.targetctx):
        if not function._cache.claim(form.kinds):
            return False
        states[number] = _TAKEN
        with suppress(Exception):  # the list may be of other sources
            function.compile(form.kinds)
    states[number] = _DONE
    return True


def _heights(forms: list[Any]) -> list[int]:
    """Return how many forms wait for each form, one for the other, in the longest chain."""
    heights = [0] * len(forms)
    for number in reversed(range(len(forms))):  # what calls a form comes after it
        for need in forms[number].needs:
            heights[need] = max(heights[need], heights[number] + 1)
    return heights

"""Processes that compile ahead: what a first text needs, on the processors that wait while this process compiles.

They share with this process nothing but the files of kept code: a form that one of them has kept is loaded where it would
have been compiled, and a form that one of them is compiling is waited for (`kernels.claims`). So they may end at any time.
"""

import atexit
import gc
import json
import mmap
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from specbeam.core.compiling.claims import LOCKS, end_all, wait_for
from specbeam.core.errors import BadSetting

MOST = 8  # processes: more find nothing to do
_MEMORY_OF_ONE = 1.5e9  # bytes; what was measured is 0.9
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of processors in a period, and the period
_MEMORY = Path("/proc/meminfo")
_MOST_MEMORY = Path("/sys/fs/cgroup/memory.max")  # of a container: bytes
_USED_MEMORY = Path("/sys/fs/cgroup/memory.current")
_PAUSE = 0.02  # seconds between two looks at what is ready; longer and longer while nothing is,
_LONGEST_PAUSE = 0.2  # up to this
_PATIENCE = 60.0  # seconds without anything to do after which a process ends
_OPEN, _TAKEN, _DONE = range(3)
_PROGRAM = "import sys, json; given = json.loads(sys.stdin.readline()); sys.path[:] = given.pop(0); "
_PROGRAM += "from specbeam.core.compiling.ahead import work; work(*given)"
_SETTINGS = ("CACHE_DIR", "CPU_NAME", "CPU_FEATURES")  # of numba, that a program may set in Python
_BEGUN: list[Any] = []  # the processes that were begun, at most once in a process


def processes_wanted() -> int:
    """Return how many processes may compile at once, with this one.

    SPECBEAM_COMPILERS, or one for each processor that this process may use, as far as the memory goes. Raises `BadSetting`
    if the variable holds something other than a number.
    """
    asked = os.environ.get("SPECBEAM_COMPILERS", "")
    if asked:
        if not (asked.isascii() and asked.isdecimal()):
            raise BadSetting(f"SPECBEAM_COMPILERS is {asked!r}; it must be a number of processes, or not set")
        return int(asked)
    from numba import config  # knows which processors this process may use

    most = min(int(config.NUMBA_NUM_THREADS), MOST, _processors(), _memory() / _MEMORY_OF_ONE)
    return max(int(most), 1)


def _processors() -> float:
    """Return how many processors the container may use on average; infinity where nothing says so."""
    with suppress(OSError, ValueError):  # "max" is no number
        (quota, period) = _QUOTA.read_text().split()
        return int(quota) / int(period)
    return float("inf")


def _memory() -> float:
    """Return how many bytes may be used; infinity where nothing says so."""
    sizes = []
    with suppress(OSError, ValueError):  # "max" is no number
        sizes.append(float(int(_MOST_MEMORY.read_text()) - int(_USED_MEMORY.read_text())))
    with suppress(OSError, ValueError):
        (_, _, available) = _MEMORY.read_text().partition("MemAvailable:")
        (kilobytes, *_) = available.split()
        sizes.append(1024.0 * int(kilobytes))
    return min(sizes, default=float("inf"))


def begin(function: Callable[..., Any]) -> None:
    """Begin processes that compile ahead, when the first form is missing and a first text needs its function."""
    if _BEGUN or not LOCKS or not _can_start_python():
        return
    if (function.__module__, function.__qualname__.removeprefix("call_")) not in _names():
        return
    others = processes_wanted() - 1
    _BEGUN.append(None)
    if others < 1:
        return
    process = _started(others)
    if process is not None:
        _BEGUN.append(process)


def _can_start_python() -> bool:
    """Return whether this program is Python: one that has Python inside would be started a second time."""
    name = Path(sys.executable or "").name
    return name.startswith(("python", "pypy")) and not getattr(sys, "frozen", False)


def _started(others: int) -> Any:
    """Return the first of the other processes, which works and ends with this one; None if none can be started."""
    from numba import config

    paths = [path for path in sys.path if isinstance(path, str)]  # Python passes over others, too
    line = json.dumps([paths, others, os.getpid()]).encode() + b"\n"
    set_here = {f"NUMBA_{name}": str(value) for name in _SETTINGS if (value := getattr(config, name, None))}
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **set_here, "SPECBEAM_COMPILERS": "1", "OMP_NUM_THREADS": "1"},
        )
    except (OSError, RuntimeError):  # RuntimeError: this process is about to end
        return None
    try:
        _begin_with(process, line)
    except (OSError, RuntimeError):  # it has ended, or no thread can be started
        _end(process)
        return None
    except BaseException:
        _end(process)
        raise
    return process


def _begin_with(process: Any, line: bytes) -> None:
    """Hand a process its line, and see to its end."""
    process.stdin.write(line)
    process.stdin.flush()  # and left open: its end says that this process has ended
    threading.Thread(target=process.wait, daemon=True).start()  # so that it does not stay as a zombie
    os.register_at_fork(after_in_child=lambda: _forget(process))
    atexit.register(_end, process)


def _end(process: Any) -> None:
    """End the processes that compile ahead: the first one, and with it the others."""
    with suppress(OSError):  # of what was not written
        process.stdin.close()
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _forget(process: Any) -> None:
    """Leave the processes alone, in a copy of the process that began them: they end with that one."""
    process.stdin.close()
    atexit.unregister(_end)


@cache
def _names() -> frozenset[tuple[str, str]]:
    from specbeam.core.compiling.form_list import PLACE, names_in

    return names_in(PLACE.read_text()) if PLACE.exists() else frozenset()


def work(processes: int, program: int) -> None:
    """Compile the forms of the list, in several processes, until all are kept.

    They end when the program does, which is the process of this number, at the other end of stdin.
    """
    from specbeam.core.compiling.form_list import PLACE, forms_in

    os.nice(10)  # whatever else runs has something to do for somebody
    _leave_with(program)
    # Of several programs one has it compiled, and then the next one what is left.
    place = place_of_claim()
    claim = None if place is None else wait_for(place, _PATIENCE, _LONGEST_PAUSE)
    if claim is None:
        return
    forms = forms_in(PLACE.read_text())
    for form in forms:
        with suppress(Exception):  # the list may be of other sources
            form.function()  # imports its module
    gc.freeze()  # what was imported stays: to look through it for garbage would take a seventh of the time
    states = mmap.mmap(-1, len(forms))  # _OPEN, _TAKEN or _DONE; all processes see it
    first = os.getpid()
    others = []
    for _ in range(processes - 1):
        other = os.fork()
        if other == 0:
            _leave_with(first)
            _compile_all(forms, states)
            os._exit(0)
        others.append(other)
    _compile_all(forms, states)
    for other in others:
        os.waitpid(other, 0)
    claim.end()


def place_of_claim() -> Path | None:
    """Return the file that the processes claim which compile the list of this package; None where nothing can be kept."""
    from specbeam.core.compiling.code_cache import code_folder, compiled_by
    from specbeam.core.compiling.form_list import PLACE

    folder = code_folder()
    key = repr((compiled_by(), str(PLACE)))
    return folder and folder / f"{PLACE.stem}-{sha256(key.encode()).hexdigest()[:32]}.claim"


def _leave_with(parent: int) -> None:
    """Make this process end when its parent does, or the program at the other end of stdin."""
    threading.Thread(target=_wait_and_leave, args=(parent,), daemon=True).start()


def _wait_and_leave(parent: int) -> None:
    while os.getppid() == parent:  # the other end of stdin stays open where a copy of the program has it
        (ended, _, _) = select.select([0], [], [], 1.0)
        if ended:
            break
    end_all()
    os._exit(0)


def _compile_all(forms: list[Any], states: Any) -> None:
    """Compile one form after the other whose needs are kept, those first that most others wait for."""
    heights = _heights(forms)
    order = sorted(range(len(forms)), key=lambda number: -heights[number])
    latest = time.monotonic() + _PATIENCE
    pause = _PAUSE
    while any(state != _DONE for state in states[:]) and time.monotonic() < latest:
        for number in order:
            ready = states[number] == _OPEN and all(states[need] == _DONE for need in forms[number].needs)
            if ready and _compile(forms[number], number, states):
                latest = time.monotonic() + _PATIENCE
                pause = _PAUSE
                break
        else:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _compile(form: Any, number: int, states: Any) -> bool:
    """Compile a form, or find that it is kept or cannot be compiled. Returns False if another process is at it."""
    with suppress(Exception):  # the list may be of other sources
        function = form.function()
        if not function._cache.keeps(form.kinds, function.targetctx):
            if not function._cache.claim(form.kinds, function.targetctx):
                return False
            states[number] = _TAKEN
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

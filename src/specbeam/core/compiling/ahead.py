"""Compiles the steps of a first text in parallel worker processes.

Workers share only the files of the code cache with this process: it loads forms that a worker has saved, and waits for forms
that a worker is compiling (`compiling.claims`). So workers may end at any time.
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
from importlib import import_module
from pathlib import Path
from typing import Any

from specbeam.core.compiling.claims import LOCKS, end_all, wait_for
from specbeam.core.errors import BadSetting
from specbeam.core.machine import free_memory, processor_quota

MOST = 8  # maximum number of processes; more would idle
_MEMORY_OF_ONE = 1.5e9  # bytes per process; measured: 0.9e9
_PAUSE = 0.02  # seconds between two checks for forms to compile; doubled while there are none,
_LONGEST_PAUSE = 0.2  # up to this
_PATIENCE = 60.0  # seconds without work after which a process ends
_OPEN, _TAKEN, _DONE = range(3)
_PROGRAM = "import sys, json; given = json.loads(sys.stdin.readline()); sys.path[:] = given.pop(0); "
_PROGRAM += "from specbeam.core.compiling.ahead import work; work(*given)"
_SETTINGS = ("CACHE_DIR", "CPU_NAME", "CPU_FEATURES")  # settings of numba that a program may change in Python
_BEGUN: list[Any] = []  # the started worker processes; started at most once per process


def processes_wanted() -> int:
    """Return the number of processes that may compile at once, including this one.

    This is SPECBEAM_COMPILERS, or one per available processor, limited by the free memory. Raises `BadSetting` if the
    variable is not a number.
    """
    asked = os.environ.get("SPECBEAM_COMPILERS", "")
    if asked:
        if not (asked.isascii() and asked.isdecimal()):
            raise BadSetting(f"SPECBEAM_COMPILERS is {asked!r}; it must be a number of processes, or unset")
        return int(asked)
    from numba import config  # knows the processors available to this process

    most = min(int(config.NUMBA_NUM_THREADS), MOST, processor_quota(), free_memory() / _MEMORY_OF_ONE)
    return max(int(most), 1)


def begin(function: Callable[..., Any]) -> None:
    """Start the worker processes if a form of this function is missing and a first text needs the function."""
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
    """Return whether `sys.executable` is Python. If an application embeds Python, it would be started a second time."""
    name = Path(sys.executable or "").name
    return name.startswith(("python", "pypy")) and not getattr(sys, "frozen", False)


def _started(others: int) -> Any:
    """Return the first worker process, which ends with this process; None if it cannot be started."""
    from numba import config

    paths = [path for path in sys.path if isinstance(path, str)]  # Python ignores other entries, too
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
    except (OSError, RuntimeError):  # RuntimeError: this process is exiting
        return None
    try:
        _begin_with(process, line)
    except (OSError, RuntimeError):  # it has ended, or no thread can start
        _end(process)
        return None
    except BaseException:
        _end(process)
        raise
    return process


def _begin_with(process: Any, line: bytes) -> None:
    """Send a worker process its arguments, and arrange for its end."""
    process.stdin.write(line)
    process.stdin.flush()  # left open: the worker ends when it is closed
    threading.Thread(target=process.wait, daemon=True).start()  # reaps the process
    os.register_at_fork(after_in_child=lambda: _forget(process))
    atexit.register(_end, process)


def _end(process: Any) -> None:
    """End the first worker process, which ends the others."""
    with suppress(OSError):  # unwritten data
        process.stdin.close()
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end() -> None:
    """End the worker processes, and release the claims of this process, for a program that ends without Python's exit."""
    for process in _BEGUN:
        if process is not None:
            _end(process)
    end_all()


def _forget(process: Any) -> None:
    """Detach the workers in a forked copy of the process that started them: they end with the original."""
    process.stdin.close()
    atexit.unregister(_end)


@cache
def _names() -> frozenset[tuple[str, str]]:
    from specbeam.core.compiling.form_list import PLACE, names_in

    return names_in(PLACE.read_text()) if PLACE.exists() else frozenset()


def work(processes: int, program: int) -> None:
    """Compile the forms of the list in several processes, until all are saved.

    Args:
        processes: number of processes, including this one.
        program: id of the process at the other end of stdin; the workers end when it does.
    """
    from specbeam.core.compiling.form_list import PLACE, forms_in, modules_in

    os.nice(10)  # yield to all other work on the machine
    _leave_with(program)
    # If several programs start, one compiles the list, and the next one compiles what is left.
    place = place_of_claim()
    claim = None if place is None else wait_for(place, _PATIENCE, _LONGEST_PAUSE)
    if claim is None:
        return
    text = PLACE.read_text()
    for module in modules_in(text):
        with suppress(Exception):  # the list may belong to other sources
            import_module(module)
    forms = forms_in(text)
    for form in forms:
        with suppress(Exception):  # the list may belong to other sources
            form.function()  # imports its module
    gc.freeze()  # garbage collection would spend a seventh of the time on the imported modules
    states = mmap.mmap(-1, len(forms))  # _OPEN, _TAKEN or _DONE; shared by all processes
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
    """Return the lock file of the compilation of this package's list; None without a cache folder."""
    from specbeam.core.compiling.code_cache import code_folder, compiled_by
    from specbeam.core.compiling.form_list import PLACE

    folder = code_folder()
    key = repr((compiled_by(), str(PLACE)))
    return folder and folder / f"{PLACE.stem}-{sha256(key.encode()).hexdigest()[:32]}.claim"


def _leave_with(parent: int) -> None:
    """End this process when its parent or the program at the other end of stdin ends."""
    threading.Thread(target=_wait_and_leave, args=(parent,), daemon=True).start()


def _wait_and_leave(parent: int) -> None:
    while os.getppid() == parent:  # a forked copy of the program may keep the other end of stdin open
        (ended, _, _) = select.select([0], [], [], 1.0)
        if ended:
            break
    end_all()
    os._exit(0)


def _compile_all(forms: list[Any], states: Any) -> None:
    """Compile forms whose dependencies are saved, those with the longest chain of dependents first."""
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
    """Compile a form unless it is saved or cannot be compiled. Returns False if another process is compiling it."""
    with suppress(Exception):  # the list may belong to other sources
        function = form.function()
        if not function._cache.keeps(form.kinds, function.targetctx):
            if not function._cache.claim(form.kinds, function.targetctx):
                return False
            states[number] = _TAKEN
            function.compile(form.kinds)
    states[number] = _DONE
    return True


def _heights(forms: list[Any]) -> list[int]:
    """Return the length of the longest chain of forms that depend on each form."""
    heights = [0] * len(forms)
    for number in reversed(range(len(forms))):  # callees come before their callers
        for need in forms[number].needs:
            heights[need] = max(heights[need], heights[number] + 1)
    return heights

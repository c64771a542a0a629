"""The threads that help with products; see engines/cpu/shares.py."""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from specbeam.engines.cpu import shares
from specbeam.engines.cpu.panels import FORM_OF, share_functions
from specbeam.kernels.compiling import address_of
from specbeam.kernels.threads import allowed_threads


class Team:
    """Helping threads, and the memory by which they and whoever asks for products know of each other.

    Attributes:
        address: of the memory; compiled code takes it in place of a number of threads.
    """

    def __init__(self) -> None:
        self._alone = threading.RLock()  # a team serves one caller at a time, who may run two models
        self._begin()

    def _begin(self) -> None:
        """Start without helpers, as a forked process has to: its parent's threads do not run in it."""
        self.process = os.getpid()
        self.memory = shares.new_memory()
        self.address = self.memory.ctypes.data
        self.memory[shares.YIELD] = _address_of_yield()
        self.wakers: list[threading.Event] = []
        self.depth = 0

    def learn(self, panels: np.ndarray) -> None:
        """Make products with panels of this kind be shared: compile what helpers call, or load it from disk."""
        for dtype in {panels.dtype, np.dtype(np.int32) if panels.dtype == np.int8 else panels.dtype}:
            form = FORM_OF[dtype.name]
            if self.memory[shares.FORMS + form] == 0:
                self.memory[shares.FORMS + form] = address_of(share_functions[dtype.name], 0, 0)

    @contextmanager
    def threads(self, most: int) -> Iterator[int]:
        """Yield what compiled code takes for its threads: 1, or the address of the team, whose helpers are there meanwhile.

        Args:
            most: number of threads, besides what `allowed_threads` says. With more than one, other callers wait until this
                context is left.
        """
        count = min(allowed_threads(), most)
        if count == 1:
            yield 1
            return
        with self._alone:
            if self.process != os.getpid():
                forms = self.memory[shares.FORMS :].copy()
                self._begin()
                self.memory[shares.FORMS :] = forms
            self._open(count)
            try:
                yield self.address
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.memory[shares.OPEN] = 0

    def _open(self, count: int) -> None:
        """Wake the helpers, and make those that are missing."""
        self.depth += 1
        if self.depth > 1:
            return
        self.memory[shares.THREADS] = count
        self.memory[shares.OPEN] = 1
        while len(self.wakers) < count - 1:
            waker = threading.Event()
            self.wakers.append(waker)
            name = f"specbeam-{len(self.wakers)}"
            threading.Thread(target=_help, args=(self.memory, waker), name=name, daemon=True).start()
        for waker in self.wakers[: count - 1]:
            waker.set()


def _help(memory: np.ndarray, waker: threading.Event) -> None:
    """Help whenever the team is open."""
    address = memory.ctypes.data
    while True:
        waker.wait()
        waker.clear()
        shares.help_team(memory, address)


def _address_of_yield() -> int:
    """Return the address of the C function that lets other threads run; 0 if it is unknown."""
    function: Any = getattr(ctypes.CDLL(None), "sched_yield", None) if os.name == "posix" else None
    return 0 if function is None else int(ctypes.cast(function, ctypes.c_void_p).value or 0)


TEAM = Team()

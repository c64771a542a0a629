"""The threads that help with products; see engines/cpu/shares.py."""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from specbeam.core.compiling.compiler import address_of, most_threads
from specbeam.core.threads import allowed_threads
from specbeam.engines.cpu import shares
from specbeam.engines.cpu.attention import ATTENTION_FORM_OF, attention_functions
from specbeam.engines.cpu.panels import FORM_OF, share_functions

# Number of weights from which other threads help. They poll for shares all the time, which does not pay for the short
# products of smaller models.
HELPED_FROM = 30_000_000


def threads_for(weights: int) -> int:
    """Return the maximum number of threads for a model with this number of weights."""
    return most_threads() if weights >= HELPED_FROM else 1


class Team:
    """Helping threads, and the memory that they share with callers of products.

    Attributes:
        address: of the memory; compiled code takes it in place of a number of threads.
    """

    def __init__(self) -> None:
        self._begin()

    def begin_anew(self) -> None:
        """Start without helpers in a forked process: the parent's threads, one of which may hold the lock, are gone.

        A caller in `threads` during a fork keeps the former memory, and does all shares itself.
        """
        forms = self.memory[shares.FORMS :].copy()
        self._begin()
        self.memory[shares.FORMS :] = forms

    def _begin(self) -> None:
        self._alone = threading.RLock()  # a team serves one caller at a time; a caller may run two models
        self.memory = shares.new_memory()
        self.address = self.memory.ctypes.data
        self.memory[shares.YIELD] = _address_of_yield()
        self.wakers: list[threading.Event] = []
        self.depth = 0

    def learn(self, panels: np.ndarray) -> None:
        """Let helpers share products with panels of this kind: compile their function, or load it from disk."""
        for dtype in {panels.dtype, np.dtype(np.int32) if panels.dtype == np.int8 else panels.dtype}:
            self.learn_function(FORM_OF[dtype.name], share_functions[dtype.name])

    def learn_attention(self, words: np.dtype) -> None:
        """Let helpers share attention to caches of this dtype."""
        self.learn_function(ATTENTION_FORM_OF[words.name], attention_functions[words.name])

    def learn_function(self, form: int, function: Any) -> None:
        """Let helpers call a compiled function for shares of a form, with the memory's address and the share's number."""
        if self.memory[shares.FORMS + form] == 0:
            self.memory[shares.FORMS + form] = address_of(function, 0, 0)

    @contextmanager
    def threads(self, most: int) -> Iterator[int]:
        """Yield the argument `threads` of compiled code: 1, or the address of the team, whose helpers run in this context.

        Args:
            most: maximum number of threads, within `allowed_threads`. With more than one, other callers wait until this
                context ends.
        """
        count = min(allowed_threads(), most)
        if count == 1:
            yield 1
            return
        with self._alone:
            memory = self.memory  # stays alive in this context, even if this process forks
            self.depth += 1
            try:
                if self.depth == 1:
                    self._open(count)
                yield memory.ctypes.data
            finally:
                if self.memory is memory:
                    self.depth -= 1
                if self.depth <= 0:
                    memory[shares.OPEN] = 0

    def _open(self, count: int) -> None:
        """Start missing helpers, as many as the system allows, and wake all of them."""
        while len(self.wakers) < count - 1:
            waker = threading.Event()
            name = f"specbeam-{len(self.wakers) + 1}"
            thread = threading.Thread(target=_help, args=(self.memory, waker), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads: the existing ones do the shares
                break
            self.wakers.append(waker)
        helpers = self.wakers[: count - 1]
        self.memory[shares.THREADS] = 1 + len(helpers)
        self.memory[shares.OPEN] = 1
        for waker in helpers:
            waker.set()


def _help(memory: np.ndarray, waker: threading.Event) -> None:
    """Do shares whenever the team is open."""
    address = memory.ctypes.data
    while True:
        waker.wait()
        waker.clear()
        shares.help_team(memory, address)


def _address_of_yield() -> int:
    """Return the address of the C function that yields the processor to other threads; 0 if there is none."""
    function: Any = getattr(ctypes.CDLL(None), "sched_yield", None) if os.name == "posix" else None
    return 0 if function is None else int(ctypes.cast(function, ctypes.c_void_p).value or 0)


TEAM = Team()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=TEAM.begin_anew)

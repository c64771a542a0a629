"""A guard that delays signal handlers to the end of a turn."""

import signal
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGALRM")  # signals whose handlers usually raise
_COMPILES = ("compile_for_python", "_compile_for_args")  # functions that compile, in compiling/linking.py and in numba
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class hold_interrupts:  # noqa: N801
    """A context manager around turns that delays signal handlers to its end.

    Compiled steps return named tuples, which numba makes by calling their classes. If a signal handler raises in such a
    call, as for Ctrl-C, numba continues with a missing object and the process crashes with a segmentation fault. While
    numba compiles, and at the second signal of the same kind, handlers run immediately.
    """

    def __enter__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.delayed: dict[int, FrameType | None] = {}
        if current_thread() is main_thread():  # Python runs handlers in the main thread only
            for number in _SIGNALS:
                if callable(handler := signal.getsignal(number)):
                    self.handlers[number] = handler
                    signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Delay the handler of a signal; run it immediately during compilation, or if it is already delayed."""
        at = frame
        while at is not None and at.f_code.co_name not in _COMPILES:
            at = at.f_back
        if at is None and number not in self.delayed:
            self.delayed[number] = frame
        else:
            self.delayed.pop(number, None)
            self.handlers[number](number, frame)

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        for number, frame in self.delayed.items():
            self.handlers[number](number, frame)

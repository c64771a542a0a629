"""Interrupts wait for the end of a turn."""

import signal
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGALRM")  # whose handlers are wont to raise
_COMPILES = ("compile_for_python", "_compile_for_args")  # functions of ours (kernels/linking.py) and of numba's
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class interrupts_held:  # noqa: N801
    """Around turns, whose loops return named tuples. Numba makes these by calling their classes; where a handler raises
    there, as that of Ctrl-C does, numba goes on with what was not made, and the process ends in a segmentation fault.
    Handlers are called at the end of the turn; at once while a loop is compiled, and when a signal comes again.
    """

    def __enter__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.came: dict[int, FrameType | None] = {}
        if current_thread() is main_thread():  # no other one has handlers
            for number in _SIGNALS:
                if callable(handler := signal.getsignal(number)):
                    self.handlers[number] = handler
                    signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        at = frame
        while at is not None and at.f_code.co_name not in _COMPILES:
            at = at.f_back
        if at is None and number not in self.came:
            self.came[number] = frame
        else:
            self.came.pop(number, None)
            self.handlers[number](number, frame)

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        for number, frame in self.came.items():
            self.handlers[number](number, frame)

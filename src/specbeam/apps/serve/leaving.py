"""The end of a server by force: by a signal before it can answer, or because its threads hang."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from specbeam.doors import end_compilation


def end_now(code: int) -> None:
    """Flush the streams, end the processes that compile, and end this one without waiting for its threads."""
    for stream in (sys.stdout, sys.stderr):
        # It may be closed or a broken pipe, or the signal has interrupted a write.
        with suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    end_compilation()
    os._exit(code)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End the process at once, with exit code 0, at SIGINT or SIGTERM while no server has installed its own handlers.

    A process that is the first of a container would otherwise ignore SIGTERM. SIGHUP, which would end the process, asks a
    server to read its keys again: before it has read them there is nothing to do. Other threads than the main one cannot
    handle signals: there this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.signal(one, _leave) for one in (signal.SIGINT, signal.SIGTERM)}
    if hasattr(signal, "SIGHUP"):  # not on Windows
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    end_now(0)

"""A spinner in the terminal while steps are compiled, once per machine."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Spinner(logging.Handler):
    """A log handler that shows a spinner with the name of the step under compilation."""

    def __init__(self, console: Any) -> None:
        super().__init__()
        self.status = console.status("")
        self.under_way: list[str] = []  # names of steps: compiling one compiles the steps that it calls
        self.done = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Record that the compilation of a step begins or ends, and show or hide the spinner."""
        if record.getMessage().startswith("compiling"):
            self.under_way.append(record.getMessage().split()[-1])
        elif self.under_way:
            self.under_way.pop()
            self.done += 1
        if not self.under_way:
            self.status.stop()
            return
        self.status.update(f"Compiling for this processor, once: {self.under_way[-1]} (steps done: {self.done})")
        self.status.start()


@contextmanager
def showing_compilation() -> Iterator[None]:
    """Show a spinner while steps are compiled inside the block, if standard error is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    log = logging.getLogger("specbeam.kernels")
    before = log.level
    spinner = _Spinner(console)
    log.setLevel(logging.INFO)
    log.addHandler(spinner)
    try:
        yield
    finally:
        spinner.status.stop()
        log.removeHandler(spinner)
        log.setLevel(before)

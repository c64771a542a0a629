"""What a user at a terminal sees while steps are compiled, which happens once on a machine."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Spinner(logging.Handler):
    """Turns while anything is compiled, and names it."""

    def __init__(self, console: Any) -> None:
        super().__init__()
        self.status = console.status("")
        self.under_way = 0  # a step may be compiled while another one is that calls it
        self.done = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Hear that a step is being compiled, or that it was."""
        is_beginning = record.getMessage().startswith("compiling")
        self.under_way += 1 if is_beginning else -1
        self.done += not is_beginning
        said = f"Compiling for this processor, once: {self.done} steps are done"
        self.status.update(f"{said}, {record.getMessage().split()[-1]} is next" if is_beginning else said)
        if self.under_way > 0:
            self.status.start()
        else:
            self.status.stop()


@contextmanager
def compiling_shown() -> Iterator[None]:
    """Show what is compiled for a while, if standard error is a terminal."""
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

"""The console of all commands. It interprets no markup in texts and escapes their control characters."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specbeam.doors.plain import for_terminal
from specbeam.doors.progress import prints_on_terminal, shows_progress

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


WHOLE = 10_000  # columns: more than any table has


class Screen(Console):
    """A console that interprets no markup or emoji names, and escapes control characters.

    Tables fit the terminal, and words too long for their column are broken, not cut. In files and pipes tables are whole,
    unless `COLUMNS` states a width, and no line ends in blanks.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False} | options)
        if not (self.is_terminal or self.is_jupyter or "COLUMNS" in os.environ):
            self.width = WHOLE

    def print(self, *things: Any, **options: Any) -> None:
        """Print texts and tables."""
        tables = [thing for thing in things if isinstance(thing, Table)]
        for table in tables:
            for column in table.columns:
                column.overflow = "fold"
        if not tables or self.is_terminal or self.is_jupyter:
            super().print(*things, **options)
            return
        with self.capture() as captured:
            super().print(*things, **options)
        lines = [line.rstrip() for line in captured.get().split("\n")]
        self.out("\n".join(lines), end="", highlight=False)

    def on_broken_pipe(self) -> None:
        """Raise the error for `main`; rich would end the process."""
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the rendered text of a line, a cell or a title."""
        return super().render_str(for_terminal(text), **options)


@cache
def progress_console() -> Screen:
    """Return the console of all progress. With several, displays that are shown together would overwrite each other."""
    return Screen(stderr=True, soft_wrap=True)  # a line printed above a bar stays one line, which copying keeps


def progress_bar(*columns: "ProgressColumn", stays: bool = False) -> "Progress":
    """Return a progress bar on standard error, hidden unless that is a terminal.

    Args:
        columns: as for `rich.progress.Progress`; by default a description, a bar, the steps, and the time left.
        stays: whether the finished bar remains visible.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = progress_console()
    usual = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(
        *(columns or usual),
        console=console,
        transient=not stays,
        redirect_stdout=prints_on_terminal(),
        disable=not shows_progress(console),
    )


def show_result(line: str) -> None:
    """Print a result of a measurement that goes on, where progress is shown; all results are printed at its end."""
    console = progress_console()
    if shows_progress(console):
        console.print(line)


@contextmanager
def counted(text: str, total: int | None = None) -> "Iterator[Callable[[], None]]":
    """Show the progress of the block, and yield a function to call after each of its steps.

    Args:
        text: the description of the work.
        total: number of steps; None: unknown.
    """
    with progress_bar() as bar:
        yield partial(bar.advance, bar.add_task(text, total=total))


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show that the block is at work, for work without steps, and for how long."""
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    with progress_bar(SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()) as bar:
        bar.add_task(text, total=None)
        yield

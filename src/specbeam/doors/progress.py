"""Progress on standard error, in terminals and notebooks: bars, and one that shows while steps are compiled."""

import os
import sys
from functools import cache
from threading import RLock
from typing import Any

from specbeam.errors import BadSetting

VARIABLE = "SPECBEAM_PROGRESS"  # "off": no bars
_LOCK = RLock()
_SHOWN: list["CompilationBar"] = []  # at most one


class CompilationBar:
    """A bar that shows how many of the steps of a first text are compiled or loaded, and the time left.

    Steps of further models and methods have no known number: they are counted.
    """

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, transient=True, redirect_stdout=prints_on_terminal())
        self.task = self.progress.add_task("", total=None)
        self.under_way = 0  # number of nested compilations: a step's callees are compiled inside its own

    def note(self, begins: bool) -> None:
        """Note that the compilation of a step begins or ends, and show or hide the bar."""
        self.under_way = max(self.under_way + (1 if begins else -1), 0)
        if self.under_way == 0:
            self.progress.stop()
            return
        done, total = _steps()
        text = "Compiling for this processor, once: "
        text += f"{done} steps so far" if total is None else f"{done} of {total} steps"
        self.progress.update(self.task, description=text, completed=done, total=total)
        self.progress.start()


def _steps() -> tuple[int, int | None]:
    """Return the number of steps that this process has, and the number that a first text needs; None if it has as many."""
    from specbeam.core.compiling.forms import forms_made

    done = forms_made()
    return done, _of_first_text() if done < _of_first_text() else None


@cache
def _of_first_text() -> int:
    """Return the number of steps that a first text needs."""
    from specbeam.core.compiling.form_list import PLACE

    lines = PLACE.read_text().splitlines() if PLACE.exists() else []
    return sum(line.startswith(('["step"', '["entry"')) for line in lines)


class CompilationWatch:
    """Whether this process compiles steps now, for those who wait for a text elsewhere."""

    def __init__(self) -> None:
        self._under_way = 0  # number of nested compilations

    def note(self, begins: bool) -> None:
        """Note that the compilation of a step begins or ends."""
        self._under_way = max(self._under_way + (1 if begins else -1), 0)

    @property
    def progress(self) -> dict[str, int | None] | None:
        """The number of steps so far ("done"), and that of a first text ("total"; None if it has as many); None if nothing
        is compiled now."""
        if not self._under_way:
            return None
        done, total = _steps()
        return {"done": done, "total": total}


@cache
def compilation_watch() -> CompilationWatch:
    """Return the watch of this process."""
    from specbeam.core.compiling.forms import listen

    watch = CompilationWatch()
    listen(watch.note)
    return watch


def prints_on_terminal() -> bool:
    """Return whether a bar may take what is printed and draw it above itself.

    Otherwise standard output goes to a file or a pipe, and a bar that took it would write it to the terminal instead.
    """
    return sys.stdout is not None and sys.stdout.isatty()


def shows_progress(console: Any) -> bool:
    """Return whether progress is shown on a console: a terminal or a notebook, unless it is turned off.

    Raises `BadSetting` if `SPECBEAM_PROGRESS` is neither "off" nor unset.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "off"):
        raise BadSetting(f"{VARIABLE} is {asked!r}; it must be 'off', or unset")
    return asked != "off" and (console.is_terminal or console.is_jupyter)


def show_compilation(console: Any = None) -> None:
    """Show a bar whenever steps are compiled, where progress is shown; once per process.

    Args:
        console: the console of other bars, below which this one is drawn; None: a new one for standard error.
    """
    with _LOCK:
        if _SHOWN:
            return
        if console is None:
            from rich.console import Console

            console = Console(stderr=True)
        if shows_progress(console):
            from specbeam.core.compiling.forms import listen

            _SHOWN.append(CompilationBar(console))
            listen(_SHOWN[0].note)

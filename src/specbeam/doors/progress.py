"""Progress on standard error: bars in terminals and notebooks, and what shows that steps are compiled, lines elsewhere."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from threading import RLock
from typing import Any

from specbeam.errors import BadSetting

VARIABLE = "SPECBEAM_PROGRESS"  # "off": no bars
_FEW_LOADED = 50  # more steps that are not in the folder of machine code come from a wheel
_FEW = 5  # steps from whose times the rest is not estimated
_LOCK = RLock()
SILENT_S = 5.0  # seconds of compilation before the first line, where no bar is shown
EVERY_S = 15.0  # seconds of compilation between two lines
_SHOWN: list["CompilationBar | CompilationNote"] = []  # at most one


class CompilationBar:
    """A bar that shows how many of the steps of a first text are compiled or loaded, and the time left.

    Steps of further models and methods have no known number: they are counted.
    """

    def __init__(self, console: Any) -> None:
        from specbeam.core.compiling.forms import forms_made

        self.console = console
        self.progress: Any = None  # the bar that is shown
        self.under_way = 0  # number of nested compilations: a step's callees are compiled inside its own
        self._spent_s = 0.0  # of compilations that are over
        self._began = 0.0
        self._known = forms_made()  # steps compiled before this bar

    def note(self, begins: bool) -> None:
        """Note that the compilation of a step begins or ends, and show or hide the bar."""
        self.under_way = max(self.under_way + (1 if begins else -1), 0)
        if self.under_way == 0:
            self._hide()
            return
        if self.progress is None:
            self._show()
        done, total = _steps()
        text = compilation_line(done, total)
        self.progress.update(
            self.task,
            description=text[0].upper() + text[1:],
            completed=done,
            total=total,
            left=self._time_left(done, total),
        )

    def _show(self) -> None:
        """Show a new bar: rich's, once it was shown below another bar, cannot be shown as the first one."""
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
        self.progress = Progress(*columns, console=self.console, transient=True, redirect_stdout=prints_on_terminal())
        self.task = self.progress.add_task("", total=None, left="")
        self.progress.start()
        self._began = time.monotonic()

    def _hide(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
            self._spent_s += time.monotonic() - self._began

    def _time_left(self, done: int, total: int | None) -> str:
        """Return the time left, as hours:minutes:seconds; "" while it is unknown."""
        fresh = done - self._known
        if total is None or fresh < _FEW:
            return ""
        spent = self._spent_s + time.monotonic() - self._began
        return str(timedelta(seconds=round(spent * (total - done) / fresh)))


class CompilationNote:
    """Lines on standard error, for files and pipes: after `SILENT_S` of compilation, and then every `EVERY_S`."""

    def __init__(self) -> None:
        self.under_way = 0  # number of nested compilations
        self.began = 0.0  # when the outermost one began
        self.spent = 0.0  # seconds of all that have ended
        self.next = SILENT_S  # seconds of compilation at which a line is written

    def note(self, begins: bool) -> None:
        """Note that the compilation of a step begins or ends, and write a line if it is time."""
        now = time.monotonic()
        if begins and self.under_way == 0:
            self.began = now
        running = now - self.began
        if self.under_way and self.spent + running >= self.next and sys.stderr is not None:
            self.next = self.spent + running + EVERY_S
            sys.stderr.write(f"specbeam: {compilation_line(*_steps())}\n")
            sys.stderr.flush()
        self.under_way = max(self.under_way + (1 if begins else -1), 0)
        if self.under_way == 0:
            self.spent += running


def compilation_line(done: int, total: int | None) -> str:
    """Return how far the compilation of steps is, as a text.

    Args:
        done, total: see `_steps`.
    """
    if total is None:
        return f"compiling for this processor, once per kind of call: {done} steps so far"
    return f"compiling for this processor, once: {done} of {total} steps"


def _steps() -> tuple[int, int | None]:
    """Return the number of steps that this process has, and the number that a first text needs.

    If they were there before, return the number that this process compiles, and None.
    """
    from specbeam.core.compiling.forms import forms_compiled, forms_made

    done = forms_made()
    if _has_first_text() or done >= _of_first_text():
        return forms_compiled(), None
    return done, _of_first_text()


@cache
def _has_first_text() -> bool:
    """Return whether the steps of a first text were there when this process began to compile: kept, or in a wheel."""
    from specbeam.core.compiling.code_cache import code_folder
    from specbeam.core.compiling.forms import forms_made

    folder = code_folder()
    kept = 0 if folder is None else sum(1 for _ in folder.rglob("*.nbc"))
    is_shipped = forms_made() - kept > _FEW_LOADED
    return kept >= _of_first_text() or is_shipped


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
        """The numbers of `_steps` ("done", "total"); None if nothing is compiled now."""
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


def end_compilation() -> None:
    """End the processes that compile for this one, before it ends without Python's exit."""
    from specbeam.core.compiling.ahead import end

    end()


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


def silence_transformers() -> None:
    """Turn off transformers' progress bars and messages."""
    if "transformers" not in sys.modules:  # it may not be needed; it reads these when it is imported
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        return
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def bars_of_transformers() -> Iterator[None]:
    """Let transformers show its progress bars only where progress is shown, while the block loads a model."""
    from rich.console import Console
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled() or shows_progress(Console(stderr=True)):
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def show_compilation(console: Any = None) -> None:
    """Show a bar whenever steps are compiled, where progress is shown, or else one line; once per process.

    Args:
        console: the console of other bars, below which this one is drawn; None: a new one for standard error.
    """
    with _LOCK:
        if _SHOWN:
            return
        if console is None:
            from rich.console import Console

            console = Console(stderr=True)
        has_bar = shows_progress(console)
        if not has_bar and os.environ.get(VARIABLE) == "off":
            return
        from specbeam.core.compiling.forms import listen

        _SHOWN.append(CompilationBar(console) if has_bar else CompilationNote())
        listen(_SHOWN[0].note)

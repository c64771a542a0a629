"""The console of all commands. It interprets no markup in texts and escapes their control characters."""

from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.text import Text

from specbeam.doors.plain import for_terminal


class Screen(Console):
    """A console that interprets no markup or emoji names, and escapes control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False} | options)

    def on_broken_pipe(self) -> None:
        """Raise the error for `main`; rich would end the process."""
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the rendered text of a line, a cell or a title."""
        return super().render_str(for_terminal(text), **options)


def progress_bar(*columns: ProgressColumn, stays: bool = False) -> Progress:
    """Return a progress bar on standard error, hidden unless that is a terminal.

    Args:
        columns: as for `rich.progress.Progress`.
        stays: whether the finished bar remains visible.
    """
    console = Screen(stderr=True)
    return Progress(*columns, console=console, transient=not stays, disable=not console.is_terminal)

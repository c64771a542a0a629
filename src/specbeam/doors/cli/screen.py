"""The console of all commands: texts are shown as they are, whatever in them looks like markup or steers a terminal."""

from typing import Any

from rich.console import Console
from rich.text import Text

from specbeam.doors.plain import for_terminal


class Screen(Console):
    """A console that takes no text for markup or for the name of an emoji, and writes control characters out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False} | options)

    def on_broken_pipe(self) -> None:
        """Let the error reach `main`, where rich would end the process by itself."""
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as rich renders it: that of a line, a cell or a title."""
        return super().render_str(for_terminal(text), **options)

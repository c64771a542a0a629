"""The line editor of `specbeam chat`: history, completion of commands, and a line of settings below the input."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_data_path

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History

HISTORY = "chat_history"  # the file of past lines, in the user's data folder
Choices = Callable[[], Iterable[str]]  # returns the values that complete a command


def line_reader(
    console: Any, commands: Mapping[str, str], choices: Mapping[str, Choices], status: Callable[[], str]
) -> Callable[[], str]:
    """Return a function that reads a line; it raises `EOFError` at the end, and `KeyboardInterrupt` for Ctrl-C.

    If input or output is no terminal, or one that cannot move its cursor, it reads lines as they come, without history and
    completion.

    Args:
        console: the console of the chat.
        commands: the meaning of each command.
        choices: the values that complete a command, by command.
        status: returns the line below the input.
    """
    if not sys.stdin.isatty() or not console.is_terminal or console.is_dumb_terminal:
        return lambda: str(console.input("[bold]>[/bold] "))
    from prompt_toolkit import PromptSession
    from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        """Start a new line within the message."""
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        "> ",
        history=_history(console),
        completer=_completer(commands, choices),
        auto_suggest=AutoSuggestFromHistory(),
        bottom_toolbar=status,
        key_bindings=keys,
    )
    return session.prompt


def _completer(commands: Mapping[str, str], choices: Mapping[str, Choices]) -> "Completer":
    """Return a completer of commands, with their meanings, and of their values; it leaves messages alone."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class CommandCompleter(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
            """Yield the commands, or the values of a command, that continue the line."""
            text = document.text_before_cursor
            name, space, value = text.partition(" ")
            if not space and text.startswith("/"):
                found = [command for command in commands if command.startswith(text)]
                yield from (Completion(one, -len(text), display_meta=commands[one]) for one in found)
            elif name == "/save":
                yield from paths.get_completions(Document(value, len(value)), event)
            elif name in choices:
                known = [one for one in sorted(choices[name]()) if one.startswith(value)]
                yield from (Completion(one, -len(value)) for one in known)

    return CommandCompleter()


def _history(console: Any) -> "History":
    """Return the history of earlier chats, or a note and an empty one if its file cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    place = history_place()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(place, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))  # for the user's eyes alone
    except OSError as error:
        console.print(f"no history is kept: {place} cannot be written ({error.strerror})", style="dim")
        return InMemoryHistory()
    return FileHistory(str(place))


def history_place() -> Path:
    """Return the path of the history file."""
    return user_data_path("specbeam") / HISTORY

"""What a terminal shows while steps are compiled."""

import io
import os
import pty
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import rich.console

from specbeam.core.compiling import forms
from specbeam.doors import progress
from specbeam.errors import BadSetting
from tests.support.steps import needs_numba


@pytest.fixture
def terminal(monkeypatch):
    """A terminal in place of standard error: what was written to it."""
    written = io.StringIO()
    real = rich.console.Console
    monkeypatch.setattr(rich.console, "Console", lambda stderr: real(file=written, force_terminal=True, width=100))
    monkeypatch.setattr(progress, "_SHOWN", [])
    monkeypatch.setattr(forms, "_LISTENERS", [])
    return written


@pytest.mark.parametrize(
    ("made", "is_kept", "said"),
    [
        (7, False, "once: 7 of 40 steps"),
        (41, False, "once per kind of call: 5 steps so far"),
        (7, True, "once per kind of call: 5 steps so far"),
    ],
)
def test_steps_are_counted_while_they_are_compiled(terminal, monkeypatch, made, is_kept, said):
    monkeypatch.setattr(forms, "_MADE", made)
    monkeypatch.setattr(forms, "_COMPILED", 3)
    monkeypatch.setattr(progress, "_of_first_text", lambda: 40)
    monkeypatch.setattr(progress, "_has_first_text", lambda: is_kept)
    progress.show_compilation()
    forms.tell(begins=True)
    forms.tell(begins=True)  # a step that the first one calls
    forms.tell(begins=False)
    time.sleep(0.3)  # it is drawn a dozen times a second
    during = terminal.getvalue()
    forms.tell(begins=False)
    assert f"Compiling for this processor, {said}" in during
    assert "\x1b[2K" in terminal.getvalue()[len(during) :]  # the line is taken away again


def test_a_bar_below_another_one_is_shown_again_without_it(terminal):
    """As in a first command: steps are compiled while a model is loaded, and then for its text."""
    from rich.progress import Progress

    progress.show_compilation()
    (listener,) = forms._LISTENERS
    with Progress(console=progress._SHOWN[0].console) as bar:
        bar.add_task("loading")
        forms.tell(begins=True)
        forms.tell(begins=False)
    forms.tell(begins=True)
    time.sleep(0.3)  # it is drawn a dozen times a second
    during = terminal.getvalue()
    forms.tell(begins=False)
    assert during.count("Compiling for this processor, once") >= 2
    assert [listener] == forms._LISTENERS


def test_a_listener_that_fails_costs_no_text(caplog, monkeypatch):
    told = []

    def failing(begins):
        raise OSError("the terminal is gone")

    monkeypatch.setattr(forms, "_LISTENERS", [failing, told.append])
    forms.tell(begins=True)
    forms.tell(begins=False)
    assert told == [True, False]
    assert "progress of compilations is not shown any more: OSError: the terminal is gone" in caplog.text
    assert caplog.text.count("the terminal is gone") == 1


def test_the_steps_of_a_first_text_are_there_if_they_are_kept_or_shipped(tmp_path, monkeypatch):
    monkeypatch.setattr("specbeam.core.compiling.code_cache.code_folder", lambda: tmp_path)
    monkeypatch.setattr(progress, "_of_first_text", lambda: 3)
    look = progress._has_first_text.__wrapped__
    monkeypatch.setattr(forms, "_MADE", 2)
    for number in range(4):
        assert look() == (number >= 3)
        (tmp_path / f"{number}.nbc").touch()
    monkeypatch.setattr(progress, "_of_first_text", lambda: 300)
    assert not look()
    monkeypatch.setattr(forms, "_MADE", 100)  # more than are kept
    assert look()


def test_the_time_left_is_that_of_the_steps_before(terminal, monkeypatch):
    now = iter([100.0, 160.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(forms, "_MADE", 4)
    bar = progress.CompilationBar(None)
    bar._began = progress.time.monotonic()
    assert bar._time_left(8, 40) == ""  # from four steps
    assert bar._time_left(24, 40) == "0:00:48"  # twenty steps took a minute


def test_a_process_has_one_bar(terminal):
    progress.show_compilation()
    progress.show_compilation()
    assert len(forms._LISTENERS) == 1


def test_nothing_is_shown_where_nothing_is_compiled(terminal):
    progress.show_compilation()
    assert terminal.getvalue() == ""


def test_it_can_be_turned_off(terminal, monkeypatch):
    monkeypatch.setenv("SPECBEAM_PROGRESS", "off")
    progress.show_compilation()
    assert not forms._LISTENERS
    monkeypatch.setenv("SPECBEAM_PROGRESS", "no")
    with pytest.raises(BadSetting, match="SPECBEAM_PROGRESS is 'no'; it must be 'off', or unset"):
        progress.show_compilation()


@pytest.mark.parametrize(("seconds", "lines"), [(0.6, 0), (3.0, 1), (8.0, 2)])
def test_a_pipe_gets_lines_of_a_long_compilation(seconds, lines, monkeypatch, capsys):
    """After five seconds of all compilations together, and every fifteen; those inside others do not count twice."""
    monkeypatch.setattr(forms, "_MADE", 7)
    monkeypatch.setattr(progress, "_of_first_text", lambda: 40)
    monkeypatch.setattr(progress, "_has_first_text", lambda: False)
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    note = progress.CompilationNote()
    for _ in range(4):
        for begins in (True, True, False, False):
            note.note(begins)
            clock[0] += seconds / 3
    said = capsys.readouterr().err
    assert said == lines * "specbeam: compiling for this processor, once: 7 of 40 steps\n"


PROGRAM = """
import logging, time, numba
from specbeam.core.compiling.compiler import compiled
from specbeam.core.compiling.forms import listen
from specbeam.doors.progress import show_compilation

logging.basicConfig(level=logging.WARNING)
show_compilation()
listen(lambda begins: time.sleep(0.4))  # longer than the bar needs to be drawn

def thrice(number):
    return 3 * number

step = compiled(thrice)
step._cache.disable()
step.compile((numba.types.int64,))
"""


@needs_numba
@pytest.mark.parametrize("has_terminal", [True, False])
def test_a_script_shows_it_on_a_terminal_only(has_terminal):
    """Messages of the log of compilations do not appear, whatever the script logs."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "100"}
    ours, theirs = pty.openpty()
    stderr = theirs if has_terminal else subprocess.PIPE
    done = subprocess.run([sys.executable, "-c", PROGRAM], stderr=stderr, check=True, env=environment)
    os.close(theirs)
    written = os.read(ours, 65_536) if has_terminal else done.stderr
    os.close(ours)
    assert (b"Compiling for this processor, once" in written) == has_terminal
    assert b"compiling thrice" not in written


@needs_numba
def test_a_step_that_cannot_be_compiled_leaves_no_bar(terminal):
    from numba import types
    from numba.core.errors import TypingError

    from specbeam.core.compiling.compiler import compiled

    def wrong(number):
        return number.no_such_attribute

    progress.show_compilation()
    step = compiled(wrong)
    step._cache.disable()
    with pytest.raises(TypingError):
        step.compile((types.int64,))
    assert progress._SHOWN[0].under_way == 0
    assert progress._SHOWN[0].progress is None


LONG = """
from specbeam.doors.cli.screen import progress_bar

with progress_bar() as bar:
    bar.add_task("prompts", total=2)
    print("word " * 40)
"""


def test_a_long_line_under_a_bar_stays_one_line():
    """A terminal breaks it for the eye alone; a line end inside would be copied."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "60"}
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", LONG], stderr=theirs, stdout=theirs, check=True, env=environment)
    os.close(theirs)
    shown = os.read(ours, 65_536)
    os.close(ours)
    assert b"word " * 39 + b"word" in shown


PRINTING = """
from specbeam.core.compiling.forms import tell
from specbeam.doors.cli.screen import progress_bar, progress_console, working
from specbeam.doors.progress import show_compilation

show_compilation(progress_console())
with working("loading"), progress_bar() as bar:
    bar.add_task("prompts", total=2)
    print("under two bars")
    tell(begins=True)
    print("under three")
    tell(begins=False)
"""


@pytest.mark.parametrize("progress_is", ["on", "off"])
def test_what_is_printed_under_a_bar_reaches_a_pipe(progress_is):
    """Bars on a terminal take what is printed only if it goes to the terminal, too."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "100"}
    if progress_is == "off":
        environment["SPECBEAM_PROGRESS"] = "off"
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", PRINTING], stderr=theirs, stdout=subprocess.PIPE, check=True, env=environment
    )
    os.write(theirs, b"end")
    os.close(theirs)
    shown = os.read(ours, 65_536)
    os.close(ours)
    assert done.stdout == b"under two bars\nunder three\n"
    assert (b"prompts" in shown) == (progress_is == "on")
    assert (shown == b"end") == (progress_is == "off")


LOADING = """
import sys
import specbeam as sb
from transformers.utils import logging

sb.load(sys.argv[1], tokenizer=False)
assert logging.is_progress_bar_enabled()  # the user's own calls show theirs
"""


def test_bars_of_transformers_are_not_written_to_files_and_pipes(tmp_path):
    from tests.support.tiny_models import tiny

    tiny("llama").save_pretrained(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    call = [sys.executable, "-c", LOADING, str(tmp_path)]
    done = subprocess.run(call, stderr=subprocess.PIPE, text=True, check=True, env=environment)
    assert "Loading weights" not in done.stderr

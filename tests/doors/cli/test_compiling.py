"""What a terminal shows while steps are compiled."""

import io
import logging
import time

import pytest
import rich.console

from specbeam.doors.cli.compiling import showing_compilation

LOG = logging.getLogger("specbeam.kernels")


@pytest.fixture
def terminal(monkeypatch):
    """A terminal in place of standard error: what was written to it."""
    written = io.StringIO()
    real = rich.console.Console
    monkeypatch.setattr(rich.console, "Console", lambda stderr: real(file=written, force_terminal=True, width=100))
    return written


def test_steps_are_counted_and_named_while_they_are_compiled(terminal):
    with showing_compilation():
        LOG.info("compiling %s", "judge")
        LOG.info("compiling %s", "draw_layer")  # which the first one calls
        LOG.info("compiled %s", "draw_layer")
        time.sleep(0.3)  # it is drawn a dozen times a second
        during = terminal.getvalue()
        LOG.info("compiled %s", "judge")
    assert "judge (steps done: 1)" in during
    assert "\x1b[2K" in terminal.getvalue()[len(during) :]  # the line is taken away again
    LOG.info("compiling %s", "nobody looks")
    assert "nobody looks" not in terminal.getvalue()


def test_nothing_is_shown_where_nothing_is_compiled(terminal):
    with showing_compilation():
        pass
    assert terminal.getvalue() == ""


def test_what_is_no_terminal_stays_quiet(capsys):
    with showing_compilation():
        LOG.info("compiling %s", "judge")
        LOG.info("compiled %s", "judge")
    assert capsys.readouterr().err == ""

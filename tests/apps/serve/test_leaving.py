"""The end of a server that cannot answer yet, by a signal."""

import signal
import subprocess
import sys

import pytest

SLEEPS = """
import os, signal, sys, threading, time
from specbeam.apps.serve.leaving import ended_by_signals
with ended_by_signals():
    threading.Thread(target=time.sleep, args=(3600,)).start()  # a thread that Python would wait for
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(3600)
"""
HANDLERS = """
import os, signal, time
from specbeam.apps.serve.leaving import ended_by_signals
before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
with ended_by_signals():
    os.kill(os.getpid(), signal.SIGHUP)  # there are no keys to read again yet
    time.sleep(0.2)
assert before == [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_process_whose_threads_are_busy_at_once_with_exit_code_0(number):
    command = [sys.executable, "-c", SLEEPS, str(int(number))]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0


def test_a_reload_before_the_keys_are_read_is_ignored_and_the_handlers_of_signals_are_restored():
    assert subprocess.run([sys.executable, "-c", HANDLERS], timeout=120, check=False).returncode == 0

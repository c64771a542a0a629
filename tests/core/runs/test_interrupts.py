"""Ctrl-C while loops run: it reaches the caller, and costs nothing but the call."""

import signal
import subprocess
import sys

import pytest

from specbeam.core import compiling
from specbeam.core.compiling.interrupts import hold_interrupts
from specbeam.core.steps import step
from tests.support.steps import needs_numba


@pytest.fixture
def raised():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def held(call):
    with hold_interrupts():
        call()


def interrupted(done):
    """What is interrupted, and notes whether it went on all the same."""

    def turn():
        signal.raise_signal(signal.SIGINT)
        done.append(1)

    return turn


def test_an_interrupt_comes_at_the_end(raised):
    done = []
    with pytest.raises(KeyboardInterrupt):
        held(interrupted(done))
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@needs_numba
def test_a_step_that_is_compiled_can_be_interrupted(raised, monkeypatch):
    @step
    def never_called(number):
        return number

    done = []
    turn = interrupted(done)
    monkeypatch.setattr(never_called.python_entry, "compile", lambda kinds: turn())
    with pytest.raises(KeyboardInterrupt):
        held(lambda: never_called(1))
    assert not done


def test_a_second_interrupt_comes_at_once(raised):
    done = []

    def turn():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
        signal.raise_signal(signal.SIGINT)
        done.append(2)

    with pytest.raises(KeyboardInterrupt):
        held(turn)
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_that_are_none_of_python_stay(raised):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with hold_interrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)


INTERRUPTED = """
import random, signal, time
import torch
import specbeam as sb
from tests.support.tiny_models import tiny

torch.set_num_threads(1)
pair = sb.load(tiny("llama", seed=1, vocab_size=64), tiny("llama", seed=2, vocab_size=64))
alone = {"max_new_tokens": 60, "eos_token_id": [], "top_k": 6, "seed": 1}
random.seed(0)
came = 0
for method in (sb.dsbd(3, width="fixed", depth=2), sb.speculative_sampling(3), sb.sampling(), sb.rsd_s(3, 2)):
    for options in (alone, alone | {"batch_size": 2}):
        prompts = [[1, 2, 3]] * 400
        sb.generate(pair, prompts[:4], method, **options)
        for _ in range(6):
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.02))
            try:
                sb.generate(pair, prompts, method, **options)
            except KeyboardInterrupt:
                came += 1
print(came)
"""


@pytest.mark.skipif(not compiling.AVAILABLE, reason="there are no loops")
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timer that interrupts")
def test_loops_are_interrupted_again_and_again():
    """A handler that raises where numba makes a named tuple ended the process."""
    program = "import signal; signal.signal(signal.SIGALRM, signal.default_int_handler)\n" + INTERRUPTED
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 40  # of 48; Python ignores one that comes while it frees an object

"""Attention by several threads: the numbers of a single one, to the last bit."""

import time

import numpy as np
import pytest

from specbeam.core import compiling
from specbeam.engines.cpu import attention, shares, team
from specbeam.engines.cpu.attention import Scoring, attend
from specbeam.engines.cpu.rows import KeyValues, Look
from specbeam.engines.cpu.sums import WIDTH

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

SIZE = 20  # of a head: no multiple of a panel's width
HEIGHT = -(-SIZE // WIDTH) * WIDTH  # of the values, which are padded
SLOTS = 40 * WIDTH
GROUP = 3


class Call:
    """Attention of rows of three sessions to caches of some length, with all that a family may have."""

    def __init__(self, words, cap=0.0, distances=0, kv_heads=2, counts=(1, 5, 40)):
        rng = np.random.default_rng(0)
        keys = rng.standard_normal((4, kv_heads, SLOTS // WIDTH, SIZE, WIDTH), dtype=np.float32)
        values = rng.standard_normal((4, kv_heads, SLOTS, HEIGHT), dtype=np.float32)
        if words == np.uint16:
            keys, values = ((array.view(np.uint32) >> 16).astype(np.uint16) for array in (keys, values))
        self.keys = keys
        self.values = values
        count = sum(counts)
        ends = np.cumsum((0, *counts))
        self.rows = np.array([(3, *ends[0:2]), (0, *ends[1:3]), (2, *ends[2:4])])
        self.q = rng.standard_normal((count, kv_heads * GROUP * SIZE), dtype=np.float32)
        self.seen = rng.random((count, SLOTS)) < 0.7
        self.seen[:, 1] = True
        reach = rng.integers(SLOTS // 2, SLOTS, count)
        for row, last in enumerate(reach):
            self.seen[row, last:] = False
            self.seen[row, last - 1] = True
        self.reach = reach
        self.cap = np.float32(cap)
        self.biases = rng.standard_normal((kv_heads * GROUP, distances), dtype=np.float32)
        back = rng.integers(-3, 60, (count if distances else 0, SLOTS))
        self.back = back.astype(np.int32)

    def answer(self, threads):
        out = np.full_like(self.q, np.nan)
        look = Look(self.rows, self.seen, self.reach, self.back)
        scoring = Scoring(GROUP, np.float32(0.2), self.cap, self.biases)
        attend(self.q, KeyValues(self.keys, self.values), look, scoring, out, threads)
        return out


@pytest.fixture
def helping(monkeypatch):
    """A team of as many threads as are asked for, more than this machine may have processors."""
    monkeypatch.setattr(team, "allowed_threads", lambda: 3)
    made = team.Team()
    for words in (np.float32, np.uint16):
        made.learn_attention(np.dtype(words))
    return made


def test_what_helpers_read_is_kept_until_they_are_done(helping, monkeypatch):
    """A task allocates arrays as large as the description of the call, which must not be freed by then."""
    call = Call(np.float32, counts=(1, 5, 300))
    slots = attention._FIELDS * 2  # of 4 bytes, where the description has 8
    whole = -(-slots // WIDTH) * WIDTH
    call.reach[:] = whole
    call.seen[:, whole:] = False
    expected = call.answer(1)
    with helping.threads(2) as threads:
        for _ in range(300):
            assert np.array_equal(call.answer(threads), expected)


@pytest.mark.parametrize("words", [np.float32, np.uint16], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("more", [{}, {"cap": 4.0, "distances": 20}], ids=str)
def test_threads_change_no_bit(helping, words, more):
    call = Call(words, **more)
    expected = call.answer(1)
    assert np.isfinite(expected).all()
    assert call.reach.sum() * call.q.shape[1] >= attention._SHARED_FROM
    for count in (2, 3):
        with helping.threads(count) as threads:
            for _ in range(100):
                assert np.array_equal(call.answer(threads), expected)
            until = time.monotonic() + 20
            while helping.memory[shares.HELPED] == 0 and time.monotonic() < until:
                call.answer(threads)
        assert helping.memory[shares.HELPED] > 0
        helping.memory[shares.HELPED] = 0
    assert helping.memory[shares.OPEN] == 0


def test_what_the_helpers_do_not_know_or_is_one_task_is_done_by_one_thread(helping):
    single = Call(np.float32, kv_heads=1, counts=(0, 0, 2))
    many = Call(np.float32)
    with helping.threads(2) as threads:
        assert np.array_equal(single.answer(threads), single.answer(1))
        helping.memory[shares.FORMS + attention.ATTENTION_FORM_OF["float32"]] = 0
        assert np.array_equal(many.answer(threads), many.answer(1))
    assert helping.memory[shares.TICKET] == 0


def test_forms_have_places_of_their_own():
    numbers = [*attention.FORM_OF.values(), *attention.ATTENTION_FORM_OF.values()]
    assert len({*numbers}) == len(numbers)
    assert shares.FORMS + max(numbers) < shares.WORDS

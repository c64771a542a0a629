"""Attention by several threads: the numbers of a single one, to the last bit."""

import time
from itertools import pairwise

import numpy as np
import pytest

from specbeam.core import compiling
from specbeam.engines.cpu import attention, shares, team
from specbeam.engines.cpu.attention import Scoring, attend
from specbeam.engines.cpu.looks import look_at, looks_of
from specbeam.engines.cpu.rows import KeyValues, LayerRows
from specbeam.engines.cpu.sources import no_sources
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
        self.rows = np.array([(store_row, *both) for store_row, both in zip((3, 0, 2), pairwise(ends), strict=False)])
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
        self.positions = rng.integers(40, 60, count)
        self.places = rng.integers(0, 63, (len(counts), SLOTS))

    def answer(self, threads):
        out = np.full_like(self.q, np.nan)
        slots = np.zeros_like(self.positions)  # nothing is stored
        rows = LayerRows(self.positions, slots, self.rows, self.seen[None], self.places, no_sources())
        look = look_at(rows, looks_of(rows), 0)
        scoring = Scoring(GROUP, np.float32(0.2), self.cap, self.biases, False)
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


@pytest.mark.parametrize("words", [np.float32, np.uint16], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("more", [{}, {"cap": 4.0, "distances": 20}], ids=str)
def test_slots_and_other_rows_change_no_bit(words, more):
    """The same path in other slots, with rows of other paths in its pass, which see slots below, between and above."""
    rng = np.random.default_rng(1)
    length = 2 * WIDTH + 3
    packed = Call(words, counts=(1,), **more)
    packed.rows[0, 0] = 0
    packed.positions[:] = length
    packed.places[0, 1 : length + 1] = np.arange(length)
    packed.seen[:] = False
    packed.seen[0, 1 : length + 1] = True
    expected = packed.answer(1)
    for _ in range(20):
        spread = Call(words, counts=(14,), **more)
        row = int(rng.integers(14))
        slots = rng.choice(SLOTS - 1, size=length, replace=False) + 1
        spread.rows[0, 0] = 2
        spread.biases = packed.biases
        spread.q[row] = packed.q[0]
        spread.positions[row] = length
        spread.seen[:, 0] = False
        spread.seen[row] = False
        spread.seen[row, slots] = True
        spread.places[0, slots] = np.arange(length)
        for place, slot in enumerate(slots):
            at = place + 1
            spread.keys[2, :, slot // WIDTH, :, slot % WIDTH] = packed.keys[0, :, at // WIDTH, :, at % WIDTH]
            spread.values[2, :, slot] = packed.values[0, :, at]
        assert np.array_equal(spread.answer(1)[row], expected[0])


def test_slots_are_ordered_by_their_positions():
    seen = np.zeros((1, 3, 2 * WIDTH), dtype=bool)
    seen[0, 0, [7, 2, 9]] = True
    seen[0, 1, [7, 2]] = True
    seen[0, 2, [7, 2, 5, 3, 6]] = True
    places = np.zeros((1, 2 * WIDTH), dtype=np.int64)
    for place, slot in enumerate([7, 2, 5, 3, 6]):
        places[0, slot] = place
    places[0, 9] = 2
    positions = np.full(3, 4)
    rows = LayerRows(positions, positions, np.array([(0, 0, 3)]), seen, places, no_sources())
    looks = looks_of(rows)
    assert looks.order[0, 0, :8].tolist() == [7, 2, 5, 9, 3, 6, 0, 0]
    assert looks.depth[0].tolist() == [4, 4, 8]
    assert looks.reach[0].tolist() == [10, 8, 8]


def test_forms_have_places_of_their_own():
    numbers = [*attention.FORM_OF.values(), *attention.ATTENTION_FORM_OF.values()]
    assert len({*numbers}) == len(numbers)
    assert shares.FORMS + max(numbers) < shares.WORDS

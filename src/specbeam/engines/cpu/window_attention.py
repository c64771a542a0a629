"""Attention of all rows of long windows to each other, on one thread or shared with a team of threads.

No row is masked, and the rows of a window are also its keys. A block of `WIDTH` queries is side by side in registers.
Their scores for all keys are one product, whose rows are the keys. Softmax runs over the keys for all queries at once.
Mixing the values is a second product, whose rows are the dimensions of the values. Only the scores of one block are in
memory, float32[frames, WIDTH], and stay in the processor's cache.

A task is a block of queries of one head. Tasks write to separate memory, and each is done by one thread, so neither the
number of threads nor other windows of the pass change the results.
"""

from typing import NamedTuple

import numpy as np

from specbeam.core.compiling.atomics import carray, pointer_to
from specbeam.core.compiling.compiler import Array, compiled
from specbeam.core.compiling.uncounted import compiled_without_counts
from specbeam.engines.cpu.attention import ATTENTION_FORM_OF, SHARES_EACH
from specbeam.engines.cpu.odds import write_odds
from specbeam.engines.cpu.panels import part_count, part_of_rows
from specbeam.engines.cpu.shares import (
    COUNT,
    PANELS,
    THREADS,
    describe,
    described,
    has_form,
    memory_of,
    part_of,
    share_out,
)
from specbeam.engines.cpu.sums import STEP, WIDTH, PanelPlaces, write_sums

FORM = max(ATTENTION_FORM_OF.values()) + 1  # number in the memory of a team, after the forms of attention to caches
# Places in the description of a call, int64[`_FIELDS`]: the address and the shape of each array, and numbers.
_QKV, _ENDS, _OUT = range(0, 9, 3)
_HEADS, _SIZE, _SCALE, _FIELDS = range(9, 13)


class Windows(NamedTuple):
    """The attention of rows to all rows of their windows in one layer."""

    qkv: Array  # float32[rows, ...], contiguous: queries, keys and values of all heads, as `write_qkv` writes them
    ends: Array  # int64[windows]: one past the last row of each window; windows are contiguous
    heads: int
    size: int  # of a head, a multiple of `STEP`
    scale: np.float32  # factor of scores
    out: Array  # float32[rows, heads * size], written


class WindowRoom(NamedTuple):
    """Scratch arrays of a thread, overwritten by each of its tasks."""

    queries: Array  # float32[size * WIDTH]: step by step, the queries of a task side by side
    keys: Array  # float32[frames * size] of a head, in the parts that `write_sums` takes
    values: Array  # the same, with the frames rounded up to a multiple of `STEP`
    scores: Array  # float32[frames, WIDTH]: scores, then exponentials
    mixed: Array  # float32[size, WIDTH]
    total: Array  # float32[WIDTH]: the sum of the exponentials of each query


@compiled_without_counts
def _in_steps(frames: int) -> int:
    return -(-frames // STEP) * STEP


@compiled_without_counts
def _gather_keys(qkv: Array, first: int, frames: int, column: int, size: int, keys: Array) -> None:
    """Write the keys of a head to `keys`: part by part, each with a row for each dimension."""
    parts = part_count(frames)
    for part in range(parts):
        start, count = part_of_rows(part, parts, frames)
        for row in range(count):
            source = qkv[first + start + row]
            for place in range(size):
                keys[start * size + place * count + row] = source[column + place]


@compiled_without_counts
def _gather_values(qkv: Array, first: int, frames: int, column: int, size: int, values: Array) -> None:
    """Write the values of a head to `values`: dimensions part by part, each with a row for each frame."""
    deep = _in_steps(frames)
    parts = part_count(size)
    for part in range(parts):
        start, count = part_of_rows(part, parts, size)
        for frame in range(frames):
            source = qkv[first + frame]
            for row in range(count):
                values[start * deep + frame * count + row] = source[column + start + row]
        for place in range(start * deep + frames * count, start * deep + deep * count):
            values[place] = np.float32(0)


@compiled_without_counts
def _gather_queries(
    qkv: Array, first: int, count: int, column: int, size: int, scale: np.float32, queries: Array
) -> None:
    """Write `count` queries of a head, scaled, to `queries`; missing ones are zeros."""
    for row in range(WIDTH):
        if row < count:
            source = qkv[first + row]
            for place in range(size):
                queries[place * WIDTH + row] = source[column + place] * scale
        else:
            for place in range(size):
                queries[place * WIDTH + row] = np.float32(0)


@compiled_without_counts
def _attend_block(room: WindowRoom, frames: int, size: int) -> None:
    """Write the mixed values of the queries to `room.mixed`, not yet divided by the sums in `room.total`."""
    parts = part_count(frames)
    flat = room.scores.reshape(-1)
    for part in range(parts):
        start, count = part_of_rows(part, parts, frames)
        places = PanelPlaces(0, WIDTH, start * size, 0, start * WIDTH, WIDTH, size, 0, 0)
        write_sums(count, room.queries, room.keys, flat, places)
    write_odds(room.scores, frames, room.total)
    deep = _in_steps(frames)
    flat[frames * WIDTH : deep * WIDTH] = np.float32(0)
    mixed = room.mixed.reshape(-1)
    parts = part_count(size)
    for part in range(parts):
        start, count = part_of_rows(part, parts, size)
        places = PanelPlaces(0, WIDTH, start * deep, 0, start * WIDTH, WIDTH, deep, 0, 0)
        write_sums(count, flat, room.values, mixed, places)


@compiled_without_counts
def _do_tasks_in(room: WindowRoom, begin: int, end: int, work: Windows) -> None:
    """Do the tasks begin .. end of `attend_within`, in scratch arrays of the caller."""
    qkv = work.qkv
    heads = work.heads
    size = work.size
    task = 0
    first = 0
    for window in range(len(work.ends)):
        frames = work.ends[window] - first
        blocks = -(-frames // WIDTH)
        for head in range(heads):
            known = False
            for block in range(blocks):
                is_here = begin <= task < end
                task += 1
                if not is_here:
                    continue
                if not known:
                    _gather_keys(qkv, first, frames, (heads + head) * size, size, room.keys)
                    _gather_values(qkv, first, frames, (2 * heads + head) * size, size, room.values)
                    known = True
                start = first + block * WIDTH
                count = min(WIDTH, first + frames - start)
                _gather_queries(qkv, start, count, head * size, size, work.scale, room.queries)
                _attend_block(room, frames, size)
                for query in range(count):
                    goal = work.out[start + query]
                    share = np.float32(1) / room.total[query]
                    for place in range(size):
                        goal[head * size + place] = room.mixed[place, query] * share
        first = work.ends[window]


@compiled
def _do_tasks(begin: int, end: int, work: Windows) -> None:
    """Do the tasks begin .. end of `attend_within`."""
    size = work.size
    longest = 0
    first = 0
    for last in work.ends:
        longest = max(longest, last - first)
        first = last
    deep = _in_steps(longest)
    room = WindowRoom(
        np.empty(size * WIDTH, dtype=np.float32),
        np.empty(longest * size, dtype=np.float32),
        np.empty(deep * size, dtype=np.float32),
        np.empty((deep, WIDTH), dtype=np.float32),
        np.empty((size, WIDTH), dtype=np.float32),
        np.empty(WIDTH, dtype=np.float32),
    )
    _do_tasks_in(room, begin, end, work)


@compiled
def attend_within(work: Windows, threads: int) -> None:
    """Write the attention of all rows to all rows of their windows.

    Args:
        threads: see `panels.multiply`.
    """
    tasks = 0
    first = 0
    for last in work.ends:
        tasks += work.heads * -(-(last - first) // WIDTH)
        first = last
    if threads > 1 and tasks > 1 and has_form(threads, FORM):
        _attend_with_team(work, tasks, threads)
    else:
        _do_tasks(0, tasks, work)


@compiled
def _attend_with_team(work: Windows, tasks: int, address: int) -> None:
    """Do all tasks of `attend_within`, with the team whose memory is at this address."""
    team = memory_of(address)
    scales = np.array([work.scale])
    call = np.empty(_FIELDS, dtype=np.int64)
    describe(call[_QKV:], work.qkv)
    describe(call[_ENDS:], work.ends)
    describe(call[_OUT:], work.out)
    call[_HEADS] = work.heads
    call[_SIZE] = work.size
    call[_SCALE] = scales.ctypes.data
    team[PANELS] = call.ctypes.data
    team[COUNT] = tasks
    share_out(address, FORM, min(team[THREADS] * SHARES_EACH, tasks), (call, scales))


@compiled
def do_window_share(address: int, share: int) -> None:
    """Do a share of the attention that the memory of a team describes."""
    team = memory_of(address)
    call = carray(pointer_to(team[PANELS]), (_FIELDS,), np.int64)
    ends = carray(pointer_to(call[_ENDS]), (call[_ENDS + 1],), np.int64)
    scales = carray(pointer_to(call[_SCALE]), (1,), np.float32)
    qkv = described(call[_QKV:], np.float32)
    out = described(call[_OUT:], np.float32)
    begin, end = part_of(team, share)
    _do_tasks(begin, end, Windows(qkv, ends, call[_HEADS], call[_SIZE], scales[0], out))

"""Attention of rows to the KV caches of their sessions, on one thread or shared with a team of threads.

A task is some of the queries that read one key-value head of a session. Tasks write to separate memory, and each is
done by one thread in a fixed order, so the number of threads does not change the results.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specbeam.core.compiling.atomics import carray, pointer_to
from specbeam.core.compiling.compiler import Array, compiled
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.compiling.ordered_sums import sum_of_shares
from specbeam.core.compiling.sums import extremes, rank_of
from specbeam.core.compiling.uncounted import compiled_without_counts
from specbeam.engines.cpu.curves import cap_scores, exponential
from specbeam.engines.cpu.panels import FORM_OF, part_count
from specbeam.engines.cpu.rows import KeyValues, Look
from specbeam.engines.cpu.shares import (
    COUNT,
    PANELS,
    THREADS,
    describe,
    described,
    described_numbers,
    has_form,
    memory_of,
    part_of,
    share_out,
)
from specbeam.engines.cpu.sums import MOST, WIDTH, PanelPlaces, write_ordered_sums, write_row_sums

_F0 = np.float32(0)
_F1 = np.float32(1)
_UNSEEN = np.float32(-1e30)
_SHARED_FROM = 200_000  # number of products of queries and keys from which threads share the tasks
SHARES_EACH = 4  # number of shares of the tasks per thread
# Numbers of the forms of attention in the memory of a team, after the forms of products, by dtype of keys and values.
_OF_FLOATS = len(FORM_OF)
_OF_WORDS = _OF_FLOATS + 1
ATTENTION_FORM_OF = {"float32": _OF_FLOATS, "uint16": _OF_WORDS}
# Places in the description of a call, int64[`_FIELDS`]: the address and the shape of each array, and numbers.
_Q, _KEYS, _VALUES, _SESSIONS, _SEEN, _REACH, _ORDER, _DEPTH, _POSITIONS, _PLACES, _BIASES, _OUT = range(0, 72, 6)
_GROUP = 72
_BY_PLACE = 73
_SCALES = 74
_FIELDS = 75


@compiled_without_counts
def largest(x: Array, scratch: Array) -> np.float32:
    """Return the maximum of float32[n], computed by integer comparisons; NaN if any number is a positive NaN.

    Args:
        scratch: int32[n], n > 0; its first number is overwritten.
    """
    _, high = extremes(x.view(np.int32))
    scratch[0] = rank_of(high)
    top: np.float32 = scratch.view(np.float32)[0]
    return top


@compiled_without_counts
def softmax(scores: Array, seen: Array, powers: Array) -> None:
    """Replace scores, float32[slots], by their softmax over the visible slots; the other slots get 0.

    The number of slots must be a multiple of `WIDTH`. `powers`, int32[slots], is overwritten.
    """
    for slot in range(len(scores)):
        scores[slot] = scores[slot] if seen[slot] else _UNSEEN
    top = largest(scores, powers)
    for slot in range(len(scores)):
        scores[slot] = scores[slot] - top
    exponential(scores, powers[: len(scores)])
    for slot in range(len(scores)):
        scores[slot] = scores[slot] if seen[slot] else _F0
    share = np.float32(1 / sum_of_shares(scores))
    for slot in range(len(scores)):
        scores[slot] *= share


@compiled_without_counts
def _gather_queries(
    q: Array, first: int, start: int, stop: int, kv: int, group: int, scale: np.float32, out: Array
) -> None:
    """Write the queries start .. stop of one kv head, scaled, to `out`, float32[queries, size], row by row.

    Args:
        first: row of the first query of the session.
    """
    size = out.shape[1]
    for query in range(start, stop):
        row = first + query // group
        head = kv * group + query % group
        own = q[row, head * size : (head + 1) * size]
        scaled = out[query - start]
        for place in range(size):
            scaled[place] = own[place] * scale


@compiled_without_counts
def _extent_of(first: int, start: int, stop: int, group: int, reach: Array) -> int:
    """Return the number of slots that queries start .. stop reach, rounded up to whole panels."""
    extent = 0
    for query in range(start, stop):
        extent = max(extent, reach[first + query // group])
    return -(-extent // WIDTH) * WIDTH


class Scoring(NamedTuple):
    """Scale, bound and biases of attention scores."""

    group: int  # query heads per kv head
    scale: np.float32  # factor of scores
    cap: np.float32  # bound of the absolute value of scores, see `cap_scores`; 0: none
    biases: Array  # float32[heads, distances], see `add_biases`; no distances: no biases
    by_place: bool  # see `add_biases`


class AttentionWork(NamedTuple):
    """The attention of rows to the caches of their sessions in one layer."""

    q: Array  # float32[rows, ...]; head h is in columns h * size .. (h + 1) * size
    cache: KeyValues  # of the layer; see engines/cpu/cache_words.py for the dtypes
    look: Look
    scoring: Scoring
    out: Array  # float32[rows, heads * size], written


@compiled
def task_count(sessions: Array, kv_heads: int, group: int) -> int:
    """Return the number of tasks of all sessions."""
    count = 0
    for session in range(len(sessions)):
        count += kv_heads * part_count((sessions[session, 2] - sessions[session, 1]) * group)
    return count


class TaskRoom(NamedTuple):
    """Scratch arrays of a thread, overwritten by each task of attention."""

    scaled: Array  # float32[MOST, size]: the queries of a task
    scores: Array  # float32[MOST, slots], whole panels
    mixed: Array  # float32[MOST, width]
    powers: Array  # int32[slots]
    spare: Array  # float32[slots] if scores have a cap


@compiled
def _do_tasks(begin: int, end: int, work: AttentionWork) -> None:
    """Do the tasks begin .. end of `attend`."""
    most = -(-(work.look.reach.max()) // WIDTH) * WIDTH
    room = TaskRoom(
        np.empty((MOST, work.cache.keys.shape[3]), dtype=np.float32),
        np.empty((MOST, most), dtype=np.float32),
        np.empty((MOST, work.cache.values.shape[3]), dtype=np.float32),
        np.empty(most, dtype=np.int32),
        np.empty(most if work.scoring.cap > 0 else 0, dtype=np.float32),
    )
    _do_tasks_in(room, begin, end, work)


@compiled_without_counts
def _do_tasks_in(room: TaskRoom, begin: int, end: int, work: AttentionWork) -> None:
    """Do the tasks begin .. end of `attend`, in scratch arrays of the caller."""
    sessions = work.look.sessions
    kv_heads = work.cache.keys.shape[1]
    task = 0
    for session in range(len(sessions)):
        queries = (sessions[session, 2] - sessions[session, 1]) * work.scoring.group
        parts = part_count(queries)
        for kv in range(kv_heads):
            for part in range(parts):
                if begin <= task < end:
                    start = part * queries // parts
                    stop = (part + 1) * queries // parts
                    _do_task(room, work, session, kv, start, stop)
                task += 1


@compiled_without_counts
def _do_task(room: TaskRoom, work: AttentionWork, session: int, kv: int, start: int, stop: int) -> None:
    """Compute the attention of the queries start .. stop of one session for one head of keys and values."""
    keys = work.cache.keys
    values = work.cache.values
    look = work.look
    group = work.scoring.group
    cap = work.scoring.cap
    biases = work.scoring.biases
    by_place = work.scoring.by_place
    cache, first, _ = look.sessions[session]
    order = look.order[session]
    _, kv_heads, panels, size, _ = keys.shape
    height = values.shape[2]
    width = values.shape[3]
    scaled = room.scaled
    scores = room.scores
    mixed = room.mixed
    most = scores.shape[1]
    flat_keys = keys.reshape(-1)
    flat_values = values.reshape(-1)
    flat_queries = scaled.reshape(-1)
    flat_scores = scores.reshape(-1)
    flat_mixed = mixed.reshape(-1)
    head_at = cache * kv_heads + kv
    count = stop - start
    extent = _extent_of(first, start, stop, group, look.reach)
    _gather_queries(work.q, first, start, stop, kv, group, work.scoring.scale, scaled)
    for panel in range(extent // WIDTH):
        start_of_panel = (head_at * panels + panel) * size * WIDTH
        places = PanelPlaces(start_of_panel, WIDTH, 0, size, panel * WIDTH, most, size, 0, 0)
        write_row_sums(count, flat_keys, flat_queries, flat_scores, places)
    if biases.shape[1] > 0:
        for query in range(count):
            row = first + (start + query) // group
            own = biases[kv * group + (start + query) % group]
            add_biases(scores[query, :extent], own, look.positions[row], look.places[session], by_place)
    if cap > 0:
        for query in range(count):
            cap_scores(scores[query, :extent], cap, room.powers, room.spare)
    for query in range(count):
        softmax(scores[query, :extent], look.seen[first + (start + query) // group], room.powers)
    depth = 0
    for query in range(start, stop):
        depth = max(depth, look.depth[first + query // group])
    last = extent
    for number in range(depth):
        last = max(last, order[number] + 1)
    for query in range(count):
        scores[query, extent:last] = 0  # slots of other queries
    for panel in range(width // WIDTH):
        column = panel * WIDTH
        places = PanelPlaces(head_at * height * width + column, width, 0, most, column, width, depth, 0, 0)
        write_ordered_sums(count, flat_values, flat_scores, flat_mixed, places, order)
    for query in range(count):
        row = first + (start + query) // group
        head = kv * group + (start + query) % group
        copy_numbers(work.out[row, head * size : (head + 1) * size], mixed[query, :size])


@compiled
def attend(q: Array, cache: KeyValues, look: Look, scoring: Scoring, out: Array, threads: int) -> None:
    """Write the attention of all rows to their sessions' caches to `out`; for the arguments see `AttentionWork`.

    Args:
        threads: see `panels.multiply`.
    """
    work = AttentionWork(q, cache, look, scoring, out)
    keys = cache.keys
    tasks = task_count(look.sessions, keys.shape[1], scoring.group)
    products = look.reach.sum() * scoring.group * keys.shape[1] * keys.shape[3]
    if threads > 1 and tasks > 1 and products >= _SHARED_FROM and has_form(threads, _form_of(keys)):
        _attend_with_team(work, tasks, threads, _form_of(keys))
    else:
        _do_tasks(0, tasks, work)


@compiled
def _form_of(keys: Array) -> int:
    return _OF_FLOATS if keys.itemsize == 4 else _OF_WORDS


@compiled
def _attend_with_team(work: AttentionWork, tasks: int, address: int, form: int) -> None:
    """Do all tasks of `attend`, with the team whose memory is at this address."""
    team = memory_of(address)
    scales = np.array([work.scoring.scale, work.scoring.cap])
    call = np.empty(_FIELDS, dtype=np.int64)
    describe(call[_Q:], work.q)
    describe(call[_KEYS:], work.cache.keys)
    describe(call[_VALUES:], work.cache.values)
    describe(call[_SESSIONS:], work.look.sessions)
    describe(call[_SEEN:], work.look.seen)
    describe(call[_REACH:], work.look.reach)
    describe(call[_ORDER:], work.look.order)
    describe(call[_DEPTH:], work.look.depth)
    describe(call[_POSITIONS:], work.look.positions)
    describe(call[_PLACES:], work.look.places)
    describe(call[_BIASES:], work.scoring.biases)
    describe(call[_OUT:], work.out)
    call[_GROUP] = work.scoring.group
    call[_BY_PLACE] = work.scoring.by_place
    call[_SCALES] = scales.ctypes.data
    team[PANELS] = call.ctypes.data
    team[COUNT] = tasks
    share_out(address, form, min(team[THREADS] * SHARES_EACH, tasks), (call, scales))


def _share_function(kind: Any) -> Callable[[int, int], None]:
    """Return the compiled function for a share of the attention that the memory of a team describes.

    Args:
        kind: dtype of keys and values.
    """

    def do_share(address: int, share: int) -> None:
        team = memory_of(address)
        call = carray(pointer_to(team[PANELS]), (_FIELDS,), np.int64)
        keys = call[_KEYS:]
        values = call[_VALUES:]
        cache = KeyValues(
            carray(pointer_to(keys[0]), (keys[1], keys[2], keys[3], keys[4], keys[5]), kind),
            carray(pointer_to(values[0]), (values[1], values[2], values[3], values[4]), kind),
        )
        look = Look(
            described(call[_SESSIONS:], np.int64),
            described(call[_SEEN:], np.bool_),
            described_numbers(call[_REACH:]),
            described(call[_ORDER:], np.int64),
            described_numbers(call[_DEPTH:]),
            described_numbers(call[_POSITIONS:]),
            described(call[_PLACES:], np.int64),
        )
        scales = carray(pointer_to(call[_SCALES]), (2,), np.float32)
        biases = described(call[_BIASES:], np.float32)
        scoring = Scoring(call[_GROUP], scales[0], scales[1], biases, call[_BY_PLACE] != 0)
        q = described(call[_Q:], np.float32)
        out = described(call[_OUT:], np.float32)
        begin, end = part_of(team, share)
        _do_tasks(begin, end, AttentionWork(q, cache, look, scoring, out))

    do_share.__name__ = f"do_attention_share_{np.dtype(kind).name}"  # the name under which numba caches its code
    do_share.__qualname__ = do_share.__name__
    return compiled(do_share)


attention_functions = {np.dtype(kind).name: _share_function(kind) for kind in (np.float32, np.uint16)}


@compiled_without_counts
def add_biases(scores: Array, biases: Array, position: int, places: Array, by_place: bool) -> None:
    """Add to scores, float32[slots], the bias for the slot's distance.

    Args:
        biases: float32[distances], by number of positions back; the last one is also for all greater distances.
        position: that of the row.
        places: int64[slots or more], see `LayerRows.places`; slots at negative distances are masked anyway.
        by_place: whether biases are by the slot's position instead.
    """
    most = len(biases) - 1
    for slot in range(len(scores)):
        distance = places[slot] if by_place else position - places[slot]
        scores[slot] += biases[min(max(distance, 0), most)]

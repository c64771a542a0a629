"""Attention of rows to the caches of their sessions, alone or with a team of threads.

A task is a part of the queries that read one key-value head of a session. Tasks share nothing that they write, and each is
done by one thread, in the order of a single one: so the numbers are the same with any number of threads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specbeam.core.compiling.atomics import carray, pointer_to
from specbeam.core.compiling.compiler import Array, compiled
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.compiling.ordered_sums import sum_of
from specbeam.core.compiling.sums import extremes, rank_of
from specbeam.core.compiling.uncounted import compiled_without_counts
from specbeam.engines.cpu.curves import cap_scores, exponential
from specbeam.engines.cpu.panels import FORM_OF, has_form, part_count
from specbeam.engines.cpu.shares import (
    COUNT,
    FORMS,
    FUNCTION,
    PANELS,
    SHARES,
    THREADS,
    WORDS,
    finish,
    publish,
    take,
    wait_for_all,
)
from specbeam.engines.cpu.sums import MOST, WIDTH, write_row_sums

_F0 = np.float32(0)
_F1 = np.float32(1)
_UNSEEN = np.float32(-1e30)
_SHARED_FROM = 200_000  # products of queries with keys, from which on they are shared among threads
_SHARES_EACH = 4  # of tasks for each thread
# The numbers of the forms of attention in the memory of a team, after those of products, by the dtype of keys and values.
_OF_FLOATS = len(FORM_OF)
_OF_WORDS = _OF_FLOATS + 1
ATTENTION_FORM_OF = {"float32": _OF_FLOATS, "uint16": _OF_WORDS}
# Places in the description of a call, int64[`_FIELDS`]: the address and the shape of each array, and numbers.
_Q, _KEYS, _VALUES, _ROWS, _SEEN, _REACH, _BIASES, _BACK, _OUT = range(0, 54, 6)
_GROUP = 54
_SCALES = 55
_FIELDS = 56


@compiled_without_counts
def largest(x: Array, scratch: Array) -> np.float32:
    """Return the maximum of float32[n], by integers that have the order of the numbers; NaN if any is a positive NaN.

    Args:
        scratch: int32[n], n > 0, of which the first number is overwritten.
    """
    _, high = extremes(x.view(np.int32))
    scratch[0] = rank_of(high)
    top: np.float32 = scratch.view(np.float32)[0]
    return top


@compiled_without_counts
def softmax(scores: Array, seen: Array, powers: Array) -> None:
    """Replace scores, float32[slots], by their softmax over the slots that are seen; the others get 0.

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
    total = sum_of(scores)
    share = _F1 / total
    for slot in range(len(scores)):
        scores[slot] *= share


@compiled_without_counts
def _gather_queries(
    q: Array, first: int, start: int, stop: int, kv: int, group: int, scale: np.float32, out: Array
) -> None:
    """Write the queries start .. stop of one kv head, scaled, to `out`, float32[queries, size].

    Those of a row follow each other.

    Args:
        first: row of the first query of the session.
    """
    size = out.shape[1]
    for query in range(start, stop):
        row = first + query // group
        head = kv * group + query % group
        for place in range(size):
            out[query - start, place] = q[row, head * size + place] * scale


@compiled_without_counts
def _extent_of(first: int, start: int, stop: int, group: int, reach: Array) -> int:
    """Return the number of slots that queries start .. stop reach, rounded up to whole panels."""
    extent = 0
    for query in range(start, stop):
        extent = max(extent, reach[first + query // group])
    return -(-extent // WIDTH) * WIDTH


@compiled
def task_count(rows: Array, kv_heads: int, group: int) -> int:
    """Return the number of tasks of all sessions."""
    count = 0
    for session in range(len(rows)):
        count += kv_heads * part_count((rows[session, 2] - rows[session, 1]) * group)
    return count


class TaskRoom(NamedTuple):
    """Arrays that the tasks of attention write into one after the other."""

    scaled: Array  # float32[MOST, size]: the queries of a task
    scores: Array  # float32[MOST, slots], of whole panels
    mixed: Array  # float32[MOST, width]
    powers: Array  # int32[slots]
    spare: Array  # float32[slots] if scores have a cap


@compiled
def _do_tasks(
    begin: int, end: int, q: Array, keys: Array, values: Array, rows: Array, seen: Array, reach: Array, group: int,
    scale: np.float32, cap: np.float32, biases: Array, back: Array, out: Array,
) -> None:  # fmt: skip
    """Do the tasks begin .. end of `attend`."""
    most = -(-(reach.max()) // WIDTH) * WIDTH
    room = TaskRoom(
        np.empty((MOST, keys.shape[3]), dtype=np.float32),
        np.empty((MOST, most), dtype=np.float32),
        np.empty((MOST, values.shape[3]), dtype=np.float32),
        np.empty(most, dtype=np.int32),
        np.empty(most if cap > 0 else 0, dtype=np.float32),
    )
    _do_tasks_in(room, begin, end, q, keys, values, rows, seen, reach, group, scale, cap, biases, back, out)


@compiled_without_counts
def _do_tasks_in(
    room: TaskRoom, begin: int, end: int, q: Array, keys: Array, values: Array, rows: Array, seen: Array, reach: Array,
    group: int, scale: np.float32, cap: np.float32, biases: Array, back: Array, out: Array,
) -> None:  # fmt: skip
    """Do the tasks begin .. end of `attend` in a room that has been made."""
    kv_heads = keys.shape[1]
    panels = keys.shape[2]
    size = keys.shape[3]
    height = values.shape[2]
    width = values.shape[3]
    scaled = room.scaled
    scores = room.scores
    mixed = room.mixed
    powers = room.powers
    most = scores.shape[1]
    flat_keys = keys.reshape(-1)
    flat_values = values.reshape(-1)
    flat_scaled = scaled.reshape(-1)
    flat_scores = scores.reshape(-1)
    flat_mixed = mixed.reshape(-1)
    task = 0
    for session in range(len(rows)):
        cache, first, last = rows[session]
        queries = (last - first) * group
        parts = part_count(queries)
        for kv in range(kv_heads):
            head_at = cache * kv_heads + kv
            for part in range(parts):
                is_here = begin <= task < end
                task += 1
                if not is_here:
                    continue
                start = part * queries // parts
                stop = (part + 1) * queries // parts
                count = stop - start
                extent = _extent_of(first, start, stop, group, reach)
                _gather_queries(q, first, start, stop, kv, group, scale, scaled)
                for panel in range(extent // WIDTH):
                    write_row_sums(
                        count, flat_keys, (head_at * panels + panel) * size * WIDTH, WIDTH, flat_scaled, 0, size,
                        flat_scores, panel * WIDTH, most, size,
                    )  # fmt: skip
                if biases.shape[1] > 0:
                    for query in range(count):
                        row = first + (start + query) // group
                        add_biases(scores[query, :extent], biases[kv * group + (start + query) % group], back[row])
                if cap > 0:
                    for query in range(count):
                        cap_scores(scores[query, :extent], cap, powers, room.spare)
                for query in range(count):
                    softmax(scores[query, :extent], seen[first + (start + query) // group], powers)
                for panel in range(width // WIDTH):
                    write_row_sums(
                        count, flat_values, head_at * height * width + panel * WIDTH, width, flat_scores, 0, most,
                        flat_mixed, panel * WIDTH, width, extent,
                    )  # fmt: skip
                for query in range(count):
                    row = first + (start + query) // group
                    head = kv * group + (start + query) % group
                    copy_numbers(out[row, head * size : (head + 1) * size], mixed[query, :size])


@compiled
def attend(
    q: Array, keys: Array, values: Array, rows: Array, seen: Array, reach: Array, group: int, scale: np.float32,
    cap: np.float32, biases: Array, back: Array, out: Array, threads: int,
) -> None:  # fmt: skip
    """Write the attention of all rows to their sessions' caches to `out`.

    Args:
        q: float32[rows, ...]; head h is in columns h * size .. (h + 1) * size.
        keys: float32 or uint16[caches, kv heads, panels, size, WIDTH], one panel for WIDTH slots; contiguous; see `WORDS` in
            engines/cpu/cache_words.py.
        values: the same numbers[caches, kv heads, slots, width], contiguous.
        rows: int64[sessions, 3]: row of the store, first row, last row + 1.
        seen: bool[rows, slots]: which slots each row looks at.
        reach: int64[rows]: one past the last slot that each row looks at.
        group: query heads per kv head.
        scale: what scores are multiplied with.
        cap: what bounds the size of scores, see `cap_scores`; 0: nothing.
        biases: float32[heads, distances], see `add_biases`; of no distances: none.
        back: int32[rows, slots]: how many positions before each row the token of each slot is; needed with biases.
        out: float32[rows, heads * size].
        threads: see `panels.multiply`.
    """
    tasks = task_count(rows, keys.shape[1], group)
    products = reach.sum() * group * keys.shape[1] * keys.shape[3]
    if threads > 1 and tasks > 1 and products >= _SHARED_FROM and has_form(threads, _form_of(keys)):
        _attend_with_team(
            q, keys, values, rows, seen, reach, group, scale, cap, biases, back, out, tasks, threads, _form_of(keys)
        )
    else:
        _do_tasks(0, tasks, q, keys, values, rows, seen, reach, group, scale, cap, biases, back, out)


@compiled
def _form_of(keys: Array) -> int:
    """Return the number of the form of attention to these keys; see `ATTENTION_FORM_OF`."""
    return _OF_FLOATS if keys.itemsize == 4 else _OF_WORDS


@compiled
def _attend_with_team(
    q: Array, keys: Array, values: Array, rows: Array, seen: Array, reach: Array, group: int, scale: np.float32,
    cap: np.float32, biases: Array, back: Array, out: Array, tasks: int, address: int, form: int,
) -> None:  # fmt: skip
    """Do all tasks of `attend`, with the team whose memory is at this address."""
    team = carray(pointer_to(address), (WORDS,), np.int64)
    scales = np.array([scale, cap])
    call = np.empty(_FIELDS, dtype=np.int64)
    _describe(call[_Q:], q)
    _describe(call[_KEYS:], keys)
    _describe(call[_VALUES:], values)
    _describe(call[_ROWS:], rows)
    _describe(call[_SEEN:], seen)
    _describe(call[_REACH:], reach)
    _describe(call[_BIASES:], biases)
    _describe(call[_BACK:], back)
    _describe(call[_OUT:], out)
    call[_GROUP] = group
    call[_SCALES] = scales.ctypes.data
    team[FUNCTION] = team[FORMS + form]
    team[PANELS] = call.ctypes.data
    team[COUNT] = tasks
    _share_tasks(team, call, scales, q, keys, values, rows, seen, reach, group, scale, cap, biases, back, out, tasks)


@compiled
def _share_tasks(
    team: Array, call: Array, scales: Array, q: Array, keys: Array, values: Array, rows: Array, seen: Array, reach: Array,
    group: int, scale: np.float32, cap: np.float32, biases: Array, back: Array, out: Array, tasks: int,
) -> None:  # fmt: skip
    """Do the tasks that `call` describes, with whoever helps. The caller keeps all arrays until then.

    They are arguments for that reason alone: numba frees an array after the last line that names it, and the team reads
    addresses.
    """
    shares = min(team[THREADS] * _SHARES_EACH, tasks)
    publish(team, shares)
    share = take(team)
    while share >= 0:
        begin = share * tasks // shares
        end = (share + 1) * tasks // shares
        _do_tasks(begin, end, q, keys, values, rows, seen, reach, group, scale, cap, biases, back, out)
        finish(team)
        share = take(team)
    wait_for_all(team, shares)


@compiled
def _describe(call: Array, array: Array) -> None:
    """Write the address and the shape of an array to the first places of `call`."""
    call[0] = array.ctypes.data
    for axis in range(array.ndim):
        call[1 + axis] = array.shape[axis]


def _share_function(kind: Any) -> Callable[[int, int], None]:
    """Return the compiled function that does a share of the attention that the memory of a team describes.

    Args:
        kind: dtype of keys and values.
    """

    def do_share(address: int, share: int) -> None:
        team = carray(pointer_to(address), (WORDS,), np.int64)
        call = carray(pointer_to(team[PANELS]), (_FIELDS,), np.int64)
        q = carray(pointer_to(call[_Q]), (call[_Q + 1], call[_Q + 2]), np.float32)
        of_keys = (call[_KEYS + 1], call[_KEYS + 2], call[_KEYS + 3], call[_KEYS + 4], call[_KEYS + 5])
        keys = carray(pointer_to(call[_KEYS]), of_keys, kind)
        of_values = (call[_VALUES + 1], call[_VALUES + 2], call[_VALUES + 3], call[_VALUES + 4])
        values = carray(pointer_to(call[_VALUES]), of_values, kind)
        rows = carray(pointer_to(call[_ROWS]), (call[_ROWS + 1], call[_ROWS + 2]), np.int64)
        seen = carray(pointer_to(call[_SEEN]), (call[_SEEN + 1], call[_SEEN + 2]), np.bool_)
        reach = carray(pointer_to(call[_REACH]), (call[_REACH + 1],), np.int64)
        biases = carray(pointer_to(call[_BIASES]), (call[_BIASES + 1], call[_BIASES + 2]), np.float32)
        back = carray(pointer_to(call[_BACK]), (call[_BACK + 1], call[_BACK + 2]), np.int32)
        out = carray(pointer_to(call[_OUT]), (call[_OUT + 1], call[_OUT + 2]), np.float32)
        scales = carray(pointer_to(call[_SCALES]), (2,), np.float32)
        tasks = team[COUNT]
        shares = team[SHARES]
        _do_tasks(
            share * tasks // shares, (share + 1) * tasks // shares, q, keys, values, rows, seen, reach, call[_GROUP],
            scales[0], scales[1], biases, back, out,
        )  # fmt: skip

    do_share.__name__ = (
        f"do_attention_share_{np.dtype(kind).name}"  # by which numba finds its code in memory and on disk
    )
    do_share.__qualname__ = do_share.__name__
    return compiled(do_share)


attention_functions = {np.dtype(kind).name: _share_function(kind) for kind in (np.float32, np.uint16)}


@compiled_without_counts
def add_biases(scores: Array, biases: Array, back: Array) -> None:
    """Add to scores, float32[slots], the bias of each slot's distance.

    Args:
        biases: float32[distances], by number of positions back; the last is that of all that are further back.
        back: int32[slots or more]; what is negative is not looked at.
    """
    most = len(biases) - 1
    for slot in range(len(scores)):
        scores[slot] += biases[min(max(back[slot], 0), most)]

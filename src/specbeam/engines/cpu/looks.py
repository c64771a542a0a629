"""The slots that the rows of a pass attend to, and the order in which attention adds them.

Where drafts are stored depends on other drafts. A text must not depend on drafts, so attention adds the slots of a row by
their positions in the text.
"""

from typing import NamedTuple

import numpy as np

from specbeam.core.compiling.compiler import Array, compiled
from specbeam.engines.cpu.rows import LayerRows, Look
from specbeam.engines.cpu.sums import STEP


class Looks(NamedTuple):
    """What `Look` has for one kind of layer, for all kinds."""

    reach: Array  # int64[kinds, rows]
    order: Array  # int64[kinds, sessions, slots]
    depth: Array  # int64[kinds, rows]


@compiled
def looks_of(rows: LayerRows) -> Looks:
    """Return the slots that the rows of a pass attend to, in the layers of each kind."""
    kinds, count, slots = rows.seen.shape
    looks = Looks(
        np.zeros((kinds, count), dtype=np.int64),
        np.zeros((kinds, len(rows.sessions), slots), dtype=np.int64),
        np.zeros((kinds, count), dtype=np.int64),
    )
    for kind in range(kinds):
        _write_reach(rows.seen[kind], looks.reach[kind])
        for session in range(len(rows.sessions)):
            _, first, last = rows.sessions[session]
            if first == last:
                continue
            seen = rows.seen[kind, first:last]
            latest = rows.positions[first:last].max()
            places = rows.places[session]
            _write_order(seen, places, latest, looks.order[kind, session], looks.depth[kind, first:last])
    return looks


@compiled
def look_at(rows: LayerRows, looks: Looks, kind: int) -> Look:
    """Return the slots that the rows of a pass attend to in layers of one kind."""
    return Look(
        rows.sessions,
        rows.seen[kind],
        looks.reach[kind],
        looks.order[kind],
        looks.depth[kind],
        rows.positions,
        rows.places,
    )


@compiled
def _write_reach(seen: Array, reach: Array) -> None:
    """Write one past the last slot that each row attends to, int64[rows], given bool[rows, slots]."""
    for row in range(len(seen)):
        last = seen.shape[1]
        while last > 0 and not seen[row, last - 1]:
            last -= 1
        reach[row] = last


@compiled
def _write_order(seen: Array, places: Array, latest: int, order: Array, depth: Array) -> None:
    """Write the slots that a session's rows attend to by their positions, and how many of them each row needs.

    Args:
        seen: bool[rows, slots].
        places: int64[slots], the positions of the slots.
        latest: the last position of the rows.
        order: int64[slots], written as `Look.order` of the session.
        depth: int64[rows], written as `Look.depth` of its rows.
    """
    is_seen = np.zeros(len(order), dtype=np.bool_)
    for row in range(len(seen)):
        for slot in range(len(is_seen)):
            is_seen[slot] |= seen[row, slot]
    count = 0
    is_sorted = True
    for slot in range(len(is_seen)):
        if is_seen[slot]:
            order[count] = slot
            is_sorted &= count == 0 or places[order[count - 1]] <= places[slot]
            count += 1
    if not is_sorted:
        _sort_slots(order[:count], places, latest)
    for row in range(len(seen)):
        last = count
        while last > 0 and not seen[row, order[last - 1]]:
            last -= 1
        depth[row] = -(-last // STEP) * STEP
    unseen = 0
    while count % STEP > 0 and is_seen[unseen]:
        unseen += 1
    while count % STEP > 0:
        order[count] = unseen
        count += 1


@compiled
def _sort_slots(slots: Array, places: Array, latest: int) -> None:
    """Sort slots, int64[n], by their positions; slots of the same position keep their order.

    The slots of a learned prefix, whose position is beyond `latest`, come last.
    """
    positions = np.minimum(places[slots], latest + 1)
    lowest = positions.min()
    starts = np.zeros(latest + 3 - lowest, dtype=np.int64)
    for position in positions:
        starts[position + 1 - lowest] += 1
    starts = np.cumsum(starts)
    former = slots.copy()
    for number in range(len(former)):
        goal = positions[number] - lowest
        slots[starts[goal]] = former[number]
        starts[goal] += 1

"""Shares of a product or of attention, which the threads of a team claim one after the other.

The caller takes shares like every other thread, and finally waits only for shares in progress. So a thread that is
suspended between shares delays no other thread. A product needs no barrier: helpers poll for shares instead of being
woken. Each panel is multiplied by one thread, in the same order as without helpers, so the number of threads does not
change the results.

The memory of a team is int64[`WORDS`]. Its ticket counts the shares of the current work and the shares taken, so that
one atomic operation reads and increments both. The rest of the description is written before the ticket, and is valid
until all shares are done.
"""

from typing import Any

import numpy as np

from specbeam.core import compiling
from specbeam.core.compiling.atomics import add_shared, carray, load_shared, pause, pointer_to, store_shared
from specbeam.core.compiling.compiler import Array, compiled

if compiling.AVAILABLE:
    from specbeam.core.compiling.compiler import call_at, call_c

# Places in the memory of a team. Numbers that different threads change lie in different lines of a cache.
TICKET = 0
DONE = 8  # shares of the current product that are done
OPEN = 16  # helpers poll for shares while it is not 0
HELPED = 17  # number of shares done by helpers so far
FUNCTION = 24  # address of the function that does a share of the current product
PANELS = 25  # address of its panels, their number, and numbers of a panel
COUNT = 26
SIZE = 27
PACKED = 28  # address of the packed rows, and their words
LENGTH = 29
ROWS = 30
DEPTH = 31
OUT = 32  # address of the result, and its columns
COLUMNS = 33
SHARES = 34
THREADS = 40  # that the team has
YIELD = 41  # address of the C function that yields the processor to other threads; 0: none
FORMS = 48  # addresses of the functions that do shares, by the kind of panels
WORDS = 64

_HALF = 32  # bits of a ticket that count the shares that are taken
_TAKEN = (1 << _HALF) - 1
_SPINS = 2000  # polls of a number before yielding to other threads
_SHARES_EACH = 8  # of a product for each thread
_LEAST_BYTES = 1 << 16  # of the panels in a share


@compiled
def shares_of(count: int, panel_bytes: int, threads: int) -> int:
    """Return the number of shares of a product."""
    least = max(_LEAST_BYTES // panel_bytes, 1)
    return max(min(threads * _SHARES_EACH, count // least), 1)


@compiled
def memory_of(address: int) -> Array:
    """Return the memory of the team at an address."""
    return carray(pointer_to(address), (WORDS,), np.int64)


@compiled
def has_form(address: int, form: int) -> bool:
    """Return whether the helpers of the team at an address have a function for the shares of a form."""
    return bool(memory_of(address)[FORMS + form] != 0)


@compiled
def publish(team: Array, shares: int) -> None:
    """Offer the shares of the product that the memory of the team describes to all threads."""
    team[SHARES] = shares
    store_shared(team, DONE, 0)
    store_shared(team, TICKET, shares << _HALF)


@compiled
def take(team: Array) -> int:
    """Return the number of a share that no other thread has taken; -1 if there is none."""
    ticket = load_shared(team, TICKET)
    if ticket & _TAKEN >= ticket >> _HALF:
        return -1
    ticket = add_shared(team, TICKET, 1)
    share = ticket & _TAKEN
    return share if share < ticket >> _HALF else -1


@compiled
def finish(team: Array) -> None:
    """Count a share as done."""
    add_shared(team, DONE, 1)


@compiled
def share_out(address: int, form: int, shares: int, kept: Any) -> None:
    """Do the work that the memory of the team at an address describes, together with helpers.

    Args:
        form: number of the function that does a share.
        kept: arrays of the caller that the memory refers to by address: numba frees an array after its last use in the
            code.
    """
    team = memory_of(address)
    team[FUNCTION] = team[FORMS + form]
    publish(team, shares)
    share = take(team)
    while share >= 0:
        call_at(team[FUNCTION], (address, share))
        finish(team)
        share = take(team)
    looks = 0
    while load_shared(team, DONE) < shares:
        looks = rest(team, looks)


@compiled
def part_of(team: Array, share: int) -> tuple[int, int]:
    """Return the first of the panels or tasks in a share, and one past the last."""
    count = team[COUNT]
    shares = team[SHARES]
    return share * count // shares, (share + 1) * count // shares


@compiled
def describe(call: Array, array: Array) -> None:
    """Write the address and the shape of an array to a description, int64[1 + dimensions or more]."""
    call[0] = array.ctypes.data
    for axis in range(array.ndim):
        call[1 + axis] = array.shape[axis]


@compiled
def described(call: Array, kind: Any) -> Array:
    """Return the matrix of this dtype that was described; see `describe`."""
    return carray(pointer_to(call[0]), (call[1], call[2]), kind)


@compiled
def described_numbers(call: Array) -> Array:
    """Return the int64 vector that was described; see `describe`."""
    return carray(pointer_to(call[0]), (call[1],), np.int64)


@compiled
def rest(team: Array, looks: int) -> int:
    """Pause between two polls; return the number of polls so far."""
    if looks < _SPINS or team[YIELD] == 0:
        pause()
    else:
        call_c(team[YIELD], ())
    return looks + 1


@compiled
def help_team(team: Array, address: int) -> None:
    """Do shares of the team's products until the team is closed; `address` is that of its memory."""
    looks = 0
    while load_shared(team, OPEN) != 0:
        share = take(team)
        if share < 0:
            looks = rest(team, looks)
            continue
        call_at(team[FUNCTION], (address, share))
        finish(team)
        add_shared(team, HELPED, 1)
        looks = 0


def new_memory() -> np.ndarray:
    """Return the memory of a new team, aligned to cache lines."""
    room = np.zeros(WORDS + 8, dtype=np.int64)
    start = -room.ctypes.data % 64 // 8
    return room[start : start + WORDS]

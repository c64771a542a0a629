"""How often the first ones of a race are drafted: the twin of `control.accepted.odds_by_drafts`."""

import numpy as np

from specbeam.kernels.compiling import Array, compiled


@compiled
def _first(arrival: Array, count: int, order: Array) -> None:
    """Into `order` the places of the `count` smallest, in order; of equal ones the first."""
    held = 0
    for place in range(len(arrival)):
        value, slot = arrival[place], held
        if held == count:
            if value >= arrival[order[count - 1]]:
                continue
            slot -= 1
        else:
            held += 1
        while slot > 0 and arrival[order[slot - 1]] > value:
            order[slot] = order[slot - 1]
            slot -= 1
        order[slot] = place


@compiled
def _needed_by_rank(arrival: Array, likeliest: Array, most: int, order: Array, needed: Array) -> None:
    """How many drafts it takes until each pair is one: the first `most` that arrive come first, then the likeliest."""
    core = 0
    needed[:] = 0
    _first(arrival, min(most, len(arrival)), order)
    for place in order[: min(most, len(arrival))]:
        if arrival[place] < np.inf:
            core += 1
            needed[place] = core
    for place in likeliest:
        if needed[place] == 0:
            core += 1
            needed[place] = core


@compiled
def _needed_by_race(arrival: Array, among: Array, rest: float, needed: Array) -> None:
    """The same of the pairs `among`, where drafts are the first to arrive: those before it, and as many as expected of the
    `rest`.
    """
    for pair in among:
        at = arrival[pair]
        before = rest * min(at, 1e9)
        for place in range(len(arrival)):
            before += arrival[place] < at
        needed[pair] = int(min(before, 1e9)) + 1


@compiled
def odds_by_drafts(noise: Array, p: Array, q: Array, drafts: int, most: int, rest: float, likeliest: Array) -> Array:
    """float64[widths, drafts + 1]: odds that the first 0, 1, ... of a race at the target are among 0, 1, ... drafts.

    Args:
        noise: float64[races, pairs].
        rest: mass of the draft on pairs that are not here.
        likeliest: pairs by draft likelihood, where a truncation cuts the draft; empty where none does.
    """
    races, size, wanted = noise.shape[0], len(p), 0
    for place in range(size):
        wanted += p[place] > 0
    wanted = min(wanted, most)
    found = np.zeros((wanted + 1, drafts + 1))
    target, draft = np.empty(size), np.empty(size)
    first, order, needed = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    for race in range(races):
        for place in range(size):
            target[place] = noise[race, place] / p[place]
            draft[place] = noise[race, place] / q[place]
        _first(target, wanted, first)
        if len(likeliest) > 0:
            _needed_by_rank(draft, likeliest, most, order, needed)
        else:
            _needed_by_race(draft, first[:wanted], rest, needed)
        deepest = 0
        for width in range(wanted):
            deepest = max(deepest, needed[first[width]])
            if deepest > drafts:
                break
            found[width + 1, deepest] += 1
    found[0, 0] = races
    for width in range(wanted + 1):
        for count in range(drafts):
            found[width, count + 1] += found[width, count]
    return found / races

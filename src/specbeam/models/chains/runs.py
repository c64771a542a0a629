"""Compiled runs with a target that another program runs: one call into Python scores the forests of all sessions."""

from typing import Any, NamedTuple

import numpy as np

from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.compiling.held import held_at
from specbeam.core.cycles import cycles
from specbeam.core.forest import MOST_KEPT
from specbeam.core.passes import (
    CYCLES,
    PASSES,
    Asked,
    extend_all,
    extend_alone,
    extend_ranked,
    has_room_for,
    rewind,
    settle_target,
    whole_rows_again,
)
from specbeam.core.ranked import Listing, Ranked, are_whole, no_lists, whole_rows
from specbeam.core.scored_by_call import JOB, part_of_rows, rows_by_call
from specbeam.core.steps import Array, borrowed, step


@borrowed
class ChainRun(NamedTuple):
    """A session of a target that scores chains; the engine finds the texts in its own cache."""

    session: int  # by which the callback knows it
    vocab: int
    listing: Listing  # the lists that passes return
    score_at: int  # address of the `Callback` that scores: `ChainLM.score_jobs`
    # The forest of the turn, int64[capacity] each: between two turns, the roots and the nodes that are kept.
    tokens: Array
    parents: Array
    size: Array  # int64[1]: number of its nodes


@step
def hold_forest(cache: ChainRun, tokens: Array, parents: Array) -> None:
    """Store the forest of a turn, to score nodes of it again."""
    size = len(tokens)
    copy_numbers(cache.tokens[:size], tokens)
    copy_numbers(cache.parents[:size], parents)
    cache.size[0] = size


@step
def write_job(job: Array, cache: ChainRun, wanted: Array) -> None:
    """Write what a callback needs to score nodes of the forest that a cache holds."""
    job[:] = 0
    job[0] = cache.session
    job[1] = cache.tokens.ctypes.data
    job[2] = cache.parents.ctypes.data
    job[3] = cache.size[0]
    job[4] = wanted.ctypes.data
    job[5] = len(wanted)


extend_ranked.of(ChainRun)(extend_alone)


@extend_all.of(ChainRun)
@step
def extend_chain_runs(like: ChainRun, caches: list[Any], asked: list[Asked], whole: bool, spent: Array) -> list[Ranked]:
    """Score the forests of all sessions that ask for rows, by one call; see `extend_all`."""
    began = cycles()
    count = len(asked)
    listing = no_lists(like.listing) if whole else like.listing
    jobs = np.empty((count, JOB), dtype=np.int64)
    total = 0
    used = 0
    for number in range(count):
        one = asked[number]
        cache = held_at(caches[number], like)
        hold_forest(cache, one.tokens, one.parents)
        if len(one.wanted) > 0:
            write_job(jobs[used], cache, one.wanted)
            total += len(one.wanted)
            used += 1
            spent[number, PASSES] += 1
    rows = whole_rows(np.empty((0, 0), dtype=np.float32))
    if used > 0:
        rows = rows_by_call(like.score_at, jobs[:used], total, listing, like.vocab)
    found = []
    start = 0
    share = (cycles() - began) // count
    for number in range(count):
        stop = start + len(asked[number].wanted)
        found.append(part_of_rows(rows, start, stop))
        spent[number, CYCLES] += share
        start = stop
    return found


@whole_rows_again.of(ChainRun)
def score_again(cache: ChainRun, known: Ranked, nodes: Array) -> Ranked:
    """Score nodes of the forest of the turn again, if their rows are lists; see `whole_rows_again`."""
    if are_whole(known):
        return known
    if len(nodes) == 0:
        return whole_rows(np.empty((0, cache.vocab), dtype=np.float32))
    jobs = np.empty((1, JOB), dtype=np.int64)
    write_job(jobs[0], cache, nodes)
    rows = rows_by_call(cache.score_at, jobs, len(nodes), no_lists(cache.listing), cache.vocab)
    return whole_rows(rows.logits)


@has_room_for.of(ChainRun)
@step
def chain_run_has_room(cache: ChainRun, fresh: int, beams: int) -> bool:
    """Return whether the forest of a turn fits; see `has_room_for`."""
    return cache.size[0] + fresh + beams + MOST_KEPT <= len(cache.tokens)


@rewind.of(ChainRun)
@step
def rewind_chain_run(cache: ChainRun, nodes: int) -> None:
    """Restore the forest to the beginning of the turn; see `rewind`."""
    cache.size[0] = nodes


@settle_target.of(ChainRun)
@step
def settle_chain_run(
    cache: ChainRun, tree: tuple[Array, Array], nodes: Array, tokens: Array, parents: Array, kept: Array
) -> None:
    """Hold the beginning of the next forest: surviving beams and kept nodes, in the order of `forest.next_start`."""
    beams = len(nodes)
    node_map = np.full(len(tree[0]), -1, dtype=np.int64)
    for beam in range(beams):
        cache.tokens[beam] = tokens[beam]
        cache.parents[beam] = -1
        if nodes[beam] >= 0:
            node_map[nodes[beam]] = beam
    for place in range(len(kept)):
        node = kept[place]
        node_map[node] = beams + place
        cache.tokens[beams + place] = tree[0][node]
        cache.parents[beams + place] = node_map[tree[1][node]]
    cache.size[0] = beams + len(kept)

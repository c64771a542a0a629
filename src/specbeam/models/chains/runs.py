"""Compiled runs with a target that another program runs: one call into Python scores the forests of all sessions."""

import ctypes
from typing import Any, NamedTuple

import numpy as np

from specbeam.core.callbacks import array_at, call_back, integers_at
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.compiling.held import address_of_record, held_at
from specbeam.core.cycles import cycles
from specbeam.core.forest import MOST_KEPT
from specbeam.core.passes import (
    CYCLES,
    PASSES,
    Asked,
    extend_all,
    extend_ranked,
    has_room_for,
    rewind,
    settle_target,
    whole_rows_again,
)
from specbeam.core.ranked import Listing, Ranked, are_whole, whole_rows
from specbeam.core.steps import Array, borrowed, step

JOB = (
    6  # numbers of a job: session, addresses of tokens and parents, number of nodes, address and number of wanted nodes
)


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
def scored_by_callback(cache: ChainRun, jobs: Array, total: int, is_listed: bool) -> Ranked:
    """Return the rows of all wanted nodes of these jobs, one job after the other.

    Args:
        jobs: int64[jobs, JOB].
        total: number of wanted nodes.
        is_listed: whether lists are wanted, not whole rows.
    """
    columns = min(cache.listing.length, cache.vocab) if is_listed else cache.vocab
    tokens = np.empty((total if is_listed else 0, columns if is_listed else 0), dtype=np.int64)
    logits = np.empty((total, columns), dtype=np.float32)
    sums = np.empty((3, total if is_listed else 0))
    numbers = (jobs.ctypes.data, len(jobs), total, columns, is_listed, tokens.ctypes.data, logits.ctypes.data)
    if call_back(cache.score_at, (*numbers, sums.ctypes.data)) != 0:
        raise RuntimeError("the target could not score the drafts")
    return Ranked(tokens, logits, sums[0], sums[1], sums[2], cache.vocab, False)


@step
def part_of_rows(rows: Ranked, start: int, stop: int) -> Ranked:
    """Return the rows from `start` to `stop` - 1; whole rows have no tokens and sums."""
    logits = rows.logits[start:stop]
    if are_whole(rows):
        return whole_rows(logits)
    sums = (rows.norms[start:stop], rows.warm[start:stop], rows.rest[start:stop])
    return Ranked(rows.tokens[start:stop], logits, sums[0], sums[1], sums[2], rows.vocab, False)


@step
def write_job(job: Array, cache: ChainRun, wanted: Array) -> None:
    """Write what a callback needs to score nodes of the forest that a cache holds."""
    job[0] = cache.session
    job[1] = cache.tokens.ctypes.data
    job[2] = cache.parents.ctypes.data
    job[3] = cache.size[0]
    job[4] = wanted.ctypes.data
    job[5] = len(wanted)


@extend_ranked.of(ChainRun)
@step
def extend_chain_run(cache: ChainRun, tokens: Array, parents: Array, wanted: Array, keys: Array, whole: bool) -> Ranked:
    """Score the forest of a single session; see `extend_ranked`."""
    spent = np.zeros((1, 2), dtype=np.int64)
    found = extend_chain_runs(cache, [address_of_record(cache)], [Asked(tokens, parents, wanted, keys)], whole, spent)
    return found[0]


@extend_all.of(ChainRun)
@step
def extend_chain_runs(like: ChainRun, caches: list[Any], asked: list[Asked], whole: bool, spent: Array) -> list[Ranked]:
    """Score the forests of all sessions that ask for rows, by one call; see `extend_all`."""
    began = cycles()
    count = len(asked)
    is_listed = like.listing.length > 0 and not whole
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
        rows = scored_by_callback(like, jobs[:used], total, is_listed)
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
    return whole_rows(scored_by_callback(cache, jobs, len(nodes), False).logits)


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


class ForestJob(NamedTuple):
    """The forest of a session, as a run passes it on; views that are valid during the call."""

    session: int
    tokens: Array
    parents: Array
    wanted: Array


class Goal(NamedTuple):
    """The arrays to which the rows of a call are written; lists have all, whole rows only `logits`."""

    tokens: Array  # int64[rows, columns]
    logits: Array  # float32[rows, columns]
    sums: Array  # float64[3, rows]


def jobs_of(numbers: tuple[int, ...]) -> tuple[list[ForestJob], Goal, bool]:
    """Return the jobs of a callback, the arrays for their rows, and whether lists are wanted.

    Args:
        numbers: as `scored_by_callback` passes them.
    """
    at, count, total, columns, is_listed, tokens_at, logits_at, sums_at = numbers
    jobs = []
    for session, tokens, parents, nodes, wanted, rows in integers_at(at, count * JOB).reshape(count, JOB).tolist():
        jobs.append(
            ForestJob(session, integers_at(tokens, nodes), integers_at(parents, nodes), integers_at(wanted, rows))
        )
    logits = array_at(logits_at, total * columns, ctypes.c_float).reshape(total, columns)
    if not is_listed:
        return jobs, Goal(np.zeros((0, 0), dtype=np.int64), logits, np.zeros((3, 0))), False
    tokens = integers_at(tokens_at, total * columns).reshape(total, columns)
    sums = array_at(sums_at, 3 * total, ctypes.c_double).reshape(3, total)
    return jobs, Goal(tokens, logits, sums), True

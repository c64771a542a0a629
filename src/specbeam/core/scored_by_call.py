"""Rows that Python scores: one call out of a compiled step for the nodes of all sessions."""

import ctypes
from typing import Any, NamedTuple

import numpy as np

from specbeam.core.callbacks import array_at, call_back, integers_at
from specbeam.core.ranked import Listing, Ranked, are_whole, whole_rows
from specbeam.core.steps import Array, step

# Numbers of a job: session; addresses of tokens and parents of a forest, and number of its nodes; address and number of the
# wanted nodes; address of their keys.
JOB = 7
_WHOLE, _BY_LOGIT, _BY_NOISE = range(3)  # kinds of rows


@step
def rows_by_call(address: int, jobs: Array, total: int, listing: Listing, vocab: int) -> Ranked:
    """Return the rows of all wanted nodes of these jobs, one job after the other.

    Raises `RuntimeError` if the call fails.

    Args:
        address: of the `Callback` that scores, with the numbers that `called_rows` reads.
        jobs: int64[jobs, JOB].
        total: number of wanted nodes.
        listing: the lists that are wanted; of length 0: whole rows.
    """
    is_listed = listing.length > 0
    columns = min(listing.length, vocab) if is_listed else vocab
    listed = total if is_listed else 0
    tokens = np.empty((listed, columns if is_listed else 0), dtype=np.int64)
    logits = np.empty((total, columns), dtype=np.float32)
    sums = np.empty((3, listed))
    if is_listed:
        sums[0] = listing.temperature
    kind = _WHOLE
    if is_listed:
        kind = _BY_NOISE if listing.by_noise else _BY_LOGIT
    numbers = (jobs.ctypes.data, len(jobs), total, columns, kind, tokens.ctypes.data, logits.ctypes.data)
    if call_back(address, (*numbers, sums.ctypes.data)) != 0:
        raise RuntimeError("the target could not score the drafts")
    return Ranked(tokens, logits, sums[0], sums[1], sums[2], vocab, is_listed and listing.by_noise)


@step
def part_of_rows(rows: Ranked, start: int, stop: int) -> Ranked:
    """Return the rows from `start` to `stop` - 1; whole rows have no tokens and sums."""
    logits = rows.logits[start:stop]
    if are_whole(rows):
        return whole_rows(logits)
    sums = (rows.norms[start:stop], rows.warm[start:stop], rows.rest[start:stop])
    return Ranked(rows.tokens[start:stop], logits, sums[0], sums[1], sums[2], rows.vocab, rows.by_noise)


class CallJob(NamedTuple):
    """The nodes of a session that a call scores; views that are valid during the call."""

    session: int
    tokens: Array  # int64[nodes] of the forest; none if the session's cache knows them
    parents: Array
    wanted: Array  # int64[n]
    keys: Array  # uint64[n], see `core.passes.extend_ranked`; none if no lists by noise are wanted


class CalledRows(NamedTuple):
    """The rows that a call has to write.

    Attributes:
        listing: the lists that are wanted; of length 0: whole rows.
        tokens, logits, sums: their arrays, int64[rows, columns], float32[rows, columns], float64[3, rows]; for whole rows
            only `logits` counts.
    """

    jobs: list[CallJob]
    listing: Listing
    tokens: Array
    logits: Array
    sums: Array


def called_rows(numbers: tuple[int, ...]) -> CalledRows:
    """Return what a call of `rows_by_call` asks for, from the numbers that its callback gets."""
    at, count, total, columns, kind, tokens_at, logits_at, sums_at = numbers
    jobs = [_job_of(row) for row in integers_at(at, count * JOB).reshape(count, JOB).tolist()]
    logits = array_at(logits_at, total * columns, ctypes.c_float).reshape(total, columns)
    if kind == _WHOLE:
        return CalledRows(jobs, Listing(), np.zeros((0, 0), dtype=np.int64), logits, np.zeros((3, 0)))
    tokens = integers_at(tokens_at, total * columns).reshape(total, columns)
    sums = array_at(sums_at, 3 * total, ctypes.c_double).reshape(3, total)
    return CalledRows(jobs, Listing(columns, kind == _BY_NOISE, float(sums[0, 0])), tokens, logits, sums)


def _job_of(numbers: list[int]) -> CallJob:
    session, tokens, parents, nodes, wanted, rows, keys = numbers
    kinds: Any = integers_at(keys, rows).view(np.uint64) if keys else np.zeros(0, dtype=np.uint64)
    return CallJob(session, integers_at(tokens, nodes), integers_at(parents, nodes), integers_at(wanted, rows), kinds)

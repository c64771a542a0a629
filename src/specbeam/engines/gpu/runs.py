"""Compiled runs on a GPU: one pass serves many sessions, and its rows come back as short lists.

A pass is written by compiled steps into the staging of the model. A single call into Python launches it, with the kernels
that rank its rows, and copies the lists back. Rows that were computed before can be computed again: their tokens take part
in a pass that stores nothing for them.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32

from specbeam.core.callbacks import Callback, array_at, call_back
from specbeam.core.compiling.compiler import Array, borrowed, compiled
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.compiling.held import held_at
from specbeam.core.cycles import cycles
from specbeam.core.laws.listing import MOST_LISTED
from specbeam.core.measure.profiler import span
from specbeam.core.passes import (
    CYCLES,
    PASSES,
    Asked,
    extend_all,
    extend_alone,
    extend_ranked,
    whole_rows_again,
)
from specbeam.core.ranked import WHOLE, Listing, Ranked, are_whole, room_for_listing, whole_rows
from specbeam.engines.arrays import Integers
from specbeam.engines.gpu.graphs import shape_for_sizes
from specbeam.engines.gpu.staging import Inputs, ModelLimits, Staging, mask_bytes, write_rows
from specbeam.engines.kv.runs import over_trie
from specbeam.engines.kv.steps import (
    BLOCK,
    SIZE,
    STORED,
    Trie,
    are_feedable,
    enter,
    feed_slots,
    stored_among,
)

if TYPE_CHECKING:
    from specbeam.engines.gpu.cache import GpuCache
    from specbeam.engines.gpu.passes import GpuPasses
    from specbeam.engines.gpu.ranking import RowRanker
    from specbeam.engines.torch.ranking import RankedRows

_FLOAT = ctypes.c_float
_SUMS = 6  # words of a list before its tokens: norm, warm norm and rest as float64


@over_trie
@borrowed
class GpuRun(NamedTuple):
    """A session's cache in a model on a GPU as arrays for compiled runs, with capacity for everything that they store."""

    trie: Trie
    model: ModelLimits
    inputs: Inputs  # on the host
    store_row: int  # the session's row of the store
    source: tuple[int, int]  # first frame and number of frames of the session's source; no frames: no source
    vocab: int
    listing: Listing  # the lists that passes return
    run_at: int  # address of the `Callback` that runs a written pass: `RunPasses.run`
    lists: Array  # int32[words]: the lists of the last pass, one after the other, see `RankedRows`


@compiled
def rows_of_pass(cache: GpuRun, again: Array) -> int:
    """Return the number of rows of a session in a pass: its pending nodes, and the local nodes `again`."""
    counts = cache.trie.counts
    return counts[SIZE] - counts[STORED] + len(again)


@compiled
def mask_bytes_of(cache: GpuRun, rows: int) -> int:
    """Return the maximum number of bytes that the mask of this many rows of a session takes."""
    slots = -(-len(cache.trie.used) // BLOCK) * BLOCK
    return mask_bytes(cache.model, rows, slots)


@compiled
def write_session(
    cache: GpuRun, nodes: Array, again: Array, keys: Array, place: tuple[int, int, int], wanted: int
) -> int:
    """Write the pending nodes of a session, and the local nodes `again`, to the inputs of a pass.

    Args:
        nodes: int64[n], the forest nodes whose rows are wanted, all pending or among `again`, in the order of `again`.
        keys: uint64[n], their noise keys.
        place: see `write_rows`.
        wanted: number of rows that sessions before this one want.

    Returns the first byte of the mask after the session.
    """
    trie = cache.trie
    inputs = cache.inputs
    start = trie.counts[STORED]
    pending = trie.counts[SIZE] - start
    slots = np.zeros(pending + len(again), dtype=np.int64)  # rows again are stored in the waste slot
    feed_slots(trie, slots[:pending])
    rows = np.empty(len(slots), dtype=np.int64)
    for number in range(pending):
        rows[number] = start + number
    copy_numbers(rows[pending:], again)
    byte = write_rows(trie, rows, slots, cache.store_row, cache.source, cache.model, inputs, place)
    used = 0
    for number in range(len(nodes)):
        local = trie.local[nodes[number]]
        row = local - start
        if local < start:
            row = pending + used
            used += 1
        inputs.wanted[wanted + number] = place[1] + row
        inputs.keys[wanted + number] = np.int64(keys[number])
    return byte


@compiled
def run_written(cache: GpuRun, rows: int, sessions: int, most: int, wanted: int, mask_end: int, goal: Array) -> bool:
    """Run the pass that was written. Returns False if it failed.

    Args:
        rows, sessions, wanted: of the pass; most: rows of the session that has most.
        goal: float32[wanted, vocab], to which whole rows are written; no rows: the pass returns lists.
    """
    address = goal.ctypes.data if len(goal) > 0 else 0
    listing = cache.listing
    kind = 2 * listing.length + listing.by_noise
    temperature = np.array([listing.temperature])
    bits = temperature.view(np.int64)[0]
    return call_back(cache.run_at, (rows, sessions, most, wanted, mask_end, address, kind, bits)) == 0


@compiled
def lists_of_pass(cache: GpuRun, first: int, count: int) -> Ranked:
    """Return the lists of `count` rows of the last pass, from row `first` on."""
    length = min(cache.listing.length, cache.vocab)
    pitch = _SUMS + 2 * cache.listing.length
    doubles = cache.lists.view(np.float64)
    singles = cache.lists.view(np.float32)
    tokens = np.empty((count, length), dtype=np.int64)
    logits = np.empty((count, length), dtype=np.float32)
    sums = np.empty((3, count))
    for row in range(count):
        start = (first + row) * pitch
        for number in range(3):
            sums[number, row] = doubles[start // 2 + number]
        is_broken = sums[0, row] != sums[0, row]
        for place in range(length):
            tokens[row, place] = cache.lists[start + _SUMS + place]
            logit = singles[start + _SUMS + cache.listing.length + place]
            logits[row, place] = np.nan if is_broken else logit
    return Ranked(tokens, logits, sums[0], sums[1], sums[2], cache.vocab, cache.listing.by_noise)


extend_ranked.of(GpuRun)(extend_alone)


@extend_all.of(GpuRun)
@compiled
def extend_gpu_runs(like: GpuRun, caches: list[Any], asked: list[Asked], whole: bool, spent: Array) -> list[Ranked]:
    """Implement `extend_all` by as few passes as the staging allows. Sessions whose nodes are refused get no rows."""
    began = cycles()
    count = len(asked)
    returns_whole = whole or like.listing.length == 0
    inputs = like.inputs
    found = []
    for _ in range(count):
        found.append(whole_rows(np.empty((0, 0), dtype=np.float32)))  # noqa: PERF401  # see `compiling.held`
    first = 0
    while first < count:
        rows = 0
        sessions = 0
        most = 0
        total = 0
        byte = 0
        number = first
        firsts = np.full(count, -1, dtype=np.int64)  # the first wanted row of each session of the pass
        while number < count:
            one = asked[number]
            cache = held_at(caches[number], like)
            if len(one.wanted) > 0:
                enter(cache.trie, one.tokens, one.parents)
                again = stored_among(cache.trie, one.wanted)
                own = rows_of_pass(cache, again)
                fits = rows + own <= len(inputs.tokens) and sessions < inputs.sessions.shape[1]
                fits &= byte + mask_bytes_of(cache, own) <= len(inputs.seen)
                if not fits and sessions > 0:
                    break
                if fits and are_feedable(cache.trie, cache.model.vocab, cache.model.positions):
                    byte = write_session(cache, one.wanted, again, one.keys, (sessions, rows, byte), total)
                    firsts[number] = total
                    total += len(one.wanted)
                    rows += own
                    most = max(most, own)
                    sessions += 1
                    spent[number, PASSES] += 1
            number += 1
        if sessions > 0:
            goal = np.empty((total if returns_whole else 0, like.vocab), dtype=np.float32)
            if not run_written(like, rows, sessions, most, total, byte, goal):
                raise RuntimeError("a pass on the GPU failed")
            for place in range(first, number):
                start = firsts[place]
                rows_wanted = len(asked[place].wanted)
                if start >= 0 and returns_whole:
                    found[place] = whole_rows(goal[start : start + rows_wanted])
                elif start >= 0:
                    found[place] = lists_of_pass(like, start, rows_wanted)
        first = number
    share = (cycles() - began) // count
    for number in range(count):
        spent[number, CYCLES] += share
    return found


@whole_rows_again.of(GpuRun)
@compiled
def score_gpu_again(cache: GpuRun, known: Ranked, nodes: Array) -> Ranked:
    """Compute the rows of stored nodes again, if they are lists; see `whole_rows_again`.

    Pending nodes take part in the pass, which stores them.
    """
    if are_whole(known):
        return known
    found = np.empty((len(nodes), cache.vocab), dtype=np.float32)
    if len(nodes) == 0:
        return whole_rows(found)
    again = stored_among(cache.trie, nodes)
    rows = rows_of_pass(cache, again)
    keys = np.zeros(len(nodes), dtype=np.uint64)
    byte = write_session(cache, nodes, again, keys, (0, 0, 0), 0)
    if not run_written(cache, rows, 1, rows, len(nodes), byte, found):
        raise RuntimeError("a pass on the GPU failed")
    return whole_rows(found)


class RunPasses:
    """The passes of compiled runs of a model on a GPU; all buffers are allocated once."""

    def __init__(self, passes: "GpuPasses") -> None:
        self.passes = passes
        self.callback = Callback(self.run)
        self.staging = passes.staging  # a larger one if the mask of a session needs it
        staging = self.staging
        pinned = staging.device.type == "cuda"
        words = staging.rows * (_SUMS + 2 * MOST_LISTED)
        self.lists = torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
        self.rankers: dict[Listing, RowRanker] = {}

    def ranker(self, listing: Listing) -> "RowRanker":
        """Return the ranker of these lists, which reads the keys of rows from the staging."""
        from specbeam.engines.gpu.ranking import RowRanker

        found = self.rankers.get(listing)
        if found is None:
            staging = self.staging
            found = RowRanker(staging.rows, self.passes.vocab, listing.length, staging.device)
            found.settings.temperatures.fill_(listing.temperature)
            found.settings.noisy.fill_(int(listing.by_noise))
            found.settings = found.settings._replace(keys=staging.inputs.keys)
            self.rankers[listing] = found
        return found

    def make_room(self, mask_end: int) -> None:
        """Replace the staging by one that holds a mask of this many bytes, unless it already does.

        Graphs read the staging of the model only, so passes with a larger one are launched kernel by kernel.
        """
        staging = self.staging
        if mask_end > staging.mask_bytes:
            self.staging = Staging(staging.device, staging.rows, staging.sessions, 2 * mask_end)
            self.rankers = {}

    @contextmanager
    def arrays(self, cache: "GpuCache", fresh: int, more: int = 0) -> Iterator[GpuRun | None]:
        """Yield a session's cache as arrays for runs; None if a pass may have more rows than the staging.

        Args:
            fresh: maximum number of new nodes in a pass.
            more: capacity for further nodes that are stored later.
        """
        passes = self.passes
        cache.trie.make_room(fresh + more)
        cache.trie.make_slots(cache.trie.pending + fresh + more)
        passes.reserve([cache])
        rows = cache.trie.known + cache.trie.pending + fresh  # stored nodes may take part again
        if rows > self.staging.rows:
            yield None
            return
        self.make_room(int(mask_bytes(passes.limits, rows, cache.trie.capacity)))
        yield GpuRun(
            cache.trie.arrays, passes.limits, self.staging.filled, cache.row, passes.source_of(cache), passes.vocab,
            WHOLE, self.callback.address, self.lists.numpy(),
        )  # fmt: skip

    def score_again(self, cache: "GpuCache", nodes: Integers) -> Float32[np.ndarray, "nodes vocab"]:
        """Return the logits of stored forest nodes, computed by a pass that stores nothing new."""
        listed = room_for_listing(len(nodes), self.passes.vocab, Listing(1))
        with self.arrays(cache, 0) as arrays:
            if arrays is None:
                raise RuntimeError(f"a pass on the GPU takes up to {self.staging.rows} rows of a session")
            try:
                found: Float32[np.ndarray, "nodes vocab"] = score_gpu_again(arrays, listed, nodes).logits
            except RuntimeError as error:
                raise (self.callback.failure or error) from None
        return found

    def run(self, *numbers: int) -> None:
        """Run the pass that steps have written to the staging. `run_written` passes the numbers."""
        rows, sessions, most, wanted, mask_end, goal, kind, bits = numbers
        passes = self.passes
        staging = self.staging
        shape = shape_for_sizes(rows, sessions, most, wanted)
        staging.pad(rows, sessions, wanted, shape)
        with span("model"), passes.on_device(), torch.inference_mode():
            staging.copy_to_device(mask_end)
            if goal:
                found = passes.graphs.run(staging, shape)[:wanted]
                room = array_at(goal, wanted * passes.vocab, _FLOAT)
                torch.from_numpy(room).view(wanted, passes.vocab).copy_(found)
                return
            temperature = float(np.array([bits], dtype=np.int64).view(np.float64)[0])
            ranker = self.ranker(Listing(kind // 2, bool(kind % 2), temperature))
            ranked: RankedRows = passes.graphs.run_ranked(staging, shape, ranker)
            words = ranked.buffer.shape[1]
            self.lists[: wanted * words].view(wanted, words).copy_(ranked.buffer[:wanted], non_blocking=True)
            if staging.device.type == "cuda":
                torch.cuda.current_stream(staging.device).synchronize()

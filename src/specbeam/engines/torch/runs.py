"""Compiled runs with transformers' forward: one call into Python runs a pass of many sessions and lists its best tokens."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from specbeam.core.callbacks import Callback
from specbeam.core.compiling.held import held_at
from specbeam.core.cycles import cycles
from specbeam.core.passes import (
    CYCLES,
    PASSES,
    Asked,
    extend_all,
    extend_alone,
    extend_ranked,
    whole_rows_again,
)
from specbeam.core.ranked import WHOLE, Listing, Ranked, are_whole, no_lists, room_for_listing, whole_rows
from specbeam.core.scored_by_call import JOB, CalledRows, CallJob, called_rows, part_of_rows, rows_by_call
from specbeam.core.steps import Array, borrowed, step
from specbeam.engines.arrays import Integers
from specbeam.engines.kv.runs import over_trie
from specbeam.engines.kv.steps import (
    Trie,
    are_feedable,
    enter,
)
from specbeam.engines.torch.ranking import on_host, plain_settings, ranked_by_topk

if TYPE_CHECKING:
    from specbeam.engines.kv.cache import PaddedCache
    from specbeam.engines.torch.passes import PaddedPasses

ANY_POSITION = 1 << 30  # of models without a limit


@over_trie
@borrowed
class PaddedRun(NamedTuple):
    """A session's cache in a model that transformers runs, with capacity for everything that a run stores."""

    trie: Trie
    session: int  # by which the callback knows it
    vocab: int
    tokens: int  # number of tokens that the model reads
    positions: int  # number of its positions
    listing: Listing  # the lists that passes return
    run_at: int  # address of the `Callback` that runs a pass: `PaddedRuns.run`


@step
def write_job(job: Array, cache: PaddedRun, wanted: Array, keys: Array) -> None:
    """Write what a call needs to score forest nodes that the trie has.

    The arrays must belong to the caller of the step that makes the call: a job holds their addresses only.
    """
    job[:] = 0
    job[0] = cache.session
    job[4] = wanted.ctypes.data
    job[5] = len(wanted)
    if len(keys) > 0:
        job[6] = keys.ctypes.data


extend_ranked.of(PaddedRun)(extend_alone)


@extend_all.of(PaddedRun)
@step
def extend_padded_runs(
    like: PaddedRun, caches: list[Any], asked: list[Asked], whole: bool, spent: Array
) -> list[Ranked]:
    """Implement `extend_all` by one pass. Sessions whose nodes are refused get no rows."""
    began = cycles()
    count = len(asked)
    listing = no_lists(like.listing) if whole else like.listing
    jobs = np.empty((count, JOB), dtype=np.int64)
    firsts = np.full(count, -1, dtype=np.int64)  # the first row of each session
    total = 0
    used = 0
    for number in range(count):
        one = asked[number]
        cache = held_at(caches[number], like)
        if len(one.wanted) > 0:
            enter(cache.trie, one.tokens, one.parents)
            if are_feedable(cache.trie, cache.tokens, cache.positions):
                write_job(jobs[used], cache, one.wanted, one.keys)
                firsts[number] = total
                total += len(one.wanted)
                used += 1
                spent[number, PASSES] += 1
    rows = whole_rows(np.empty((0, 0), dtype=np.float32))
    if used > 0:
        rows = rows_by_call(like.run_at, jobs[:used], total, listing, like.vocab)
    found = []
    share = (cycles() - began) // count
    for number in range(count):
        start = firsts[number]
        if start >= 0:
            found.append(part_of_rows(rows, start, start + len(asked[number].wanted)))
        else:
            found.append(whole_rows(np.empty((0, 0), dtype=np.float32)))
        spent[number, CYCLES] += share
    return found


@whole_rows_again.of(PaddedRun)
@step
def score_padded_again(cache: PaddedRun, known: Ranked, nodes: Array) -> Ranked:
    """Compute the rows of nodes again, if they are lists; see `whole_rows_again`. Pending nodes take part in the pass."""
    if are_whole(known):
        return known
    if len(nodes) == 0:
        return whole_rows(np.empty((0, cache.vocab), dtype=np.float32))
    jobs = np.empty((1, JOB), dtype=np.int64)
    write_job(jobs[0], cache, nodes, np.empty(0, dtype=np.uint64))
    rows = rows_by_call(cache.run_at, jobs, len(nodes), no_lists(cache.listing), cache.vocab)
    return whole_rows(rows.logits)


class PaddedRuns:
    """The passes of compiled runs of a model that transformers runs.

    Args:
        tokens: number of tokens that the model reads.
        positions: number of its positions; None: no limit.
        vocab: number of its logits.
    """

    def __init__(self, passes: "PaddedPasses", tokens: int, positions: int | None, vocab: int) -> None:
        self.passes = passes
        self.limits = (tokens, positions or ANY_POSITION)
        self.vocab = vocab
        self.callback = Callback(self.run)
        self._caches: weakref.WeakValueDictionary[int, PaddedCache] = weakref.WeakValueDictionary()

    @contextmanager
    def arrays(self, cache: "PaddedCache", fresh: int, more: int = 0) -> Iterator[PaddedRun]:
        """Yield a session's cache as arrays for runs.

        Args:
            fresh: maximum number of new nodes in a pass.
            more: capacity for further nodes that are stored later.
        """
        trie = cache.trie
        trie.make_room(fresh + more)
        trie.make_slots(trie.pending + fresh + more)
        number = id(cache)
        self._caches[number] = cache
        yield PaddedRun(trie.arrays, number, self.vocab, *self.limits, WHOLE, self.callback.address)

    def run(self, *numbers: int) -> None:
        """Run a pass of all pending nodes of these sessions; `rows_by_call` passes the numbers."""
        asked = called_rows(numbers)
        caches = [self._caches[job.session] for job in asked.jobs]
        wanted = [cache.trie.local[job.wanted] for cache, job in zip(caches, asked.jobs, strict=True)]
        rows = self.passes.rows_of(list(zip(caches, wanted, strict=True)))
        if asked.listing.length == 0:
            asked.logits[:] = rows.float().cpu().numpy()
            return
        write_lists(asked, rows)

    def score_again(self, cache: "PaddedCache", nodes: Integers) -> Any:
        """Return the logits of stored forest nodes, float32[nodes, vocab], by a pass that stores nothing new."""
        listed = room_for_listing(len(nodes), self.vocab, Listing(1))
        with self.arrays(cache, 0) as arrays:
            try:
                return score_padded_again(arrays, listed, nodes).logits
            except RuntimeError as error:
                raise (self.callback.failure or error) from None


@torch.inference_mode()
def write_lists(asked: CalledRows, rows: torch.Tensor) -> None:
    """Write the best tokens of rows of logits, float[rows, vocab], to the arrays of a call."""
    count, vocab = rows.shape
    listing = asked.listing
    device = rows.device
    settings = plain_settings(count, vocab, device)
    settings.temperatures.fill_(listing.temperature)
    if listing.by_noise:
        settings.noisy.fill_(1)
        settings.keys.copy_(torch.from_numpy(keys_of(asked.jobs)))
    words = on_host(ranked_by_topk(rows, settings, listing.length))
    asked.tokens[:] = words.tokens.numpy()
    asked.logits[:] = words.logits.numpy()
    asked.sums[:] = torch.stack([words.norm, words.warm, words.rest]).numpy()
    asked.logits[np.isnan(asked.sums[0])] = np.nan


def keys_of(jobs: Sequence[CallJob]) -> Integers:
    """Return the keys of all rows with the bits of int64."""
    return np.concatenate([job.keys for job in jobs]).view(np.int64)

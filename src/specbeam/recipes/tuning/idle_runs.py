"""A language model that computes nothing and takes part in compiled runs, to measure their cost on the host."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from specbeam.core.answers import scored_rows
from specbeam.core.compiling.held import held_at
from specbeam.core.forest import Forest
from specbeam.core.laws.listing import MOST_LISTED
from specbeam.core.laws.reduce import log_norm
from specbeam.core.lm import Uncached
from specbeam.core.passes import (
    PASSES,
    Asked,
    extend,
    extend_all,
    extend_ranked,
    has_room_for,
    rewind,
    settle_target,
    whole_rows_again,
)
from specbeam.core.ranked import WHOLE, Listing, Ranked, are_whole, whole_rows
from specbeam.core.records import Needs, Scored
from specbeam.core.session import Session
from specbeam.core.steps import Array, borrowed, step

ROWS = 64  # number of different rows of logits
LISTED = MOST_LISTED + 1  # best tokens of a row that are kept: one more than a list has
LAUNCHES, SENT, BYTES = range(3)  # indices of `IdleCache.counts`


@borrowed
class IdleCache(NamedTuple):
    """The rows that an idle model returns: the row of a node depends on its token only."""

    rows: Array  # float32[ROWS, vocab]
    norms: Array  # float64[ROWS]: logsumexp of each row
    best: Array  # int64[ROWS, n]: the best tokens of each row, ascending
    logits: Array  # float32[ROWS, n]: the logits of these tokens
    ranks: Array  # int64[ROWS, n]: the rank of each of them by logit
    listing: Listing
    counts: Array  # int64[3]: passes, rows returned, and their bytes (LAUNCHES, SENT, BYTES)


@extend.of(IdleCache)
@step
def extend_idly(cache: IdleCache, tokens: Array, parents: Array, wanted: Array) -> Array:
    """Return whole rows; see `extend`."""
    found = np.empty((len(wanted), cache.rows.shape[1]), dtype=np.float32)
    for place in range(len(wanted)):
        found[place] = cache.rows[tokens[wanted[place]] % ROWS]
    cache.counts[LAUNCHES] += 1
    cache.counts[SENT] += len(found)
    cache.counts[BYTES] += found.nbytes
    return found


@step
def listed_idly(cache: IdleCache, asked: Asked) -> Ranked:
    """Return the lists of the wanted nodes, which are by logit."""
    count = len(asked.wanted)
    length = cache.listing.length
    tokens = np.empty((count, length), dtype=np.int64)
    logits = np.empty((count, length), dtype=np.float32)
    norms = np.empty(count)
    rest = np.empty(count)
    for place in range(count):
        row = asked.tokens[asked.wanted[place]] % ROWS
        held = 0
        for at in range(cache.best.shape[1]):
            if cache.ranks[row, at] < length:
                tokens[place, held] = cache.best[row, at]
                logits[place, held] = cache.logits[row, at]
                held += 1
            elif cache.ranks[row, at] == length:
                rest[place] = cache.logits[row, at]
        norms[place] = cache.norms[row]
    cache.counts[SENT] += count
    cache.counts[BYTES] += count * (8 * length + 24)  # tokens and logits of 32 bits, and three sums
    return Ranked(tokens, logits, norms, norms, rest, cache.rows.shape[1], False)


@step
def returns_whole(cache: IdleCache, whole: bool) -> bool:
    """Return whether a pass returns whole rows: if they are wanted, or if lists would need noise or a temperature."""
    listing = cache.listing
    return whole or listing.length == 0 or listing.by_noise or listing.temperature != 1


@extend_ranked.of(IdleCache)
@step
def extend_idly_ranked(
    cache: IdleCache, tokens: Array, parents: Array, wanted: Array, keys: Array, whole: bool
) -> Ranked:
    """Return lists, if there is a listing; see `extend_ranked`."""
    if returns_whole(cache, whole):
        return whole_rows(extend_idly(cache, tokens, parents, wanted))
    cache.counts[LAUNCHES] += 1
    return listed_idly(cache, Asked(tokens, parents, wanted, keys))


@extend_all.of(IdleCache)
@step
def extend_all_idly(like: IdleCache, caches: list[Any], asked: list[Asked], whole: bool, spent: Array) -> list[Ranked]:
    """Return the lists of all sessions by one pass; see `extend_all`."""
    found = []
    like.counts[LAUNCHES] += 1
    for number in range(len(asked)):
        one = asked[number]
        cache = held_at(caches[number], like)
        spent[number, PASSES] += len(one.wanted) > 0
        if returns_whole(cache, whole):
            like.counts[LAUNCHES] -= 1
            found.append(whole_rows(extend_idly(cache, one.tokens, one.parents, one.wanted)))
        else:
            found.append(listed_idly(cache, one))
    return found


@whole_rows_again.of(IdleCache)
@step
def whole_rows_from_lists(cache: IdleCache, known: Ranked, nodes: Array) -> Ranked:
    """Find the row of each list by its sum; see `whole_rows_again`."""
    if are_whole(known):
        return known
    found = np.empty((len(nodes), cache.rows.shape[1]), dtype=np.float32)
    for place in range(len(nodes)):
        found[place] = cache.rows[np.argmin(np.abs(cache.norms - known.norms[place]))]
    return whole_rows(found)


@has_room_for.of(IdleCache)
def has_always_room(cache: IdleCache, fresh: int, beams: int) -> bool:
    """Return True."""
    return True


@rewind.of(IdleCache)
def rewind_nothing(cache: IdleCache, nodes: int) -> None:
    """Do nothing: an idle model stores nothing."""
    return


@settle_target.of(IdleCache)
def settle_nothing(
    cache: IdleCache, tree: tuple[Array, Array], nodes: Array, tokens: Array, parents: Array, kept: Array
) -> None:
    """Do nothing: an idle model stores nothing."""
    return


class IdleRuns(Uncached):
    """A language model whose logits after each token are one of 64 random rows, float32, for compiled runs.

    Args:
        vocab: number of tokens.
        seed: of the rows.
        noise: standard deviation of what is added to the rows of `seed`, for a draft model that resembles the target.
    """

    supports_runs = True
    shares_passes = True
    returns_lists = True

    def __init__(self, vocab: int, seed: int, noise: float = 0.0) -> None:
        rng = np.random.default_rng(seed)
        rows = rng.standard_normal((ROWS, vocab), dtype=np.float32) * np.float32(2.5)
        if noise:
            rows += np.random.default_rng(seed + 1).standard_normal((ROWS, vocab), dtype=np.float32) * np.float32(noise)
        self.vocab = vocab
        self.passes = 0
        self.counts = np.zeros(3, dtype=np.int64)
        self._rows = rows
        best = np.sort(np.argpartition(-rows, LISTED, axis=1)[:, :LISTED], axis=1)
        logits = np.take_along_axis(rows, best, axis=1)
        order = np.argsort(-logits, axis=1, kind="stable")
        ranks = np.argsort(order, axis=1)
        self._cache = IdleCache(rows, log_norm(rows), best, logits, ranks, WHOLE, self.counts)

    def extend(
        self, sessions: Sequence[Session], forests: Sequence[Forest], needs: Sequence[Needs] | None = None
    ) -> list[Scored]:
        """Return a row of logits for each node that is new to the model, as `LM.extend` does."""
        self.counts[LAUNCHES] += 1
        found = []
        for session, forest, need in zip(sessions, forests, self.needs_of_each(sessions, needs), strict=True):
            tokens = forest.tokens[self.take_new_nodes(session, forest)]
            self.counts[SENT] += len(tokens)
            self.counts[BYTES] += 4 * self.vocab * len(tokens)
            found.append(scored_rows(need, torch.from_numpy(self._rows[tokens % ROWS])))
        return found

    def for_run(
        self, session: Session, fresh: int, beams: int, more: int, needs: Needs | None = None
    ) -> AbstractContextManager[IdleCache]:
        """Return the model's only cache; see `RunLM.for_run`."""
        return self._yielded()

    @contextmanager
    def _yielded(self) -> Iterator[IdleCache]:
        yield self._cache

    def finish_run(self, session: Session, passes: int, roots: int) -> None:
        """Count the passes of a run."""
        self.passes += passes

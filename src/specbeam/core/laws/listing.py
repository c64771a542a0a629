"""The lists of rows that laws can decide by, and the sums of rows, whole or listed."""

import numpy as np

from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.laws.ranking import Truncation, ascending, best_pairs, cuts
from specbeam.core.laws.reduce import log_norm
from specbeam.core.noise import gumbel
from specbeam.core.ranked import WHOLE, Listing, Ranked, are_whole
from specbeam.core.steps import Array, step

LISTED_FROM = 2**12  # size of the vocabulary from which lists pay
MOST_LISTED = 128  # maximum number of tokens of a list; laws that need more get whole rows
EQUALS = 6  # further tokens of a list by logit, because logits of 16 bits are often equal
NUCLEUS = 64  # tokens of a list for a top-p or min-p without a top-k


def listing_for(truncation: Truncation, noisy: bool, pairs: int) -> Listing:
    """Return the lists that nearly always decide a layer of up to `pairs` pairs.

    Args:
        noisy: whether pairs are chosen under noise.
    """
    if not cuts(truncation):
        count = pairs + 1 if noisy else pairs + EQUALS
        return Listing(count, noisy, float(truncation.temperature))
    kept = truncation.top_k if truncation.top_k > 0 else NUCLEUS
    return Listing(max(kept, truncation.least, pairs) + EQUALS, False, float(truncation.temperature))


def joined_listing(one: Listing, other: Listing | None) -> Listing:
    """Return lists that serve both parts of a session; None: the part reads no rows."""
    if other is None:
        return one
    if one.length == 0 or other.length == 0 or one.by_noise != other.by_noise:
        return WHOLE
    return one if one.length >= other.length else other


@step
def norms_of(rows: Ranked) -> Array:
    """Return the logsumexp of each whole row, float64[rows]; see `reduce.log_norm`."""
    return log_norm(rows.logits) if are_whole(rows) else rows.norms


@step
def warm_norms_of(rows: Ranked, temperature: float) -> Array:
    """Return the logsumexp of each whole row / temperature, float64[rows]; lists must be made for this temperature."""
    if not are_whole(rows):
        return rows.warm
    return log_norm(rows.logits / rows.logits.dtype.type(temperature))


@step
def listed_rows(logits: Array, keys: Array, listing: Listing) -> Ranked:
    """Return the lists of whole rows of logits, float[rows, vocab].

    Args:
        keys: uint64[rows], the key of each row's path; read only if the listing is by noise.
        listing: with a count of at least 1.
    """
    rows, vocab = logits.shape
    count = min(listing.length, vocab)
    norms = log_norm(logits)
    warm = norms
    if listing.temperature != 1:
        warm = log_norm(logits / logits.dtype.type(listing.temperature))
    tokens = np.empty((rows, count), dtype=np.int64)
    listed = np.empty((rows, count), dtype=logits.dtype)
    rest = np.full(rows, -np.inf)
    nothing = np.zeros(1)
    alone = np.ones(1, dtype=np.bool_)
    for row in range(rows):
        key = keys[row : row + 1] if listing.by_noise else keys[:0]
        temperature = listing.temperature if listing.by_noise else 1.0
        here = logits[row : row + 1]
        best = best_pairs(here, nothing, temperature, nothing, key, alone, count + 1)
        if len(best) > count:
            next_token = best[count]
            rest[row] = np.float64(logits[row, next_token]) / temperature
            if listing.by_noise:
                rest[row] += gumbel(keys[row], next_token)
        held = _with_others(best[:count], count, norms[row])
        for place in range(count):
            tokens[row, place] = held[place]
            listed[row, place] = logits[row, held[place]] if norms[row] == norms[row] else np.nan
    return Ranked(tokens, listed, norms, warm, rest, vocab, listing.by_noise)


@step
def as_listed(rows: Ranked, keys: Array, listing: Listing) -> Ranked:
    """Return rows as lists; unchanged if they are lists already, or the listing asks for whole rows. See `listed_rows`."""
    if listing.length == 0 or not are_whole(rows):
        return rows
    return listed_rows(rows.logits, keys, listing)


@step
def _with_others(best: Array, count: int, norm: float) -> Array:
    """Return `count` tokens, ascending: the best ones, then the first others, whose logits are -inf or are not read."""
    held = len(best) if norm == norm else 0
    every = np.empty(count, dtype=np.int64)
    copy_numbers(every, best[:held])
    token = 0
    while held < count:
        if not (best == token).any() or norm != norm:
            every[held] = token
            held += 1
        token += 1
    return ascending(every)

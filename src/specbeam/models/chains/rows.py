"""Ranked rows from lists of likeliest tokens with log-probabilities."""

import numpy as np
from jaxtyping import Float32, Float64, Int64

from specbeam.core.ranked import Listing, Ranked
from specbeam.models.chains.chains import Likeliest


def ranked_of(found: Likeliest, listing: Listing, vocab: int) -> Ranked:
    """Return rows as lists of `listing.length` tokens, of which one more was asked for if there is one.

    Logits are log-probabilities, so the logsumexp of a whole row is 0. That of a row divided by a temperature is not known
    from a list; it is NaN, and no law that reads it gets lists (`ChainLM.listing_for`).
    """
    count = min(listing.length, vocab)
    best = found.tokens[:, :count]
    order = np.argsort(best, axis=1)
    tokens = np.take_along_axis(best, order, axis=1)
    logits = np.take_along_axis(found.logp[:, :count], order, axis=1).astype(np.float32)
    norms = np.zeros(len(tokens))
    norms[np.isnan(found.logp).any(axis=1)] = np.nan
    rest = np.full(len(tokens), -np.inf)
    if count < vocab:
        rest = found.logp[:, min(count, found.logp.shape[1] - 1)].astype(np.float64)
    warm = norms if listing.temperature == 1 else np.full(len(tokens), np.nan)
    return Ranked(tokens, logits, norms, warm, rest, vocab, False)


def whole_of(found: Likeliest, vocab: int) -> Float32[np.ndarray, "rows vocab"]:
    """Return rows of `vocab` log-probabilities from lists of all tokens."""
    rows = np.empty((len(found.tokens), vocab), dtype=np.float32)
    np.put_along_axis(rows, found.tokens, found.logp.astype(np.float32), axis=1)
    return rows


def filled_rows(found: Likeliest, vocab: int) -> Float32[np.ndarray, "rows vocab"]:
    """Return rows in which the tokens that are not listed share the remaining probability equally.

    Such a row has the order of the listed tokens and the logsumexp of the model's row. It serves laws that read nothing
    else of it (`ChainLM.decisive`).
    """
    listed = np.exp(found.logp.astype(np.float64)).sum(axis=1)
    others = vocab - found.tokens.shape[1]
    with np.errstate(divide="ignore"):
        each = np.log(np.maximum(1.0 - listed, 0.0) / max(others, 1))
    each = np.minimum(each, found.logp[:, -1])
    rows = np.repeat(each.astype(np.float32)[:, None], vocab, axis=1)
    np.put_along_axis(rows, found.tokens, found.logp.astype(np.float32), axis=1)
    return rows


def undecided_rows(found: Likeliest, kept: int) -> Int64[np.ndarray, " n"]:
    """Return the rows in which a token that is not listed may be among the `kept` likeliest."""
    edge: Float64[np.ndarray, " rows"] = found.logp[:, kept - 1].astype(np.float64)
    return np.flatnonzero(~(edge > found.logp[:, -1]))

"""Ranked rows: the logits of a model, whole or as a short list of the best tokens of each row.

A whole row has one number per token of the vocabulary: 512 KB at 128,000 tokens. A law needs few of them, so models return
lists, with the sums over the whole row. A law decides by a list only if no token outside of the list can change the
decision; otherwise it asks for the whole row.
"""

from typing import NamedTuple

import numpy as np

from specbeam.core.compiling.copies import copy_numbers, copy_rows
from specbeam.core.steps import Array, step

_NO_TOKENS = np.zeros((0, 0), dtype=np.int64)
_NO_NUMBERS = np.zeros(0)


class Listing(NamedTuple):
    """The lists that the laws of a session can decide by."""

    length: int = 0  # tokens per row; 0: whole rows
    by_noise: bool = False  # the best by logit / temperature + noise of the path; False: by logit
    temperature: float = 1.0


WHOLE = Listing()


class Ranked(NamedTuple):
    """Rows of logits, one per node: whole, or as lists of the best tokens of each row.

    The order value of a token is its logit, or with `by_noise` its logit / temperature + noise of its path. Equal logits are
    in the order of the vocabulary.
    """

    tokens: Array  # int64[rows, listed], ascending in each row; int64[0, 0]: the rows are whole
    logits: Array  # float[rows, listed] of these tokens, or float[rows, vocab]
    norms: Array  # float64[rows]: logsumexp of the whole row; NaN if it contains NaN or +inf; no entries for whole rows
    warm: Array  # float64[rows]: logsumexp of the whole row / temperature; no entries for whole rows
    # float64[rows]: the largest order value of a token that is not listed, or more; -inf: none is above -inf; no entries for
    # whole rows
    rest: Array
    vocab: int
    by_noise: bool


NO_ROWS = Ranked(_NO_TOKENS, np.zeros((0, 0), dtype=np.float32), _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, 0, False)


@step
def no_lists(listing: Listing) -> Listing:
    """Return the listing that asks for whole rows instead."""
    return Listing(0, listing.by_noise, listing.temperature)


@step
def whole_rows(logits: Array) -> Ranked:
    """Return whole rows of logits, float[rows, vocab], as ranked rows."""
    none = np.empty(0)
    return Ranked(np.empty((0, 0), dtype=np.int64), logits, none, none, none, logits.shape[1], False)


@step
def are_whole(rows: Ranked) -> bool:
    """Return whether rows are whole, not lists."""
    return rows.tokens.shape[1] == 0


@step
def room_for_rows(like: Ranked, count: int) -> Ranked:
    """Return `count` rows to be written, in the form of other rows."""
    columns = like.logits.shape[1]
    listed = 0 if are_whole(like) else count
    numbers = np.empty((3, listed))
    tokens = np.empty((listed, like.tokens.shape[1]), dtype=np.int64)
    logits = np.empty((count, columns), dtype=like.logits.dtype)
    return Ranked(tokens, logits, numbers[0], numbers[1], numbers[2], like.vocab, like.by_noise)


def room_for_listing(rows: int, vocab: int, listing: Listing) -> Ranked:
    """Return rows to be written: lists, or whole rows of `vocab` tokens."""
    count = min(listing.length, vocab) if rows else 0
    logits = np.empty((rows, count or vocab), dtype=np.float32)
    if count == 0:
        return NO_ROWS._replace(logits=logits, vocab=vocab)
    tokens = np.empty((rows, count), dtype=np.int64)
    return Ranked(tokens, logits, np.empty(rows), np.empty(rows), np.empty(rows), vocab, listing.by_noise)


def are_of_form(rows: Ranked, listing: Listing) -> bool:
    """Return whether rows are whole, or lists of this form."""
    if bool(are_whole(rows)) or len(rows.logits) == 0:
        return True
    return rows.by_noise == listing.by_noise and rows.tokens.shape[1] == min(listing.length, rows.vocab)


@step
def copy_row(goal: Ranked, place: int, rows: Ranked, row: int) -> None:
    """Copy a row into row `place` of rows of the same form."""
    copy_numbers(goal.logits[place], rows.logits[row])
    if are_whole(rows):
        return
    copy_numbers(goal.tokens[place], rows.tokens[row])
    goal.norms[place] = rows.norms[row]
    goal.warm[place] = rows.warm[row]
    goal.rest[place] = rows.rest[row]


@step
def rows_between(rows: Ranked, start: int, stop: int) -> Ranked:
    """Return the rows from `start` to `stop` - 1 as views."""
    logits = rows.logits[start:stop]
    return Ranked(
        rows.tokens[start:stop], logits, rows.norms[start:stop], rows.warm[start:stop], rows.rest[start:stop], rows.vocab,
        rows.by_noise,
    )  # fmt: skip


@step
def with_logits(rows: Ranked, logits: Array) -> Ranked:
    """Return the rows with other logits of the same tokens."""
    return Ranked(rows.tokens, logits, rows.norms, rows.warm, rows.rest, rows.vocab, rows.by_noise)


def rows_for_steps(rows: Ranked) -> Ranked:
    """Return rows with the dtypes and layouts that compiled steps expect."""
    return rows._replace(logits=np.ascontiguousarray(rows.logits, dtype=np.float32))


@step
def copied_rows(rows: Ranked) -> Ranked:
    """Return a copy of the rows."""
    found = room_for_rows(rows, len(rows.logits))
    copy_rows(found.logits, rows.logits)
    copy_rows(found.tokens, rows.tokens)
    copy_numbers(found.norms, rows.norms)
    copy_numbers(found.warm, rows.warm)
    copy_numbers(found.rest, rows.rest)
    return found

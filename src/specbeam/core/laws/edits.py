"""Edits of logits by steps: repetition penalty, minimum number of new tokens, banned tokens.

They have the results of transformers' processors. All other processors run in Python (laws/warp.py).
"""

from typing import NamedTuple

import numpy as np

from specbeam.core.beams import LENGTH, Texts, depth_of, room_for_texts, write_path
from specbeam.core.callbacks import call_back
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.laws.reduce import log_probabilities
from specbeam.core.ranked import Ranked, with_logits
from specbeam.core.steps import Array, borrowed, step


@borrowed
class Edits(NamedTuple):
    """Edits of rows of logits, which may depend on the text before the row."""

    penalty: float  # repetition penalty: divides positive and multiplies negative logits of the text's tokens; 1: off
    prompt: Array  # int64[n]: the tokens before the new ones
    least: int  # minimum number of new tokens
    eos: Array  # int64[ends]
    texts: Texts  # the new tokens of the live beams
    of_logp: bool  # whether rows become log-probabilities first, as in transformers' beam modes
    callback: int  # address of a `Callback` into Python that edits rows; 0: none
    banned: Array  # int64[n]: banned tokens


_NOTHING = np.empty(0, dtype=np.int64)
NO_EDITS = Edits(1.0, _NOTHING, 0, _NOTHING, room_for_texts(None, 1, 1), False, 0, _NOTHING)


@step
def edits_any(edits: Edits) -> bool:
    """Return whether edits can change any row."""
    return follows_text(edits) or len(edits.banned) > 0


@step
def follows_text(edits: Edits) -> bool:
    """Return whether the edits of a row may depend on the text before it."""
    return edits.penalty != 1 or edits.least > 0 or edits.callback != 0


@step
def new_text(texts: Texts, tokens: Array, parents: Array, node: int) -> Array:
    """Return the new tokens up to a forest node, int64[length]: those of its live beam, then its path."""
    before = texts.sizes[LENGTH]
    depth = depth_of(parents, node)
    text = np.empty(before + depth, dtype=np.int64)
    root = write_path(text, before + depth, tokens, parents, node)
    copy_numbers(text, texts.tokens[root, :before])
    return text


@step
def edited_rows(rows: Ranked, nodes: Array, tokens: Array, parents: Array, edits: Edits) -> Ranked:
    """Return an edited copy of rows of logits, or the rows themselves if there are no edits.

    Args:
        rows: whole rows, unless there are no edits.
        nodes: int64[n], the forest node of each row.
        tokens, parents: tokens and parents of all forest nodes.
    """
    if not edits_any(edits) or len(nodes) == 0:
        return rows
    if edits.callback != 0:
        edited = rows.logits.copy()
        _edit_in_python(edited, nodes, tokens, parents, edits.callback)
        return with_logits(rows, edited)
    edited = log_probabilities(rows.logits) if edits.of_logp else rows.logits.copy()
    vocab = edited.shape[1]
    seen_in = np.full(vocab, -1, dtype=np.int64)  # last row whose text has the token
    for row in range(len(edited)):
        text = new_text(edits.texts, tokens, parents, nodes[row])
        if edits.penalty != 1:
            _penalise(edited[row], edits.prompt, edits.penalty, seen_in, row)
            _penalise(edited[row], text, edits.penalty, seen_in, row)
        if len(text) < edits.least:
            for token in edits.eos:
                if token < vocab:
                    edited[row, token] = -np.inf
    _ban_tokens(edited, edits.banned)
    return with_logits(rows, edited)


@step
def rows_with_bans(rows: Ranked, edits: Edits) -> Ranked:
    """Return an edited copy of whole rows, given edits that do not depend on the text."""
    edited = log_probabilities(rows.logits) if edits.of_logp else rows.logits.copy()
    _ban_tokens(edited, edits.banned)
    return with_logits(rows, edited)


@step
def _ban_tokens(rows: Array, tokens: Array) -> None:
    """Set the logits of tokens to -inf in all rows."""
    for row in range(len(rows)):
        for token in tokens:
            if token < rows.shape[1]:
                rows[row, token] = -np.inf


@step
def _edit_in_python(rows: Array, nodes: Array, tokens: Array, parents: Array, callback: int) -> None:
    """Edit rows of logits in place by a call into Python; if it raises, all logits become NaN.

    All arrays must be contiguous.

    Args:
        nodes: int64[rows], the forest node of each row.
        tokens, parents: tokens and parents of all forest nodes.
    """
    wide = rows.itemsize
    where = (
        rows.ctypes.data,
        len(rows),
        rows.shape[1],
        wide,
        tokens.ctypes.data,
        parents.ctypes.data,
        len(tokens),
        nodes.ctypes.data,
    )
    if call_back(callback, where) != 0:
        rows[:] = np.nan


@step
def ban(rows: Array, allowed: Array) -> None:
    """Set the logits of forbidden tokens to -inf.

    Args:
        rows: float[rows, vocab].
        allowed: uint8[rows, bytes], one bit per token; token 0 is the lowest bit of the first byte.
    """
    vocab = rows.shape[1]
    for row in range(len(rows)):
        for place in range(allowed.shape[1]):
            bits = allowed[row, place]
            if bits == 255:
                continue
            for token in range(8 * place, min(8 * place + 8, vocab)):
                if (bits >> (token & 7)) & 1 == 0:
                    rows[row, token] = -np.inf


@step
def _penalise(row: Array, text: Array, penalty: float, seen_in: Array, number: int) -> None:
    """Apply the repetition penalty to the tokens of a text, once each.

    Args:
        seen_in: int64[vocab], the last row in which each token was penalised; changed in place.
        number: number of this row.
    """
    factor = row.dtype.type(penalty)
    for token in text:
        if 0 <= token < len(row) and seen_in[token] != number:
            seen_in[token] = number
            row[token] = row[token] * factor if row[token] < 0 else row[token] / factor

"""Edits of logits by steps: repetition penalty, minimum number of new tokens, banned tokens, rules of timestamps.

They have the results of transformers' processors. All other processors run in Python (laws/warp.py).
"""

from typing import NamedTuple

import numpy as np

from specbeam.core.beams import LENGTH, Texts, depth_of, room_for_texts, write_path
from specbeam.core.callbacks import call_back
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.laws.reduce import log_probabilities, log_sum
from specbeam.core.ranked import Ranked, with_logits
from specbeam.core.steps import Array, borrowed, step


class TimestampRules(NamedTuple):
    """Whisper's rules for timestamps, as in transformers' `WhisperTimeStampLogitsProcessor`.

    A text begins with a timestamp; the others come in pairs, and none is earlier than the one before.
    """

    begin: int  # the first timestamp; -1: no rules
    never: int  # the token for texts without timestamps, which is banned
    end: int  # after a single timestamp, tokens below it are banned
    latest: int  # the last timestamp that may be the first token
    decides: bool  # whether text is banned if all timestamps together are more likely than any text token


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
    banned_first: Array  # int64[n]: tokens that are banned as the first new token
    timestamps: TimestampRules


_NOTHING = np.empty(0, dtype=np.int64)
NO_RULES = TimestampRules(-1, 0, 0, 0, False)
NO_EDITS = Edits(1.0, _NOTHING, 0, _NOTHING, room_for_texts(None, 1, 1), False, 0, _NOTHING, _NOTHING, NO_RULES)


@step
def edits_any(edits: Edits) -> bool:
    """Return whether edits can change any row."""
    return follows_text(edits) or len(edits.banned) > 0


@step
def follows_text(edits: Edits) -> bool:
    """Return whether the edits of a row may depend on the text before it."""
    bans_by_text = edits.least > 0 or len(edits.banned_first) > 0 or edits.timestamps.begin >= 0
    return edits.penalty != 1 or bans_by_text or edits.callback != 0


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
    _ban_tokens(edited, edits.banned)
    for row in range(len(edited)):
        text = new_text(edits.texts, tokens, parents, nodes[row])
        if edits.penalty != 1:
            _penalise(edited[row], edits.prompt, edits.penalty, seen_in, row)
            _penalise(edited[row], text, edits.penalty, seen_in, row)
        if len(text) < edits.least:
            for token in edits.eos:
                if token < vocab:
                    edited[row, token] = -np.inf
        if len(text) == 0:
            _ban_tokens(edited[row : row + 1], edits.banned_first)
        if edits.timestamps.begin >= 0:
            _follow_rules(edited[row], text, edits.timestamps)
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
def _follow_rules(row: Array, text: Array, rules: TimestampRules) -> None:
    """Ban the tokens of a row that the rules of timestamps do not allow after a text."""
    vocab = len(row)
    size = len(text)
    follows_one = size > 0 and text[size - 1] >= rules.begin
    follows_two = follows_one and (size < 2 or text[size - 2] >= rules.begin)
    _ban_range(row, rules.never, rules.never + 1)
    if follows_two:
        _ban_range(row, rules.begin, vocab)
    elif follows_one:
        _ban_range(row, 0, rules.end)
    newest = -1
    for token in text:
        if token >= rules.begin:
            newest = token
    if newest >= 0:
        may_repeat = follows_one and not follows_two
        _ban_range(row, rules.begin, newest if may_repeat else newest + 1)
    if size == 0:
        _ban_range(row, 0, rules.begin)
        _ban_range(row, rules.latest + 1, vocab)
    if rules.decides and _are_timestamps_likelier(row, min(rules.begin, vocab)):
        _ban_range(row, 0, rules.begin)


@step
def _are_timestamps_likelier(row: Array, begin: int) -> bool:
    """Return whether the tokens from `begin` on are together likelier than any before; False for NaN and +inf."""
    most = -np.inf
    for token in range(begin):
        if not row[token] < np.inf:
            return False
        most = max(most, row[token])
    return log_sum(row[begin:].astype(np.float64)) > most


@step
def _ban_range(row: Array, start: int, stop: int) -> None:
    """Set the logits of the tokens from `start` up to `stop` to -inf, as far as the row goes."""
    for token in range(start, min(stop, len(row))):
        row[token] = -np.inf


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

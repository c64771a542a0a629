"""What options change in rows of logits before laws are made of them: the repetition penalty, and no end before its time.

The same as transformers' processors, as steps. What else looks at rows does it in Python (laws/warp.py).
"""

from typing import NamedTuple

import numpy as np

from specbeam.core.beams import LENGTH, Texts, depth_of, room_for_texts, write_path
from specbeam.core.steps import Array, step


class Edits(NamedTuple):
    """What is changed in the row after a text."""

    penalty: float  # by which logits of tokens of the text are divided, or multiplied below 0; 1: nothing
    prompt: Array  # int64[n]: its tokens belong to the text
    least: int  # new tokens before which no text ends
    eos: Array  # int64[ends]
    texts: Texts  # the new tokens of the live beams


_NOTHING = np.empty(0, dtype=np.int64)
NO_EDITS = Edits(1.0, _NOTHING, 0, _NOTHING, room_for_texts(None, 1, 1))


@step
def edits_any(edits: Edits) -> bool:
    """Return whether anything is ever changed."""
    return edits.penalty != 1 or edits.least > 0


@step
def new_text(texts: Texts, tokens: Array, parents: Array, node: int) -> Array:
    """Return the new tokens up to a forest node, int64[length]: those of its beam, which end with the root, and a path."""
    before = texts.sizes[LENGTH]
    depth = depth_of(parents, node)
    text = np.empty(before + depth, dtype=np.int64)
    root = write_path(text, before + depth, tokens, parents, node)
    text[:before] = texts.tokens[root, :before]
    return text


@step
def edited_rows(rows: Array, first: int, tokens: Array, parents: Array, edits: Edits) -> Array:
    """Return rows of logits after the edits: the same ones where there are none, else a copy.

    Args:
        rows: float[nodes, vocab], of the forest nodes from `first` on.
        tokens, parents: of the forest.
    """
    if not edits_any(edits):
        return rows
    edited = rows.copy()
    vocab = rows.shape[1]
    seen_in = np.full(vocab, -1, dtype=np.int64)  # the last row whose text had a token
    for row in range(len(rows)):
        text = new_text(edits.texts, tokens, parents, first + row)
        if edits.penalty != 1:
            _penalise(edited[row], edits.prompt, edits.penalty, seen_in, row)
            _penalise(edited[row], text, edits.penalty, seen_in, row)
        if len(text) < edits.least:
            for token in edits.eos:
                if token < vocab:
                    edited[row, token] = -np.inf
    return edited


@step
def _penalise(row: Array, text: Array, penalty: float, seen_in: Array, number: int) -> None:
    """Make the tokens of a text less likely, each once."""
    factor = row.dtype.type(penalty)
    for token in text:
        if 0 <= token < len(row) and seen_in[token] != number:
            seen_in[token] = number
            row[token] = row[token] * factor if row[token] < 0 else row[token] / factor

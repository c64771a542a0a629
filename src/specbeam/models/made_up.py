"""Prompts and rows on which passes are timed; their content does not matter."""

import numpy as np

from specbeam.core.forest import Forest


def made_up_prompt(length: int, vocab: int) -> list[int]:
    """Return a prompt of `length` tokens."""
    return [(7 * place + 3) % vocab for place in range(length)]


def made_up_rows(root: Forest, rows: int, vocab: int) -> Forest:
    """Return a forest with this number of nodes under its root."""
    nodes = np.arange(rows, dtype=np.int64)
    return root.grown(nodes % vocab, np.zeros_like(nodes))

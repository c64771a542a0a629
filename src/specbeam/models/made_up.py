"""Synthetic prompts and forests on which passes are timed."""

import numpy as np

from specbeam.core.forest import Forest


def made_up_prompt(length: int, vocab: int) -> list[int]:
    return [(7 * place + 3) % vocab for place in range(length)]


def made_up_rows(root: Forest, rows: int, vocab: int) -> Forest:
    """Return a forest with `rows` nodes under its root."""
    nodes = np.arange(rows, dtype=np.int64)
    return root.grown(nodes % vocab, np.zeros_like(nodes))

"""Batches of trees: rows of similar length, with a mask that shows each node its ancestors."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from specbeam.lab.train.trees import Trees
from specbeam.models.heads import lineage


class TreeBatch(NamedTuple):
    """Some trees as the rows of one forward. Columns after the end of a tree are padding, which no node attends to."""

    tokens: Int64[Tensor, "rows length"]
    parents: Int64[Tensor, "rows length"]  # columns; -1: none
    positions: Int64[Tensor, "rows length"]  # the depth of each node
    mask: Float[Tensor, "rows 1 length length"]  # added to attention scores: 0 for a node and its ancestors, else -inf
    learnt: Bool[
        Tensor, "rows length"
    ]  # nodes with a law; the fields below have an entry for each of them, in reading order
    ids: Int64[Tensor, "laws kept"]
    logp: Float[Tensor, "laws kept"]
    weights: Float[Tensor, " laws"]

    def to(self, device: torch.device) -> "TreeBatch":
        """Return the batch on a device."""
        return TreeBatch(*(values.to(device) for values in self))


def batches_of(trees: Trees, most_tokens: int, rng: np.random.Generator) -> Iterator[TreeBatch]:
    """Yield all trees in batches of at most `most_tokens` tokens with padding, in random order.

    Trees of a batch have nearly equal length. A longer tree gets its own batch.
    """
    lengths = trees.lengths
    order = np.argsort(lengths + rng.uniform(0, 2, len(lengths)), kind="stable")
    groups: list[np.ndarray] = []
    start = 0
    while start < len(order):
        stop = start + 1
        longest = lengths[order[start]]
        while stop < len(order):
            longest = max(longest, lengths[order[stop]])
            if longest * (stop + 1 - start) > most_tokens:
                break
            stop += 1
        groups.append(order[start:stop])
        start = stop
    for group in rng.permutation(len(groups)):
        yield tree_batch(trees, groups[group])


def tree_batch(trees: Trees, picked: np.ndarray) -> TreeBatch:
    """Return the trees of these numbers as a batch."""
    rows = len(picked)
    length = int(trees.lengths[picked].max())
    tokens = np.zeros((rows, length), dtype=np.int64)
    parents = np.full((rows, length), -1)
    law_of = np.full((rows, length), -1)
    weights = np.zeros((rows, length), dtype=np.float32)
    for row, tree in enumerate(picked):
        here = slice(trees.starts[tree], trees.starts[tree + 1])
        size = here.stop - here.start
        tokens[row, :size] = trees.tokens[here]
        parents[row, :size] = trees.parents[here]
        law_of[row, :size] = trees.law_of[here]
        weights[row, :size] = trees.weights[here]
    positions, sees = lineage(parents)
    learnt = law_of >= 0
    laws = law_of[learnt]
    mask = np.where(sees, np.float32(0), np.float32(-np.inf))
    return TreeBatch(
        tokens=torch.from_numpy(tokens),
        parents=torch.from_numpy(parents),
        positions=torch.from_numpy(positions),
        mask=torch.from_numpy(mask)[:, None],
        learnt=torch.from_numpy(learnt),
        ids=torch.from_numpy(trees.ids[laws].astype(np.int64)),
        logp=torch.from_numpy(trees.logp[laws]),
        weights=torch.from_numpy(weights[learnt]),
    )

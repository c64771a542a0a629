"""Texts or token trees scored by a target, with its hidden states: for trying heads, and for training them."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from specbeam.models.heads.arrays import Columns, TreeRows


class ScoredTrees(NamedTuple):
    """A batch of token trees, parents before children. Columns after the end of a tree are padding.

    The first token of a tree has no parent. A padding node has neither a parent nor children.
    """

    tokens: Columns
    parents: Columns  # columns; -1: none
    depths: Columns  # number of nodes above
    sees: Bool[Tensor, "rows length length"]  # each node its ancestors and itself
    states: dict[int, TreeRows]  # the target's hidden states, by `Needs.columns`

    def to(self, device: torch.device) -> "ScoredTrees":
        """Return the trees on a device."""
        states = {tap: rows.to(device) for tap, rows in self.states.items()}
        tokens, parents, depths, sees = (one.to(device) for one in self[:4])
        return ScoredTrees(tokens, parents, depths, sees, states)

    @property
    def columns(self) -> Columns:
        """The column of each node."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)

    def others_above(self) -> Bool[Tensor, "trees length length"]:
        """Return which nodes are ancestors of each node, excluding the node itself."""
        return self.sees & ~torch.eye(self.tokens.shape[1], dtype=torch.bool, device=self.tokens.device)

    def states_at(self, taps: tuple[int, ...]) -> Float[Tensor, "rows length columns"]:
        """Return the hidden states at some taps, concatenated."""
        return torch.cat([self.states[tap] for tap in taps], -1)

    def above(self, nodes: Columns) -> Columns:
        """Return the columns of the parents of nodes, given by column; 0 for nodes without any."""
        return self.parents.gather(1, nodes).clamp_min(0)

    def last_tokens(self, count: int) -> Int64[Tensor, "rows length count"]:
        """Return the last `count` tokens of the path to each node; shorter paths are padded with their first token."""
        nodes = self.columns
        columns: list[Tensor] = []
        for _ in range(count):
            columns.insert(0, self.tokens.gather(1, nodes))
            nodes = self.above(nodes)
        return torch.stack(columns, -1)

    def at(self, values: TreeRows, nodes: Int64[Tensor, "rows nodes"]) -> Float[Tensor, "rows nodes size"]:
        """Return the values of nodes, which are given by column."""
        return values.gather(1, nodes[..., None].expand(-1, -1, values.shape[-1]))


def chain_of(tokens: Int64[Tensor, " tokens"], states: dict[int, Float[Tensor, "tokens size"]]) -> ScoredTrees:
    """Return one text as a tree."""
    places = torch.arange(len(tokens), device=tokens.device)
    sees = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=tokens.device).tril()
    batched = {tap: rows[None] for tap, rows in states.items()}
    return ScoredTrees(tokens[None], (places - 1)[None], places[None], sees[None], batched)


def lineage(
    parents: Int64[np.ndarray, "rows length"],
) -> tuple[Int64[np.ndarray, "rows length"], Bool[np.ndarray, "rows length length"]]:
    """Return the depth of each node, and which nodes it sees: itself and its ancestors."""
    rows, length = parents.shape
    depth = np.zeros((rows, length), dtype=np.int64)
    sees = np.zeros((rows, length, length), dtype=np.bool_)
    every = np.arange(rows)
    for node in range(length):
        parent = parents[:, node]
        has_parent = parent >= 0
        sees[:, node] = sees[every, parent] & has_parent[:, None]
        sees[:, node, node] = True
        depth[:, node] = np.where(has_parent, depth[every, parent] + 1, 0)
    return depth, sees

"""A head on a whole text at once, several drafts deep: for training, and for finding out how a head was trained.

Row i of step 0 reads the target's feature of token i, and token i + 1. Row i of step s is the draft s deep below it: it
reads the head's own state of row i of the step before, and token i + 1 + s. It sees the rows up to i of step 0, and the rows
i of the steps 1 to s: what drafting from there would see (EAGLE-3's training-time test, arXiv 2503.01840).
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from specbeam.heads.layers import attended

if TYPE_CHECKING:
    from specbeam.heads.trunk import PairTrunk


class UnrolledRows:
    """The keys and values of all steps so far, by layer, and who looks at whom."""

    def __init__(self, layers: int) -> None:
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Add the keys and values of a step; return what its queries make of those that they see."""
        rows = len(queries)
        self.keys[layer].append(keys)
        self.values[layer].append(values)
        first, *later = self.keys[layer]
        seen = seen_rows(rows, len(first), len(later)).to(queries.device)
        every_key = torch.cat([first, *(one[:rows] for one in later)])
        first, *later = self.values[layer]
        every_value = torch.cat([first, *(one[:rows] for one in later)])
        return attended(queries, every_key, every_value, seen)


def seen_rows(rows: int, first: int, steps: int) -> Bool[Tensor, "rows seen"]:
    """Return which rows each of `rows` rows sees: of the `first` rows of step 0, and of the rows of `steps` later steps."""
    past = torch.ones(rows, first, dtype=torch.bool).tril()
    own = torch.eye(rows, dtype=torch.bool)
    return torch.cat([past, *[own] * steps], 1)


def unrolled(
    trunk: "PairTrunk", tokens: Int64[Tensor, " rows"], features: Float[Tensor, "rows width"], steps: int
) -> list[Float[Tensor, "_ width"]]:
    """Return the head's states of the rows of each step: one row fewer from step to step.

    Args:
        tokens: of a text without its first one.
        features: of the text without its last token.
        steps: number of steps, at least 1.
    """
    seen = UnrolledRows(trunk.shape.layers)
    positions = torch.arange(len(tokens), device=tokens.device)
    found = []
    given = features
    for step in range(steps):
        rows = len(tokens) - step
        states = trunk(tokens[step:], given[:rows], positions[step:], seen.attend)
        found.append(states)
        given = trunk.fed_back(states)
    return found

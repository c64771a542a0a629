"""Pair trunks on whole trees at once, several drafts deep: for training, and for finding out how a head was trained.

The row of a node as a draft one deep reads the target's feature of the node above. As a draft s + 1 deep it reads the head's
own state of the node above, as a draft s deep. It sees the rows one deep of what is above its s nearest ancestors, and of
these the rows as drafts 2, 3, ... deep: what drafting would see from there (EAGLE-3's training-time test, arXiv 2503.01840,
here on trees).

Of modules in a row each makes the drafts of one depth. Its rows see its own rows alone, and drafts deeper than there are
modules are made by the last one, as by a trunk that stands alone.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specbeam.models.heads.layers import View, attended, view_of
from specbeam.models.heads.trees import ScoredTrees

if TYPE_CHECKING:
    from specbeam.models.heads.chimera import Chimera
    from specbeam.models.heads.trunk import PairTrunk


class UnrolledRows:
    """The keys and values of a trunk at all depths so far, by layer, and who looks at whom.

    Args:
        layers: number of layers.
        views: see `TrunkShape.views`.
        least: number of nodes above that a node needs to have a row.
    """

    def __init__(self, trees: ScoredTrees, layers: int, views: tuple[View, ...] = (), least: int = 1) -> None:
        self.trees = trees
        self.views = views
        self.least = least
        columns = torch.arange(trees.tokens.shape[1], device=trees.tokens.device)
        self.ancestors = [columns.expand_as(trees.tokens)]  # of each node, by how far above it they are
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]
        self.seen = self._seen_by_layer()

    def deepen(self) -> None:
        """Go on to drafts one deeper."""
        self.ancestors.append(self.trees.above(self.ancestors[-1]))
        self.seen = self._seen_by_layer()

    def _seen_by_layer(self) -> list[Bool[Tensor, "rows length seen"]]:
        """Return which rows each row of the depth sees, by layer."""
        made = {view: self._seen(view) for view in set(self.views) or {View()}}
        return [made[view_of(self.views, layer)] for layer in range(len(self.keys))]

    def _seen(self, view: View) -> Bool[Tensor, "rows length seen"]:
        """Return which rows each row of the depth sees: of the first depth, of the second, and so on to its own."""
        trees = self.trees
        length = trees.tokens.shape[1]
        *nearer, top = self.ancestors
        past = trees.sees.gather(1, top[..., None].expand(-1, -1, length))
        past = past & (trees.depths >= self.least)[:, None]
        if view.within:
            origins = trees.depths if view.from_row else trees.depths.gather(1, top)
            past = past & (trees.depths[:, None] > origins[..., None] - view.within)
        alike = torch.eye(length, dtype=torch.bool, device=past.device)
        if not nearer:
            return past | alike  # rows that nothing reads see themselves
        return torch.cat([past, *(alike[ancestor] for ancestor in reversed(nearer))], -1)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Add the keys and values of a depth; return what its queries make of those that they see."""
        self.keys[layer].append(keys)
        self.values[layer].append(values)
        return attended(queries, torch.cat(self.keys[layer], 1), torch.cat(self.values[layer], 1), self.seen[layer])


def unrolled(
    trunks: "Sequence[PairTrunk] | Sequence[Chimera]", trees: ScoredTrees, depth: int
) -> list[Float[Tensor, "rows length width"]]:
    """Return the states of the nodes as drafts 1 to `depth` deep.

    States of nodes with fewer nodes above them mean nothing.

    Args:
        trunks: those that make the drafts of each depth; deeper ones are made by the last.
    """
    trunk = trunks[0]
    rows = UnrolledRows(trees, trunk.shape.layers, trunk.views)
    parents = trees.above(rows.ancestors[0])
    given = trees.at(trunk.features(trees.states_at(trunk.taps)), parents)
    tokens = trees.tokens if trunk.history == 1 else trees.last_tokens(trunk.history)
    found = [trunk(tokens, given, trees.depths, rows.attend)]
    for deep in range(1, depth):
        given = trees.at(trunk.fed_back(found[-1]), parents)
        if deep < len(trunks):
            trunk = trunks[deep]
            rows = UnrolledRows(trees, trunk.shape.layers, trunk.views, least=deep + 1)
        else:
            rows.deepen()
        found.append(trunk(tokens, given, trees.depths, rows.attend))
    return found

"""Heads run on whole trees at once, several drafts deep, to train them and to find out how they were trained.

The row of a node as a draft one deep reads the target's feature of the node above. As a draft s + 1 deep it reads the head's
own state of the node above as a draft s deep. It sees the depth-1 rows of the nodes above its s nearest ancestors, and the
rows of these ancestors as drafts 2, 3, ... deep: the rows that drafting would see (EAGLE-3's training-time test, arXiv
2503.01840, here on trees).

Each of several modules in a row makes the drafts of one depth, and its rows see only its own rows. The last module also
makes deeper drafts, like a single trunk.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional

from specbeam.models.heads.arrays import PerNode, TreeRows
from specbeam.models.heads.head import wanted_below
from specbeam.models.heads.layers import View, attended, view_of
from specbeam.models.heads.trees import ScoredTrees

if TYPE_CHECKING:
    from specbeam.models.heads.chimera import Chimera
    from specbeam.models.heads.trunk import PairTrunk


class UnrolledRows:
    """The keys and values of a trunk at all depths so far by layer, and which rows see which.

    Args:
        layers: number of layers.
        views: see `TrunkShape.views`.
        least: number of nodes above a node that it needs for a row.
    """

    def __init__(self, trees: ScoredTrees, layers: int, views: tuple[View, ...] = (), least: int = 1) -> None:
        self.trees = trees
        self.views = views
        self.least = least
        self.ancestors = [trees.columns]  # by distance: the column of each node's ancestor
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]
        self.seen = self._seen_by_layer()

    def deepen(self) -> None:
        """Continue with drafts one deeper."""
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
        """Add the keys and values of a depth; return the mixed values for its queries."""
        self.keys[layer].append(keys)
        self.values[layer].append(values)
        return attended(queries, torch.cat(self.keys[layer], 1), torch.cat(self.values[layer], 1), self.seen[layer])


def unrolled(trunks: "Sequence[PairTrunk] | Sequence[Chimera]", trees: ScoredTrees, depth: int) -> list[TreeRows]:
    """Return the states of the nodes as drafts 1 to `depth` deep.

    States of nodes with fewer nodes above them are meaningless.

    Args:
        trunks: one for the drafts of each depth; the last one also makes deeper drafts.
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


def drafted_rows(
    trunks: "Sequence[PairTrunk] | Sequence[Chimera]", trees: ScoredTrees, depth: int, wanted: PerNode
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each depth of drafts, 1 to `depth`, the wanted nodes with drafts of this depth, and their states."""
    for deep, states in enumerate(unrolled(trunks, trees, depth), 1):
        nodes = wanted_below(trees, wanted, deep)
        yield deep, nodes, states.flatten(0, 1)[nodes]


class BlocksOnTrees:
    """Attention of the rows of the blocks below all nodes of trees: to the nodes above, and to the rows of the same block.

    Args:
        views: the views of the layers; see `View`.
        context: keys and values of the nodes by layer; None: the first row of the block below each node provides them.
            Then rows see neither later rows of their block nor the first token of a text, which has no row.
    """

    def __init__(
        self, trees: ScoredTrees, views: tuple[View, ...], context: list[tuple[Tensor, Tensor]] | None = None
    ) -> None:
        self.depths = trees.depths
        self.views = views
        self.context = context
        self.above = trees.others_above()
        if context is None:
            self.above &= (trees.depths > 0)[:, None]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the mixed values for queries, float[trees, nodes, rows, heads, size]."""
        view = view_of(self.views, layer)
        rows = queries.shape[2]
        above_keys, above_values = self.context[layer] if self.context else (keys[:, :, 0], values[:, :, 0])
        group = queries.shape[-2] // keys.shape[-2]
        keys, values, above_keys, above_values = (
            one.repeat_interleave(group, -2) for one in (keys, values, above_keys, above_values)
        )
        scaled = queries / queries.shape[-1] ** 0.5
        to_above = torch.einsum("tnrhs,tmhs->tnrhm", scaled, above_keys)
        to_above = to_above.masked_fill(~self._seen(view, rows)[:, :, :, None], -torch.inf)
        to_block = torch.einsum("tnrhs,tnqhs->tnrhq", scaled, keys)
        if view.is_causal or self.context is None:
            before = torch.ones(rows, rows, dtype=torch.bool, device=queries.device).tril()
            to_block = to_block.masked_fill(~before[:, None], -torch.inf)
        odds = functional.softmax(torch.cat([to_above, to_block], -1), -1, dtype=torch.float32).to(to_above.dtype)
        of_above, of_block = odds.split([above_keys.shape[1], rows], -1)
        mixed = torch.einsum("tnrhm,tmhs->tnrhs", of_above, above_values)
        return mixed + torch.einsum("tnrhq,tnqhs->tnrhs", of_block, values)

    def _seen(self, view: View, count: int) -> Bool[Tensor, "trees nodes rows above"]:
        """Return the nodes that each of `count` rows sees."""
        seen = self.above[:, :, None].expand(-1, -1, count, -1)
        if view.within:
            origins = self.depths[..., None] + torch.arange(count, device=self.depths.device) * view.from_row
            seen = seen & (self.depths[:, None, None] > origins[..., None] - view.within)
        return seen

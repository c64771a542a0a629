"""Pair trunks that draft a whole block in one pass, by mask rows after the row of a pair (P-EAGLE).

The first draft is that of a pair trunk. The row of each further draft reads a mask token and a learnt state in place of the
token and the feature that are not known yet, and looks at the rows of pairs above and at the mask rows before it. So the law
of a draft does not depend on the drafts above it: it is a product law.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from specbeam.models.heads.head import DraftRows, wanted_below
from specbeam.models.heads.layers import Rotary, View, view_of
from specbeam.models.heads.trees import ScoredTrees
from specbeam.models.heads.trunk import PairTrunk, TrunkShape


class MaskTrunk(PairTrunk):
    """A pair trunk with mask rows, as a module whose tensors have the names of speculators' files.

    Equation (11) of the project's notes on heads; source: P-EAGLE (vllm-project/speculators, SpecForge).

    Args:
        rotary: the rotation by positions.
        embedding: float[vocab, width], of the target, or the head's own.
        head: float[draft_vocab, width], the matrix that makes logits, of the target, or the head's own.
        mask: the token that mask rows read.
        rows: number of rows of a block: that of a pair, and the mask rows after it.
        tokens: see `Head.tokens`.
    """

    def __init__(
        self,
        shape: TrunkShape,
        rotary: Rotary,
        embedding: nn.Embedding,
        head: nn.Linear,
        mask: int,
        rows: int,
        tokens: Int64[Tensor, " draft_vocab"] | None = None,
    ) -> None:
        super().__init__(shape, rotary, embedding, head, tokens)
        self.mask = mask
        self.rows = rows
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.states_size))

    @property
    def described(self) -> dict[str, str]:
        """See `Head.described`."""
        parts = super().described
        del parts["feeds back"]
        return {
            **parts,
            "kind": f"P-EAGLE: drafts {self.rows} tokens in one pass, by the row of a pair and mask rows",
            "mask token": str(self.mask),
        }

    def read_by(
        self,
        roots: Int64[Tensor, "*blocks"],
        above: Float[Tensor, "*blocks width"],
        positions: Int64[Tensor, "*blocks"],
    ) -> tuple[Int64[Tensor, "*blocks rows"], Float[Tensor, "*blocks rows width"], Int64[Tensor, "*blocks rows"]]:
        """Return what the rows of blocks read: tokens, features and positions.

        Args:
            roots: the tokens of the roots.
            above: the features of the nodes above the roots.
            positions: of the roots.
        """
        count = self.rows
        tokens = torch.full((*roots.shape, count), self.mask, device=roots.device)
        tokens[..., 0] = roots
        masked = self.features(self.mask_hidden.flatten()).expand(*above.shape[:-1], count - 1, -1)
        given = torch.cat([above[..., None, :], masked], -2)
        return tokens, given, positions[..., None] + torch.arange(count, device=roots.device)

    def drafts(self, trees: ScoredTrees, depth: int, wanted: Bool[Tensor, "rows length"]) -> list[DraftRows]:
        """See `Head.drafts`: each node is the root of a block, and a draft in the blocks of the nodes above it."""
        root = torch.arange(trees.tokens.shape[1], device=trees.tokens.device).expand_as(trees.tokens)
        above = trees.at(self.features(trees.states_at(self.taps)), trees.above(root))
        tokens, given, positions = self.read_by(trees.tokens, above, trees.depths)
        states = self(tokens, given, positions, _MasksOfTrees(trees, self.shape.views).attend)
        found = []
        for deep in range(1, min(depth, self.rows) + 1):
            nodes = wanted_below(trees, wanted, deep)
            drafted = trees.at(states[:, :, deep - 1], root).flatten(0, 1)[nodes]
            found.append(DraftRows(nodes, self.logits(drafted)))
            root = trees.above(root)
        return found

    def other_readings(self, layers: int) -> Iterator[tuple[str, PairTrunk]]:
        """See `Head.other_readings`: those of a pair trunk, but that nothing is fed back."""
        for name, other in super().other_readings(layers):
            if other.shape.feeds_normed == self.shape.feeds_normed:
                yield name, other


class _MasksOfTrees:
    """Lets the rows of the blocks below all nodes of trees look at the pairs above them, and at the rows before them."""

    def __init__(self, trees: ScoredTrees, views: tuple[View, ...]) -> None:
        self.trees = trees
        self.views = views
        alike = torch.eye(trees.tokens.shape[1], dtype=torch.bool, device=trees.tokens.device)
        self.above = trees.sees & ~alike & (trees.depths > 0)[:, None]  # the first token of a text has no row

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return what queries, float[trees, nodes, rows, heads, size], make of what they see."""
        count = queries.shape[2]
        group = queries.shape[-2] // keys.shape[-2]
        keys = keys.repeat_interleave(group, -2)
        values = values.repeat_interleave(group, -2)
        scaled = queries / queries.shape[-1] ** 0.5
        to_above = torch.einsum("tnrhs,tmhs->tnrhm", scaled, keys[:, :, 0])
        to_above = to_above.masked_fill(~self._seen(view_of(self.views, layer), count)[:, :, :, None], -torch.inf)
        to_block = torch.einsum("tnrhs,tnqhs->tnrhq", scaled, keys)
        before = torch.ones(count, count, dtype=torch.bool, device=queries.device).tril()
        to_block = to_block.masked_fill(~before[:, None], -torch.inf)
        odds = functional.softmax(torch.cat([to_above, to_block], -1), -1, dtype=torch.float32).to(to_above.dtype)
        pairs = to_above.shape[-1]
        mixed = torch.einsum("tnrhm,tmhs->tnrhs", odds[..., :pairs], values[:, :, 0])
        return mixed + torch.einsum("tnrhq,tnqhs->tnrhs", odds[..., pairs:], values)

    def _seen(self, view: View, count: int) -> Bool[Tensor, "trees nodes rows above"]:
        """Return the nodes whose pairs each of `count` rows sees."""
        seen = self.above[:, :, None].expand(-1, -1, count, -1)
        if view.within:
            depths = self.trees.depths
            origins = depths[..., None] + torch.arange(count, device=depths.device) * view.from_row
            seen = seen & (depths[:, None, None] > origins[..., None] - view.within)
        return seen

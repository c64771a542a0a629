"""Pair trunks that draft a whole block in one pass, by mask rows after the row of a pair (P-EAGLE).

The first draft is made as in a pair trunk. The row of each further draft reads a mask token and a learned state in
place of the unknown token and feature, and attends to the rows of pairs above and the mask rows before it. So the law
of a draft does not depend on the drafts above it: it is a product law.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from specbeam.models.heads.arrays import Blocks, PerNode, PerRow, TokenMap
from specbeam.models.heads.head import DraftRows, wanted_below
from specbeam.models.heads.layers import Rotary
from specbeam.models.heads.trees import ScoredTrees
from specbeam.models.heads.trunk import PairTrunk, TrunkShape
from specbeam.models.heads.unroll import BlocksOnTrees


class MaskTrunk(PairTrunk):
    """A pair trunk with mask rows; its tensors have the names of speculators' files.

    Equation (11) of the project's notes on heads; source: P-EAGLE (vllm-project/speculators, SpecForge).

    Args:
        mask: the token that mask rows read.
        rows: number of rows of a block: the row of a pair and the mask rows after it.
    """

    def __init__(
        self,
        shape: TrunkShape,
        rotary: Rotary,
        embedding: nn.Embedding,
        head: nn.Linear,
        mask: int,
        rows: int,
        tokens: TokenMap = None,
    ) -> None:
        super().__init__(shape, rotary, embedding, head, tokens)
        self.mask = mask
        self.rows = rows
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.states_size))

    @property
    def described(self) -> dict[str, str]:
        parts = super().described
        del parts["feeds back"]
        return {
            **parts,
            "kind": f"P-EAGLE: drafts {self.rows} tokens in one pass, by the row of a pair and mask rows",
            "mask token": str(self.mask),
        }

    def read_by(
        self, roots: PerRow, above: Float[Tensor, "*blocks width"], positions: PerRow
    ) -> tuple[Int64[Tensor, "*blocks rows"], Blocks, Int64[Tensor, "*blocks rows"]]:
        """Return the inputs of the rows of blocks: tokens, features and positions.

        Args:
            roots: the tokens of the roots.
            above: the features of the nodes above the roots.
            positions: the positions of the roots.
        """
        count = self.rows
        tokens = torch.full((*roots.shape, count), self.mask, device=roots.device)
        tokens[..., 0] = roots
        masked = self.features(self.mask_hidden.flatten()).expand(*above.shape[:-1], count - 1, -1)
        given = torch.cat([above[..., None, :], masked], -2)
        return tokens, given, positions[..., None] + torch.arange(count, device=roots.device)

    def drafts(self, trees: ScoredTrees, depth: int, wanted: PerNode) -> list[DraftRows]:
        """See `Head.drafts`: each node is the root of its own block, and a draft in the blocks of its ancestors."""
        root = trees.columns
        above = trees.at(self.features(trees.states_at(self.taps)), trees.above(root))
        tokens, given, positions = self.read_by(trees.tokens, above, trees.depths)
        states = self(tokens, given, positions, BlocksOnTrees(trees, self.shape.views).attend)
        found = []
        for deep in range(1, min(depth, self.rows) + 1):
            nodes = wanted_below(trees, wanted, deep)
            drafted = trees.at(states[:, :, deep - 1], root).flatten(0, 1)[nodes]
            found.append(DraftRows(nodes, self.logits(drafted)))
            root = trees.above(root)
        return found

    def other_readings(self, layers: int) -> Iterator[tuple[str, PairTrunk]]:
        """See `Head.other_readings`: a pair trunk's readings, except of feedback, which this head lacks."""
        for name, other in super().other_readings(layers):
            if other.shape.feeds_normed == self.shape.feeds_normed:
                yield name, other

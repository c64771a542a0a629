"""BiTA: learned mask embeddings in the target's own pass, with a learned prefix that only they see (arXiv 2401.12522)."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from specbeam.core.records import ExtraInputs
from specbeam.models.heads.arrays import AnchorRows, Anchors
from specbeam.models.heads.extra_rows import ExtraHead, StoredTrees
from specbeam.models.heads.trees import ScoredTrees

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Bita(ExtraHead):
    """Soft prompts and mask embeddings.

    The soft prompts are keys and values for each layer, without rotation and without a position.

    Args:
        depth: number of mask embeddings.
        sizes: number of layers, of key-value heads, of soft prompts, and size of a head.
        width: size of an embedding.
    """

    def __init__(self, target: "PreTrainedModel", depth: int, sizes: tuple[int, int, int, int], width: int) -> None:
        super().__init__(target, depth)
        self.keys = nn.Parameter(torch.zeros(sizes))
        self.values = nn.Parameter(torch.zeros(sizes))
        self.masks = nn.Embedding(depth, width)

    @property
    def inputs(self) -> ExtraInputs:
        return ExtraInputs(
            model=self.target,
            kinds=self.depth,
            embeddings=self.masks.weight.detach(),
            keys=tuple(self.keys.detach()),
            values=tuple(self.values.detach()),
        )

    @property
    def described(self) -> dict[str, str]:
        return {
            "kind": "BiTA: mask tokens in the target's own pass",
            "drafts": str(self.depth),
            "reads": f"the text, and {self.keys.shape[2]} soft prompts in each layer, which the text does not see",
            **self.described_ranks,
        }

    def rows(self, trees: ScoredTrees, anchors: Anchors, depth: int) -> AnchorRows:
        made = self.masks.weight[:depth].to(self.target.dtype)
        stored = StoredTrees(self.target, trees, keys=tuple(self.keys), values=tuple(self.values))
        return stored.last_states(anchors, made.expand(*anchors.shape, -1, -1))

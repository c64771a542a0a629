"""Medusa heads: one small network for each depth of a draft, all on the same feature (arXiv 2401.10774).

The law of a draft does not depend on the drafts above it: it is a product law.
"""

from torch import nn

from specbeam.models.heads.arrays import Logits, PerRow, States, StatesAbove
from specbeam.models.heads.feature import FeatureHead, FeatureSizes, Residual


class Medusa(FeatureHead):
    """Equation (23) of the project's notes on heads.

    Args:
        layers: number of residual layers of each head.
        matrix: the target's output matrix if all heads share it; None: each head has one.
    """

    def __init__(self, sizes: FeatureSizes, layers: int, matrix: nn.Linear | None = None) -> None:
        super().__init__(sizes)
        width = sizes.width
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Residual(width, width) for _ in range(layers))) for _ in range(sizes.depth)
        )
        matrices = [matrix or nn.Linear(width, sizes.draft_vocab, bias=False) for _ in range(sizes.depth)]
        self.matrices = nn.ModuleList(matrices)

    def step(self, far: int, states: StatesAbove, tokens: PerRow) -> States:
        """See `FeatureHead.step`: the state is always the feature."""
        return states

    def logits(self, far: int, states: States) -> Logits:
        return self.matrices[far - 1](self.blocks[far - 1](states))

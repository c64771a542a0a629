"""Denoisers: block heads that draft by masked diffusion, in one step or in several (SpecDiff, arXiv 2408.05636).

The drafts of a block are tokens or masks, and the head gives a law for each mask, given the tokens. In one step all drafts
are masks, and all laws are fixed before any token is drawn: a product law, as in DFlash. In several steps some masks become
tokens, and the laws of the others are computed again.

The paper drafts with a separate diffusion model that reads only tokens. Here the context is the target's features, as in
block heads, so the head can be small.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from specbeam.models.heads.arrays import Blocks, PerRow, TokenMap
from specbeam.models.heads.block import BlockHead, BlockShape
from specbeam.models.heads.layers import Attend, Rotary

NO_TOKEN = -1  # replaces `BlockHead`'s mask token: the mask is an embedding of the head, not a token of the target


class Denoiser(BlockHead):
    """A SpecDiff head: a block head whose mask has a learned embedding, so that it is never drafted.

    Args:
        shape, rotary, embedding, head, tokens: see `LayeredHead`.
    """

    def __init__(
        self, shape: BlockShape, rotary: Rotary, embedding: nn.Embedding, head: nn.Linear, tokens: TokenMap = None
    ) -> None:
        super().__init__(shape, rotary, embedding, head, NO_TOKEN, tokens)
        self.mask_embedding = nn.Parameter(torch.zeros(embedding.weight.shape[1]))

    @property
    def described(self) -> dict[str, str]:
        kind = f"SpecDiff: unmasks {self.shape.depth} tokens, in one step or several"
        shared = super().described
        return {"kind": kind} | {name: shared[name] for name in ("layers", "reads", "positions")}

    def blocks(
        self, roots: PerRow, positions: PerRow, attend: Attend, known: Int64[Tensor, "*blocks drafts"] | None = None
    ) -> Blocks:
        """Return the rows of the blocks below roots; see `BlockHead.blocks`.

        Args:
            known: the drafts of each block, -1 for masks; None: only masks.
        """
        if known is None:
            known = torch.full((*roots.shape, self.shape.depth), NO_TOKEN, device=roots.device)
        is_mask = (known < 0)[..., None]
        drafts = torch.where(is_mask, self.mask_embedding, self.embed_tokens(known.clamp_min(0)))
        x = torch.cat([self.embed_tokens(roots)[..., None, :], drafts], -2)
        return self.rows_after_layers(x.to(self.fc.weight.dtype), positions, attend)

    def other_readings(self, layers: int) -> Iterator[tuple[str, BlockHead]]:
        """See `Head.other_readings`: its files leave no choice."""
        return iter(())

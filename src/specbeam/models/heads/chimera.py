"""Chimera: rows that read the last three tokens and the features of all tokens above them (arXiv 2402.15758).

Row v belongs to a node, as in a pair trunk, and stands twice in the context of the rows below it: by the feature of the node
above v, and by what the last three tokens on the path to v are encoded to. Where the target has not scored the node above,
the head's own state there stands for its feature. One layer looks at both, and makes a state that estimates the target's
feature of v. Logits are read out of this state and the last feature of the target, by a matrix for each depth of a draft.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from specbeam.core.records import FINAL
from specbeam.models.heads.arrays import Logits, PerNode, PerRow, Rows, TargetStates, TokenMap
from specbeam.models.heads.feature import Residual
from specbeam.models.heads.head import DraftRows, LayeredHead, described_rope, described_taps
from specbeam.models.heads.layers import Attend, DecoderLayer, LayerSizes, Rotary, View
from specbeam.models.heads.trees import ScoredTrees
from specbeam.models.heads.unroll import drafted_rows

SHARED = "shared"
OWN = "own"
READ_OUTS = (SHARED, OWN)


@dataclass(frozen=True)
class ChimeraShape:
    """The shape of a Chimera head.

    Attributes:
        sizes: of its layer, as wide as the target's hidden states.
        depth: number of drafts, one below the other, that it has matrices for; deeper ones are read out by the last.
        draft_vocab: number of tokens that the head gives logits for.
        read_out: "own": a matrix of all tokens for each depth, as in the paper's code. "shared": a map to the width of the
            target for each depth, and one matrix of all tokens behind it, which is the target's.
    """

    sizes: LayerSizes
    depth: int
    draft_vocab: int
    read_out: str = SHARED

    @property
    def layers(self) -> int:
        """The number of layers, one."""
        return 1

    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden states that it reads: those that the target's head reads."""
        return (FINAL,)

    @property
    def target_width(self) -> int:
        """The size of a hidden state of the target."""
        return self.sizes.width


class Trigrams(nn.Module):
    """The encoder of three tokens: a residual layer on their embeddings side by side, and a matrix to the head's width."""

    def __init__(self, embed: int, width: int) -> None:
        super().__init__()
        self.block = Residual(3 * embed, 3 * embed)
        self.proj = nn.Linear(3 * embed, width, bias=False)

    def forward(self, embedded: Float[Tensor, "*rows three embed"]) -> Rows:
        """Return the code of the tokens of each row."""
        return self.proj(self.block(embedded.flatten(-2)))


class ContextLayer(DecoderLayer):
    """A decoder layer whose rows stand twice in the context: by a feature, and by the code of their tokens.

    Only the code looks at the context, and the layer's output is added to it.
    """

    def forward(  # type: ignore[override]
        self,
        codes: Rows,
        features: Rows,
        angles: Any,
        angles_above: Any,
        attend: Attend,
    ) -> Rows:
        """Return the rows after the layer.

        Args:
            angles, angles_above: of the positions of the rows, and of the nodes above them, where the features stand.
        """
        normed = self.input_layernorm(codes)
        keys, values = self.self_attn.keys_and_values(normed, angles)
        feature_keys, feature_values = self.self_attn.keys_and_values(self.input_layernorm(features), angles_above)
        both_keys = torch.cat([feature_keys, keys], -1)
        both_values = torch.cat([feature_values, values], -1)
        mixed = attend(0, self.self_attn.queries(normed, angles), both_keys, both_values)
        return self.with_inner(codes + self.self_attn.o_proj(mixed.flatten(-2)))


class Chimera(LayeredHead):
    """A head of this kind.

    Args:
        shape, rotary, embedding, tokens: see `LayeredHead`.
        head: the matrix behind the maps of "shared" read-outs; None for "own" ones.
    """

    shape: ChimeraShape
    history = 3  # number of last tokens that a row reads
    views: tuple[View, ...] = ()  # see `TrunkShape.views`: rows look at all that is above them

    def __init__(
        self,
        shape: ChimeraShape,
        rotary: Rotary,
        embedding: nn.Embedding,
        head: nn.Linear | None,
        tokens: TokenMap = None,
    ) -> None:
        super().__init__(shape, rotary, embedding, None, tokens)
        width = shape.sizes.width
        self.trigrams = Trigrams(embedding.weight.shape[1], width)
        self.layer = ContextLayer(shape.sizes)
        if head is None:
            self.matrices = nn.ModuleList(
                nn.Linear(2 * width, shape.draft_vocab, bias=False) for _ in range(shape.depth)
            )
        else:
            self.lm_head = head
            self.maps = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(shape.depth))

    @property
    def described(self) -> dict[str, str]:
        shape = self.shape
        how = "a matrix of tokens for each" if shape.read_out == OWN else "a map for each, and one matrix of tokens"
        return {
            "kind": "Chimera: reads the last three tokens, and the features of all tokens above",
            "layers": "1",
            "reads": described_taps(self.taps),
            "read-outs": f"{shape.depth}, one for each depth; {how}",
            "positions": described_rope(self.rotary.rope),
        }

    def features(self, states: TargetStates) -> Rows:
        """See `Head.features`: the states themselves."""
        return states.to(self.trigrams.proj.weight.dtype)

    def forward(self, tokens: Int64[Tensor, "*rows three"], features: Rows, positions: PerRow, attend: Attend) -> Rows:
        """Return the head's states of rows: estimates of the target's features there.

        Args:
            tokens: the last three on the path to each row, its own last.
            features: of the node above each row.
            positions: any numbers that grow by one from node to node; only differences count.
            attend: lets rows look at the rows above them, and at themselves.
        """
        codes = self.trigrams(self.embed_tokens(tokens).to(features.dtype))
        return self.layer(codes, features, self.rotary(positions), self.rotary(positions - 1), attend)

    def fed_back(self, x: Rows) -> Rows:
        """Return the features that rows below read, from the states of rows that the target has not scored."""
        return x

    def logits(self, far: int, features: Rows, x: Rows) -> Logits:
        """Return the logits of the next token, from the states of rows.

        Args:
            far: how far below the last scored node the rows are, at least 1.
            features: of that scored node above each row.
        """
        number = min(far, self.shape.depth) - 1
        both = torch.cat([features, x], -1)
        if self.shape.read_out == OWN:
            return self.matrices[number](both)
        return self.lm_head(self.maps[number](both))

    def drafts(self, trees: ScoredTrees, depth: int, wanted: PerNode) -> list[DraftRows]:
        features = self.features(trees.states_at(self.taps))
        above = trees.columns
        found = []
        for deep, nodes, own in drafted_rows([self], trees, depth, wanted):
            above = trees.above(above)
            scored = trees.at(features, above).flatten(0, 1)[nodes]
            found.append(DraftRows(nodes, self.logits(deep, scored, own), estimates=own))
        return found

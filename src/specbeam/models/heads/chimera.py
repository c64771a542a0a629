"""Chimera: rows that read the last three tokens and the features of all tokens above them (arXiv 2402.15758).

Row v belongs to a node, as in a pair trunk, and has two entries in the context of the rows below it: the feature of the
node above v, and the code of the last three tokens on the path to v. Where the target has not scored the node above, the
head's own state there replaces its feature. One layer attends to both, and makes a state that estimates the target's
feature of v. A matrix for each depth of a draft makes logits from this state and the last feature of the target.
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
        sizes: the sizes of its layer, which is as wide as the target's hidden states.
        depth: number of successive drafts with a matrix of their own; deeper drafts use the last one.
        draft_vocab: number of tokens of the head.
        read_out: "own": an output matrix for each depth, as in the paper's code. "shared": a map to the width of the target
            for each depth, followed by the target's output matrix.
    """

    sizes: LayerSizes
    depth: int
    draft_vocab: int
    read_out: str = SHARED

    @property
    def layers(self) -> int:
        """The number of layers: one."""
        return 1

    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden states that the head reads: the input of the target's head."""
        return (FINAL,)

    @property
    def target_width(self) -> int:
        """The size of a hidden state of the target."""
        return self.sizes.width


class Trigrams(nn.Module):
    """The encoder of three tokens: a residual layer on their concatenated embeddings, and a matrix to the head's width."""

    def __init__(self, embed: int, width: int) -> None:
        super().__init__()
        self.block = Residual(3 * embed, 3 * embed)
        self.proj = nn.Linear(3 * embed, width, bias=False)

    def forward(self, embedded: Float[Tensor, "*rows three embed"]) -> Rows:
        """Return the codes of the tokens of rows."""
        return self.proj(self.block(embedded.flatten(-2)))


class ContextLayer(DecoderLayer):
    """A decoder layer whose rows have two entries in the context: a feature, and the code of their tokens.

    Queries come from the code only, and the layer's output is added to it.
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
            angles: the angles of the rows' positions.
            angles_above: the angles of the positions of the nodes above, which the features belong to.
        """
        normed = self.input_layernorm(codes)
        keys, values = self.self_attn.keys_and_values(normed, angles)
        feature_keys, feature_values = self.self_attn.keys_and_values(self.input_layernorm(features), angles_above)
        both_keys = torch.cat([feature_keys, keys], -1)
        both_values = torch.cat([feature_values, values], -1)
        mixed = attend(0, self.self_attn.queries(normed, angles), both_keys, both_values)
        return self.with_inner(codes + self.self_attn.o_proj(mixed.flatten(-2)))


class Chimera(LayeredHead):
    """A Chimera head.

    Args:
        shape, rotary, embedding, tokens: see `LayeredHead`.
        head: the output matrix of "shared" read-outs; None for "own" ones.
    """

    shape: ChimeraShape
    history = 3  # number of last tokens that a row reads
    views: tuple[View, ...] = ()  # see `TrunkShape.views`: rows attend to everything above them

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
        how = "an output matrix for each" if shape.read_out == OWN else "a map for each, and one output matrix"
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
            features: the feature of the node above each row.
            positions: any numbers that grow by one from node to node; only differences count.
            attend: lets rows attend to the rows above them, and to themselves.
        """
        codes = self.trigrams(self.embed_tokens(tokens).to(features.dtype))
        return self.layer(codes, features, self.rotary(positions), self.rotary(positions - 1), attend)

    def fed_back(self, x: Rows) -> Rows:
        """Return the features for rows below, from the states of rows that the target has not scored."""
        return x

    def logits(self, far: int, features: Rows, x: Rows) -> Logits:
        """Return the logits of the next token, from the states of rows.

        Args:
            far: how far below the last scored node the rows are, at least 1.
            features: the feature of that scored node.
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

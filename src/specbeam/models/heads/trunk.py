"""Pair trunks: heads whose rows read a feature of the target and the token after it (EAGLE-1, 2 and 3, HASS, MTP).

Row v belongs to a node of the tree of drafts and reads the feature of the node above v and v's own token. The feature is the
target's, where it has scored the node above; below drafts it is the head's own state there.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specbeam.core.records import FINAL
from specbeam.models.heads.arrays import PerNode, PerRow, Rows, TargetStates, TokenMap
from specbeam.models.heads.borrowed import BorrowedRotary
from specbeam.models.heads.head import (
    DraftRows,
    LayeredHead,
    described_rope,
    described_taps,
    described_views,
)
from specbeam.models.heads.layers import Attend, DecoderLayer, Gated, LayerSizes, Norm, PairLayer, Rotary, View
from specbeam.models.heads.trees import ScoredTrees
from specbeam.models.heads.unroll import drafted_rows


@dataclass(frozen=True)
class TrunkShape:
    """The shape of a pair trunk.

    Attributes:
        sizes: the sizes of a layer that reads rows of the head's width.
        layers: number of layers.
        taps: the hidden states of the target that make a feature, see `Needs.columns`.
        target_width: size of a hidden state of the target.
        pairs: how embedding and feature are joined. "attention": the first layer's attention reads both (EAGLE-3).
            "projection": one matrix joins them before the first layer (EAGLE-1, 2, HASS). "normed projection": the same,
            both normed (MTP).
        swaps: whether the feature comes before the embedding in the projection (MiMo).
        joins_bias: whether the matrix that makes features (EAGLE-3) or joins pairs (the others) has a bias.
        norms_features: how the states of the target are normed before they make a feature: "no", "all" together, or "each"
            separately.
        norms_residual: see `PairLayer`.
        feeds_normed: whether the head's own state is normed before it is fed back as a feature.
        norms_output: whether the head's rows are normed before the output matrix.
        sampling: inner size of the gate by which the next token changes the feature before they are joined (FSPAD); 0: none.
        alignment: inner size of a layer between states that are fed back and states that make logits (FSPAD); 0: none.
        logit_gradient: the share of the logits' gradient that reaches the states in training.
        draft_vocab: number of tokens of the head.
        views: which rows the rows of each layer attend to; (): everything above. Drafts see all rows of their own draft.
    """

    sizes: LayerSizes
    layers: int
    taps: tuple[int, ...]
    target_width: int
    pairs: str
    draft_vocab: int
    swaps: bool = False
    joins_bias: bool = False
    norms_features: str = "no"
    norms_residual: bool = False
    feeds_normed: bool = False
    norms_output: bool = True
    sampling: int = 0
    alignment: int = 0
    logit_gradient: float = 1.0
    views: tuple[View, ...] = ()


class FeatureSampling(Gated):
    """A change of features by the token drawn after them: a feature alone does not determine the token (FSPAD)."""

    def __init__(self, embed: int, width: int, inner: int) -> None:
        super().__init__(width, inner, embed)

    def forward(  # type: ignore[override]
        self, embedded: Float[Tensor, "*rows embed"], features: Rows
    ) -> Rows:
        """Return the features, changed by the tokens."""
        return features + self.gated(embedded, features)


class Alignment(nn.Module):
    """A layer between the states that estimate the target's and the states that make logits (FSPAD)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Rows) -> Rows:
        """Return the states that make logits."""
        return x + self.down_proj(nn.functional.silu(self.up_proj(x)))


class BorrowedParts(NamedTuple):
    """The parts of a trunk of a target's kind (see heads/borrowed.py), with their weights."""

    layer: nn.Module  # called as `DecoderLayer` is
    enorm: nn.Module  # norm of embeddings
    hnorm: nn.Module  # norm of features
    norm: nn.Module  # norm of the head's output


class PairTrunk(LayeredHead):
    """A pair trunk; its tensors have the names of speculators' EAGLE-3 files.

    Equations (1) to (10) of the project's notes on heads; sources: EAGLE (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840),
    DeepSeek-V3 (arXiv 2412.19437).

    Args:
        shape, rotary, embedding, head, tokens: see `LayeredHead`.
        borrowed: parts that replace those here; only with "normed projection" and one layer.
    """

    shape: TrunkShape
    history = 1  # number of last tokens that a row reads

    def __init__(
        self,
        shape: TrunkShape,
        rotary: Rotary,
        embedding: nn.Embedding,
        head: nn.Linear,
        tokens: TokenMap = None,
        borrowed: BorrowedParts | None = None,
    ) -> None:
        super().__init__(shape, rotary, embedding, head, tokens)
        sizes = shape.sizes
        width = sizes.width
        embed = embedding.weight.shape[1]
        states = self.states_size
        self.fc = nn.Linear(states if shape.pairs == "attention" else embed + width, width, shape.joins_bias)
        if shape.pairs == "normed projection":
            self.enorm: nn.Module = borrowed.enorm if borrowed else Norm(embed, sizes.eps)
            self.hnorm: nn.Module = borrowed.hnorm if borrowed else Norm(width, sizes.eps)
        if borrowed is None:
            self._make_layers(embed)
        else:
            self.layers = nn.ModuleList([borrowed.layer])
            self.norm = borrowed.norm

    def _make_layers(self, embed: int) -> None:
        """Make the layers, and the norms of features and of the head's rows.

        Args:
            embed: size of an embedding.
        """
        shape = self.shape
        sizes = shape.sizes
        width = sizes.width
        reads_pairs = shape.pairs == "attention"
        if shape.norms_features == "all":
            self.input_norm = Norm(self.states_size, sizes.eps)
        if shape.norms_features == "each":
            self.fc_norm = nn.ModuleList(Norm(shape.target_width, sizes.eps) for _ in shape.taps)
        first: nn.Module = DecoderLayer(sizes, has_first_norm=shape.pairs != "projection")
        if reads_pairs:
            pair_sizes = LayerSizes(**{**vars(sizes), "reads": embed + width})
            first = PairLayer(pair_sizes, shape.norms_residual)
        self.layers = nn.ModuleList([first, *(DecoderLayer(sizes) for _ in range(shape.layers - 1))])
        self.norm = Norm(width, sizes.eps) if shape.norms_output else nn.Identity()
        if shape.sampling:
            self.feature_sampling = FeatureSampling(embed, width, shape.sampling)
        if shape.alignment:
            self.alignment = Alignment(width, shape.alignment)

    @property
    def views(self) -> tuple[View, ...]:
        """See `TrunkShape.views`."""
        return self.shape.views

    @property
    def is_fspad(self) -> bool:
        """Whether the head has one of FSPAD's modules."""
        return bool(self.shape.sampling or self.shape.alignment)

    @property
    def described(self) -> dict[str, str]:
        shape = self.shape
        kinds = {"attention": "EAGLE-3", "projection": "EAGLE-1, EAGLE-2 or HASS", "normed projection": "MTP"}
        norms = {"no": "not normed", "all": "normed together", "each": "normed separately"}
        reads = {
            "reads": f"{described_taps(shape.taps)}, {norms[shape.norms_features]}",
            "attention is added to": "the normed feature" if shape.norms_residual else "the feature",
        }
        if shape.pairs == "normed projection":
            order = "feature, then embedding" if shape.swaps else "embedding, then feature"
            reads = {"reads": described_taps(shape.taps), "projects": f"{order}, both normed"}
        return {
            "kind": f"{'FSPAD' if self.is_fspad else kinds[shape.pairs]}: reads pairs of a feature and the next token",
            "layers": str(shape.layers),
            **reads,
            "feeds back": "normed states" if shape.feeds_normed else "states before the norm",
            "positions": described_rope(self.rotary.rope),
            **described_views(shape.views),
        }

    def drafts(self, trees: ScoredTrees, depth: int, wanted: PerNode) -> list[DraftRows]:
        found = []
        for _, nodes, own in drafted_rows([self], trees, depth, wanted):
            estimates = own if self.shape.pairs == "projection" else None
            found.append(DraftRows(nodes, self.logits(own), estimates=estimates))
        return found

    def features(self, states: TargetStates) -> Rows:
        """Return the features of scored nodes, from the target's hidden states there."""
        shape = self.shape
        states = states.to(self.fc.weight.dtype)
        if shape.pairs != "attention":
            return states
        if shape.norms_features == "all":
            states = self.input_norm(states)
        if shape.norms_features == "each":
            parts = states.split(shape.target_width, -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(states)

    def forward(self, tokens: PerRow, features: Rows, positions: PerRow, attend: Attend) -> Rows:
        """Return the head's states of rows.

        Args:
            tokens: the token of each row.
            features: the feature of the node above each row.
            positions: any numbers that grow by one from node to node; only differences count.
            attend: lets rows attend to the rows above them.
        """
        embedded = self.embed_tokens(tokens).to(features.dtype)
        angles = self.rotary(positions)
        first, *others = self.layers
        if self.shape.pairs == "attention":
            x = first(embedded, features, angles, attend)
        else:
            x = first(self._joined(embedded, features), angles, 0, attend)
        for number, layer in enumerate(others, 1):
            x = layer(x, angles, number, attend)
        return x

    def _joined(self, embedded: Float[Tensor, "*rows embed"], features: Rows) -> Rows:
        """Return the input of the first layer: embedding and feature, joined by a matrix."""
        if self.shape.sampling:
            features = self.feature_sampling(embedded, features)
        if self.shape.pairs == "normed projection":
            embedded = self.enorm(embedded)
            features = self.hnorm(features)
        both = (features, embedded) if self.shape.swaps else (embedded, features)
        return self.fc(torch.cat(both, -1))

    def fed_back(self, x: Rows) -> Rows:
        """Return the features for rows below, from the states of rows that the target has not scored."""
        return self.norm(x) if self.shape.feeds_normed else x

    def logits(self, x: Rows) -> Float[Tensor, "*rows draft_vocab"]:
        """Return the logits of the next token, from the states of rows."""
        share = self.shape.logit_gradient
        if share < 1:  # scales the gradient, not the value
            x = share * x + (1 - share) * x.detach()
        if self.shape.alignment:
            x = self.alignment(x)
        return self.lm_head(self.norm(x))

    def other_readings(self, layers: int) -> Iterator[tuple[str, "PairTrunk"]]:
        """See `Head.other_readings`: taps, positions, residuals, and the states that are fed back."""
        shape = self.shape
        rope = self.rotary.rope
        yield from self.with_moved_taps(layers)
        if shape.pairs == "normed projection":
            yield from self._other_inputs(layers)
        if not isinstance(self.rotary, BorrowedRotary):  # a target's own positions are certain
            yield from self.with_usual_base()
            if rope["rope_type"] != "default":
                plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
                yield "positions without scaling", self.changed(plain)
        if shape.pairs == "attention":
            name = "feature" if shape.norms_residual else "normed feature"
            yield f"attention added to the {name}", self.changed(norms_residual=not shape.norms_residual)
        if shape.norms_output:
            name = "states before the norm" if shape.feeds_normed else "normed states"
            yield f"{name} fed back", self.changed(feeds_normed=not shape.feeds_normed)

    def _other_inputs(self, layers: int) -> Iterator[tuple[str, "PairTrunk"]]:
        """Yield other readings of the input of a module of multi-token prediction."""
        shape = self.shape
        if shape.taps == (FINAL,):
            yield "hidden states before the target's last norm", self.changed(taps=(layers,))
        else:
            yield "hidden states after the target's last norm", self.changed(taps=(FINAL,))
        order = "embedding before feature" if shape.swaps else "feature before embedding"
        yield order, self.changed(swaps=not shape.swaps)

    def changed(self, rope: dict[str, Any] | None = None, **shape: Any) -> "PairTrunk":
        trunk = super().changed(rope, **shape)
        first, *others = trunk.layers
        if isinstance(first, PairLayer) and first.norms_residual != trunk.shape.norms_residual:
            first = copy.copy(first)
            first.norms_residual = trunk.shape.norms_residual
            trunk.layers = nn.ModuleList([first, *others])
        return trunk

"""Block heads: one pass drafts a whole block below a committed token, from features of the target.

The first row of a block reads the embedding of its root, the first token that the target has not scored; the other rows
read the embedding of a mask token. All rows attend to the features of the tokens above the root, and to each other. In
DFlash heads the rows determine the laws of the drafts; in DSpark, Domino, DFlash2 and XPress heads the laws also depend on
the tokens above (heads/correction.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specbeam.models.heads.arrays import Blocks, Odds, PerNode, PerRow, Rows, States, TargetStates, TokenMap
from specbeam.models.heads.correction import (
    BlockNodes,
    Corrected,
    Correction,
    Markov,
    PrefixGRU,
    RecurrentMarkov,
    Refiner,
    Selector,
)
from specbeam.models.heads.head import (
    DraftRows,
    LayeredHead,
    capped,
    described_rope,
    described_taps,
    described_views,
    wanted_below,
)
from specbeam.models.heads.layers import Attend, DecoderLayer, LayerSizes, LocalLayer, Norm, Rotary, View
from specbeam.models.heads.trees import ScoredTrees
from specbeam.models.heads.unroll import BlocksOnTrees


@dataclass(frozen=True)
class BlockShape:
    """The shape of a block head.

    Attributes:
        sizes: the sizes of a layer.
        layers: number of layers.
        taps: the hidden states of the target that make a feature, see `Needs.columns`.
        target_width: size of a hidden state of the target.
        rows: number of rows of a block.
        first_row: the row that gives the law of the first draft: 0, the row of the root ("anchored"), or 1, the first mask
            row.
        draft_vocab: number of tokens of the head.
        correction: how the law of a draft depends on the tokens above it: "no", or one of `CORRECTIONS`.
        rank: rank of the correction's matrices; the size of the network of a "prefix".
        has_confidence: whether the head estimates the acceptance probability of a draft.
        confidence_reads_token: whether this estimate reads the token above.
        inner: size of the state of a "prefix" or of the inner layer of a "refiner"; number of tokens of a "selector".
        pure_drafts: number of successive drafts that a "prefix" does not correct.
        local_rows: number of rows of a block that are mixed around attention and inner layers (DFlash2); 0: none.
        local_group: number of columns that share mixing weights.
        logit_scale: factor of logits before the correction.
        logit_cap: bound of their absolute values, by a hyperbolic tangent; 0: none.
        views: which rows the rows of each layer attend to; (): everything above, and all rows of their block.
    """

    sizes: LayerSizes
    layers: int
    taps: tuple[int, ...]
    target_width: int
    rows: int
    first_row: int
    draft_vocab: int
    correction: str = "no"
    rank: int = 0
    has_confidence: bool = False
    confidence_reads_token: bool = False
    inner: int = 0
    pure_drafts: int = 0
    local_rows: int = 0
    local_group: int = 0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    views: tuple[View, ...] = ()

    @property
    def depth(self) -> int:
        """The number of successive drafts of a block."""
        return self.rows - self.first_row


# The corrections by name: their kind of head, and the prefix of their tensors in files.
CORRECTIONS = {
    "vanilla": ("DSpark", "markov_head"),
    "gated": ("DSpark", "markov_head"),
    "rnn": ("DSpark", "markov_head"),
    "prefix": ("Domino", "domino"),
    "selector": ("DFlash2", "candidate_selector"),
    "refiner": ("XPress", "refiner_head"),
}


def new_correction(shape: BlockShape, embedding: nn.Embedding) -> Correction:
    """Return the correction of a head of this shape.

    Args:
        embedding: the target's.
    """
    vocab = embedding.weight.shape[0]
    width = shape.sizes.width
    if shape.correction in ("vanilla", "gated"):
        return Markov(vocab, shape.draft_vocab, width, shape.rank, shape.correction == "gated")
    if shape.correction == "rnn":
        return RecurrentMarkov(vocab, shape.draft_vocab, width, shape.rank)
    if shape.correction == "prefix":
        return PrefixGRU(embedding, shape.draft_vocab, width, shape.rank, shape.inner, shape.pure_drafts)
    if shape.correction == "selector":
        return Selector(vocab, width, shape.rank, shape.inner)
    return Refiner(vocab, shape.draft_vocab, width, shape.rank, shape.inner, shape.rows, shape.first_row)


class Confidence(nn.Module):
    """An estimate of the acceptance probability of a draft."""

    def __init__(self, reads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(reads, 1)

    def forward(self, x: Float[Tensor, "drafts reads"]) -> Odds:
        """Return the logits of acceptance probabilities."""
        return self.proj(x)[:, 0]


class BlockHead(LayeredHead):
    """A block head; its tensors have the names of speculators' files.

    Equations (12) to (22) of the project's notes on heads; sources: DFlash and DFlash2 (z-lab/dflash), DSpark
    (deepseek-ai/DeepSpec), Domino (SpecForge), XPress (vllm-project/speculators).

    Args:
        mask: the token whose embedding the mask rows read.
    """

    shape: BlockShape
    markov_head: Any  # the correction of a DSpark head

    def __init__(
        self,
        shape: BlockShape,
        rotary: Rotary,
        embedding: nn.Embedding,
        head: nn.Linear,
        mask: int,
        tokens: TokenMap = None,
    ) -> None:
        super().__init__(shape, rotary, embedding, head, tokens)
        self.mask = mask
        sizes = shape.sizes
        self.fc = nn.Linear(self.states_size, sizes.width, bias=False)
        self.hidden_norm = Norm(sizes.width, sizes.eps)
        self.layers = nn.ModuleList()
        for _ in range(shape.layers):
            is_local = shape.local_rows > 0
            layer = LocalLayer(sizes, shape.local_rows, shape.local_group) if is_local else DecoderLayer(sizes)
            self.layers.append(layer)
        self.norm = Norm(sizes.width, sizes.eps)
        self.plain = Correction()
        if shape.correction != "no":
            self.add_module(CORRECTIONS[shape.correction][1], new_correction(shape, embedding))
        if shape.has_confidence:
            self.confidence_head = Confidence(sizes.width + (shape.rank if shape.confidence_reads_token else 0))

    @property
    def correction(self) -> Correction:
        """The correction of laws by the tokens above."""
        if self.shape.correction == "no":
            return self.plain
        return getattr(self, CORRECTIONS[self.shape.correction][1])

    @property
    def described(self) -> dict[str, str]:
        shape = self.shape
        kind = "DFlash" if shape.correction == "no" else CORRECTIONS[shape.correction][0]
        return {
            "kind": f"{kind}: drafts {shape.depth} tokens in one pass",
            "layers": str(shape.layers),
            "reads": described_taps(shape.taps),
            "first draft from": "the row of the root" if shape.first_row == 0 else "the first mask row",
            "correction by the tokens above": shape.correction,
            "mask token": str(self.mask),
            "positions": described_rope(self.rotary.rope),
            **described_views(shape.views),
        }

    def features(self, states: TargetStates) -> Rows:
        return self.hidden_norm(self.fc(states.to(self.fc.weight.dtype)))

    def context(self, features: Rows, positions: PerRow) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of scored nodes by layer; all layers read the same features."""
        angles = self.rotary(positions)
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        return [attention.keys_and_values(features, angles) for attention in attentions]

    def blocks(self, roots: PerRow, positions: PerRow, attend: Attend) -> Blocks:
        """Return the rows of the blocks below roots, from which logits are made; see also `Correction.reads_mean`.

        Args:
            roots: the tokens of the roots.
            positions: the positions of the roots.
            attend: lets the rows of a block attend to the nodes above their root, and to each other.
        """
        filled = torch.full((*roots.shape, self.shape.rows), self.mask, device=roots.device)
        filled[..., 0] = roots
        return self.rows_after_layers(self.embed_tokens(filled).to(self.fc.weight.dtype), positions, attend)

    def rows_after_layers(self, x: Blocks, positions: PerRow, attend: Attend) -> Blocks:
        """Return the rows of blocks after all layers, given the input of the first layer; see `blocks`."""
        angles = self.rotary(positions[..., None] + torch.arange(x.shape[-2], device=x.device))
        for number, layer in enumerate(self.layers):
            x = layer(x, angles, number, attend)
        rows: Tensor = self.norm(x)
        if self.correction.reads_mean:
            rows = torch.cat([rows, rows.mean(-2, keepdim=True).expand_as(rows)], -1)
        return rows

    def first_states(self, rows: Rows, tokens: PerRow, above: PerRow) -> States:
        """Return the correction's states at roots.

        Args:
            rows: the first rows of their blocks.
            tokens: the tokens of the roots.
            above: the tokens before them.
        """
        correction = self.correction
        if self.shape.first_row == 0:
            return rows.new_zeros(len(rows), correction.state_size)
        return correction.start(rows, tokens, above)

    def corrected(self, far: int, rows: Rows, tokens: PerRow, states: States) -> Corrected:
        """Return the logits below nodes, and the states for their children.

        Args:
            far: depth of the nodes below the roots of their blocks.
            rows: the rows of the blocks at this depth.
            tokens: the tokens of the nodes.
            states: the states that the nodes' parents pass down.
        """
        shape = self.shape
        base: Tensor = self.lm_head(rows[..., : shape.sizes.width])
        if shape.logit_scale != 1:
            base = base * shape.logit_scale
        return self.correction(BlockNodes(far, rows, tokens, states, capped(base, shape.logit_cap)))

    def confidence(self, rows: Rows, tokens: PerRow) -> Odds | None:
        """Return the logits of the acceptance probabilities of drafts below these tokens; None without an estimate."""
        if not self.shape.has_confidence:
            return None
        rows = rows[..., : self.shape.sizes.width]
        if self.shape.confidence_reads_token:
            rows = torch.cat([rows, self.markov_head.markov_w1(tokens)], -1)
        return self.confidence_head(rows)

    def drafts(self, trees: ScoredTrees, depth: int, wanted: PerNode) -> list[DraftRows]:
        """See `Head.drafts`: each node is the root of its own block, and a draft in the blocks of its ancestors."""
        return self.drafts_in(self.blocks(trees.tokens, trees.depths, self.attend_in(trees)), trees, depth, wanted)

    def attend_in(self, trees: ScoredTrees) -> Attend:
        """Return the attention of the rows of blocks below all nodes of trees: to the nodes above, and to each other."""
        features = self.features(trees.states_at(self.taps))
        return BlocksOnTrees(trees, self.shape.views, self.context(features, trees.depths)).attend

    def drafts_in(
        self,
        rows: Float[Tensor, "trees length rows size"],
        trees: ScoredTrees,
        depth: int,
        wanted: PerNode,
        roots: PerNode | None = None,
    ) -> list[DraftRows]:
        """Return the drafts of the blocks below all nodes of trees; see `drafts`.

        Args:
            rows: the rows of these blocks.
            roots: the nodes whose blocks draft; None: all.
        """
        root = trees.columns
        parents = trees.above(root)
        tokens = trees.tokens.flatten()
        above = trees.tokens.gather(1, parents).flatten()
        states = self.first_states(rows[:, :, 0].flatten(0, 1), tokens, above)
        carries = self.correction.state_size > 0
        found = []
        for deep in range(1, min(depth, self.shape.depth) + 1):
            nodes = wanted_below(trees, wanted if roots is None else wanted & roots.gather(1, root), deep)
            drafted = trees.at(rows[:, :, self.shape.first_row + deep - 1], root).flatten(0, 1)
            if carries:  # all nodes, for the states that their children get
                logits, after = self.corrected(deep - 1, drafted, tokens, states)
                states = trees.at(after.unflatten(0, trees.tokens.shape), parents).flatten(0, 1)
                logits = logits[nodes]
            else:
                logits, _ = self.corrected(deep - 1, drafted[nodes], tokens[nodes], states[nodes])
            found.append(DraftRows(nodes, logits, self.confidence(drafted[nodes], tokens[nodes])))
            root = trees.above(root)
        return found

    def other_readings(self, layers: int) -> Iterator[tuple[str, "BlockHead"]]:
        """See `Head.other_readings`: taps, base of the positions, attention in windows, and the row of the first draft."""
        shape = self.shape
        yield from self.with_moved_taps(layers)
        yield from self.with_usual_base()
        if any(view.within for view in shape.views):
            yield from self._other_views()
        # The tensors of a refiner fit one of them only.
        if shape.rows - (1 - shape.first_row) >= 1 and shape.correction != "refiner":
            name = "first mask row" if shape.first_row == 0 else "row of the root"
            yield f"the {name} for the first draft", self.changed(first_row=1 - shape.first_row)

    def _other_views(self) -> Iterator[tuple[str, "BlockHead"]]:
        """Yield heads with another attention within blocks in layers with a window."""
        for name, is_causal in (("all rows of their block", False), ("rows of their block before them", True)):
            views = tuple(view._replace(is_causal=is_causal) if view.within else view for view in self.shape.views)
            if views != self.shape.views:
                yield f"rows that attend to {name} in layers with windows", self.changed(views=views)

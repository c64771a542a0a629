"""Block heads: one pass drafts a whole block below a decided token, from features of the target (DFlash, DSpark).

The first row of a block reads the embedding of its root, the first token that the target has not scored; the others read
that of a mask token. All rows look at the features of the tokens above the root, and at each other. In DSpark the law of
a draft depends on the token above it, by a low-rank matrix.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from specbeam.heads.head import DraftRows, Head, described_rope, described_taps, moved_taps, wanted_below
from specbeam.heads.layers import BASE, Attend, DecoderLayer, LayerSizes, Norm, Rotary
from specbeam.heads.trees import ScoredTrees


@dataclass(frozen=True)
class BlockShape:
    """The shape of a block head.

    Attributes:
        sizes: of its layers.
        layers: number of them.
        taps: the hidden states of the target that make a feature, see `Needs.columns`.
        target_width: of each of them.
        rows: number of rows of a block.
        first_row: the row that gives the law of the first draft: 0, that of the root itself ("anchored"), or 1, the first
            mask row.
        draft_vocab: number of tokens that the head gives logits for.
        correction: how the law of a draft depends on the token above it: "no", "vanilla" (by this token), or "gated" (by
            this token and the row).
        rank: of the matrices of the correction.
        has_confidence: whether the head says how likely a draft is to be accepted.
        confidence_reads_token: whether it reads the token above for that.
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

    @property
    def depth(self) -> int:
        """The number of drafts, one below the other, of a block."""
        return self.rows - self.first_row


class Correction(nn.Module):
    """What the law of a draft owes to the token above it: a matrix of low rank (DSpark)."""

    def __init__(self, vocab: int, draft_vocab: int, shape: BlockShape) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, shape.rank)
        self.markov_w2 = nn.Linear(shape.rank, draft_vocab, bias=False)
        if shape.correction == "gated":
            self.gate_proj = nn.Linear(shape.sizes.width + shape.rank, shape.rank)

    def forward(
        self, rows: Float[Tensor, "drafts width"], tokens: Int64[Tensor, " drafts"]
    ) -> Float[Tensor, "drafts draft_vocab"]:
        """Return what is added to the logits of drafts below these tokens."""
        read = self.markov_w1(tokens)
        if hasattr(self, "gate_proj"):
            read = torch.sigmoid(self.gate_proj(torch.cat([rows, read], -1))) * read
        added: Tensor = self.markov_w2(read)
        return added


class Confidence(nn.Module):
    """How likely a draft is to be accepted, as the logit of these odds."""

    def __init__(self, reads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(reads, 1)

    def forward(self, x: Float[Tensor, "drafts reads"]) -> Float[Tensor, " drafts"]:
        """Return the logits of the odds."""
        odds: Tensor = self.proj(x)[:, 0]
        return odds


class BlockHead(Head):
    """A head of this kind, as a module whose tensors have the names of speculators' files.

    Equations (12) to (19) of the project's notes on heads; sources: DFlash (z-lab/dflash), DSpark (deepseek-ai/DeepSpec).

    Args:
        rotary: the rotation by positions.
        embedding: float[vocab, width], the target's.
        head: float[draft_vocab, width], the matrix that makes logits, of the target, or the head's own.
        mask: the token whose embedding the rows after the first one read.
        tokens: see `Head.tokens`.
    """

    def __init__(
        self,
        shape: BlockShape,
        rotary: Rotary,
        embedding: nn.Embedding,
        head: nn.Linear,
        mask: int,
        tokens: Int64[Tensor, " draft_vocab"] | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = tokens
        self.mask = mask
        self.embed_tokens = embedding
        self.lm_head = head
        self.rotary = rotary
        sizes = shape.sizes
        self.fc = nn.Linear(self.states_size, sizes.width, bias=False)
        self.hidden_norm = Norm(sizes.width, sizes.eps)
        self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in range(shape.layers))
        self.norm = Norm(sizes.width, sizes.eps)
        if shape.correction != "no":
            self.markov_head = Correction(embedding.weight.shape[0], shape.draft_vocab, shape)
        if shape.has_confidence:
            self.confidence_head = Confidence(sizes.width + (shape.rank if shape.confidence_reads_token else 0))

    @property
    def taps(self) -> tuple[int, ...]:
        """See `Head.taps`."""
        return self.shape.taps

    @property
    def device(self) -> torch.device:
        """See `Head.device`."""
        return self.fc.weight.device

    @property
    def described(self) -> dict[str, str]:
        """See `Head.described`."""
        shape = self.shape
        return {
            "kind": f"{'DFlash' if shape.correction == 'no' else 'DSpark'}: drafts {shape.depth} tokens in one pass",
            "layers": str(shape.layers),
            "reads": described_taps(shape.taps),
            "first draft from": "the row of the root" if shape.first_row == 0 else "the first mask row",
            "correction by the token above": shape.correction,
            "mask token": str(self.mask),
            "positions": described_rope(self.rotary.rope),
        }

    @property
    def states_size(self) -> int:
        """See `Head.states_size`."""
        return len(self.shape.taps) * self.shape.target_width

    def features(self, states: Float[Tensor, "*rows states"]) -> Float[Tensor, "*rows width"]:
        """See `Head.features`."""
        made: Tensor = self.hidden_norm(self.fc(states.to(self.fc.weight.dtype)))
        return made

    def context(
        self, features: Float[Tensor, "*rows width"], positions: Int64[Tensor, "*rows"]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of scored nodes by layer: all layers read the same features."""
        angles = self.rotary(positions)
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        return [attention.keys_and_values(features, angles) for attention in attentions]

    def blocks(
        self, roots: Int64[Tensor, "*blocks"], positions: Int64[Tensor, "*blocks"], attend: Attend
    ) -> Float[Tensor, "*blocks rows width"]:
        """Return the rows of the blocks below roots, from which logits are made.

        Args:
            roots: the tokens of the roots.
            positions: of the roots.
            attend: lets the rows of a block look at the nodes above their root, and at each other.
        """
        count = self.shape.rows
        filled = torch.full((*roots.shape, count), self.mask, device=roots.device)
        filled[..., 0] = roots
        x = self.embed_tokens(filled).to(self.fc.weight.dtype)
        angles = self.rotary(positions[..., None] + torch.arange(count, device=roots.device))
        for number, layer in enumerate(self.layers):
            x = layer(x, angles, number, attend)
        rows: Tensor = self.norm(x)
        return rows

    def logits(
        self, rows: Float[Tensor, "drafts width"], tokens: Int64[Tensor, " drafts"]
    ) -> Float[Tensor, "drafts draft_vocab"]:
        """Return the logits of drafts below these tokens, from their rows of the block."""
        base: Tensor = self.lm_head(rows)
        return base if self.shape.correction == "no" else base + self.markov_head(rows, tokens)

    def confidence(
        self, rows: Float[Tensor, "drafts width"], tokens: Int64[Tensor, " drafts"]
    ) -> Float[Tensor, " drafts"] | None:
        """Return the logits of the odds that the drafts below these tokens are accepted; None if the head does not say."""
        if not self.shape.has_confidence:
            return None
        if self.shape.confidence_reads_token:
            rows = torch.cat([rows, self.markov_head.markov_w1(tokens)], -1)
        odds: Tensor = self.confidence_head(rows)
        return odds

    def drafts(self, trees: ScoredTrees, depth: int, wanted: Bool[Tensor, "rows length"]) -> list[DraftRows]:
        """See `Head.drafts`: each node is the root of a block, and a draft in the blocks of the nodes above it."""
        features = self.features(trees.states_at(self.taps))
        attend = _BlocksOfTrees(trees, self.context(features, trees.depths))
        rows = self.blocks(trees.tokens, trees.depths, attend.attend)
        found = []
        root = torch.arange(trees.tokens.shape[1], device=trees.tokens.device).expand_as(trees.tokens)
        for deep in range(1, min(depth, self.shape.depth) + 1):
            nodes = wanted_below(trees, wanted, deep)
            drafted = trees.at(rows[:, :, self.shape.first_row + deep - 1], root).flatten(0, 1)[nodes]
            tokens = trees.tokens.flatten()[nodes]
            found.append(DraftRows(nodes, self.logits(drafted, tokens), self.confidence(drafted, tokens)))
            root = trees.above(root)
        return found

    def other_readings(self, layers: int) -> Iterator[tuple[str, "BlockHead"]]:
        """See `Head.other_readings`: the numbers of hidden states, positions, and which row drafts first."""
        shape = self.shape
        rope = self.rotary.rope
        for offset, name in ((-1, "hidden states one layer earlier"), (1, "hidden states one layer later")):
            if moved := moved_taps(shape.taps, offset, layers):
                yield name, self.changed(taps=moved)
        if rope["rope_theta"] != BASE:
            yield f"positions of base {BASE:g}", self.changed({**rope, "rope_theta": BASE})
        if shape.rows - (1 - shape.first_row) >= 1:
            name = "first mask row" if shape.first_row == 0 else "row of the root"
            yield f"the {name} for the first draft", self.changed(first_row=1 - shape.first_row)

    def changed(self, rope: dict[str, Any] | None = None, **shape: Any) -> "BlockHead":
        """Return a head that shares all weights with this one, and is read in another way; see `PairTrunk.changed`."""
        head = copy.copy(self)
        head._modules = dict(self._modules)
        head.shape = replace(self.shape, **shape)
        if rope is not None:
            head.rotary = Rotary(self.shape.sizes, rope, self.rotary.positions).to(self.device)
        return head


class _BlocksOfTrees:
    """Lets the rows of the blocks below all nodes of trees look at the nodes above them, and at each other."""

    def __init__(self, trees: ScoredTrees, context: list[tuple[Tensor, Tensor]]) -> None:
        self.context = context
        alike = torch.eye(trees.tokens.shape[1], dtype=torch.bool, device=trees.tokens.device)
        self.above = trees.sees & ~alike

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return what queries, float[trees, nodes, rows, heads, size], make of what they see."""
        above_keys, above_values = self.context[layer]
        group = queries.shape[-2] // keys.shape[-2]
        keys, values, above_keys, above_values = (
            one.repeat_interleave(group, -2) for one in (keys, values, above_keys, above_values)
        )
        scaled = queries / queries.shape[-1] ** 0.5
        to_above = torch.einsum("tnrhs,tmhs->tnrhm", scaled, above_keys)
        to_above = to_above.masked_fill(~self.above[:, :, None, None], -torch.inf)
        to_block = torch.einsum("tnrhs,tnqhs->tnrhq", scaled, keys)
        odds = functional.softmax(torch.cat([to_above, to_block], -1), -1)
        count = to_above.shape[-1]
        mixed = torch.einsum("tnrhm,tmhs->tnrhs", odds[..., :count], above_values)
        return mixed + torch.einsum("tnrhq,tnqhs->tnrhs", odds[..., count:], values)

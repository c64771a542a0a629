"""Corrections of the laws of drafts in a block by the tokens above them: DSpark, Domino, DFlash2 and XPress.

A pass makes a row for each depth of a block. A correction turns the logits of a row into logits of the tokens below a node,
given the node's own token and a state that is passed down from the root of the block, node by node.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from specbeam.models.heads.arrays import Logits, PerRow, Rows, States


class BlockNodes(NamedTuple):
    """Nodes of blocks, all at the same depth below their roots."""

    far: int  # the depth
    rows: Rows  # the rows of the blocks at this depth
    tokens: PerRow  # the tokens of the nodes
    states: States  # the states that the nodes' parents passed down
    base: Logits  # the logits of the rows, before the correction


class Corrected(NamedTuple):
    """The results of a correction at nodes."""

    logits: Logits  # logits of the tokens below
    states: States  # states for the nodes' children


class Correction(nn.Module):
    """A correction. This one adds nothing and carries no state (DFlash).

    Attributes:
        state_size: size of the state that is passed down.
        reads_mean: whether the mean of all rows of a block is appended to each of its rows.
    """

    state_size = 0
    reads_mean = False

    def start(self, rows: Rows, tokens: PerRow, above: PerRow) -> States:
        """Return the states of roots if mask rows draft; the rows of the roots draft nothing then.

        Args:
            rows: the rows of the roots.
            tokens: the tokens of the roots.
            above: the tokens before them.
        """
        return rows.new_zeros(len(rows), self.state_size)

    def forward(self, nodes: BlockNodes) -> Corrected:
        """Return the logits below nodes, and the states for their children."""
        return Corrected(nodes.base, nodes.states)


class Markov(Correction):
    """A low-rank matrix applied to the node's own token; with `is_gated` the row gates it (DSpark)."""

    def __init__(self, vocab: int, draft_vocab: int, width: int, rank: int, is_gated: bool = False) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)
        if is_gated:
            self.gate_proj = nn.Linear(width + rank, rank)

    def forward(self, nodes: BlockNodes) -> Corrected:
        read = self.markov_w1(nodes.tokens)
        if hasattr(self, "gate_proj"):
            read = torch.sigmoid(self.gate_proj(torch.cat([nodes.rows, read], -1))) * read
        return Corrected(nodes.base + self.markov_w2(read), nodes.states)


class RecurrentMarkov(Markov):
    """A low-rank matrix applied to the output of a recurrent network over tokens and rows from the root on (DSpark, "rnn").

    If mask rows draft, the network reads the root and its row before the first draft.
    """

    def __init__(self, vocab: int, draft_vocab: int, width: int, rank: int) -> None:
        super().__init__(vocab, draft_vocab, width, rank)
        self.state_size = rank
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def start(self, rows: Rows, tokens: PerRow, above: PerRow) -> States:
        after, _ = self._read(super().start(rows, tokens, above), tokens, rows)
        return after

    def forward(self, nodes: BlockNodes) -> Corrected:
        after, output = self._read(nodes.states, nodes.tokens, nodes.rows)
        return Corrected(nodes.base + self.markov_w2(torch.tanh(output)), after)

    def _read(self, states: States, tokens: PerRow, rows: Rows) -> tuple[Tensor, Tensor]:
        joined = self.joint_proj(torch.cat([states, self.markov_w1(tokens), rows], -1))
        gate, candidate, output = joined.chunk(3, -1)
        kept = torch.sigmoid(gate)
        return kept * states + (1 - kept) * torch.tanh(candidate), output


class PrefixGRU(Correction):
    """A small network on the row and the state of a gated recurrent unit over the tokens from the root on (Domino).

    Args:
        embedding: the target's, the input of the unit.
        inner: size of the network.
        state: size of the unit.
        pure: number of successive drafts without a correction.
    """

    def __init__(
        self, embedding: nn.Embedding, draft_vocab: int, width: int, inner: int, state: int, pure: int
    ) -> None:
        super().__init__()
        self.state_size = state
        self.pure = pure
        self.embeddings = [embedding]  # in a list, so that it does not become a weight of this module
        self.prefix_gru = nn.GRU(embedding.weight.shape[1], state, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + state, inner, bias=False), nn.SiLU(), nn.Linear(inner, draft_vocab, bias=False)
        )

    def forward(self, nodes: BlockNodes) -> Corrected:
        embedding = self.embeddings[0]
        read = embedding(nodes.tokens).to(nodes.rows.dtype)
        if len(read) == 0:  # the unit refuses empty inputs
            return Corrected(nodes.base, nodes.states)
        made, _ = self.prefix_gru(read[:, None], nodes.states[None].contiguous())
        after = made[:, 0]
        if nodes.far < self.pure:
            return Corrected(nodes.base, after)
        return Corrected(nodes.base + self.embed_proj(torch.cat([nodes.rows, after], -1)), after)


class Selector(Correction):
    """A choice among the likeliest tokens of a row, by a product of the node's token, the row and the candidate (DFlash2).

    All other tokens get probability 0.

    Args:
        top: number of candidates.
    """

    def __init__(self, vocab: int, width: int, rank: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def forward(self, nodes: BlockNodes) -> Corrected:
        likeliest = nodes.base.topk(self.top, -1)
        context = self.predecessor_codebook[nodes.tokens] * self.hidden_projection(nodes.rows)
        products = (context[:, None] * self.successor_codebook[likeliest.indices]).sum(-1)
        nothing = torch.full_like(nodes.base, -torch.inf)
        return Corrected(nothing.scatter(-1, likeliest.indices, likeliest.values + products), nodes.states)


class Refiner(Correction):
    """A small network over the rows and tokens of a block from its start on (XPress).

    Engines run it several times over drafts that are guessed all at once. Here each node gets the exact law given the tokens
    above it. The state is the concatenated inputs of the rows above.

    Args:
        rows: number of rows of a block.
        inner: size of the network's inner layer.
        first_row: see `BlockShape.first_row`.
    """

    reads_mean = True

    def __init__(
        self, vocab: int, draft_vocab: int, width: int, rank: int, inner: int, rows: int, first_row: int
    ) -> None:
        super().__init__()
        self.state_size = rows * rank
        self.first_row = first_row
        self.token_embed = nn.Embedding(vocab, rank)
        self.down_h = nn.Linear(width, rank, bias=False)
        self.down_g = nn.Linear(width, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, rows, rows))
        self.mlp_gate = nn.Linear(rank, inner, bias=False)
        self.mlp_up = nn.Linear(rank, inner, bias=False)
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, draft_vocab, bias=False)

    def start(self, rows: Rows, tokens: PerRow, above: PerRow) -> States:
        """See `Correction.start`: the row of a root reads the token before it."""
        put_in = self._put_in(rows, above)
        return functional.pad(put_in, (0, self.state_size - put_in.shape[-1]))

    def forward(self, nodes: BlockNodes) -> Corrected:
        """See `Correction.forward`. Drafts deeper than the block use the place of its last row."""
        rank, rows = self.mix_l.shape[:2]
        place = min(self.first_row + nodes.far, rows - 1)
        before = nodes.states.unflatten(-1, (rows, rank))
        put_in = self._put_in(nodes.rows, nodes.tokens)
        every = torch.cat([before[:, :place], put_in[:, None], before[:, place + 1 :]], 1)
        mixed = put_in + torch.einsum("rk,nkr->nr", self.mix_l[:, place, : place + 1], every[:, : place + 1])
        refined = mixed + self.mlp_down(functional.silu(self.mlp_gate(mixed)) * self.mlp_up(mixed))
        return Corrected(nodes.base + self.readout(refined), every.flatten(1))

    def _put_in(self, rows: Rows, tokens: PerRow) -> Float[Tensor, "nodes rank"]:
        """Return the network's input from rows with the means of their blocks, and the tokens above their drafts."""
        own, mean = rows.chunk(2, -1)
        read = torch.cat([self.down_h(own), self.down_g(mean), self.token_embed(tokens)], -1)
        return self.in_proj(read)

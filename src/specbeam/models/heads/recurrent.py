"""Heads that pass a state from draft to draft, starting from one feature: Hydra, MLP speculators, ReDrafter."""

import math

import torch
from torch import nn
from torch.nn import functional

from specbeam.models.heads.arrays import Logits, PerRow, Rows, States, StatesAbove
from specbeam.models.heads.feature import FeatureHead, FeatureSizes, Residual

EPS = 1e-6  # epsilon of the norms of MLP speculators


class Hydra(FeatureHead):
    """Medusa heads that also read the embeddings of the drafts above (arXiv 2402.05109); equation (24) of the notes.

    The state is the feature followed by the embeddings of the tokens so far, padded with zeros.

    Args:
        layers: number of residual layers of each head; the first one joins feature and embeddings.
        embedding: the target's.
    """

    def __init__(self, sizes: FeatureSizes, layers: int, embedding: nn.Embedding) -> None:
        super().__init__(sizes)
        width = sizes.width
        self.embed_tokens = embedding
        self.blocks = nn.ModuleList(
            nn.Sequential(
                Residual((head + 2) * width, width, shrinks=True), *(Residual(width, width) for _ in range(layers - 1))
            )
            for head in range(sizes.depth)
        )
        self.matrices = nn.ModuleList(nn.Linear(width, sizes.draft_vocab) for _ in range(sizes.depth))

    def start(self, features: Rows) -> States:
        return functional.pad(features, (0, self.sizes.depth * self.sizes.width))

    def step(self, far: int, states: StatesAbove, tokens: PerRow) -> States:
        """See `FeatureHead.step`. Tokens deeper than the last head are ignored."""
        if far > self.sizes.depth:
            return states
        width = self.sizes.width
        embedded = self.embed_tokens(tokens).to(states.dtype)
        return torch.cat([states[..., : far * width], embedded, states[..., (far + 1) * width :]], -1)

    def logits(self, far: int, states: States) -> Logits:
        read = states[..., : (far + 1) * self.sizes.width]
        return self.matrices[far - 1](self.blocks[far - 1](read))


class Shift(nn.Module):
    """The norm of MLP speculators: root mean square, a weight, and a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Rows) -> Rows:
        """Return the normed rows."""
        return self.weight * scaled(x) + self.bias


def scaled(x: Rows) -> Rows:
    """Return rows scaled to root mean square 1."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


class MLPSpeculator(FeatureHead):
    """A state that each draft projects, adds its token's embedding to, and norms; equation (25) of the notes.

    Source: foundation-model-stack/fms-extras.

    Args:
        inner: size of the state after the first draft.
        scales_input: whether the feature is normed first.
    """

    def __init__(self, sizes: FeatureSizes, inner: int, scales_input: bool = False) -> None:
        super().__init__(sizes)
        depth = sizes.depth
        self.scales_input = scales_input
        self.emb = nn.ModuleList(nn.Embedding(sizes.vocab, inner) for _ in range(depth))
        reads = [sizes.width, *([inner] * (depth - 1))]
        self.proj = nn.ModuleList(nn.Linear(size, inner, bias=False) for size in reads)
        self.head = nn.ModuleList(nn.Linear(inner, sizes.draft_vocab, bias=False) for _ in range(depth))
        self.ln = nn.ModuleList(Shift(inner) for _ in range(depth))
        # With these weights the feature contributes half of the norm of the last state.
        state_weight = 0.5 ** (0.5 / depth)
        self.token_weight = math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight

    def start(self, features: Rows) -> States:
        return scaled(features) / 2**0.5 if self.scales_input else features

    def step(self, far: int, states: StatesAbove, tokens: PerRow) -> States:
        """See `FeatureHead.step`. Drafts deeper than the last head leave the state unchanged."""
        if far > self.sizes.depth:
            return states
        at = far - 1
        moved = self.proj[at](states) + self.token_weight * self.emb[at](tokens)
        return functional.gelu(self.ln[at](moved))

    def logits(self, far: int, states: States) -> Logits:
        return self.head[far - 1](states)


class ReDrafter(FeatureHead):
    """One network for all depths, on the feature and a recurrent state (arXiv 2403.09919); equation (26) of the notes.

    The original release runs its own beam search; here each node has the law that the network gives.
    The state is the feature followed by the recurrent state.

    Args:
        layers: number of residual layers.
        exit_size: size of these layers.
        is_recurrent: whether the state comes from a recurrent network; otherwise it is the sum of embeddings.
        embedding: the target's.
    """

    def __init__(
        self, sizes: FeatureSizes, layers: int, exit_size: int, is_recurrent: bool, embedding: nn.Embedding
    ) -> None:
        super().__init__(sizes)
        width = sizes.width
        self.embed_tokens = embedding
        self.input_proj = nn.Linear(2 * width, exit_size) if exit_size != 2 * width else nn.Identity()
        blocks = [Residual(exit_size, exit_size) for _ in range(layers)]
        self.network = nn.Sequential(*blocks, nn.Linear(exit_size, sizes.draft_vocab, bias=False))
        if is_recurrent:
            self.rnn_u = nn.Linear(width, width)
            self.rnn_w = nn.Linear(width, width, bias=False)

    def start(self, features: Rows) -> States:
        return functional.pad(features, (0, self.sizes.width))

    def step(self, far: int, states: StatesAbove, tokens: PerRow) -> States:
        feature, carried = states.chunk(2, -1)
        embedded = self.embed_tokens(tokens).to(states.dtype)
        if hasattr(self, "rnn_u"):
            carried = functional.silu(self.rnn_w(embedded) + self.rnn_u(carried))
        else:
            carried = embedded + carried
        return torch.cat([feature, carried], -1)

    def logits(self, far: int, states: States) -> Logits:
        return self.network(self.input_proj(states))

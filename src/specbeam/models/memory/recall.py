"""The weights of HMT: two learned embeddings, and the attention of a segment's query to the memories."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Recall(nn.Module):
    """The weights that HMT adds to its model (arXiv 2405.06067, sec. 3; 2 d d_h + 2 d numbers).

    Args:
        size: size of the model's embeddings and last hidden states (d).
        width: size of queries and keys (d_h).

    Attributes:
        summary: the embedding before and after the tokens of a query (T).
        first: the recall of segments without memories (P_init).
        queries, keys: the projections of query and memories (W_q, W_k), without bias.
    """

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.size = size
        self.width = width
        self.summary = nn.Parameter(torch.zeros(size))
        self.first = nn.Parameter(torch.zeros(size))
        self.queries = nn.Linear(size, width, bias=False)
        self.keys = nn.Linear(size, width, bias=False)

    def mixture(
        self, summaries: Float[Tensor, "rows size"], memories: Float[Tensor, "rows memories size"]
    ) -> Float[Tensor, "rows memories"]:
        """Return the share of each memory in the recall of each row (A), which depends on content and not on order."""
        asked = self.queries(summaries)
        offered = self.keys(memories)
        scores = torch.einsum("rw,rmw->rm", asked, offered) / self.width**0.5
        return scores.softmax(-1)

    def forward(
        self, summaries: Float[Tensor, "rows size"], memories: Float[Tensor, "rows memories size"]
    ) -> Float[Tensor, "rows size"]:
        """Return the recall of each row: the mixture of its memories (P)."""
        return torch.einsum("rm,rms->rs", self.mixture(summaries, memories), memories)


def new_recall(embeddings: Float[Tensor, "tokens size"], width: int, seed: int) -> Recall:
    """Return initial weights for a model with these embeddings; the learned embeddings are noise of the same spread."""
    random = torch.Generator().manual_seed(seed)
    size = embeddings.shape[1]
    recall = Recall(size, width)
    spread = float(embeddings.detach().float().std())
    with torch.no_grad():
        for vector in (recall.summary, recall.first):
            vector.copy_(spread * torch.randn(size, generator=random))
        for projection in (recall.queries, recall.keys):
            projection.weight.copy_(torch.randn(width, size, generator=random) / size**0.5)
    return recall

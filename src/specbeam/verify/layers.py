"""VERIFY: joint log-likelihoods under the target, layer by layer."""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64

from specbeam.forest import Forest
from specbeam.probs import row_logp
from specbeam.session import Session

TIE = 1e-12  # log-likelihoods closer than this are equal up to rounding
Nodes = Int64[np.ndarray, " n"]
Layer = tuple[Nodes, Float64[np.ndarray, "n vocab"], Nodes, Nodes]


def layers(session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"], count: int) -> Iterator[Layer]:
    """Yield the first `count` layers from the root down: (nodes, logp, children, their rows in `logp`).

    logp[n, v] belongs to the path to the n-th node and the token v behind it, each conditional warped by itself. End tokens
    have no row: nothing comes after them, and a logits processor need not know what would.
    """
    depths, above = forest.depths(), np.zeros(len(forest))
    going = ~np.isin(forest.tokens, session.limits.eos) | (depths == 0)  # a prompt may end with an end token
    for depth in range(count):
        nodes = np.flatnonzero((depths == depth) & going)
        logp = above[nodes][:, None] + row_logp(
            scored[torch.from_numpy(nodes).to(scored.device)],
            session.warp,
            lambda nodes=nodes: session.paths(forest, nodes),  # type: ignore[misc]
        )
        children = np.flatnonzero(depths == depth + 1)
        rows = np.searchsorted(nodes, forest.parents[children])  # `nodes` ascends, and holds every parent
        above[children] = logp[rows, forest.tokens[children]]
        yield nodes, logp, children, rows

"""VERIFY: joint log-likelihoods under the target, layer by layer."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64

from specbeam.core.forest import Forest
from specbeam.core.laws.warp import dense_logp, on_host, processed_rows
from specbeam.core.session import Session

TIE = 1e-12  # log-likelihoods closer than this are equal up to rounding
Nodes = Int64[np.ndarray, " n"]
Layer = tuple[Nodes, Float64[np.ndarray, "n vocab"], Nodes, Nodes]


def layers(session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"], count: int) -> Iterator[Layer]:
    """Yield the first `count` layers from the root down: (nodes, logp, children, rows of the children's parents in `logp`).

    logp[n, v] is the log-likelihood of the path to the n-th node followed by token v, each conditional warped separately.
    End tokens have no row: nothing follows them, and logits processors may not be able to process such paths.
    """
    depths = forest.depths()
    above = np.zeros(forest.size)
    rows_of_all = on_host(scored)
    going = ~np.isin(forest.tokens, session.limits.eos) | (depths == 0)  # a prompt may end with an end token
    for depth in range(count):
        nodes = np.flatnonzero((depths == depth) & going)
        rows = processed_rows(rows_of_all[nodes], session.warp, _paths_of(session, forest, nodes))
        logp = above[nodes][:, None] + dense_logp(rows, session.warp)
        children = np.flatnonzero(depths == depth + 1)
        places = np.searchsorted(nodes, forest.parents[children])  # `nodes` ascends, and holds every parent
        above[children] = logp[places, forest.tokens[children]]
        yield nodes, logp, children, places


def _paths_of(session: Session, forest: Forest, nodes: Nodes) -> Callable[[], Int64[np.ndarray, "n length"]]:
    return lambda: session.paths(forest, nodes)

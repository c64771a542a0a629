"""PLAN: the best fixed tree for measured acceptance rates and measured costs."""

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from specbeam.core.control.cost import CostCurve

Topology = tuple[Any, ...]  # the subtrees under a node, in the order in which children are tried; () for leaves


def depth_of_tree(topology: Topology) -> int:
    """Return the number of layers below the root."""
    return 1 + max(map(depth_of_tree, topology)) if topology else 0


def layers_of(topology: Topology) -> tuple[int, ...]:
    """Return the number of nodes of each layer below the root."""
    below = itertools.zip_longest(*map(layers_of, topology), fillvalue=0)
    return (len(topology), *map(sum, below)) if topology else ()


def size_of(topology: Topology) -> int:
    """Return the number of nodes below the root."""
    return sum(layers_of(topology))


def sequoia_tree(acceptance: Sequence[float], nodes: int, depth: int) -> tuple[Topology, float]:
    """Return the tree with the most expected tokens per pass, and their number (Sequoia, arXiv 2402.12374, sec. 3.1).

    Args:
        acceptance: probability that the accepted child of a node is the k-th one tried.
        nodes: number of nodes, including the root; fewer if no tree of this size fits the depth and the ranks.
        depth: maximum number of layers below the root.

    >>> sequoia_tree([0.7, 0.175, 0.125], 3, 9)  # a chain of two below the root
    ((((),),), 2.19)
    """
    table = _BestSubtrees(acceptance, nodes, depth)
    size = int(np.flatnonzero(np.isfinite(table.value[depth].max(1))).max())
    return table.tree(size, depth), float(table.value[depth, size].max())


def ranked_tree(ranks: Sequence[Sequence[float]], nodes: int, spine: bool = False) -> Topology:
    """Return the fixed tree with the most expected accepted tokens, given the odds of a child by depth and rank.

    The probability of accepting a path is the product of the odds of its nodes, so the best tree consists of the likeliest
    paths. The result is the best tree if odds fall from rank to rank.

    Sources: Medusa (arXiv 2401.10774), and with `spine` the streamlined tree of BiTA (arXiv 2401.12522).

    Args:
        ranks: for each layer, the odds that the k-th likeliest child of an accepted node is accepted.
        nodes: maximum number of nodes below the root.
        spine: whether only the likeliest node of each layer has children.

    >>> ranked_tree([[0.6, 0.2], [0.5, 0.2]], 3)
    (((),), ())
    """
    waiting: list[tuple[float, tuple[int, ...]]] = []  # (minus the odds of a path, its ranks)
    if ranks and len(ranks[0]):
        waiting.append((-ranks[0][0], (0,)))
    chosen: list[tuple[int, ...]] = []
    while waiting and len(chosen) < nodes:
        negative, path = heapq.heappop(waiting)
        chosen.append(path)
        above = path[:-1]
        rank = path[-1]
        row = ranks[len(above)]
        if rank + 1 < len(row) and row[rank] > 0:
            heapq.heappush(waiting, (negative * row[rank + 1] / row[rank], (*above, rank + 1)))
        may_branch = not spine or not any(path)
        if may_branch and len(path) < len(ranks) and len(ranks[len(path)]):
            heapq.heappush(waiting, (negative * ranks[len(path)][0], (*path, 0)))
    return _topology(set(chosen), ())


def _topology(paths: set[tuple[int, ...]], above: tuple[int, ...]) -> Topology:
    """Return the subtrees under the node at the end of a path of ranks."""
    children: list[Topology] = []
    while (child := (*above, len(children))) in paths:
        children.append(_topology(paths, child))
    return tuple(children)


class _BestSubtrees:
    """The table T[l][m][b]: most expected tokens of a subtree of m nodes and at most l layers whose root has b children."""

    def __init__(self, acceptance: Sequence[float], nodes: int, depth: int) -> None:
        self.acceptance = acceptance
        width = len(acceptance)
        self.value: Float64[np.ndarray, "layers nodes children"] = np.full((depth + 1, nodes + 1, width + 1), -np.inf)
        self.value[:, 1, 0] = 1.0
        for layers in range(1, depth + 1):
            best_below = self.value[layers - 1].max(1)
            for children in range(1, width + 1):
                gain = _scaled(acceptance[children - 1], best_below)
                for size in range(2, nodes + 1):
                    options = self.value[layers, 1:size, children - 1] + gain[size - 1 : 0 : -1]
                    self.value[layers, size, children] = options.max()

    def tree(self, size: int, layers: int) -> Topology:
        """Return the best subtree of `size` nodes and at most `layers` layers."""
        return self._children(size, layers, int(np.argmax(self.value[layers, size])))

    def _children(self, size: int, layers: int, children: int) -> Topology:
        """Return the best subtree of `size` nodes and at most `layers` layers whose root has `children` children."""
        if children == 0:
            return ()
        best_below = self.value[layers - 1].max(1)
        gain = _scaled(self.acceptance[children - 1], best_below)
        options = self.value[layers, 1:size, children - 1] + gain[size - 1 : 0 : -1]
        rest = 1 + int(np.argmax(options))
        return (*self._children(rest, layers, children - 1), self.tree(size - rest, layers - 1))


def _scaled(odds: float, values: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Return odds * values; -inf, the value of an impossible tree, stays -inf even if the odds are 0."""
    return np.where(np.isfinite(values), odds * np.where(np.isfinite(values), values, 0.0), -np.inf)


def fastest_tree(
    acceptance: Sequence[float],
    cost: CostCurve,
    most_nodes: int,
    most_depth: int,
    sizes: Sequence[int] | None = None,
) -> tuple[Topology, float]:
    """Return the tree with the least time per token, and that time in seconds (Sequoia's hardware-aware rule).

    Args:
        acceptance: as in `sequoia_tree`.
        cost: seconds of passes and of a draft layer.
        most_nodes: maximum number of nodes, including the root.
        most_depth: maximum number of layers below the root.
        sizes: candidate numbers of nodes; None: the measured ones.
    """
    table = _BestSubtrees(acceptance, most_nodes, most_depth)
    best = (cost.pass_s(1), 1, 0)  # the root alone gives one token
    for depth in range(1, most_depth + 1):
        for size in (one for one in sizes or cost.nodes if 2 <= one <= most_nodes):
            tokens = float(table.value[depth, size].max())
            if not np.isfinite(tokens):
                continue
            seconds_per_token = (depth * cost.draft_layer_s + cost.pass_s(size)) / tokens
            best = min(best, (seconds_per_token, size, depth))
    seconds_per_token, size, depth = best
    return table.tree(size, depth), seconds_per_token

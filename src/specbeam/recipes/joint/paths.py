"""VERIFY: joint likelihoods of draft paths, the paths that pass a threshold, and the longest of these."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float64, Int64

from specbeam.recipes.joint.layers import TIE

Theta = Literal["chain", "max", "own"]
Prefix = Literal["longest", "first_failure"]
PerNode = Float64[np.ndarray, " nodes"]


@dataclass(frozen=True, eq=False)
class Paths:
    """Draft paths under one root (node 0) with their warped joint log-likelihoods. Parents come before their children."""

    parents: Int64[np.ndarray, " nodes"]
    logp: PerNode  # under the target; -inf from a token of probability 0 on
    logq: PerNode  # under the draft model
    chains: Int64[np.ndarray, " beams"]  # last nodes of the final draft beams, best first
    ended: Bool[np.ndarray, " nodes"] | None = None  # nodes of end tokens; only for `best_possible`
    # Largest log-likelihood of a path that leaves the tree after this node; only for `best_possible`.
    escape: PerNode | None = None

    @cached_property
    def depths(self) -> Int64[np.ndarray, " nodes"]:
        depths = np.zeros(len(self.parents), dtype=np.int64)
        for node in range(1, len(depths)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    def path(self, node: int | np.integer) -> list[int]:
        """Return the nodes below the root down to `node`."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(int(node))
            node = self.parents[node]
        return nodes[::-1]

    def theta(self, kind: Theta) -> PerNode:
        """Return the draft log-likelihood to compare each node with.

        "own": its own; "chain": that of the best final beam at the same depth; "max": the largest at the same depth. An
        ended beam keeps its log-likelihood at all greater depths.
        """
        if kind == "own":
            return self.logq
        by_depth = np.full(int(self.depths.max()) + 1, -np.inf)
        by_depth[0] = 0.0
        last = set(self.chains.tolist())
        for node in range(1, len(self.parents)) if kind == "max" else self.path(self.chains[0]):
            depth = int(self.depths[node])
            span = slice(depth, None if node in last else depth + 1)
            by_depth[span] = np.maximum(by_depth[span], self.logq[node])
        found: Float64[np.ndarray, " nodes"] = by_depth[self.depths]
        return found

    def best_possible(self, length: int) -> float:
        """Return an upper bound of the log-likelihood of all paths of `length` tokens, and of paths that end earlier.

        Each path either stays in the tree or leaves it after some node, by a token that is not a child of this node.
        """
        assert self.escape is not None
        assert self.ended is not None
        inside = self.logp[(self.depths == length) | (self.ended & (self.depths < length))]
        outside = self.escape[self.depths < length]
        return float(max(inside.max(initial=-np.inf), outside.max(initial=-np.inf)))


def passing(paths: Paths, theta: PerNode, threshold: float, prefix: Prefix = "longest") -> Bool[np.ndarray, " nodes"]:
    """Return whether min(1, p / exp(theta)) > threshold at each node, with "first_failure" also at all nodes above it."""
    edge = math.log(threshold) if threshold > 0 else -math.inf
    possible = (paths.logp > -np.inf) & (theta > -np.inf)
    ratio = np.where(possible, paths.logp, -np.inf) - np.where(possible, theta, 0.0)
    fine: Bool[np.ndarray, " nodes"] = possible & (np.minimum(ratio, 0.0) > edge + TIE)
    fine[0] = True
    if prefix == "first_failure":
        for node in range(1, len(fine)):
            fine[node] &= fine[paths.parents[node]]
    return fine


def deepest_in_tree(paths: Paths, threshold: float, theta: Theta = "chain", prefix: Prefix = "longest") -> int:
    """Return the deepest passing node; of several the most likely one, or with theta="own" that of the largest ratio."""
    fine = np.flatnonzero(passing(paths, paths.theta(theta), threshold, prefix)[1:]) + 1
    if len(fine) == 0:
        return 0
    fine = fine[paths.depths[fine] == paths.depths[fine].max()]
    value = paths.logp - paths.logq if theta == "own" else paths.logp
    return int(fine[np.argmax(value[fine])])


def deepest_in_chains(paths: Paths, threshold: float, count: int = 1, prefix: Prefix = "longest") -> int:
    """Return the last node of the longest passing prefix among the `count` best final beams.

    Each beam is judged by its own draft likelihood. Of equally long prefixes the first wins. The search ends at a beam
    that passes as a whole and is longer than all prefixes before it: an ended beam may be short.
    """
    fine = passing(paths, paths.logq, threshold, prefix)
    found = 0
    length = 0
    for last in paths.chains[:count]:
        nodes = paths.path(last)
        passed = max((number for number, node in enumerate(nodes, 1) if fine[node]), default=0)
        if passed > length:
            found = nodes[passed - 1]
            length = passed
            if passed == len(nodes):
                break
    return found

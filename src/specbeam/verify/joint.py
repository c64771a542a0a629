"""VERIFY: by joint likelihood. A draft path lives on if the target likes it, as a whole, nearly as much as the draft did.

This trades the law of the text for likelihood and length, and says so: nothing here is a sample of the target's law.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64

from specbeam.errors import LostLaw, NotSupported
from specbeam.forest import Forest
from specbeam.lm.own import TargetAsDraft
from specbeam.probs import row_logp
from specbeam.records import Certificate, Verdict
from specbeam.session import Rule, Session
from specbeam.verify.single import Walk

Theta = Literal["chain", "max", "own"]
Prefix = Literal["longest", "first_failure"]
Bonus = Literal["sample", "argmax", "none"]
TIE = 1e-12  # log-ratios this close to the threshold are on it, up to rounding
Values = Float64[np.ndarray, " nodes"]


@dataclass(frozen=True, eq=False)
class Paths:
    """Draft paths under one root (node 0) with their joint log-likelihoods, warped; a parent stands before its children."""

    parents: Int64[np.ndarray, " nodes"]
    logp: Values  # by the target; -inf below a token that it cannot say
    logq: Values  # by the draft model
    final: Bool[np.ndarray, " nodes"]  # last nodes of the beams that were left when the draft was complete
    escape: Values | None = None  # largest log-likelihood of a path that leaves the tree after this node

    @cached_property
    def depths(self) -> Int64[np.ndarray, " nodes"]:
        depths = np.zeros(len(self.parents), dtype=np.int64)
        for node in range(1, len(depths)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    @cached_property
    def reach(self) -> Int64[np.ndarray, " nodes"]:
        """Depth up to which a node stands for its path: an ended beam stays in the race to the last layer, as it is."""
        return np.where(self.final, self.depths.max(), self.depths)

    @cached_property
    def chains(self) -> list[int]:
        """Last nodes of the final beams, best first by the draft model, the earlier one of equals first."""
        final = np.flatnonzero(self.final)
        return final[np.argsort(-self.logq[final], kind="stable")].tolist()

    def path(self, node: int) -> list[int]:
        """The nodes from below the root down to `node`."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]

    def theta(self, kind: Theta) -> Values:
        """The draft log-likelihood that each node is compared with: its own, that of the best final beam at the same
        depth ("chain"), or the largest of its depth ("max"). A beam that ended keeps its own at all greater depths.
        """
        if kind == "own":
            return self.logq
        by_depth = np.full(int(self.depths.max()) + 1, -np.inf)
        by_depth[0] = 0.0
        nodes = range(1, len(self.parents)) if kind == "max" else self.path(self.chains[0])
        for node in nodes:
            span = slice(int(self.depths[node]), int(self.reach[node]) + 1)
            by_depth[span] = np.maximum(by_depth[span], self.logq[node])
        return by_depth[self.depths]

    def best_possible(self, length: int) -> float:
        """Upper bound of the log-likelihood of every path of that many tokens, and of those that end before.

        Such a path either stays in the tree or leaves it after some node, by a token that is no child there.
        """
        assert self.escape is not None
        inside = self.logp[(self.depths == length) | (self.final & (self.depths < length))]
        outside = self.escape[(self.depths < length) & ~self.final]
        return float(max(inside.max(initial=-np.inf), outside.max(initial=-np.inf)))


def passing(paths: Paths, theta: Values, threshold: float, prefix: Prefix = "longest") -> Bool[np.ndarray, " nodes"]:
    """Where min(1, p / exp(theta)) > threshold, strictly; "first_failure" asks it of all nodes above too."""
    edge = math.log(threshold) if threshold > 0 else -math.inf
    fine = (np.minimum(paths.logp - theta, 0.0) > edge + TIE) & (paths.logp > -np.inf)
    fine[0] = True
    if prefix == "first_failure":
        for node in range(1, len(fine)):
            fine[node] &= fine[paths.parents[node]]
    return fine


def deepest_in_tree(paths: Paths, threshold: float, theta: Theta = "chain", prefix: Prefix = "longest") -> int:
    """The passing node that reaches deepest; of several the one of largest likelihood (theta "own": of largest ratio)."""
    fine = np.flatnonzero(passing(paths, paths.theta(theta), threshold, prefix)[1:]) + 1
    if len(fine) == 0:
        return 0
    fine = fine[paths.reach[fine] == paths.reach[fine].max()]
    value = paths.logp - paths.logq if theta == "own" else paths.logp
    return int(fine[np.argmax(value[fine])])


def deepest_in_chains(paths: Paths, threshold: float, count: int = 1, prefix: Prefix = "longest") -> int:
    """The longest passing prefix of the `count` best final beams, each by its own odds; the first of equally long ones.
    A beam that passes as a whole ends the search.
    """
    fine = passing(paths, paths.logq, threshold, prefix)
    found, length = 0, 0
    for last in paths.chains[:count]:
        nodes = paths.path(last)
        prefixes = [number for number, node in enumerate(nodes, 1) if fine[node]]
        if prefixes and prefixes[-1] > length:
            length, found = prefixes[-1], nodes[prefixes[-1] - 1]
        if prefixes and prefixes[-1] == len(nodes):
            break
    return found


@dataclass(frozen=True)
class JointRule:
    """Accept the longest draft path whose joint likelihood ratio passes a threshold, then one token of the target's own.

    Works with every draft whose forest knows the draft log-likelihoods of its paths (`Forest.logq`). No chance enters the
    decision; only the bonus token is drawn.

    Args:
        threshold: in [0, 1]. 0 accepts all that the target can say; at 1 nothing passes, which is plain decoding.
        chains: look at this many of the final draft beams alone (1: MTAD, more: MJSD). None: at every node (MMTAD).
        theta: with chains=None: what the nodes are compared with, see `Paths.theta`.
        prefix: "longest": shorter prefixes may fail. "first_failure": they may not.
        bonus: "sample" from the warped law (at temperature 0 its best token), "argmax", or "none" if a draft was accepted.
        coupling: "noise": the bonus is drawn by the noise of its place, so with threshold 1 the text is that of plain
            sampling with the same seed. "dice": by the session's dice.

    Law: approximate: none is stated; accepted blocks carry a `Certificate`.
    Source: arXiv 2407.09722 (MTAD, sec. 3; MJSD in v1; MMTAD in the final version).
    """

    threshold: float
    chains: int | None = None
    theta: Theta = "chain"
    prefix: Prefix = "longest"
    bonus: Bonus = "sample"
    coupling: str = "noise"

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        refuse_audit(session)
        walk, going = Walk(session, forest, scored), True
        node, certificate = 0, None
        if len(forest) > 1:
            paths = judged(session, forest, scored)
            node = self.accepted(paths)
            for step in paths.path(node):
                going = walk.emit(int(forest.tokens[step]), step)
                if not going:
                    break
            if node and walk.node == node:
                certificate = self._certificate(paths, node)
        if going and (node == 0 or self.bonus != "none"):
            self._emit_bonus(walk)
        return replace(walk.verdict(), certificate=certificate)

    def accepted(self, paths: Paths) -> int:
        """The last accepted node; 0 if none is."""
        if self.chains is not None:
            return deepest_in_chains(paths, self.threshold, self.chains, self.prefix)
        return deepest_in_tree(paths, self.threshold, self.theta, self.prefix)

    def _emit_bonus(self, walk: Walk) -> None:
        best = self.bonus == "argmax"
        walk.emit(int(walk.law(walk.node).best(1)[0]) if best else walk.drawn(walk.node, self.coupling), -1)
        walk.steps[-1] = replace(walk.steps[-1], passed=False)  # an end token may have been drafted too

    def _certificate(self, paths: Paths, node: int) -> Certificate | None:
        if self.threshold == 0:  # then nothing is promised
            return None
        theta = paths.logq if self.chains is not None else paths.theta(self.theta)
        length, logp = int(paths.depths[node]), float(paths.logp[node])
        gap = max(paths.best_possible(length) - logp, 0.0)
        return Certificate(1, length, logp, float(theta[node]) + math.log(self.threshold), gap)


@dataclass(frozen=True)
class OnOwnRows:
    """A rule for drafts of the target itself, whose rows were scored while the draft grew."""

    rule: Rule
    lm: TargetAsDraft

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "new vocab"]) -> Verdict:
        return self.rule.verify(session, forest, self.lm.all_rows(session, scored))


def judged(session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Paths:
    """The draft paths of a forest with their likelihoods under both models, each conditional warped by itself."""
    if forest.logq is None or np.isnan(forest.logq).any():
        raise LostLaw(
            "JointRule compares paths by their joint draft likelihood, but these drafts have none (retrieved, merged or "
            "pruned); draft with a model, or verify them with MatchRule"
        )
    depths, logp = forest.depths(), np.zeros(len(forest))
    inner = np.isin(np.arange(len(forest)), forest.parents)
    ended = np.isin(forest.tokens, session.limits.eos) & (depths > 0)
    escape = np.full(len(forest), -np.inf)
    for depth in range(int(depths.max())):
        above = np.flatnonzero((depths == depth) & ~ended)
        rows = row_logp(
            scored[torch.from_numpy(above).to(scored.device)],
            session.warp,
            lambda nodes=above: session.paths(forest, nodes),  # type: ignore[misc]
        )
        below = np.flatnonzero(depths == depth + 1)
        place = np.searchsorted(above, forest.parents[below])
        logp[below] = logp[forest.parents[below]] + rows[place, forest.tokens[below]]
        rows[place, forest.tokens[below]] = -np.inf
        escape[above] = logp[above] + rows.max(1)
    final = ~inner & (ended | (depths == depths.max()))
    return Paths(forest.parents, logp, forest.logq, final, escape)


def refuse_audit(session: Session) -> None:
    if session.audited:
        raise NotSupported(
            "an audit tests that the text follows the target's law, and joint decoding changes it on purpose; "
            "leave audit out, and see the certificate in the report"
        )

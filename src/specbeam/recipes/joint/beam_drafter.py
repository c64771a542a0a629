"""DRAFT: beams ranked by their joint likelihood under the draft model, for rules that judge whole paths.

Unlike in core/draft/beams.py, whose layers follow the target's law of beam sampling, a path is ranked only by the sum of its
warped conditional log-probabilities, finished beams still compete with the others, and only the best beams may be passed on.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float64, Int64

from specbeam.core.dice import Dice
from specbeam.core.draft.tree import GrowingTree
from specbeam.core.forest import CHOSEN, LOST, Forest, siblings
from specbeam.core.laws.rows import RowLaw
from specbeam.core.laws.warp import best_places

FAINT = 1e-100  # relative probabilities below this are rescaled, for precision


@dataclass(frozen=True, eq=False)
class RankedBeams:
    """The beams of one draft after a layer, best first.

    Beams of equal likelihood are in the order of parents and tokens in mode "search", and in draw order in mode "sample".
    """

    nodes: Int64[np.ndarray, " beams"]  # forest nodes, also of ended beams
    logq: Float64[np.ndarray, " beams"]  # log-likelihood of the path
    ended: Bool[np.ndarray, " beams"]
    counts: Int64[np.ndarray, " beams"]  # number of draws of each beam, with replacement

    @classmethod
    def start(cls, tree: GrowingTree) -> "RankedBeams":
        """Return the beams before the first layer: the roots."""
        roots = len(tree.roots)
        counts = tree.session.beams.counts
        return cls(np.arange(roots), np.array([*tree.root_scores().values()]), np.zeros(roots, dtype=bool), counts)

    def extended_scores(
        self, frontier: Int64[np.ndarray, " frontier"], logq: Float64[np.ndarray, "frontier vocab"]
    ) -> Float64[np.ndarray, "beams vocab"]:
        """Return the log-likelihood of each beam with each next token.

        An ended beam has its own log-likelihood in the first column and -inf in the others.

        Args:
            frontier: nodes of the beams that have a row in `logq`, in the order of the beams. Other beams get no extensions.
        """
        scores = np.full((len(self.nodes), logq.shape[1]), -np.inf)
        live = np.isin(self.nodes, frontier)
        scores[live] = self.logq[live][:, None] + logq
        scores[self.ended, 0] = self.logq[self.ended]
        return scores


@dataclass(frozen=True)
class JointBeams:
    """A growth that decodes beams with the draft model, `shape.width` beams of `shape.depth` tokens.

    The candidates of a layer are all extensions of live beams, and unchanged ended beams. Their scores are joint
    log-likelihoods. Candidates of probability 0 are never chosen, so there may be fewer than `shape.width` beams.

    Source: arXiv 2407.09722, sec. 3.

    Args:
        mode: "search" keeps the best candidates; "sample" draws them by their normalised joint probabilities. At
            temperature 0 both search.
        replacement: draw independently, with replacement (mode "sample" only); a beam drawn twice has twice the weight in
            the next layer.
        chains: number of final beams to pass on, best first; None: the whole forest.
        lost_ends: when passing on the whole forest, include ended beams that likelier ones replaced later.
    """

    mode: Literal["search", "sample"] = "sample"
    replacement: bool = False
    chains: int | None = None
    lost_ends: bool = False

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None:
        beams: RankedBeams = tree.memory.get("beams") or RankedBeams.start(tree)
        logq = np.stack([law.spread().logp for law in laws])
        scores = beams.extended_scores(tree.frontier, logq).ravel()
        is_drawn = self.mode == "sample" and not tree.session.warp.greedy
        if is_drawn:
            weights = np.repeat(beams.counts, logq.shape[1])
            chosen, counts = drawn_candidates(scores, weights, tree.shape.width, self.replacement, tree.session.dice)
        else:
            chosen = best_places(scores, tree.shape.width)
            counts = np.ones_like(chosen)
        parents, tokens = np.divmod(chosen, logq.shape[1])
        had_ended = beams.ended[parents]
        goes_on = ~had_ended
        nodes = beams.nodes[parents]
        new = _add_layer(tree, nodes[goes_on], tokens[goes_on], scores[chosen][goes_on], deterministic=not is_drawn)
        nodes[goes_on] = new
        ended = had_ended | np.isin(tokens, tree.session.limits.eos)
        tree.memory["beams"] = RankedBeams(nodes, scores[chosen], ended, counts)
        tree.frontier = new if not ended.all() else new[:0]

    def finish(self, tree: GrowingTree) -> None:
        """Choose the nodes to pass on: the paths of the best beams, or all nodes except replaced ended beams."""
        beams: RankedBeams | None = tree.memory.get("beams")
        if beams is None:
            return
        tree.forest = forest = tree.forest._replace(beams=beams.nodes[: self.chains])
        if self.chains is not None:
            tree.kept = _with_ancestors(forest, beams.nodes[: self.chains])
        elif not self.lost_ends:
            ends = np.isin(forest.tokens, tree.session.limits.eos) & (forest.parents >= 0)
            tree.kept = np.flatnonzero(~ends | np.isin(np.arange(forest.size), beams.nodes))
        if tree.kept is not None and len(tree.kept) == forest.size:
            tree.kept = None


def _with_ancestors(forest: Forest, nodes: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " kept"]:
    """Return all roots, these nodes and their ancestors, ascending."""
    kept = {*range(forest.roots)}
    for node in nodes.tolist():
        while node not in kept:
            kept.add(node)
            node = int(forest.parents[node])
    return np.array(sorted(kept), dtype=np.int64)


def drawn_candidates(
    scores: Float64[np.ndarray, " n"], counts: Int64[np.ndarray, " n"], width: int, replacement: bool, dice: Dice
) -> tuple[Int64[np.ndarray, " k"], Int64[np.ndarray, " k"]]:
    """Return at most `width` draws from the law counts * exp(scores): distinct candidates, best first, and counts.

    Probabilities are relative to the best remaining candidate, so that much smaller ones do not underflow.
    """
    odds = np.zeros(len(scores))
    drawn = list[int]()
    while len(drawn) < width:
        if odds.max(initial=0.0) < FAINT:
            left = scores.copy()
            left[drawn] = -np.inf
            if (top := left.max(initial=-np.inf)) == -np.inf:
                break
            odds = counts * np.exp(left - top)
        drawn.append(dice.pick(odds))
        if not replacement:
            odds[drawn[-1]] = 0.0
    times = Counter(drawn)  # in the order of the first draws, which breaks ties
    chosen = np.array([*times], dtype=np.int64)
    counts = np.array([*times.values()], dtype=np.int64)
    order = np.argsort(-scores[chosen], kind="stable")
    return chosen[order], counts[order]


def _add_layer(
    tree: GrowingTree,
    parents: Int64[np.ndarray, " n"],
    tokens: Int64[np.ndarray, " n"],
    logq: Float64[np.ndarray, " n"],
    deterministic: bool,
) -> Int64[np.ndarray, " n"]:
    """Add a layer of nodes, one group per parent: CHOSEN if deterministic, LOST if drawn. Returns the nodes."""
    nodes = tree.forest.size + np.arange(len(tokens))
    groups = []
    for parent in dict.fromkeys(parents.tolist()):
        here = parents == parent
        groups.append(siblings(CHOSEN if deterministic else LOST, [parent], tokens[here], nodes[here]))
    tree.forest = tree.forest.grown(tokens, parents, logq, groups)
    return nodes

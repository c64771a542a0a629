"""DRAFT: beams ranked by their joint likelihood under the draft model, for rules that judge whole paths.

Unlike the layers of `draft/beams.py`, which share the law of beam sampling with the target, these rank a path by the sum
of its warped conditionals alone, keep a beam that ended in the race, and may hand on only the best of them.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float64, Int64

from specbeam.core.dice import Dice
from specbeam.core.forest import CHOSEN, LOST, Forest, siblings
from specbeam.draft.tree import GrowingTree
from specbeam.laws.rows import RowLaw
from specbeam.laws.warp import best_places

FAINT = 1e-100  # odds from which on precision is worth another look


@dataclass(frozen=True, eq=False)
class Slots:
    """The beams of one draft after a layer, best first.

    Equal ones stand by parent slot and then token where they were searched; where they were drawn, in draw order, which
    favours no token.
    """

    nodes: Int64[np.ndarray, " slots"]  # forest nodes; ended beams have one too, so that they can be judged
    logq: Float64[np.ndarray, " slots"]  # log-likelihood of the path
    ended: Bool[np.ndarray, " slots"]
    counts: Int64[np.ndarray, " slots"]  # how often each was drawn, with replacement

    @classmethod
    def start(cls, tree: GrowingTree) -> "Slots":
        roots = len(tree.roots)
        counts = tree.session.beams.counts
        return cls(np.arange(roots), np.array([*tree.standing().values()]), np.zeros(roots, dtype=bool), counts)

    def prolonged(
        self, front: Int64[np.ndarray, " front"], logq: Float64[np.ndarray, "front vocab"]
    ) -> Float64[np.ndarray, "slots vocab"]:
        """Log-likelihood of each beam with each next token; that of an ended beam stands in the first column, as it is.

        `front` names the beams with a row in `logq`, in the order of their slots; the others cannot go on.
        """
        scores = np.full((len(self.nodes), logq.shape[1]), -np.inf)
        live = np.isin(self.nodes, front)
        scores[live] = self.logq[live][:, None] + logq
        scores[self.ended, 0] = self.logq[self.ended]
        return scores


@dataclass(frozen=True)
class JointBeams:
    """Beam decoding with the draft model, `shape.width` beams, `shape.depth` tokens deep (arXiv 2407.09722, sec. 3).

    A layer's candidates are all prolongations of live beams, and ended beams as they are; their scores are the true joint
    log-likelihoods. Candidates of no odds are never taken, so a small support keeps fewer beams.

    Args:
        mode: "search" keeps the best candidates; "sample" draws them from their normalised joint odds. At temperature 0
            there is only "search".
        replacement: independent draws (mode "sample" only); a beam drawn twice weighs twice in the next layer.
        chains: how many of the final beams are handed on, best first; None: the whole forest.
        lost_ends: hand on, of a whole forest, ended beams that later lost their place to likelier ones too.
    """

    mode: Literal["search", "sample"] = "sample"
    replacement: bool = False
    chains: int | None = None
    lost_ends: bool = False

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None:
        slots: Slots = tree.memory.get("slots") or Slots.start(tree)
        logq = np.stack([law.spread().logp for law in laws])
        scores = slots.prolonged(tree.front, logq).ravel()
        drawn = self.mode == "sample" and not tree.session.warp.greedy
        if drawn:
            odds = np.repeat(slots.counts, logq.shape[1])
            chosen, counts = taken(scores, odds, tree.shape.width, self.replacement, tree.session.dice)
        else:
            chosen = best_places(scores, tree.shape.width)
            counts = np.ones_like(chosen)
        parents, tokens = np.divmod(chosen, logq.shape[1])
        stays = slots.ended[parents]
        new = _hang(tree, slots.nodes[parents][~stays], tokens[~stays], scores[chosen][~stays], deterministic=not drawn)
        nodes = slots.nodes[parents]
        nodes[~stays] = new
        ended = stays | np.isin(tokens, tree.session.limits.eos)
        tree.memory["slots"] = Slots(nodes, scores[chosen], ended, counts)
        tree.front = new if not ended.all() else new[:0]

    def finish(self, tree: GrowingTree) -> None:
        """Hand on the paths of the best beams; of a whole forest all but the ended beams that lost the race."""
        slots: Slots | None = tree.memory.get("slots")
        if slots is None:
            return
        tree.forest = forest = tree.forest._replace(beams=slots.nodes[: self.chains])
        if self.chains is not None:
            tree.kept = _ancestry(forest, slots.nodes[: self.chains])
        elif not self.lost_ends:
            ends = np.isin(forest.tokens, tree.session.limits.eos) & (forest.parents >= 0)
            tree.kept = np.flatnonzero(~ends | np.isin(np.arange(forest.size), slots.nodes))
        if tree.kept is not None and len(tree.kept) == forest.size:
            tree.kept = None


def _ancestry(forest: Forest, nodes: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " kept"]:
    """The roots, these nodes and all between."""
    found = {*range(forest.roots)}
    for node in nodes.tolist():
        while node not in found:
            found.add(node)
            node = int(forest.parents[node])
    return np.array(sorted(found), dtype=np.int64)


def taken(
    scores: Float64[np.ndarray, " n"], counts: Int64[np.ndarray, " n"], width: int, replacement: bool, dice: Dice
) -> tuple[Int64[np.ndarray, " k"], Int64[np.ndarray, " k"]]:
    """At most `width` draws with odds counts * exp(scores): the distinct ones, best first, and how often each was drawn.

    Odds are relative to the best candidate that is left, so that none is lost for being far below the first.
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
    times = Counter(drawn)  # in the order of their first draw, which decides between equals
    chosen = np.array([*times], dtype=np.int64)
    counts = np.array([*times.values()], dtype=np.int64)
    order = np.argsort(-scores[chosen], kind="stable")
    return chosen[order], counts[order]


def _hang(
    tree: GrowingTree,
    parents: Int64[np.ndarray, " n"],
    tokens: Int64[np.ndarray, " n"],
    logq: Float64[np.ndarray, " n"],
    deterministic: bool,
) -> Int64[np.ndarray, " n"]:
    """The nodes of a new layer, a group per parent: chosen ones are sure, of drawn ones the law is lost."""
    nodes = tree.forest.size + np.arange(len(tokens))
    groups = []
    for parent in dict.fromkeys(parents.tolist()):
        mine = parents == parent
        groups.append(siblings(CHOSEN if deterministic else LOST, [parent], tokens[mine], nodes[mine]))
    tree.forest = tree.forest.grown(tokens, parents, logq, groups)
    return nodes

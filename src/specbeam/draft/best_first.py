"""DRAFT: trees whose shape follows the draft's own confidence, under a budget of nodes."""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from specbeam.draft.children import Draws
from specbeam.draft.tree import Complete, Family, GrowingTree
from specbeam.laws.rows import RowLaw
from specbeam.laws.warp import best_places


@dataclass(frozen=True)
class BestFirst:
    """The `shape.width` nodes of largest value, the product of draft odds on the path; nothing is drawn.

    Each layer expands the `widest` most valuable nodes that wait, each by its `top` likeliest tokens. Values never increase
    along a path, so the best nodes are closed under parents.

    Sources: EAGLE-2 (arXiv 2406.16858) expands within a layer, `within_layer=True`; OPT-Tree (2406.17276) and SpecExec
    (2406.02532) wherever it is worth most. OPT-Tree stops when a layer adds at most `least_gain` expected tokens.
    """

    top: int = 8
    widest: int = 8
    within_layer: bool = False
    least_gain: float = 0.0

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None:
        value: dict[int, float] = tree.memory.setdefault("value", tree.standing())
        waiting: list[tuple[float, int, int]] = tree.memory.setdefault("waiting", [])  # (log value, parent, token)
        ends = tree.session.limits.eos
        fresh = [
            (value[node] + float(law.logp[place]), node, token)
            for node, law in zip(tree.front.tolist(), laws, strict=True)
            for place in best_places(law.logp, self.top).tolist()
            if (token := law.token(place)) not in ends
        ]
        before = self._expected(tree)
        waiting += fresh
        ranked = sorted(fresh if self.within_layer else waiting, reverse=True)
        worth = self._threshold(tree)
        chosen = [one for one in ranked[: self.widest] if one[0] >= worth]
        gain = self._expected(tree) - before
        last = layer + 1 >= tree.shape.depth or gain <= self.least_gain
        start = tree.forest.size
        if not last:
            for node, one in enumerate(chosen, start):
                waiting.remove(one)
                value[node] = one[0]
            scores, parents, tokens = map(list, zip(*chosen, strict=True)) if chosen else ([], [], [])
            tree.forest = tree.forest.grown(tokens, parents, np.array(scores))
        tree.front = np.arange(start, tree.forest.size)

    def _values(self, tree: GrowingTree) -> list[float]:
        """Log values of all nodes seen, best first, the roots left out."""
        seen = [score for node, score in tree.memory["value"].items() if node not in tree.roots]
        return sorted([*seen, *(one[0] for one in tree.memory["waiting"])], reverse=True)

    def _threshold(self, tree: GrowingTree) -> float:
        """The value of the last node within the budget so far."""
        values = self._values(tree)
        budget = tree.shape.width
        return values[budget - 1] if len(values) >= budget else -np.inf

    def _expected(self, tree: GrowingTree) -> float:
        """Expected accepted tokens of the best tree so far, if draft odds were acceptance odds."""
        return float(np.exp(self._values(tree)[: tree.shape.width]).sum())

    def finish(self, tree: GrowingTree) -> None:
        if "waiting" not in tree.memory:
            return
        value: dict[int, float] = tree.memory["value"]
        inner = [(score, node) for node, score in value.items() if node not in tree.roots]
        # Among equal values an ancestor goes first, so that no node is kept without its parent.
        leaves = [(one[0], -1, one) for one in tree.memory["waiting"]]
        depth = tree.forest.depths()
        ranked = sorted(
            [(-score, int(depth[node]), node, None) for score, node in inner]
            + [(-score, int(depth[one[1]]) + 1, one[1], one) for score, _, one in leaves],
            key=lambda entry: entry[:3],
        )[: tree.shape.width]
        kept = {*tree.roots, *(node for _, _, node, leaf in ranked if leaf is None)}
        for _, _, _, leaf in ranked:
            if leaf is not None:
                kept.add(tree.forest.size)
                tree.forest = tree.forest.grown([leaf[2]], [leaf[1]], np.array([leaf[0]]))
        tree.kept = np.array(sorted(kept), dtype=np.int64)
        _group_as_sure(tree)


def _group_as_sure(tree: GrowingTree) -> None:
    """State for every parent that its children were chosen, not drawn."""
    assert tree.kept is not None
    kept = set(tree.kept.tolist())
    families = list[Family]()
    for parent in tree.kept.tolist():
        tokens = [token for token, node in tree.children_of(parent).items() if node in kept]
        if tokens:
            families.append(Family(parent, Draws(tokens, deterministic=True)))
    tree.add_children(families)


@dataclass(frozen=True)
class BestFirstDraws(Complete):
    """Drawn tokens, as many per node as are worth it (DySpec, arXiv 2410.11744, the variant with a threshold).

    The next draw at a node is worth the worth of the node times the draft mass that its earlier draws left; it is made
    while that is at least `least` and the tree has fewer than `shape.width` nodes. Worth comes from laws and from earlier
    draws, never from the draw in question, so each draw still has the draft law without its earlier siblings.
    """

    least: float = 0.05

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None:
        worth: dict[int, float] = tree.memory.setdefault("worth", _odds(tree))
        greedy = tree.session.warp.greedy
        left = [law.p for law in laws]
        nodes = tree.front.tolist()
        tokens: list[list[int]] = [[] for _ in nodes]
        odds: list[list[float]] = [[] for _ in nodes]
        heap = [(-worth[node], row) for row, node in enumerate(nodes)]
        heapq.heapify(heap)
        budget = tree.shape.width - (tree.forest.size - len(tree.roots))
        while heap and budget > 0 and -heap[0][0] >= self.least:
            negative, row = heapq.heappop(heap)
            mass = left[row].sum()
            if mass <= 0:
                continue
            token = int(left[row].argmax()) if greedy else tree.session.dice.pick(left[row])
            share = float(left[row][token] / mass)
            tokens[row].append(token)
            odds[row].append(-negative * share)
            left[row][token] = 0.0
            heapq.heappush(heap, (negative * (1 - share), row))
            budget -= 1
        families = [
            Family(node, Draws(drawn, deterministic=True) if greedy else Draws(drawn, law.p), law)
            for node, law, drawn in zip(nodes, laws, tokens, strict=True)
            if drawn
        ]
        born = [child for children in tree.add_children(families) for child in children]
        values = [value for some in odds for value in some]
        going = {child: value for child, value in zip(born, values, strict=True) if child >= 0}
        worth |= going
        tree.front = np.array([*going], dtype=np.int64)


def _odds(tree: GrowingTree) -> dict[int, float]:
    return {root: math.exp(score) for root, score in tree.standing().items()}

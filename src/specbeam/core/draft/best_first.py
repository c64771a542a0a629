"""DRAFT: trees whose shape follows the draft model's confidence, with a budget of nodes."""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from specbeam.core.draft.children import Draws
from specbeam.core.draft.tree import Complete, Family, GrowingTree
from specbeam.core.laws.rows import RowLaw
from specbeam.core.laws.warp import best_places


@dataclass(frozen=True)
class BestFirst:
    """A growth that keeps the `shape.width` nodes of largest value; nothing is drawn.

    The value of a node is the product of the draft probabilities on its path. Each layer expands the `widest` most valuable
    nodes that wait, each by its `top` likeliest tokens. Values never increase along a path, so the best nodes include their
    parents.

    Sources: EAGLE-2 (arXiv 2406.16858) expands nodes of the newest layer, `within_layer=True`; OPT-Tree (2406.17276) and
    SpecExec (2406.02532) expand the most valuable nodes of all layers. OPT-Tree stops when a layer adds at most `least_gain`
    expected tokens.
    """

    top: int = 8
    widest: int = 8
    within_layer: bool = False
    least_gain: float = 0.0

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None:
        value: dict[int, float] = tree.memory.setdefault("value", tree.root_scores())  # log values
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
        threshold = self._threshold(tree)
        chosen = [leaf for leaf in ranked[: self.widest] if leaf[0] >= threshold]
        gain = self._expected(tree) - before
        last = layer + 1 >= tree.shape.depth or gain <= self.least_gain
        start = tree.forest.size
        if not last:
            for node, leaf in enumerate(chosen, start):
                waiting.remove(leaf)
                value[node] = leaf[0]
            scores, parents, tokens = map(list, zip(*chosen, strict=True)) if chosen else ([], [], [])
            tree.forest = tree.forest.grown(tokens, parents, np.array(scores))
        tree.front = np.arange(start, tree.forest.size)

    def _values(self, tree: GrowingTree) -> list[float]:
        """Return the log values of all nodes but the roots, including those that wait, best first."""
        expanded = [score for node, score in tree.memory["value"].items() if node not in tree.roots]
        return sorted([*expanded, *(leaf[0] for leaf in tree.memory["waiting"])], reverse=True)

    def _threshold(self, tree: GrowingTree) -> float:
        """Return the log value of the last node within the budget; -inf while there are fewer nodes."""
        values = self._values(tree)
        budget = tree.shape.width
        return values[budget - 1] if len(values) >= budget else -np.inf

    def _expected(self, tree: GrowingTree) -> float:
        """Return the expected accepted tokens of the best tree so far, with draft probabilities as those of acceptance."""
        return float(np.exp(self._values(tree)[: tree.shape.width]).sum())

    def finish(self, tree: GrowingTree) -> None:
        if "waiting" not in tree.memory:
            return
        value: dict[int, float] = tree.memory["value"]
        inner = [(score, node) for node, score in value.items() if node not in tree.roots]
        # Among equal values an ancestor goes first, so that no node is kept without its parent.
        depth = tree.forest.depths()
        ranked = sorted(
            [(-score, int(depth[node]), node, None) for score, node in inner]
            + [(-leaf[0], int(depth[leaf[1]]) + 1, leaf[1], leaf) for leaf in tree.memory["waiting"]],
            key=lambda entry: entry[:3],
        )[: tree.shape.width]
        kept = {*tree.roots, *(node for _, _, node, leaf in ranked if leaf is None)}
        for _, _, _, leaf in ranked:
            if leaf is not None:
                kept.add(tree.forest.size)
                tree.forest = tree.forest.grown([leaf[2]], [leaf[1]], np.array([leaf[0]]))
        tree.kept = np.array(sorted(kept), dtype=np.int64)
        _add_chosen_groups(tree)


def _add_chosen_groups(tree: GrowingTree) -> None:
    """Add a CHOSEN group of siblings for every kept parent: its children were chosen, not drawn."""
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
    """A growth that draws children where they are worth most (DySpec, arXiv 2410.11744, the variant with a threshold).

    The worth of the next draw at a node is the worth of the node times the draft probability that its earlier draws left.
    The draw of most worth is next, while its worth is at least `least` and the tree has fewer than `shape.width` nodes.
    Worth depends on laws and on earlier draws, never on the draw in question, so each draw still has the draft law without
    its earlier siblings.
    """

    least: float = 0.05

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None:
        worth: dict[int, float] = tree.memory.setdefault("worth", _root_odds(tree))
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
        values = [value for node_odds in odds for value in node_odds]
        going = {child: value for child, value in zip(born, values, strict=True) if child >= 0}
        worth |= going
        tree.front = np.array([*going], dtype=np.int64)


def _root_odds(tree: GrowingTree) -> dict[int, float]:
    """Return the likelihood of the beam at each root, relative to the best beam."""
    return {root: math.exp(score) for root, score in tree.root_scores().items()}

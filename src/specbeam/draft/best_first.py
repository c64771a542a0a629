"""DRAFT: trees whose shape follows the draft's own confidence, under a budget of nodes."""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from specbeam.draft.children import Draws
from specbeam.draft.tree import Complete, Litter, Sprout
from specbeam.forest import Row
from specbeam.probs import best


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

    def grow(self, sprout: Sprout, layer: int, rows: list[Row]) -> None:
        value: dict[int, float] = sprout.memory.setdefault("value", sprout.standing())
        waiting: list[tuple[float, int, int]] = sprout.memory.setdefault("waiting", [])  # (log value, parent, token)
        ends = sprout.session.limits.eos
        fresh = [
            (value[node] + float(row.logp[place]), node, token)
            for node, row in zip(sprout.front.tolist(), rows, strict=True)
            for place in best(row.logp, self.top).tolist()
            if (token := row.token(place)) not in ends
        ]
        before = self._expected(sprout)
        waiting += fresh
        ranked = sorted(fresh if self.within_layer else waiting, reverse=True)
        worth = self._threshold(sprout)
        chosen = [one for one in ranked[: self.widest] if one[0] >= worth]
        gain = self._expected(sprout) - before
        last = layer + 1 >= sprout.shape.depth or gain <= self.least_gain
        start = len(sprout.forest)
        if not last:
            for node, one in enumerate(chosen, start):
                waiting.remove(one)
                value[node] = one[0]
            scores, parents, tokens = map(list, zip(*chosen, strict=True)) if chosen else ([], [], [])
            sprout.forest = sprout.forest.grown(tokens, parents, np.array(scores))
        sprout.front = np.arange(start, len(sprout.forest))

    def _values(self, sprout: Sprout) -> list[float]:
        """Log values of all nodes seen, best first, the roots left out."""
        seen = [score for node, score in sprout.memory["value"].items() if node not in sprout.roots]
        return sorted([*seen, *(one[0] for one in sprout.memory["waiting"])], reverse=True)

    def _threshold(self, sprout: Sprout) -> float:
        """The value of the last node within the budget so far."""
        values, budget = self._values(sprout), sprout.shape.width
        return values[budget - 1] if len(values) >= budget else -np.inf

    def _expected(self, sprout: Sprout) -> float:
        """Expected accepted tokens of the best tree so far, if draft odds were acceptance odds."""
        return float(np.exp(self._values(sprout)[: sprout.shape.width]).sum())

    def finish(self, sprout: Sprout) -> None:
        if "waiting" not in sprout.memory:
            return
        value: dict[int, float] = sprout.memory["value"]
        inner = [(score, node) for node, score in value.items() if node not in sprout.roots]
        # Among equal values an ancestor goes first, so that no node is kept without its parent.
        leaves = [(one[0], -1, one) for one in sprout.memory["waiting"]]
        depth = sprout.forest.depths()
        ranked = sorted(
            [(-score, int(depth[node]), node, None) for score, node in inner]
            + [(-score, int(depth[one[1]]) + 1, one[1], one) for score, _, one in leaves],
            key=lambda entry: entry[:3],
        )[: sprout.shape.width]
        kept = {*sprout.roots, *(node for _, _, node, leaf in ranked if leaf is None)}
        for _, _, _, leaf in ranked:
            if leaf is not None:
                kept.add(len(sprout.forest))
                sprout.forest = sprout.forest.grown([leaf[2]], [leaf[1]], np.array([leaf[0]]))
        sprout.kept = np.array(sorted(kept), dtype=np.int64)
        _group_as_sure(sprout)


def _group_as_sure(sprout: Sprout) -> None:
    """State for every parent that its children were chosen, not drawn."""
    assert sprout.kept is not None
    kept, litters = set(sprout.kept.tolist()), list[Litter]()
    for parent in sprout.kept.tolist():
        tokens = [token for token, node in sprout.children_of(parent).items() if node in kept]
        if tokens:
            litters.append(Litter(parent, Draws(tokens, sure=True)))
    sprout.bear(litters)


@dataclass(frozen=True)
class BestFirstDraws(Complete):
    """Drawn tokens, as many per node as are worth it (DySpec, arXiv 2410.11744, the variant with a threshold).

    The next draw at a node is worth the worth of the node times the draft mass that its earlier draws left; it is made
    while that is at least `least` and the tree has fewer than `shape.width` nodes. Worth comes from laws and from earlier
    draws, never from the draw in question, so each draw still has the draft law without its earlier siblings.
    """

    least: float = 0.05

    def grow(self, sprout: Sprout, layer: int, rows: list[Row]) -> None:
        worth: dict[int, float] = sprout.memory.setdefault("worth", _odds(sprout))
        greedy, left = sprout.session.warp.greedy, [row.p.copy() for row in rows]
        nodes = sprout.front.tolist()
        tokens: list[list[int]] = [[] for _ in nodes]
        odds: list[list[float]] = [[] for _ in nodes]
        heap = [(-worth[node], row) for row, node in enumerate(nodes)]
        heapq.heapify(heap)
        budget = sprout.shape.width - (len(sprout.forest) - len(sprout.roots))
        while heap and budget > 0 and -heap[0][0] >= self.least:
            negative, row = heapq.heappop(heap)
            mass = left[row].sum()
            if mass <= 0:
                continue
            token = int(left[row].argmax()) if greedy else sprout.session.dice.pick(left[row])
            share = float(left[row][token] / mass)
            tokens[row].append(token)
            odds[row].append(-negative * share)
            left[row][token] = 0.0
            heapq.heappush(heap, (negative * (1 - share), row))
            budget -= 1
        litters = [
            Litter(node, Draws(drawn, sure=True) if greedy else Draws(drawn, law.p), law)
            for node, law, drawn in zip(nodes, rows, tokens, strict=True)
            if drawn
        ]
        born = [child for children in sprout.bear(litters) for child in children]
        values = [value for some in odds for value in some]
        going = {child: value for child, value in zip(born, values, strict=True) if child >= 0}
        worth |= going
        sprout.front = np.array([*going], dtype=np.int64)


def _odds(sprout: Sprout) -> dict[int, float]:
    return {root: math.exp(score) for root, score in sprout.standing().items()}

"""DRAFT: chains whose tokens have siblings, the more of them the less sure the draft model is (SWIFT, arXiv 2410.06916)."""

from dataclasses import dataclass

import numpy as np

from specbeam.core.draft.children import Draws
from specbeam.core.draft.stems import StemSpec
from specbeam.core.draft.tree import Family, GrowingTree
from specbeam.core.forest import Siblings
from specbeam.core.laws.ranking import Truncation, largest
from specbeam.core.laws.rows import RowLaw
from specbeam.core.session import Session
from specbeam.core.steps import Array

Counts = tuple[tuple[float, int], ...]  # (odds, number of children), descending: of the first odds that are exceeded
OF_BEST: Counts = ((0.95, 3), (0.8, 5), (0.5, 8), (0.0, 10))
OF_DRAWN: Counts = ((0.95, 1), (0.8, 3), (0.5, 5), (0.0, 10))
SIBLINGS = "siblings"  # in the memory of a tree


@dataclass(frozen=True, eq=False)
class _Waiting:
    """Children of a node, of which only the first is in the forest so far."""

    parent: int
    draws: Draws  # by place in the law
    law: RowLaw
    node: int  # of the first draw; -1 if it has none


@dataclass(frozen=True)
class Caterpillar:
    """A growth of chains in which each token has siblings, which are leaves. The draft model never scores these.

    The first draw under a node goes on. How many draws there are depends on the odds of the first one, which stands before
    them and is tried before them, so each is still drawn from the law that it is tried against.

    Args:
        of_drawn: number of children by the odds of the first, if they are drawn, without replacement.
        of_best: the same if they are the likeliest tokens, at temperature 0.
    """

    of_drawn: Counts = OF_DRAWN
    of_best: Counts = OF_BEST

    def spec(self, truncation: Truncation, eos: Array, greedy: bool, constrained: bool) -> StemSpec:
        """Return how steps grow such chains."""
        counts = self.of_best if greedy else self.of_drawn
        odds = np.array([least for least, _ in counts])
        return StemSpec(odds, np.array([count for _, count in counts]), greedy, truncation, eos)

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None:
        """Add the first draw under each node of the front, and keep its siblings for `finish`."""
        session = tree.session
        eos = session.limits.eos
        waiting: list[_Waiting] = tree.memory.setdefault(SIBLINGS, [])
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        for node, law in zip(tree.front.tolist(), laws, strict=True):
            draws = self._draws(law, session)
            first = draws.tokens[0]
            (token,) = law.tokens_at([first]).tolist()
            goes_on = token not in eos
            waiting.append(_Waiting(node, draws, law, tree.forest.size + len(tokens) if goes_on else -1))
            if goes_on:
                tokens.append(token)
                parents.append(node)
                scores.append(_logq_of(tree, node) + float(law.logp[first]))
        before = tree.forest.size
        tree.forest = tree.forest.grown(tokens, parents, np.array(scores))
        tree.front = np.arange(before, tree.forest.size)

    def finish(self, tree: GrowingTree) -> None:
        """Add the siblings as leaves after all chains."""
        eos = tree.session.limits.eos
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        groups: list[Siblings] = []
        for one in tree.memory.get(SIBLINGS, []):
            family = Family(one.parent, one.draws, one.law)
            base = _logq_of(tree, one.parent)
            nodes = [one.node]
            drawn = family.tokens
            for place, token in zip(one.draws.tokens[1:], drawn[1:], strict=True):
                if token in eos:
                    nodes.append(-1)
                    continue
                nodes.append(tree.forest.size + len(tokens))
                tokens.append(token)
                parents.append(one.parent)
                scores.append(base + float(one.law.logp[place]))
            groups.append(family.group(drawn, nodes))
        tree.forest = tree.forest.grown(tokens, parents, np.array(scores), groups)

    def _draws(self, law: RowLaw, session: Session) -> Draws:
        """Return the children of a node, the one that goes on first."""
        if session.warp.greedy:
            count = number_of(self.of_best, float(np.exp(law.logp.max())))
            places = largest(law.logp.reshape(1, law.size), np.zeros(1), count)[:count].tolist()
            return Draws(places, deterministic=True)
        left = law.p.copy()
        places = [session.dice.pick(left)]
        count = number_of(self.of_drawn, float(law.p[places[0]]))
        left[places[0]] = 0.0
        while len(places) < count and (left > 0).any():
            places.append(session.dice.pick(left))
            left[places[-1]] = 0.0
        return Draws(places, law.p)


def number_of(counts: Counts, odds: float) -> int:
    """Return the number of children of a node, given the odds of the first.

    >>> [number_of(OF_DRAWN, odds) for odds in (0.99, 0.9, 0.6, 0.1)]
    [1, 3, 5, 10]
    """
    return next((count for least, count in counts if odds > least), counts[-1][1])


def _logq_of(tree: GrowingTree, node: int) -> float:
    """Return the draft log-likelihood of the path to a node."""
    return float(tree.forest.logq[node]) if len(tree.forest.logq) else 0.0

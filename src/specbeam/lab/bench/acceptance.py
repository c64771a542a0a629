"""Acceptance by rank: how often the k-th draft token tried is the accepted one. Sequoia plans its tree with this."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbeam import Pair, sequoia, turns_of
from specbeam.core import Turn
from specbeam.doors import Prompt


@dataclass(frozen=True)
class Acceptance:
    """The probability that the child accepted at a node is the k-th one tried, and the number of nodes counted.

    Attributes:
        odds: share of the nodes at which the k-th child was accepted, for each k. The rest of the nodes accepted none.
        nodes: number of nodes whose children were tried.
    """

    odds: tuple[float, ...]
    nodes: int

    @property
    def error(self) -> tuple[float, ...]:
        """The standard error of each of the odds."""
        odds = np.array(self.odds)
        errors = np.sqrt(odds * (1 - odds) / max(self.nodes, 1))
        return tuple(errors.tolist())


def acceptance(pair: Pair, prompts: Iterable[Prompt], children: int = 8, seed: int = 0, **options: Any) -> Acceptance:
    """Measure how often the k-th draft token tried is the accepted one.

    The drafts are wide flat trees: `children` draws without replacement under the last token, tried in the order in
    which they were drawn.

    Args:
        children: number of draft tokens under the last token.
        options: as for `specbeam.generate`.
    """
    flat = sequoia(children, 1, acceptance=[1 / children] * children, cost=None, controller="fixed")
    counts = np.zeros(children + 1)  # the last entry counts the nodes that accepted no child
    for prompt in prompts:
        for turn in turns_of(pair, prompt, flat, seed=seed, **options):
            if turn.forest.siblings.size:
                counts[_rank_of_accepted(turn)] += 1
    nodes = int(counts.sum())
    odds = counts[:-1] / max(nodes, 1)
    rounded = np.floor(odds * 10_000 + 1e-6) / 10_000  # rounds down, so that the sum is at most 1
    return Acceptance(tuple(rounded.tolist()), nodes)


def _rank_of_accepted(turn: Turn) -> int:
    """Return the place of the accepted child in the order of trial, -1 if none was accepted."""
    step = turn.verdict.steps[0]
    if not step.passed:
        return -1
    tried = [token for group in turn.forest.groups_under(0) for token in group.tokens.tolist()]
    return tried.index(int(step.beams.tokens[0]))

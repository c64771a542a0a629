"""Which of several children is accepted, how often: the vector from which Sequoia plans its tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbeam.generation import Prompt, turns_of
from specbeam.pair import Pair
from specbeam.recipes.sequence import sequoia
from specbeam.records import Turn


@dataclass(frozen=True)
class Acceptance:
    """Odds that the child accepted at a node is the k-th one tried, and on how many nodes that rests."""

    odds: tuple[float, ...]
    nodes: int

    @property
    def error(self) -> tuple[float, ...]:
        """One standard error of each."""
        return tuple(float(np.sqrt(p * (1 - p) / max(self.nodes, 1))) for p in self.odds)


def acceptance(pair: Pair, prompts: Sequence[Prompt], children: int = 8, seed: int = 0, **options: Any) -> Acceptance:
    """Measured on wide flat trees: `children` draws without replacement under the last token, tried in draw order."""
    flat = sequoia(children, 1, acceptance=[1 / children] * children)
    taken = np.zeros(children + 1)
    for prompt in prompts:
        for turn in turns_of(pair, prompt, flat, seed=seed, **options):
            if turn.forest.siblings.size:
                taken[_accepted(turn)] += 1
    nodes = int(taken.sum())
    return Acceptance(tuple((taken[:-1] / max(nodes, 1)).round(4).tolist()), nodes)


def _accepted(turn: Turn) -> int:
    """Place of the accepted child among those tried; -1 if there is none."""
    step = turn.verdict.steps[0]
    if not step.passed:
        return -1
    tried = [token for group in turn.forest.groups_under(0) for token in group.tokens.tolist()]
    return tried.index(int(step.beams.tokens[0]))

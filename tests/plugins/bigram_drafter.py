"""A drafter of one's own, without a model: each token is followed by the one that a table names."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from specbeam.core.beams import is_end
from specbeam.core.draft.turns import draft_turn, uncut
from specbeam.core.forest import Forest
from specbeam.core.laws.reduce import SOUND
from specbeam.core.steps import Array, borrowed, step


@borrowed
class BigramSpec(NamedTuple):
    follower: Array  # int64[vocab]
    eos: Array  # int64[ends]


@step
def chains(tokens, parents, follower, eos, depth):
    """Return tokens and parents of a forest, with a chain of up to `depth` followers under each root."""
    roots = len(tokens)
    chain_tokens = np.empty(roots * depth, dtype=np.int64)
    chain_parents = np.empty(roots * depth, dtype=np.int64)
    count = 0
    for root in range(roots):
        if parents[root] >= 0:
            continue
        node = root
        token = follower[tokens[root]]
        for _ in range(depth):
            if is_end(token, eos):
                break
            chain_tokens[count] = token
            chain_parents[count] = node
            node = roots + count
            token = follower[token]
            count += 1
    return np.append(tokens, chain_tokens[:count]), np.append(parents, chain_parents[:count])


@draft_turn.of(BigramSpec)
@step
def draft_bigrams(drafts, model, task, dice, spent):
    roots = task.roots
    tokens, parents = chains(roots.tokens, roots.parents, drafts.follower, drafts.eos, task.depth)
    forest = Forest(tokens, parents, roots.siblings, roots.logq, roots.beams, roots.frontier_rows, roots.known)
    return uncut(forest), SOUND


@dataclass(frozen=True, eq=False)
class BigramDrafter:
    follower: np.ndarray
    models: ClassVar[tuple[Any, ...]] = ()
    no_law_reason: ClassVar[str] = "takes its drafts from a table"

    def spec(self, session):
        return BigramSpec(self.follower, session.limits.ending)

    def draft(self, sessions, shapes):
        return [self._drafted(session, shape) for session, shape in zip(sessions, shapes, strict=True)]

    def _drafted(self, session, shape):
        roots = Forest.rooted(session.beams.tokens)
        tokens, parents = chains(roots.tokens, roots.parents, self.follower, session.limits.ending, max(shape.depth, 0))
        return roots._replace(tokens=tokens, parents=parents)

    def settle(self, session, turn):
        pass

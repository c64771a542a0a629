"""A drafter that prunes by content: what is left of its draws has no law any more, whatever it claims."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from specbeam.core.draft.tree import TreeDrafter
from specbeam.core.forest import DISTINCT, joined, siblings


@dataclass(frozen=True)
class Thinned:
    """Draws of a tree on three tokens, of which those of draft odds below a fifth are dropped, for one turn.

    Args:
        q: draft odds after a path.
        claims: that what is left was drawn from q without replacement, which is wrong.
    """

    drafter: TreeDrafter
    q: Any
    claims: bool = False

    def draft(self, sessions, shapes):
        (forest,) = self.drafter.draft(sessions, shapes)
        kept = [0]
        for node in range(1, forest.size):
            parent = int(forest.parents[node])
            if parent in kept and self.q(tuple(forest.path(parent)))[forest.tokens[node]] >= 0.2:
                kept.append(node)
        thin = forest.selected(np.array(kept))
        if not self.claims:
            return [thin.lost()]
        return [thin._replace(siblings=joined([self._claimed(thin, group) for group in thin.siblings.groups()]))]

    def _claimed(self, thin, group):
        """The same draws, said to be drawn from q."""
        q = self.q(tuple(thin.path(int(group.parents[0]))))
        return siblings(DISTINCT, group.parents, group.tokens, group.nodes, law=(np.arange(3), q), vocab=3)

    def settle(self, session, turn):
        raise AssertionError("one turn alone")

    close = settle

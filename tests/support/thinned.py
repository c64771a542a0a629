"""A drafter that prunes by content: what is left of its draws has no law any more, whatever it claims."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specbeam.draft.tree import TreeDrafter
from specbeam.forest import Row


@dataclass(frozen=True)
class Thinned:
    """Draws of a tree on three tokens, of which those of draft odds below a fifth are dropped, for one turn.

    Args:
        q: draft odds after a path.
        claims: that what is left was drawn from q, which is wrong.
    """

    drafter: TreeDrafter
    q: Any
    claims: bool = False

    def draft(self, sessions, shapes):
        (forest,) = self.drafter.draft(sessions, shapes)
        kept = [0]
        for node in range(1, len(forest)):
            parent = int(forest.parents[node])
            if parent in kept and self.q(tuple(forest.path(parent)))[forest.tokens[node]] >= 0.2:
                kept.append(node)
        thin = forest.selected(np.array(kept))
        if not self.claims:
            return [thin.lost()]
        laws = [Row(np.log(self.q(tuple(thin.path(int(group.parents[0]))))), 3) for group in thin.groups]
        return [replace(thin, groups=tuple(replace(g, law=law) for g, law in zip(thin.groups, laws, strict=True)))]

    def settle(self, session, turn):
        raise AssertionError("one turn alone")

    close = settle

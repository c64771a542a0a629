"""DRAFT without a model, under a catalogue: the next levels of its trie, where they have few tokens."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specbeam.core.errors import NotSupported
from specbeam.core.forest import LOST, Forest, siblings
from specbeam.core.items import ConstrainedToItems, state_after
from specbeam.core.lm import LM
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session


@dataclass(frozen=True)
class ItemLevels:
    """A drafter that drafts whole levels of a catalogue's trie below the live beams, so that their layers surely pass.

    Only one token continues most items from some level on, so the last levels of all beams often fit in one pass.

    Args:
        most: maximum number of draft nodes in a turn; a level that does not fit is left out, with those below it.
    """

    most: int = 256
    models: ClassVar[tuple[LM, ...]] = ()
    keeps_nodes: ClassVar[bool] = True
    no_law_reason: ClassVar[str] = "drafts all continuations of a catalogue"

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """Return the levels below the live beams of each session."""
        return [self._levels(session, shape.depth) for session, shape in zip(sessions, shapes, strict=True)]

    def _levels(self, session: Session, depth: int) -> Forest:
        constraint = session.warp.constraint
        if not isinstance(constraint, ConstrainedToItems):
            raise NotSupported("drafter 'items' drafts items of a catalogue; give catalogue=..., or another drafter")
        items = constraint.items
        forest = session.undrafted
        node_of = {
            (int(parent), int(token)): node
            for node, (parent, token) in enumerate(zip(forest.parents, forest.tokens, strict=True))
        }
        level = list(enumerate(constraint.roots.tolist()))
        left = self.most
        for _ in range(depth):
            below = [(node, state, _tokens_below(constraint, state)) for node, state in level]
            count = sum(len(tokens) for _, _, tokens in below)
            if count == 0 or count > left:
                break
            left -= count
            tokens_added: list[int] = []
            parents_added: list[int] = []
            groups = []
            level = []
            for node, state, tokens in below:
                nodes = []
                for token in tokens:
                    child = node_of.get((node, token))
                    if child is None:
                        child = forest.size + len(tokens_added)
                        tokens_added.append(token)
                        parents_added.append(node)
                    nodes.append(child)
                    level.append((child, int(state_after(items, state, token))))
                if tokens:
                    groups.append(siblings(LOST, [node], tokens, nodes))
            forest = forest.grown(tokens_added, parents_added, groups=groups)
        return forest

    def settle(self, session: Session, turn: Turn) -> None:
        """Do nothing: the trie is the memory."""


def _tokens_below(constraint: ConstrainedToItems, state: int) -> list[int]:
    """Return the tokens that continue an item after a state, ascending, without end tokens."""
    if state < 0:
        return []
    trie = constraint.items.trie
    tokens = np.asarray(trie.tokens[trie.first[state] : trie.first[state + 1]])
    return [token for token in tokens.tolist() if state_after(constraint.items, state, token) > 0]

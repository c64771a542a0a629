"""DRAFT: all possible paths, for rules that judge whole blocks."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specbeam.core.errors import BadSetting
from specbeam.core.forest import Forest
from specbeam.core.lm import LM
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session


@dataclass(frozen=True)
class EveryBlock:
    """A drafter of all paths of `shape.depth` tokens, without a draft model: for tables and small vocabularies.

    Args:
        vocab: vocabulary size of the target.
        most: maximum number of draft nodes of a tree; `check` rejects larger trees.
    """

    vocab: int
    most: int = 4096
    models: ClassVar[tuple[LM, ...]] = ()

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """Return trees with layers in lexicographic order. End tokens get no nodes, because nothing follows them."""
        return [self._tree(session, shape.depth) for session, shape in zip(sessions, shapes, strict=True)]

    def settle(self, session: Session, turn: Turn) -> None:
        """Do nothing: the drafter has no state."""

    def close(self, session: Session) -> None:
        """Do nothing: the drafter has no state."""

    def check(self, depth: int, eos: tuple[int, ...]) -> None:
        """Raise `BadSetting` if a tree of this depth has more than `most` draft nodes."""
        going = self.vocab - len(set(eos) & set(range(self.vocab)))
        if sum(going**layer for layer in range(1, depth + 1)) > self.most:
            raise BadSetting(
                f"exact joint decoding of {depth + 1} tokens at once over {self.vocab} tokens needs more than "
                f"{self.most} nodes per pass; choose a smaller depth, or the target's own beams: mode='beam_search'"
            )

    def _tree(self, session: Session, depth: int) -> Forest:
        forest = Forest.rooted(session.beams.tokens)
        with session.failing_alone():
            self.check(depth, session.limits.eos)
            going = np.setdiff1d(np.arange(self.vocab), session.limits.eos)
            frontier = np.arange(forest.size)
            for _ in range(depth):
                start = forest.size
                count = len(frontier) * len(going)
                forest = forest.grown(np.tile(going, len(frontier)), np.repeat(frontier, len(going)))
                frontier = np.arange(start, start + count)
        return forest

"""PLAN: the same shape in every turn, cut to what may still be emitted."""

from dataclasses import dataclass

from specbeam.records import Shape, Turn
from specbeam.session import Session


@dataclass(frozen=True)
class FixedShape:
    """A turn emits up to `beyond` layers more than it drafts, so the last turns draft less."""

    depth: int
    width: int
    beyond: int = 1

    def plan(self, session: Session) -> Shape:
        return Shape(min(self.depth, session.remaining - self.beyond), self.width)

    def settle(self, session: Session, turn: Turn) -> None:
        """Nothing to learn."""

"""PLAN: the same shape in every turn, limited by the remaining number of tokens."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specbeam.core.control.planning import Plan, plan_of_shape
from specbeam.core.errors import BadSetting
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session


@dataclass(frozen=True)
class FixedShape:
    """A controller that plans the same shape in every turn.

    A turn emits up to `beyond` layers more than it drafts, so near the end of a session it drafts fewer layers.
    """

    depth: int
    width: int
    beyond: int = 1

    def __post_init__(self) -> None:
        for name in ("depth", "width"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < 0:
                raise BadSetting(f"{name} is {value!r}; it must be an integer of at least 0")

    @property
    def largest(self) -> Shape:
        """The largest shape that it plans."""
        return Shape(self.depth, self.width)

    def plan(self, session: Session) -> Shape:
        return Shape(min(self.depth, session.remaining - self.beyond), self.width)

    def numbers(self, session: Session) -> Plan:
        """Return the plan for steps."""
        return self._plan

    @cached_property
    def _plan(self) -> Plan:
        """The plan, cached because it never changes."""
        return plan_of_shape(self.depth, self.width, self.beyond)

    def settle(self, session: Session, turn: Turn) -> None:
        """Do nothing: the shape is fixed."""

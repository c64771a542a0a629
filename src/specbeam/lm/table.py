"""A language model given by a table: stands in for real ones where every outcome is enumerated."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float

from specbeam.core.forest import Forest
from specbeam.engines.answers import answered
from specbeam.lm.base import Uncached
from specbeam.records import Needs, Scored
from specbeam.session import Session


class TableLM(Uncached):
    """`law(path)` gives the odds of the next token after the new tokens `path`; a plain sequence serves every path."""

    def __init__(self, law: Callable[[tuple[int, ...]], Sequence[float]] | Sequence[float]) -> None:
        self._law = law if callable(law) else lambda path: law
        self.vocab = len(self._law(()))
        self.passes = 0

    def extend(
        self, sessions: Sequence[Session], forests: Sequence[Forest], needs: Sequence[Needs] | None = None
    ) -> list[Scored]:
        self.passes += 1
        return [
            answered(need, self._rows(session, forest))
            for session, forest, need in zip(sessions, forests, self.told(sessions, needs), strict=True)
        ]

    def _rows(self, session: Session, forest: Forest) -> Float[torch.Tensor, "nodes vocab"]:
        fresh = self.fresh(session, forest)
        paths = [session.new_tokens(forest, np.array([node]))[0].tolist() for node in fresh]
        odds = np.array([self._law(tuple(path)) for path in paths], dtype=np.float64).reshape(-1, self.vocab)
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(odds))

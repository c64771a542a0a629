"""A language model given by a table, for examples and for tests that enumerate every outcome."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float

from specbeam.core.answers import scored_rows
from specbeam.core.forest import Forest
from specbeam.core.lm import Uncached
from specbeam.core.records import Needs, Scored
from specbeam.core.session import Session


class TableLM(Uncached):
    """A language model whose next-token law is a function of the new tokens, or constant.

    Args:
        law: a function of the tokens after the prompt that returns the weight of each next token; their logs are the
            logits, so they need not sum to 1. Or a sequence of weights, the same after any tokens.
    """

    def __init__(self, law: Callable[[tuple[int, ...]], Sequence[float]] | Sequence[float]) -> None:
        self._law = law if callable(law) else lambda path: law
        self.vocab = len(self._law(()))
        self.passes = 0

    def extend(
        self, sessions: Sequence[Session], forests: Sequence[Forest], needs: Sequence[Needs] | None = None
    ) -> list[Scored]:
        self.passes += 1
        return [
            scored_rows(need, self._rows(session, forest))
            for session, forest, need in zip(sessions, forests, self.needs_of_each(sessions, needs), strict=True)
        ]

    def _rows(self, session: Session, forest: Forest) -> Float[torch.Tensor, "nodes vocab"]:
        """Return the logits of the nodes that were not yet scored in this turn."""
        fresh = self.take_new_nodes(session, forest)
        paths = [session.new_tokens(forest, np.array([node]))[0].tolist() for node in fresh]
        odds = np.array([self._law(tuple(path)) for path in paths], dtype=np.float64).reshape(-1, self.vocab)
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(odds))

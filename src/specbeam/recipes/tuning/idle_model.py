"""A language model that computes nothing, to measure the cost of turns outside the models."""

import time
from collections.abc import Sequence

import torch

from specbeam.core.answers import scored_rows
from specbeam.core.forest import Forest
from specbeam.core.lm import Uncached
from specbeam.core.records import Needs, Scored
from specbeam.core.session import Session

ROWS = 64  # number of different rows of logits


class IdleLM(Uncached):
    """A language model whose logits after each token are one of 64 random rows, float32.

    Models with the same seed always agree; models with different seeds never do.

    Attributes:
        seconds: time spent inside the model, for the caller to subtract.
    """

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab = vocab
        self.seconds = 0.0
        self._rows = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(seed)) * 3

    def __repr__(self) -> str:
        return f"IdleLM({self.vocab})"

    def extend(
        self, sessions: Sequence[Session], forests: Sequence[Forest], needs: Sequence[Needs] | None = None
    ) -> list[Scored]:
        """Return a row of logits for each node that is new to the model, as `LM.extend` does."""
        began = time.perf_counter()
        rows = []
        for session, forest, need in zip(sessions, forests, self.needs_of_each(sessions, needs), strict=True):
            tokens = forest.tokens[self.take_new_nodes(session, forest)]
            rows.append(scored_rows(need, torch.from_numpy(self._rows.numpy()[tokens % ROWS])))
        self.seconds += time.perf_counter() - began
        return rows

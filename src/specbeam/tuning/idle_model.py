"""A language model that does not compute: to measure what a turn costs outside the models."""

import time
from collections.abc import Sequence

import torch

from specbeam.core.forest import Forest
from specbeam.engines.answers import answered
from specbeam.lm.base import Uncached
from specbeam.records import Needs, Scored
from specbeam.session import Session

ROWS = 64


class IdleLM(Uncached):
    """The logits after a token are one of a few random rows, float32: models of one seed agree everywhere, models of
    different seeds nowhere.

    Attributes:
        seconds: spent inside, so that the caller can take them off.
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
        """See `LM.extend`."""
        began = time.perf_counter()
        rows = []
        for session, forest, need in zip(sessions, forests, self.told(sessions, needs), strict=True):
            tokens = forest.tokens[self.fresh(session, forest).start :]
            rows.append(answered(need, torch.from_numpy(self._rows.numpy()[tokens % ROWS])))
        self.seconds += time.perf_counter() - began
        return rows

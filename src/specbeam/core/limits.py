"""The stop rules of a session, as they are set; steps go by their numbers (core/beams.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int64

from specbeam.core.beams import BEST_LIVE_MAY_WIN, FIRST_ENOUGH, NEVER, Stop, normalised_score

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Ended:
    """A beam that left the live ones."""

    tokens: list[int]
    loglik: float
    finished: bool = True  # by an end token or stop string, not by a limit


@dataclass(frozen=True)
class Limits:
    """Stop rules of one session. They look at outcomes only, never at drafts, so that no law depends on them.

    `early_stopping` as in transformers: True stops at `keep` finished beams; False when the best live beam, at its
    present length, cannot beat the worst of the `keep` best finished ones; "never" when it could not at any length. One
    beam stops when it finishes.
    """

    max_new_tokens: int
    eos: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    decode: Decode | None = None  # needed for stop strings
    keep: int = 1
    early_stopping: bool | str = False
    length_penalty: float = 1.0
    closing: Bool[np.ndarray, " vocab"] | None = None  # tokens that can complete a stop string; None: nobody knows

    @cached_property
    def stop(self) -> Stop:
        """The numbers, for steps."""
        early = FIRST_ENOUGH if self.early_stopping is True else BEST_LIVE_MAY_WIN
        if self.early_stopping == "never":
            early = NEVER
        return Stop(self.max_new_tokens, self.keep, early, float(self.length_penalty), self.ending)

    @cached_property
    def ending(self) -> Int64[np.ndarray, " ends"]:
        """The end tokens."""
        return np.array(self.eos, dtype=np.int64)

    def stopped_by(self, tokens: list[int]) -> str | None:
        """Return the stop string that the newest token completed, or None.

        A stop string is never longer than its bytes in tokens, so only so many tokens are decoded.
        """
        if not self.stop_strings or self.decode is None:
            return None
        longest = max(len(stop.encode()) for stop in self.stop_strings)
        tail = self.decode(tokens[-longest - 4 :])
        return next((stop for stop in self.stop_strings if stop in tail), None)

    def normalised(self, loglik: float, length: int) -> float:
        """Return the score by which texts of different length are compared."""
        return float(normalised_score(self.stop, loglik, length))

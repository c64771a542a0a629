"""The stop rules of a session as the user sets them. Steps read them as numbers: `core.beams.Stop`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int64

from specbeam.core.beams import BEST_LIVE_MAY_WIN, FIRST_ENOUGH, NEVER, Stop, normalised_score

SPAN = 128  # maximum number of tokens of a compiled run
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Ended:
    """A text: a beam that ended, or one that was live at the end of the session."""

    tokens: list[int]
    loglik: float
    finished: bool = True  # False: cut off by a limit, not ended by an end token or stop string
    bound: float | None = None  # of a best-first search: no text that came later has a larger normalised score


@dataclass(frozen=True)
class Limits:
    """The stop rules of one session. They depend on outcomes, never on drafts, so they do not change any law.

    `early_stopping` has the same meaning as in transformers: True stops at `keep` finished beams; False stops when the
    best live beam, at its current length, cannot beat the worst of the `keep` best finished ones; "never" stops when it
    cannot do so at any length.
    """

    max_new_tokens: int
    eos: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    decode: Decode | None = None  # turns tokens into text; needed for stop strings
    keep: int = 1  # number of finished beams to collect
    early_stopping: bool | str = False
    length_penalty: float = 1.0
    closing: Bool[np.ndarray, " vocab"] | None = None  # whether a token can complete a stop string; None: unknown

    @cached_property
    def stop(self) -> Stop:
        """The same rules, without stop strings, as numbers for steps."""
        early = FIRST_ENOUGH if self.early_stopping is True else BEST_LIVE_MAY_WIN
        if self.early_stopping == "never":
            early = NEVER
        return Stop(self.max_new_tokens, self.keep, early, float(self.length_penalty), self.ending)

    @cached_property
    def ending(self) -> Int64[np.ndarray, " ends"]:
        """The end tokens, ascending, for steps."""
        return np.sort(np.array(self.eos, dtype=np.int64))

    def stopped_by(self, tokens: list[int]) -> str | None:
        """Return the stop string that the newest token completed, or None.

        A stop string has at most as many tokens as bytes, so only that many of the last tokens, and 4 more, are decoded.
        """
        if not self.stop_strings or self.decode is None:
            return None
        longest = max(len(stop.encode()) for stop in self.stop_strings)
        tail = self.decode(tokens[-longest - 4 :])
        return next((stop for stop in self.stop_strings if stop in tail), None)

    def normalised(self, loglik: float, length: int) -> float:
        """Return loglik / length ** length_penalty, the score by which texts of different lengths are compared."""
        return float(normalised_score(self.stop, loglik, length))

"""When a beam ends, and when a session does."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float64, Int64

from specbeam.kernels.stopping import Stop

Decode = Callable[[list[int]], str]
Paths = Callable[[], Int64[np.ndarray, "beams length"]]


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

    @cached_property
    def ending(self) -> Int64[np.ndarray, " ends"]:
        """`eos` for array code."""
        return np.array(self.eos, dtype=np.int64)

    @property
    def for_loops(self) -> Stop:
        """What stops a session, as loops see it; they know no stop strings."""
        early = 2 if self.early_stopping == "never" else int(bool(self.early_stopping))
        return Stop(self.max_new_tokens, self.keep, early, float(self.length_penalty))

    def ended(self, tokens: Int64[np.ndarray, " beams"], paths: Paths) -> Bool[np.ndarray, " beams"]:
        """Which beams end with their newest token; `paths()` gives all their new tokens and is called only if needed."""
        ended = self.ends(tokens)
        if self.stop_strings and self.decode is not None:
            for beam, path in enumerate(paths()):
                ended[beam] |= self.stopped_by(path.tolist()) is not None
        return ended

    def ends(self, tokens: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Which are end tokens."""
        found = np.zeros(len(tokens), dtype=bool)
        for end in self.eos:
            found |= tokens == end
        return found

    def stopped_by(self, tokens: list[int]) -> str | None:
        """The stop string that the newest token completed. A stop string is never longer than its bytes in tokens."""
        if not self.stop_strings or self.decode is None:
            return None
        tail = self.decode(tokens[-max(len(stop.encode()) for stop in self.stop_strings) - 4 :])
        return next((stop for stop in self.stop_strings if stop in tail), None)

    def normalised(self, loglik: float, length: int) -> float:
        """The score by which texts of different length are compared."""
        return loglik / max(length, 1) ** self.length_penalty

    def enough(self, finished: list[Ended], live: Float64[np.ndarray, " beams"], length: int) -> bool:
        """Whether the session is over although beams are alive. `live` holds their log-likelihoods."""
        if length >= self.max_new_tokens or len(live) == 0:
            return True
        if len(finished) < self.keep:
            return False
        if self.early_stopping is True or self.keep == 1:  # one beam is greedy search or sampling, which ends at an end
            return True
        longest = self.early_stopping == "never" and self.length_penalty > 0
        best = self.normalised(float(live.max()), self.max_new_tokens if longest else length)
        scores = sorted((self.normalised(one.loglik, len(one.tokens)) for one in finished), reverse=True)
        return best <= scores[self.keep - 1]

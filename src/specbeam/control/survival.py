"""PLAN: draft one more token while it is worth more than it costs."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64

from specbeam.records import Shape, Turn
from specbeam.session import Session


@dataclass
class Experience:
    """What one session has seen. Draft odds are read through a calibration map that starts as the identity."""

    hits: Float64[np.ndarray, " bins"]
    tries: Float64[np.ndarray, " bins"]
    tokens: float = 1.0  # emitted
    cost: float = 1.0  # spent on them, in target passes
    scores: list[float] = field(default_factory=list)  # draft odds of this turn's tokens
    survival: float = 1.0  # odds that all tokens drafted in this turn are accepted

    @classmethod
    def none(cls, bins: int = 10, weight: float = 4.0) -> "Experience":
        centres = (np.arange(bins) + 0.5) / bins
        return cls(weight * centres, np.full(bins, weight))

    def accepted_at(self, score: float) -> float:
        """Odds of acceptance of a token with these draft odds."""
        place = self._bin(score)
        return float(self.hits[place] / self.tries[place])

    def next_accepted(self) -> float:
        """Odds of acceptance of a token of which nothing is known yet."""
        return float(self.hits.sum() / self.tries.sum())

    def learn(self, accepted: int, drafted: int, cost: float) -> None:
        """The first refusal hides the fate of the tokens after it."""
        for place, score in enumerate(self.scores[: accepted + 1]):
            self.hits[self._bin(score)] += place < accepted
            self.tries[self._bin(score)] += 1
        self.tokens += accepted + 1
        self.cost += 1 + cost * drafted

    def _bin(self, score: float) -> int:
        return min(int(score * len(self.hits)), len(self.hits) - 1)


@dataclass(frozen=True)
class Survival:
    """Draft on while (odds that everything drafted survives) x (odds of the next token) > cost x (tokens per cost so far).

    The right side is what the time of a draft step is worth elsewhere. Reads past turns and tokens that are already drafted,
    so no law depends on it.

    Args:
        cost: a draft step's share of a target pass.
        most: longest draft.
    """

    cost: float = 0.1
    most: int = 12
    width: int = 1

    def plan(self, session: Session) -> Shape:
        seen = self._seen(session)
        seen.scores = []
        seen.survival = 1.0
        return Shape(min(self.most, session.remaining - 1), self.width)

    def more(self, session: Session, depth: int, confidence: float) -> bool:
        seen = self._seen(session)
        seen.scores.append(confidence)
        seen.survival *= seen.accepted_at(confidence)
        return seen.survival * seen.next_accepted() > self.cost * seen.tokens / seen.cost

    def settle(self, session: Session, turn: Turn) -> None:
        self._seen(session).learn(turn.verdict.accepted, turn.forest.layers, self.cost)

    def _seen(self, session: Session) -> Experience:
        return session.state.setdefault(self, Experience.none())

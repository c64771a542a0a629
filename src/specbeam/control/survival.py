"""PLAN: draft one more token while it is worth more than it costs."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64

from specbeam.records import Shape, Turn
from specbeam.session import Session


@dataclass
class Experience:
    """What one session has learnt. Draft probabilities go through a calibration map that starts as the identity."""

    hits: Float64[np.ndarray, " bins"]  # accepted tokens, by draft probability
    tries: Float64[np.ndarray, " bins"]  # judged tokens, by draft probability
    tokens: float = 1.0  # emitted
    cost: float = 1.0  # of these tokens, in target passes
    scores: list[float] = field(default_factory=list)  # draft probabilities of this turn's tokens
    survival: float = 1.0  # probability that all tokens drafted in this turn are accepted

    @classmethod
    def none(cls, bins: int = 10, weight: float = 4.0) -> "Experience":
        """Return the prior: in each of `bins` bins, `weight` tokens that were accepted as often as the draft model said."""
        centres = (np.arange(bins) + 0.5) / bins
        return cls(weight * centres, np.full(bins, weight))

    def accepted_at(self, score: float) -> float:
        """Return the probability that a token with the draft probability `score` is accepted."""
        place = self._bin(score)
        return float(self.hits[place] / self.tries[place])

    def next_accepted(self) -> float:
        """Return the probability that a token of unknown draft probability is accepted."""
        return float(self.hits.sum() / self.tries.sum())

    def learn(self, accepted: int, drafted: int, cost: float) -> None:
        """Count a turn that drafted tokens at `cost` target passes each. Those after the first refusal were not judged."""
        for place, score in enumerate(self.scores[: accepted + 1]):
            self.hits[self._bin(score)] += place < accepted
            self.tries[self._bin(score)] += 1
        self.tokens += accepted + 1
        self.cost += 1 + cost * drafted

    def _bin(self, score: float) -> int:
        return min(int(score * len(self.hits)), len(self.hits) - 1)


@dataclass(frozen=True)
class Survival:
    """A controller that drafts on while the next token is expected to gain more than it costs.

    That is while (probability that all drafted tokens are accepted) x (that of the next token) > cost x (tokens emitted per
    cost so far). The right side is what the time of a draft step would gain elsewhere. It reads past turns and tokens that
    are already drafted, so it does not change the law of the output.

    Args:
        cost: time of a draft step as a share of a target pass.
        most: the most layers of a draft.
        width: number of draft nodes per layer.
    """

    cost: float = 0.1
    most: int = 12
    width: int = 1

    def plan(self, session: Session) -> Shape:
        experience = self._experience(session)
        experience.scores = []
        experience.survival = 1.0
        return Shape(min(self.most, session.remaining - 1), self.width)

    def more(self, session: Session, depth: int, confidence: float) -> bool:
        experience = self._experience(session)
        experience.scores.append(confidence)
        experience.survival *= experience.accepted_at(confidence)
        return experience.survival * experience.next_accepted() > self.cost * experience.tokens / experience.cost

    def settle(self, session: Session, turn: Turn) -> None:
        self._experience(session).learn(turn.verdict.accepted, turn.forest.layers, self.cost)

    def _experience(self, session: Session) -> Experience:
        return session.state.setdefault(self, Experience.none())

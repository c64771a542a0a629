"""PLAN by Thompson sampling of the acceptance rate (EESD, arXiv 2406.03853)."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from specbeam.records import Shape, Turn
from specbeam.session import Session

Mode = Literal["step", "round", "best"]


@dataclass
class Belief:
    """Beta posterior of the rate, the error of draft odds as a predictor of acceptance, and a private stream."""

    accepted: float
    refused: float
    score_error: float
    stream: np.random.Generator
    rate: float = 1.0  # this turn's draw
    scores: list[float] = field(default_factory=list)  # draft odds of this turn's tokens


@dataclass(frozen=True)
class Thompson:
    """Draw the rate at which drafts are accepted from its posterior, and draft as far as that rate carries.

    Args:
        mode: "step": a fresh draw after each token, continue with that probability; "round": one draw per turn; "best":
            one draw per turn and the length that is best for it and `cost`.
        cost: a draft step's share of a target pass, for mode "best".
        calibrated: mix the posterior with the draft's own odds of the newest token, each weighted by its certainty
            (Calibration-TS), and toss a coin with the mixture after each token; in mode "best" within the chosen length.
        persistent: keep a spread of the rate between tokens, so that the score keeps its say in long texts.
        censored: after the first refusal the other tokens' fate is unknown; False counts them as refused.
        forget: share of what was learned that is kept per turn.
        most: longest draft.
    """

    mode: Mode = "best"
    cost: float = 0.1
    calibrated: bool = False
    persistent: bool = True
    censored: bool = True
    forget: float = 1.0
    prior: tuple[float, float] = (1.0, 1.0)
    most: int = 12
    width: int = 1

    @property
    def between_layers(self) -> bool:
        """Mode "best" alone has fixed the length in `plan`."""
        return self.calibrated or self.mode != "best"

    def plan(self, session: Session) -> Shape:
        belief = self._belief(session)
        belief.rate = float(belief.stream.beta(belief.accepted, belief.refused))
        belief.scores = []
        length = best_length(belief.rate, self.cost, self.most) if self.mode == "best" else self.most
        return Shape(min(max(length, 1), session.remaining - 1), self.width)

    def more(self, session: Session, depth: int, confidence: float) -> bool:
        """The first token is always drafted; mode "best" has fixed the length in `plan`."""
        belief = self._belief(session)
        belief.scores.append(confidence)
        if self.calibrated:
            return bool(belief.stream.random() < self._calibrated(belief, confidence))
        if self.mode == "best":
            return True
        rate = belief.rate if self.mode == "round" else belief.stream.beta(belief.accepted, belief.refused)
        return bool(belief.stream.random() < rate)

    def settle(self, session: Session, turn: Turn) -> None:
        belief = self._belief(session)
        drafted = turn.forest.layers
        accepted = turn.verdict.accepted
        start_accepted, start_refused = self.prior
        belief.accepted = start_accepted + self.forget * (belief.accepted - start_accepted) + accepted
        belief.refused = start_refused + self.forget * (belief.refused - start_refused)
        belief.refused += (accepted < drafted) if self.censored else drafted - accepted
        for place, score in enumerate(belief.scores[: accepted + 1]):
            surprise = (float(place < accepted) - score) ** 2 - score * (1 - score)
            belief.score_error = 0.95 * belief.score_error + 0.05 * max(0.002, surprise)

    def _belief(self, session: Session) -> Belief:
        if self not in session.state:
            stream = np.random.Generator(np.random.Philox(key=session.dice.key ^ 0x7505))
            session.state[self] = Belief(*self.prior, 0.05, stream)
        return session.state[self]

    def _calibrated(self, belief: Belief, score: float) -> float:
        total = belief.accepted + belief.refused
        mean = belief.accepted / total
        spread = 0.05 if self.persistent else belief.accepted * belief.refused / (total**2 * (total + 1))
        weight = belief.score_error / (belief.score_error + spread)
        mixed = weight * mean + (1 - weight) * score
        variance = belief.score_error * spread / (belief.score_error + spread)
        return float(np.clip(belief.stream.normal(mixed, variance**0.5), 0.0, 1.0))


def best_length(rate: float, cost: float, most: int) -> int:
    """argmax over K of (1 - rate^(K+1)) / ((1 - rate)(1 + cost K)): tokens per unit of time at a constant rate.

    >>> [best_length(rate, 0.05, 30) for rate in (0.5, 0.7, 0.9)]
    [3, 6, 13]
    """
    lengths = np.arange(most + 1)
    tokens = lengths + 1.0 if rate >= 1 else (1 - rate ** (lengths + 1)) / (1 - rate)
    return int(np.argmax(tokens / (1 + cost * lengths)))

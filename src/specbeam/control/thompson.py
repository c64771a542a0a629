"""PLAN: the length of drafts by Thompson sampling of the acceptance rate (EESD, arXiv 2406.03853)."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from specbeam.records import Shape, Turn
from specbeam.session import Session

Mode = Literal["step", "round", "best"]


@dataclass
class Belief:
    """A Beta posterior of the acceptance rate, the error of draft probabilities as predictions, and a random stream."""

    accepted: float  # first parameter of the Beta posterior
    refused: float  # second parameter
    score_error: float  # estimated variance of the true acceptance rate around the draft probability
    stream: np.random.Generator
    rate: float = 1.0  # the rate drawn for this turn
    scores: list[float] = field(default_factory=list)  # draft probabilities of this turn's tokens


@dataclass(frozen=True)
class Thompson:
    """A controller that draws the acceptance rate of drafts from its posterior, and drafts as long as that rate suggests.

    Args:
        mode: "step": draw a new rate after each token, and go on with that probability; "round": draw one rate per turn, and
            go on with that probability; "best": draw one rate per turn, and draft to the best length for it and `cost`.
        cost: time of a draft step as a share of a target pass, for mode "best".
        calibrated: mix the posterior with the draft model's own probability of the newest token, each weighted by its
            certainty (Calibration-TS), and go on with the mixed probability after each token; in mode "best" within the
            chosen length.
        persistent: give the rate a constant variance in this mixture; that of the posterior shrinks, so that the draft
            model's own probability would lose its influence in long texts.
        censored: True: the tokens after the first refusal are not counted, because they were not judged; False: they count
            as refused.
        forget: share of what was learnt that is kept at each turn; 1: all of it.
        prior: parameters of the Beta prior: accepted, refused.
        most: the most layers of a draft.
        width: number of draft nodes per layer.
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
        """Whether it may end a draft between layers. Mode "best", if not calibrated, fixes the length in `plan`."""
        return self.calibrated or self.mode != "best"

    def plan(self, session: Session) -> Shape:
        belief = self._belief(session)
        belief.rate = float(belief.stream.beta(belief.accepted, belief.refused))
        belief.scores = []
        length = best_length(belief.rate, self.cost, self.most) if self.mode == "best" else self.most
        return Shape(min(max(length, 1), session.remaining - 1), self.width)

    def more(self, session: Session, depth: int, confidence: float) -> bool:
        """Return whether to draft on after a token. The first one is always drafted."""
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
        """Return a draw of the acceptance rate, mixed with the draft probability `score` of the newest token."""
        total = belief.accepted + belief.refused
        mean = belief.accepted / total
        spread = 0.05 if self.persistent else belief.accepted * belief.refused / (total**2 * (total + 1))
        weight = belief.score_error / (belief.score_error + spread)
        mixed = weight * mean + (1 - weight) * score
        variance = belief.score_error * spread / (belief.score_error + spread)
        return float(np.clip(belief.stream.normal(mixed, variance**0.5), 0.0, 1.0))


def best_length(rate: float, cost: float, most: int) -> int:
    """Return the K up to `most` of largest (1 - rate^(K+1)) / ((1 - rate)(1 + cost K)).

    These are the expected tokens per unit of time at a constant acceptance rate.

    >>> [best_length(rate, 0.05, 30) for rate in (0.5, 0.7, 0.9)]
    [3, 6, 13]
    """
    lengths = np.arange(most + 1)
    tokens = lengths + 1.0 if rate >= 1 else (1 - rate ** (lengths + 1)) / (1 - rate)
    return int(np.argmax(tokens / (1 + cost * lengths)))

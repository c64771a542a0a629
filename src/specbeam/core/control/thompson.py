"""PLAN: the length of drafts by Thompson sampling of the acceptance rate (EESD, arXiv 2406.03853).

The paper's controllers draw a rate from its posterior and toss a coin with this rate. Only the coin matters. Its odds
are the posterior mean of the rate, given the earlier coins of the same rate. So coins are tossed with these odds, in
closed form, and no rate is drawn.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specbeam.core.control.planning import BY_COIN, Plan, PlansMostLayers, StopSpec, new_stop, note_score, plan_of_shape
from specbeam.core.dice import Dice, flip
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session
from specbeam.core.steps import step

Mode = Literal["step", "round", "best"]
COINS = 0x7505  # key of the random numbers of coins, within a session
RATES = 0x7506  # key of the random numbers of the rates that mode "best" draws
# Indices into `StopSpec.learnt` for BY_COIN: both parameters of the Beta posterior; the estimated variance of the true
# acceptance rate around the draft probability.
ACCEPTED, REFUSED, SCORE_ERROR = range(3)
# Indices into `StopSpec.settings`: settings of `Thompson` (booleans as 1 and 0), whether all coins of a turn share one rate,
# and whether coins are tossed at all.
PRIOR_ACCEPTED, PRIOR_REFUSED, FORGET, CALIBRATED, PERSISTENT, CENSORED, SHARES_RATE, HAS_COINS = range(8)
FIRST_ERROR = 0.05  # prior of SCORE_ERROR
LEAST_ERROR = 0.002
TOKEN_SPREAD = 0.05  # variance of the acceptance rate from token to token


@step
def mean_of_clipped(mean: float, variance: float) -> float:
    """Return the mean of a normal variable clipped to [0, 1]."""
    if variance <= 0:
        return min(max(mean, 0.0), 1.0)
    spread = math.sqrt(variance)
    low = -mean / spread
    high = (1.0 - mean) / spread
    below_low = 0.5 * math.erfc(-low / math.sqrt(2.0))
    below_high = 0.5 * math.erfc(-high / math.sqrt(2.0))
    above_high = 0.5 * math.erfc(high / math.sqrt(2.0))
    density_low = math.exp(-0.5 * low * low) / math.sqrt(2.0 * math.pi)
    density_high = math.exp(-0.5 * high * high) / math.sqrt(2.0 * math.pi)
    inside = mean * (below_high - below_low) + spread * (density_low - density_high)
    return min(max(inside + above_high, 0.0), 1.0)


@step
def calibrated_odds(stop: StopSpec, score: float) -> float:
    """Return the mean of the acceptance rate, mixed with the draft probability `score` of the newest token."""
    accepted = stop.learnt[ACCEPTED]
    refused = stop.learnt[REFUSED]
    error = stop.learnt[SCORE_ERROR]
    total = accepted + refused
    spread = TOKEN_SPREAD if stop.settings[PERSISTENT] == 1 else accepted * refused / (total**2 * (total + 1))
    weight = error / (error + spread)
    mixed = weight * accepted / total + (1 - weight) * score
    return mean_of_clipped(mixed, error * spread / (error + spread))


@step
def odds_of_coin(stop: StopSpec) -> float:
    """Return the odds of continuing the draft after the newest noted layer.

    If all coins of a turn share a rate, each earlier coin counts as an acceptance, because it decided to continue.
    """
    newest = stop.counted[0] - 1
    if stop.settings[CALIBRATED] == 1:
        return calibrated_odds(stop, stop.scores[newest])
    accepted = stop.learnt[ACCEPTED]
    if stop.settings[SHARES_RATE] == 1:
        accepted += newest
    return accepted / (accepted + stop.learnt[REFUSED])


@step
def toss(stop: StopSpec, confidence: float) -> bool:
    """Note the draft probability of the newest token, and return whether to continue the draft after it."""
    note_score(stop, confidence)
    if stop.settings[HAS_COINS] == 0:
        return True
    return flip(stop.coins, odds_of_coin(stop))


@step
def learn_rate(stop: StopSpec, drafted: int, accepted: int) -> None:
    """Learn from a turn that accepted `accepted` of `drafted` layers."""
    learnt = stop.learnt
    settings = stop.settings
    refused = drafted - accepted
    if settings[CENSORED] == 1:
        refused = 1 if accepted < drafted else 0
    known_accepted = settings[FORGET] * (learnt[ACCEPTED] - settings[PRIOR_ACCEPTED])
    known_refused = settings[FORGET] * (learnt[REFUSED] - settings[PRIOR_REFUSED])
    learnt[ACCEPTED] = settings[PRIOR_ACCEPTED] + known_accepted + accepted
    learnt[REFUSED] = settings[PRIOR_REFUSED] + known_refused + refused
    for place in range(min(stop.counted[0], accepted + 1)):
        score = stop.scores[place]
        passed = 1.0 if place < accepted else 0.0
        surprise = (passed - score) ** 2 - score * (1 - score)
        learnt[SCORE_ERROR] = 0.95 * learnt[SCORE_ERROR] + 0.05 * max(LEAST_ERROR, surprise)


@dataclass(frozen=True)
class CoinState:
    """The state of a `Thompson` controller in a session."""

    numbers: StopSpec
    coins: Dice
    rates: np.random.Generator


@dataclass(frozen=True)
class Thompson(PlansMostLayers):
    """A controller that samples the acceptance rate of drafts from its posterior, and chooses the length by this rate.

    Args:
        mode: "step": draw a rate after each token, and continue with this probability. "round": draw one rate per turn, and
            continue with this probability after each token. "best": draw one rate per turn, and draft to the best length
            for this rate and `cost`.
        cost: time of a draft step as a share of a target pass, for mode "best".
        calibrated: mix the posterior with the draft probability of the newest token, each weighted by its certainty
            (Calibration-TS), and continue with the mixed probability after each token; in mode "best" within the chosen
            length.
        persistent: whether the rate has a constant variance in this mixture. The variance of the posterior shrinks, so in
            long texts the draft probability would lose its influence.
        censored: True: tokens after the first refusal are not counted, because they were not judged. False: they count as
            refused.
        forget: weight of earlier turns after each turn; 1: nothing is forgotten.
        prior: parameters of the Beta prior: accepted, refused.
        most: maximum number of layers of a draft.
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
        """Whether a draft may end between layers. Mode "best" without calibration fixes the length in `plan`."""
        return self.calibrated or self.mode != "best"

    def plan(self, session: Session) -> Shape:
        known = self._known(session)
        known.numbers.counted[0] = 0
        length = self.most
        if self.mode == "best":
            accepted, refused, _ = known.numbers.learnt
            length = best_length(float(known.rates.beta(accepted, refused)), self.cost, self.most)
        return Shape(min(max(length, 1), session.remaining - 1), self.width)

    def numbers(self, session: Session) -> Plan | None:
        """Return the plan for steps; None in mode "best", whose lengths are drawn in Python."""
        return None if self.mode == "best" else plan_of_shape(max(self.most, 1), self.width)

    def stops(self, session: Session, tosses: int) -> StopSpec:
        """Return the state for steps, with at least `tosses` random numbers; see `control.stopping.stops_of`."""
        known = self._known(session)
        return known.numbers._replace(coins=known.coins.ready(tosses))

    def more(self, session: Session, depth: int, confidence: float) -> bool:
        """Return whether to continue the draft. The first token is always drafted."""
        return bool(toss(self.stops(session, 1), confidence))

    def settle(self, session: Session, turn: Turn) -> None:
        learn_rate(self.stops(session, 0), turn.forest.layers, turn.verdict.accepted)

    def _known(self, session: Session) -> CoinState:
        if self not in session.state:
            is_so = (self.calibrated, self.persistent, self.censored, self.mode == "round", self.between_layers)
            settings = np.array([*self.prior, self.forget, *is_so], dtype=np.float64)
            learnt = np.array([*self.prior, FIRST_ERROR])
            rates = np.random.Generator(np.random.Philox(key=session.dice.key ^ RATES))
            session.state[self] = CoinState(
                new_stop(BY_COIN, settings, learnt, self.most), Dice(session.dice.key ^ COINS), rates
            )
        found: CoinState = session.state[self]
        return found


def best_length(rate: float, cost: float, most: int) -> int:
    """Return the K <= `most` that maximises (1 - rate^(K+1)) / ((1 - rate)(1 + cost K)).

    This is the expected number of tokens per unit of time at a constant acceptance rate.

    >>> [best_length(rate, 0.05, 30) for rate in (0.5, 0.7, 0.9)]
    [3, 6, 13]
    """
    lengths = np.arange(most + 1)
    tokens = lengths + 1.0 if rate >= 1 else (1 - rate ** (lengths + 1)) / (1 - rate)
    return int(np.argmax(tokens / (1 + cost * lengths)))

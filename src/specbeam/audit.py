"""Tests of a run's law while it runs: what was drawn, against the laws that it is declared to have."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

TILTS = (1.0, -1.0, 1 / 4, -1 / 4, 1 / 16, -1 / 16, 1 / 64, -1 / 64)  # how boldly each bet is made, and on which side
ALARM = 10_000.0  # a run of the declared law ever comes to this much evidence less than once in so many runs
NO_GAINS = (0.0,) * len(TILTS)


@dataclass(frozen=True)
class Audit:
    """Evidence of a run against the law that it is declared to have. Audits of turns, and of sessions, add up.

    Bets are made on each chance outcome x before it is known, at the odds of the declared law. A bet of tilt t stakes all
    that it has, on each x in proportion to its odds times exp(t * x). If the declared law is the true one, a bet gains as
    much as it loses on average: its wealth is a martingale that starts at 1, and so is the mean wealth of all bets, which is
    the `evidence`. So this ever reaches c with odds of at most 1/c (Ville's inequality), after however few draws, and
    whatever stops a run. If outcomes are larger or smaller on average than they should be, some bet grows exponentially.

    The quotients `z_accept` and `z_logp` describe a long run: surprises over the root of their variance, close to N(0, 1).
    The first one tells a wrong draft law, the second one a wrong output law, whatever the method.
    """

    accept_surprise: float = 0.0  # accepted - odds of acceptance, over all trials
    accept_variance: float = 0.0
    logp_surprise: float = 0.0  # log p(token) - its mean under p, over all drawn tokens
    logp_variance: float = 0.0
    trials: int = 0
    draws: int = 0
    impossible: int = 0  # tokens drawn that have no odds at all
    trial_gains: tuple[float, ...] = NO_GAINS  # log-wealth of the bets on trials, a bet per tilt
    draw_gains: tuple[float, ...] = NO_GAINS  # log-wealth of the bets on drawn tokens

    def __add__(self, other: "Audit") -> "Audit":
        """Return the evidence of both. They must not be of the same draws."""
        return Audit(
            self.accept_surprise + other.accept_surprise,
            self.accept_variance + other.accept_variance,
            self.logp_surprise + other.logp_surprise,
            self.logp_variance + other.logp_variance,
            self.trials + other.trials,
            self.draws + other.draws,
            self.impossible + other.impossible,
            _sums(self.trial_gains, other.trial_gains),
            _sums(self.draw_gains, other.draw_gains),
        )

    @property
    def z_accept(self) -> float:
        """The surprise of all trials over the root of its variance."""
        return self.accept_surprise / self.accept_variance**0.5 if self.accept_variance > 0 else 0.0

    @property
    def z_logp(self) -> float:
        """The surprise of all drawn tokens over the root of its variance."""
        return self.logp_surprise / self.logp_variance**0.5 if self.logp_variance > 0 else 0.0

    @property
    def evidence(self) -> float:
        """The mean wealth of all bets; infinite after a token of no odds."""
        if self.impossible > 0:
            return math.inf
        gains = np.array([*self.trial_gains, *self.draw_gains])
        with np.errstate(over="ignore"):
            return float(np.exp(gains).mean())

    @property
    def suspicious(self) -> bool:
        """Whether a run of the declared law would ever look like this less than once in ten thousand."""
        return self.evidence >= ALARM

    @property
    def empty(self) -> bool:
        """Whether nothing was left to chance, so that there was nothing to test."""
        return self.trials == 0 and self.draws == 0

    @classmethod
    def of_draw(cls, logp: Float64[np.ndarray, " n"], token: int) -> "Audit":
        """Return the audit of a token drawn from a law, given as logs."""
        if logp[token] == -np.inf:
            return cls(draws=1, impossible=1)
        possible = logp[logp > -np.inf]
        p = np.exp(possible)
        mean = float(p @ possible)
        variance = float(p @ (possible - mean) ** 2)
        surprise = float(logp[token]) - mean
        gains = _gains(float(logp[token]), possible, p)
        return cls(logp_surprise=surprise, logp_variance=variance, draws=1, draw_gains=gains)

    @classmethod
    def of_trial(cls, r: Float64[np.ndarray, " n"], law: Float64[np.ndarray, " n"], accepted: bool) -> "Audit":
        """Return the audit of a candidate of law `law` on trial for `r`: it is accepted with odds sum(min(r, law))."""
        odds = min(float(np.minimum(r, law).sum()), 1.0)
        outcome = 1.0 if accepted else 0.0
        gains = _gains(outcome, np.array([0.0, 1.0]), np.array([1.0 - odds, odds]))
        variance = odds * (1 - odds)
        return cls(accept_surprise=outcome - odds, accept_variance=variance, trials=1, trial_gains=gains)

    @classmethod
    def of_odds(cls, r: Float64[np.ndarray, " n"], law: Float64[np.ndarray, " n"], odds: float) -> "Audit":
        """Return the audit of a candidate of law `law` that is worth `odds` = min(1, r / law) at its token.

        For rules that toss the coin later: `law` draws the token, and that is all the chance there is. Where it sums to less
        than 1, the rest is on tokens that are worth nothing.
        """
        p = law[law > 0]
        worth = np.minimum(r[law > 0] / p, 1.0)
        mean = float(p @ worth)
        variance = max(float(p @ worth**2) - mean**2, 0.0)
        left = max(1.0 - float(p.sum()), 0.0)
        gains = _gains(odds, np.append(worth, 0.0), np.append(p, left))
        return cls(accept_surprise=odds - mean, accept_variance=variance, trials=1, trial_gains=gains)


def _sums(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    """Return the sums of two tuples, number by number."""
    return tuple(first + second for first, second in zip(one, other, strict=True))


def _gains(outcome: float, outcomes: Float64[np.ndarray, " n"], odds: Float64[np.ndarray, " n"]) -> tuple[float, ...]:
    """Return what each bet gains, as a log, when `outcome` comes: the log of exp(tilt * outcome) over its mean."""
    return tuple(tilt * outcome - _log_mean(tilt * outcomes, odds) for tilt in TILTS)


def _log_mean(values: Float64[np.ndarray, " n"], odds: Float64[np.ndarray, " n"]) -> float:
    """Return the log of the mean of exp(values) under these odds, which sum to one up to rounding."""
    top = float(values.max())
    return top + math.log(float(odds @ np.exp(values - top)) / float(odds.sum()))

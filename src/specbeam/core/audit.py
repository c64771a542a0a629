"""The audit: a statistical test, run during decoding, of whether draws follow their declared laws."""

import math
from dataclasses import dataclass

import numpy as np

from specbeam.core.laws.evidence import (
    ACCEPT_SURPRISE,
    ACCEPT_VARIANCE,
    BETS,
    DRAWS,
    FIRST_BET,
    IMPOSSIBLE,
    LOGP_SURPRISE,
    LOGP_VARIANCE,
    TILTS,
    TRIALS,
    Evidence,
    gathers,
)

ALARM = 10_000.0  # evidence that a run of the declared law reaches with probability at most 1 / ALARM
NO_GAINS = (0.0,) * len(TILTS)


@dataclass(frozen=True, repr=False)
class Audit:
    """The evidence of a run against its declared law. Audits of turns, and of sessions, can be added.

    The test bets on each random outcome x before it is known, at the odds of the declared law. A bet of tilt t spreads
    all its wealth over the outcomes x in proportion to their probability times exp(t * x). If the declared law is the
    true one, a bet neither gains nor loses on average: its wealth is a martingale that starts at 1, and so is the
    mean wealth of all bets, the `evidence`. By Ville's inequality the probability that the evidence ever reaches c is
    at most 1/c, for any number of draws and any stopping rule. If outcomes are larger or smaller on average than
    declared, some bet grows exponentially.

    The quotients `z_accept` and `z_logp` describe a long run: a surprise divided by the square root of its variance, which
    is close to N(0, 1). For every method, a large `z_accept` shows a wrong draft law, a large `z_logp` a wrong output law.
    """

    accept_surprise: float = 0.0  # accepted (1 or 0) - probability of acceptance, summed over all trials
    accept_variance: float = 0.0
    logp_surprise: float = 0.0  # log p(token) - its mean under p, summed over all drawn tokens
    logp_variance: float = 0.0
    trials: int = 0  # number of drafts tried
    draws: int = 0  # number of tokens drawn
    impossible: int = 0  # number of tokens drawn that have probability 0
    trial_gains: tuple[float, ...] = NO_GAINS  # log-wealth of the bets on trials, one bet per tilt
    draw_gains: tuple[float, ...] = NO_GAINS  # log-wealth of the bets on drawn tokens

    def __repr__(self) -> str:
        """The evidence, its counts and its quotients; the fields hold the sums and the log-wealth of each bet."""
        sure = f", impossible={self.impossible}" if self.impossible else ""
        return (
            f"Audit(evidence={self.evidence:.3g}, suspicious={self.suspicious}, trials={self.trials}, draws={self.draws}, "
            f"z_accept={self.z_accept:.2f}, z_logp={self.z_logp:.2f}{sure})"
        )

    def __add__(self, other: "Audit") -> "Audit":
        """Return the audit of both runs. They must not share draws."""
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
        """The surprise of all trials, divided by the square root of its variance; 0 without variance."""
        return self.accept_surprise / self.accept_variance**0.5 if self.accept_variance > 0 else 0.0

    @property
    def z_logp(self) -> float:
        """The surprise of all drawn tokens, divided by the square root of its variance; 0 without variance."""
        return self.logp_surprise / self.logp_variance**0.5 if self.logp_variance > 0 else 0.0

    @property
    def evidence(self) -> float:
        """The mean wealth of all bets; infinite after a token of probability 0."""
        if self.impossible > 0:
            return math.inf
        gains = np.array([*self.trial_gains, *self.draw_gains])
        with np.errstate(over="ignore"):
            return float(np.exp(gains).mean())

    @property
    def suspicious(self) -> bool:
        """Whether a run of the declared law would reach this evidence with probability 1/10,000 at most; True for NaN."""
        return not self.evidence < ALARM

    @property
    def empty(self) -> bool:
        """Whether there was nothing to test: neither trials nor draws."""
        return self.trials == 0 and self.draws == 0

    @classmethod
    def of(cls, evidence: Evidence) -> "Audit":
        """Return the audit of the evidence that steps gathered; an empty audit if there is none."""
        if not gathers(evidence):
            return cls()
        numbers = evidence.numbers
        bets = numbers[FIRST_BET:].tolist()
        return cls(
            accept_surprise=float(numbers[ACCEPT_SURPRISE]),
            accept_variance=float(numbers[ACCEPT_VARIANCE]),
            logp_surprise=float(numbers[LOGP_SURPRISE]),
            logp_variance=float(numbers[LOGP_VARIANCE]),
            trials=int(numbers[TRIALS]),
            draws=int(numbers[DRAWS]),
            impossible=int(numbers[IMPOSSIBLE]),
            trial_gains=tuple(bets[:BETS]),
            draw_gains=tuple(bets[BETS:]),
        )


def _sums(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    """Return the elementwise sum of two tuples."""
    return tuple(first + second for first, second in zip(one, other, strict=True))

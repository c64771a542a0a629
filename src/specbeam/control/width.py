"""PLAN, inside a turn: how many beams the next layer draws, decided before its drafts are looked at."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64

Laws = Callable[[], tuple[Float64[np.ndarray, " n"], Float64[np.ndarray, " n"]]]


@runtime_checkable
class Width(Protocol):
    """A width policy. It may look at the laws of the layer, never at its draws."""

    @property
    def most(self) -> int: ...

    def choose(self, laws: Laws, drafts: int) -> int:
        """Width of a layer of that many draft draws; `laws` gives target law and draft law, each at most 1 in sum."""
        ...


@dataclass(frozen=True)
class FixedWidth:
    most: int

    def choose(self, laws: Laws, drafts: int) -> int:
        return self.most


@dataclass(frozen=True)
class SureWidth:
    """The widest layer that is accepted in full with at least `threshold` odds (DSBD, arXiv 2409.16560, eq. 4-5).

    The odds are those of independent drafts; for drafts without replacement and for shared noise they are a proxy,
    which moves the policy and not the law.
    """

    most: int
    least: int = 1
    threshold: float = 0.7

    def choose(self, laws: Laws, drafts: int) -> int:
        at_least = np.cumsum(accepted_pmf(*laws(), drafts)[::-1])[::-1]
        sure = int(np.flatnonzero(at_least >= self.threshold).max(initial=0))
        return min(max(sure, self.least), self.most)


def accepted_pmf(
    p: Float64[np.ndarray, " n"], q: Float64[np.ndarray, " n"], drafts: int
) -> Float64[np.ndarray, " counts"]:
    """Odds of 0, 1, ..., `drafts` accepted draws among independent drafts from `q` for target `p`.

    After j rejections in a row the residual is (p - c_j q)^+ / S_j, with c_0 = 0, S_0 = 1, c_{j+1} = c_j + S_j and
    S_{j+1} = sum (p - c_{j+1} q)^+. The first acceptance comes at draft i with odds S_{i-1} - S_i and starts anew.
    `q` may sum to less than 1: the rest lies on drafts that cannot be accepted.

    >>> p, q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
    >>> accepted_pmf(p, q, 2).round(2).tolist()
    [0.28, 0.36, 0.36]
    """
    left = [1.0]  # S_j
    reach = 0.0  # c_j
    for _ in range(drafts):
        reach += left[-1]
        left.append(float(np.maximum(p - reach * q, 0.0).sum()))
    first = -np.diff(left)
    pmf = np.zeros((drafts + 1, drafts + 1))
    pmf[:, 0] = left
    for n in range(1, drafts + 1):
        for k in range(1, n + 1):
            pmf[n, k] = first[:n] @ pmf[n - 1 :: -1, k - 1][:n]
    return pmf[drafts]

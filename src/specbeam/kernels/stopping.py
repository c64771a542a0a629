"""When ended beams are enough, as loops ask: the twin of `limits.Limits.enough`."""

from typing import NamedTuple

import numpy as np

from specbeam.kernels.compiling import Array, compiled


class Stop(NamedTuple):
    """What stops a session."""

    most: int  # new tokens
    keep: int
    early: int  # 0, 1, 2: early_stopping is False, True, "never"
    penalty: float


@compiled
def is_end(token: int, eos: Array) -> bool:
    """Whether it is an end token."""
    found = False
    for end in eos:
        found |= token == end
    return found


@compiled
def normalised(stop: Stop, loglik: float, length: int) -> float:
    return loglik / max(length, 1) ** stop.penalty


@compiled
def enough(stop: Stop, finished: Array, live: Array, length: int) -> bool:
    """Whether the session is over.

    Args:
        finished: normalised scores of the beams that ended.
        live: log-likelihoods of the others, which are so long.
    """
    if length >= stop.most or len(live) == 0:
        return True
    if len(finished) < stop.keep:
        return False
    if stop.early == 1 or stop.keep == 1:
        return True
    longest = stop.early == 2 and stop.penalty > 0
    best = normalised(stop, live.max(), stop.most if longest else length)
    return best <= np.sort(finished)[len(finished) - stop.keep]

"""Temperature, top-k, top-p and min-p: which pairs a law keeps, as the head of a ranking."""

from typing import NamedTuple

import numpy as np

from specbeam.core.steps import Array, step
from specbeam.laws.ranking import largest

FIRST_LOOK = 64  # pairs that are ranked at first where no top-k says how many can be kept
GROWTH = 8  # how much longer each further ranking is


class Truncation(NamedTuple):
    """What is cut from a law: applied in this order, each to what the former left. The laws of transformers' warpers."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    least: int = 1  # pairs that are kept whatever their odds
    by_row: bool = False  # it sees each beam's row by itself, as in transformers' beam modes; else the joint law

    @property
    def cuts(self) -> bool:
        """Whether any pair can be lost."""
        return cuts(self)


NO_TRUNCATION = Truncation()


@step
def cuts(truncation: Truncation) -> bool:
    """Return whether a truncation can cut anything."""
    return truncation.top_k > 0 or truncation.top_p < 1 or truncation.min_p > 0


@step
def warps(truncation: Truncation) -> bool:
    """Return whether a truncation changes anything: by its temperature, or as it cuts."""
    return truncation.temperature != 1 or cuts(truncation)


@step
def kept_of(values: Array, log_total: float, truncation: Truncation) -> int:
    """Return how many of `values`, log-odds that descend, top-p and min-p keep; -1 if more of them have to be known.

    Args:
        log_total: logsumexp of these values and of all that follow; NaN if none follow.
    """
    kept = len(values)
    complete = np.isnan(log_total)
    if kept == 0:
        return 0
    if truncation.top_p < 1:
        whole = log_total
        if complete:
            whole = values[0] + np.log(np.exp(values - values[0]).sum())
        mass = 0.0
        needed = 0
        while needed < kept and mass < truncation.top_p:
            mass += np.exp(values[needed] - whole)
            needed += 1
        if mass < truncation.top_p and not complete:
            return -1
        kept = min(max(needed, truncation.least), kept)
        complete = True
    if truncation.min_p > 0:
        edge = min(values[0] + np.log(truncation.min_p), values[min(truncation.least, kept) - 1])
        if not complete and values[kept - 1] >= edge:
            return -1
        while values[kept - 1] < edge:
            kept -= 1
    return kept


@step
def kept_pairs(logits: Array, shift: Array, offset: float, truncation: Truncation, log_total: float) -> Array:
    """Return the pairs that a truncation leaves of the law (logit + shift) / temperature, best first.

    Args:
        logits: float[beams, vocab]; shift: float64[beams].
        offset: the largest score, taken off so that float32 holds finely what is compared.
        log_total: logsumexp of all (logit + shift - offset) / temperature; not looked at under a top-k.
    """
    beams, vocab = logits.shape
    near = np.empty(beams, dtype=logits.dtype)
    for beam in range(beams):
        near[beam] = shift[beam] - offset
    looked = FIRST_LOOK if truncation.top_k == 0 else truncation.top_k
    looked = max(looked, truncation.least)
    while True:
        pairs = largest(logits, near, looked)
        values = np.empty(len(pairs))
        for place in range(len(pairs)):
            beam = pairs[place] // vocab
            value = np.float64(logits[beam, pairs[place] % vocab]) + shift[beam] - offset
            values[place] = value / truncation.temperature
        is_all = truncation.top_k > 0 or looked >= beams * vocab
        kept = kept_of(values, np.nan if is_all else log_total, truncation)
        if kept >= 0:
            return pairs[:kept]
        looked *= GROWTH

"""How likely a draft layer is accepted in full, by its width: what a width is chosen by.

Computed from the laws of the layer alone, never from its draws or its noise, so that a width chosen by it leaves the law of
the layer as it is.
"""

from collections.abc import Hashable
from functools import cache
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from specbeam import kernels
from specbeam.control.width import NO_VALUES, FixedWidth, SureWidth, ValuedWidth, Width
from specbeam.laws import JointLaw

_NONE = np.zeros(0, dtype=np.int64)
SAMPLES = 64  # races that are run
ENTRANTS = 64  # likeliest pairs that run in them


def accepted_pmf(
    p: Float64[np.ndarray, " n"], q: Float64[np.ndarray, " n"], drafts: int
) -> Float64[np.ndarray, " counts"]:
    """Odds of 0, 1, ..., `drafts` accepted draws among independent drafts from `q` for target `p` (DSBD, arXiv 2409.16560,
    eq. 4).

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


def odds_of_rejection(
    p: Float64[np.ndarray, " n"], q: Float64[np.ndarray, " n"], drafts: int
) -> Float64[np.ndarray, " widths"]:
    """Odds that 0, 1, ..., `drafts` draws are accepted from as many independent drafts."""
    return np.cumsum(accepted_pmf(p, q, drafts)[::-1])[::-1]


def odds_by_drafts(
    p: Float64[np.ndarray, " n"],
    q: Float64[np.ndarray, " n"],
    drafts: int,
    most: int,
    place: Int64[np.ndarray, " n"] | None = None,
    compiled: bool = kernels.AVAILABLE,
) -> Float64[np.ndarray, "widths counts"]:
    """Odds that the first 0, 1, ..., `most` draws from `p` are among 0, 1, ..., `drafts` draft nodes, under shared noise.

    The pairs run a race: pair i arrives at e_i / p_i at the target and at e_i / q_i at the draft model, with the same
    exponential e_i; draws are the first ones to arrive. Estimated from `SAMPLES` races with noise of their own, the
    same for all layers, to about 0.06.

    Args:
        p, q: odds of the same pairs. `q` may sum to less than 1: the rest are pairs that the target does not care for,
            countless small ones, of which as many as expected arrive before.
        place: rank of each pair by draft likelihood, where a truncation cuts `q`: then the first `most` to arrive are
            drafted, and the likeliest others.
    """
    p, q, place = _entrants(p, q, place)
    noise, rest = _noise()[:, : len(p)], max(1.0 - float(q.sum()), 0.0)
    likeliest = _NONE if place is None else np.argsort(place, kind="stable")
    if compiled:
        return kernels.odds_by_drafts(noise, p, q, drafts, most, rest, likeliest)
    with np.errstate(divide="ignore"):
        target, draft = noise / p, noise / q
    first = np.argsort(target, axis=1)[:, : min(most, int(np.count_nonzero(p)))]
    if place is None:
        at = np.take_along_axis(draft, first, 1)
        before = (draft[:, None] < at[:, :, None]).sum(2) + rest * np.minimum(at, 1e9)
        needed = np.floor(before) + 1
    else:
        needed = np.take_along_axis(_needed(draft, likeliest, most), first, 1)
    needed = np.maximum.accumulate(np.concatenate([np.zeros((len(needed), 1)), needed], axis=1), axis=1)
    return (needed[:, :, None] <= np.arange(drafts + 1)).mean(0)


def _entrants(
    p: Float64[np.ndarray, " n"], q: Float64[np.ndarray, " n"], place: Int64[np.ndarray, " n"] | None
) -> tuple[Float64[np.ndarray, " m"], Float64[np.ndarray, " m"], Int64[np.ndarray, " m"] | None]:
    if len(p) <= ENTRANTS:
        return p, q, place
    likely = np.argpartition(-p, ENTRANTS)[:ENTRANTS]
    return p[likely], q[likely], None if place is None else place[likely]


def _needed(
    draft: Float64[np.ndarray, "races n"], likeliest: Int64[np.ndarray, " n"], most: int
) -> Int64[np.ndarray, "races n"]:
    """How many drafts it takes until each pair is one."""
    rank = draft.argsort(1, kind="stable").argsort(1)
    core = (rank < most) & np.isfinite(draft)
    halo = np.empty_like(rank)
    halo[:, likeliest] = np.cumsum(~core[:, likeliest], axis=1) + core.sum(1, keepdims=True)
    return np.where(core, rank + 1, halo)


@cache
def _noise() -> Float64[np.ndarray, "races n"]:
    return np.random.default_rng(0).exponential(size=(SAMPLES, ENTRANTS))


def widths_by(width: Width, memory: dict[Hashable, Any]) -> kernels.Widths | None:
    """A width under shared noise, as loops choose it for a session that remembers this."""
    if type(width) is FixedWidth:
        return kernels.Widths(False, width.most, width.most, 0.0, _noise(), NO_VALUES)
    if type(width) is SureWidth:
        return kernels.Widths(True, width.most, width.least, float(width.threshold), _noise(), NO_VALUES)
    if type(width) is ValuedWidth:
        return kernels.Widths(True, width.most, width.least, 0.0, _noise(), width.values(memory))
    return None


def odds_under_shared_noise(
    target: JointLaw,
    draft: JointLaw,
    row_of: Int64[np.ndarray, " beams"],
    beam_of: Int64[np.ndarray, " rows"],
    drafts: int,
    most: int,
) -> Float64[np.ndarray, "widths counts"] | None:
    """`odds_by_drafts` of a layer in one loop, where both laws are cut and short; else None.

    Args:
        row_of: row in the draft's law of each beam of the target; `beam_of`: the other way round. -1 for none.
    """
    laws = target.for_loops(), draft.for_loops()
    if laws[0] is None or laws[1] is None:
        return None
    odds = kernels.accepted_by_drafts(*laws, row_of, beam_of, _noise(), drafts, most)
    return odds if len(odds) else None

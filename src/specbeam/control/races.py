"""How likely a draft layer is accepted in full, by its width: what a width is chosen by.

Computed from the laws of the layer alone, never from its draws or its noise, so that a width chosen by it leaves the law of
the layer as it is.
"""

import numpy as np

from specbeam.core.steps import Array, step

RACES = 64  # exponential races that are run
ENTRANTS = 64  # likeliest pairs that run in them
NEVER = 10**9  # drafts that a pair takes which is none of them
RACE_NOISE = np.random.default_rng(0).exponential(size=(RACES, ENTRANTS))


@step
def accepted_pmf(p: Array, q: Array, drafts: int) -> Array:
    """Return the odds of 0, 1, ..., `drafts` accepted draws among independent drafts from `q` for target `p`.

    After j rejections in a row the residual is (p - c_j q)^+ / S_j, with c_0 = 0, S_0 = 1, c_{j+1} = c_j + S_j and
    S_{j+1} = sum (p - c_{j+1} q)^+. The first acceptance comes at draft i with odds S_{i-1} - S_i and starts anew.
    `q` may sum to less than 1: the rest lies on drafts that cannot be accepted. Source: DSBD (arXiv 2409.16560, eq. 4).

    >>> p, q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
    >>> accepted_pmf(p, q, 2).round(2).tolist()
    [0.28, 0.36, 0.36]
    """
    left = np.ones(drafts + 1)  # S_j
    reach = 0.0  # c_j
    for draft in range(drafts):
        reach += left[draft]
        left[draft + 1] = np.maximum(p - reach * q, 0.0).sum()
    pmf = np.zeros((drafts + 1, drafts + 1))
    pmf[:, 0] = left
    for n in range(1, drafts + 1):
        for k in range(1, n + 1):
            for first in range(1, n + 1):
                pmf[n, k] += (left[first - 1] - left[first]) * pmf[n - first, k - 1]
    return pmf[drafts]


@step
def odds_of_rejection(p: Array, q: Array, drafts: int) -> Array:
    """Return the odds that 0, 1, ..., `drafts` draws are accepted from as many independent drafts."""
    return np.cumsum(accepted_pmf(p, q, drafts)[::-1])[::-1]


@step
def _first(arrival: Array, count: int, order: Array) -> None:
    """Write the places of the `count` smallest into `order`, in order; of equal ones the first."""
    held = 0
    for place in range(len(arrival)):
        value = arrival[place]
        slot = held
        if held == count:
            if value >= arrival[order[count - 1]]:
                continue
            slot -= 1
        else:
            held += 1
        while slot > 0 and arrival[order[slot - 1]] > value:
            order[slot] = order[slot - 1]
            slot -= 1
        order[slot] = place


@step
def _needed_by_rank(arrival: Array, likeliest: Array, most: int, order: Array, needed: Array) -> None:
    """Write how many drafts it takes until each pair is one: the first `most` that arrive come first, then the likeliest."""
    core = 0
    needed[:] = 0
    _first(arrival, min(most, len(arrival)), order)
    for place in order[: min(most, len(arrival))]:
        if arrival[place] < np.inf:
            core += 1
            needed[place] = core
    for place in likeliest:
        if needed[place] == 0:
            core += 1
            needed[place] = core


@step
def _needed_by_race(arrival: Array, among: Array, rest: float, needed: Array) -> None:
    """Write the same for the pairs `among`, where drafts are the first to arrive: those before, and as many of the rest."""
    for pair in among:
        at = arrival[pair]
        if at == np.inf:
            needed[pair] = NEVER
            continue
        before = rest * min(at, 1e9)
        for place in range(len(arrival)):
            before += arrival[place] < at
        needed[pair] = int(min(before, NEVER)) + 1


@step
def odds_by_drafts(p: Array, q: Array, drafts: int, most: int, rest: float, likeliest: Array, noise: Array) -> Array:
    """Return the odds that the first 0, 1, ..., `most` draws from `p` are among 0, 1, ..., `drafts` draft nodes.

    The pairs run an exponential race (Gumbel-max in another form): pair i arrives at e_i / p_i at the target and at
    e_i / q_i at the draft model, with the same e_i; draws are the first ones to arrive. Estimated from races with noise
    of their own, the same for all layers, to about 0.06.

    Args:
        p, q: odds of the same pairs, float64[pairs], at most `ENTRANTS` of them.
        rest: mass of the draft on countless small pairs that are not here, of which as many as expected arrive before.
        likeliest: pairs by draft likelihood, where a truncation cuts the draft: then the first `most` to arrive are drafted,
            and the likeliest others. Empty where none does.
        noise: float64[races, `ENTRANTS`].

    Returns float64[widths, drafts + 1].
    """
    races = noise.shape[0]
    size = len(p)
    wanted = 0
    for place in range(size):
        wanted += p[place] > 0
    wanted = min(wanted, most)
    found = np.zeros((wanted + 1, drafts + 1))
    target = np.empty(size)
    draft = np.empty(size)
    first = np.empty(size, np.int64)
    order = np.empty(size, np.int64)
    needed = np.empty(size, np.int64)
    for race in range(races):
        for place in range(size):
            target[place] = noise[race, place] / p[place] if p[place] > 0 else np.inf
            draft[place] = noise[race, place] / q[place] if q[place] > 0 else np.inf
        _first(target, wanted, first)
        if len(likeliest) > 0:
            _needed_by_rank(draft, likeliest, most, order, needed)
        else:
            _needed_by_race(draft, first[:wanted], rest, needed)
        deepest = 0
        for width in range(wanted):
            deepest = max(deepest, needed[first[width]])
            if deepest > drafts:
                break
            found[width + 1, deepest] += 1
    found[0, 0] = races
    for width in range(wanted + 1):
        for count in range(drafts):
            found[width, count + 1] += found[width, count]
    return found / races

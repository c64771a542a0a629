"""The probability that a draft layer is accepted in full, by its width; widths are chosen by it.

It depends only on the laws of the layer, never on its draws or noise. So choosing a width by it does not change the law
of the layer.
"""

import numpy as np

from specbeam.core.steps import Array, step

RACES = 64  # number of simulated exponential races
ENTRANTS = 64  # number of most probable pairs in a race
NEVER = 10**9  # in place of the number of drafts until a pair is drafted, if it never is
RACE_NOISE = np.random.default_rng(0).exponential(size=(RACES, ENTRANTS))


@step
def accepted_pmf(p: Array, q: Array, drafts: int) -> Array:
    """Return the probabilities of 0, 1, ..., `drafts` accepted draws among `drafts` drafts from `q`, for the target law `p`.

    Drafts are independent. After j rejections in a row the residual is (p - c_j q)^+ / S_j, with c_0 = 0, S_0 = 1,
    c_{j+1} = c_j + S_j and S_{j+1} = sum (p - c_{j+1} q)^+. The first acceptance comes at draft i with probability
    S_{i-1} - S_i; then the process restarts. `q` may sum to less than 1; the remainder is the probability of drafts that
    cannot be accepted. Source: DSBD (arXiv 2409.16560, eq. 4).

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
    """Return the probabilities that at least 0, 1, ..., `drafts` draws are accepted from `drafts` independent drafts."""
    return np.cumsum(accepted_pmf(p, q, drafts)[::-1])[::-1]


@step
def _first(arrival: Array, count: int, order: Array) -> None:
    """Write the indices of the `count` smallest arrivals into `order`, ascending; of equal arrivals the first index."""
    held = 0
    for place in range(len(arrival)):
        value = arrival[place]
        rank = held
        if held == count:
            if value >= arrival[order[count - 1]]:
                continue
            rank -= 1
        else:
            held += 1
        while rank > 0 and arrival[order[rank - 1]] > value:
            order[rank] = order[rank - 1]
            rank -= 1
        order[rank] = place


@step
def _needed_by_rank(arrival: Array, likeliest: Array, most: int, order: Array, needed: Array) -> None:
    """Write into `needed` the number of drafts until each pair is drafted, if a truncation cuts the draft law.

    Then the first `most` pairs to arrive are drafted, followed by the most probable other pairs.
    """
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
    """Write into `needed` the number of drafts until each pair of `among` is one, if drafts are the first to arrive.

    It counts the pair itself, the pairs that arrive before it, and the expected number of earlier pairs in the mass `rest`.
    """
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
    """Return the probabilities that the first 0, 1, ..., `most` draws from `p` are among 0, 1, ..., `drafts` drafts.

    The pairs run an exponential race (Gumbel-max in another form): pair i arrives at e_i / p_i at the target and at
    e_i / q_i at the draft model, with the same e_i. Draws are the first pairs to arrive. The probabilities are
    estimated, to about 0.06, from simulated races whose separate noise is the same for all layers.

    Args:
        p, q: target and draft probabilities of the same pairs, float64[pairs], at most `ENTRANTS` of them.
        rest: draft probability of the many small pairs that are left out; their expected number arrives before a pair.
        likeliest: indices of pairs by descending draft probability, if a truncation cuts the draft law: then the first
            `most` to arrive are drafted, and after them the most probable others. Empty if none does.
        noise: float64[races, `ENTRANTS`].

    Returns float64[widths, drafts + 1], where the number of widths is at most `most` + 1.
    """
    races = noise.shape[0]
    size = len(p)
    wanted = 0
    for place in range(size):
        wanted += p[place] > 0
    wanted = min(wanted, most)
    hits = np.zeros((wanted + 1, drafts + 1))
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
            hits[width + 1, deepest] += 1
    hits[0, 0] = races
    for width in range(wanted + 1):
        for count in range(drafts):
            hits[width, count + 1] += hits[width, count]
    return hits / races

"""How likely drafts hold all draws of a layer under shared noise, in array code, on the odds of all pairs.

The pairs run exponential races, at the target and at the draft model with the same exponentials. Pair i arrives at e_i / p_i
and e_i / q_i; draws are the first to arrive at the target, drafts the first at the draft model.
"""

import numpy as np

from specbeam.core.control.races import ENTRANTS
from specbeam.core.control.width import HEAD
from tests.oracles.laws import best


def odds_by_drafts(p, q, drafts, most, rest, by_rank, noise):
    """Odds that the first 0, 1, ..., `most` draws are among 0, 1, ..., `drafts` drafts, float64[widths, drafts + 1].

    Args:
        rest: mass of the draft on countless small pairs that do not run.
        by_rank: drafts are the first `most` to arrive and then the others in the order in which they stand here.
        noise: exponentials, float64[races, pairs].
    """
    noise = noise[:, : len(p)]
    with np.errstate(divide="ignore"):
        target = noise / p
        draft = noise / q
    first = np.argsort(target, axis=1)[:, : min(most, np.count_nonzero(p))]
    if by_rank:
        needed = np.take_along_axis(_needed_by_rank(draft, most), first, 1)
    else:
        at = np.take_along_axis(draft, first, 1)
        before = (draft[:, None] < at[:, :, None]).sum(2) + rest * np.minimum(at, 1e9)
        needed = np.where(np.isfinite(at), np.floor(before) + 1, np.inf)
    nothing = np.zeros((len(needed), 1))
    needed = np.maximum.accumulate(np.concatenate([nothing, needed], axis=1), axis=1)
    return (needed[:, :, None] <= np.arange(drafts + 1)).mean(0)


def _needed_by_rank(draft, most):
    """How many drafts it takes until each pair is one, in each race."""
    rank = draft.argsort(1, kind="stable").argsort(1)
    core = (rank < most) & np.isfinite(draft)
    others = np.cumsum(~core, axis=1) + core.sum(1, keepdims=True)
    return np.where(core, rank + 1, others)


def odds_of_layer(p, q, uncut_q, row_of, cuts, drafts, most, noise):
    """The same for a layer.

    Args:
        p: odds of the target, float64[beams, vocab]; q: of the draft, float64[rows, vocab].
        uncut_q: odds of the draft before top-k, top-p and min-p.
        row_of: the draft's row of each beam, -1 for none.
        cuts: whether there is a truncation.
    """
    vocab = p.shape[1]
    q_of_pairs = np.where(row_of[:, None] >= 0, q[row_of], 0.0).ravel()
    p = p.ravel()
    if not cuts:
        pairs = best(p, ENTRANTS)
        pairs = np.sort(pairs[p[pairs] >= p.max() * np.exp(-HEAD)])
        rest = max(1 - q_of_pairs[pairs].sum(), 0.0)
        return odds_by_drafts(p[pairs], q_of_pairs[pairs], drafts, most, rest, False, noise)
    beam_of = {row: beam for beam, row in enumerate(row_of.tolist())}
    likeliest = [(beam_of.get(pair // vocab, -1), pair % vocab) for pair in best(uncut_q, drafts + most).tolist()]
    named = [beam * vocab + token for beam, token in likeliest if beam >= 0]
    pairs = np.array(named + [pair for pair in np.flatnonzero(p).tolist() if pair not in named])
    if len(pairs) > ENTRANTS:
        pairs = pairs[np.sort(np.argsort(-p[pairs], kind="stable")[:ENTRANTS])]
    return odds_by_drafts(p[pairs], q_of_pairs[pairs], drafts, most, 0.0, True, noise)

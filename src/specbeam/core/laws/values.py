"""Values of the best pairs of a joint law, by which a layer's pairs are chosen."""

import numpy as np
from jaxtyping import Float64, UInt64

from specbeam.core.laws.joint import JointLaw, all_pairs, drawn_pairs, odds_among, token_of
from specbeam.core.laws.ranking import cuts
from specbeam.core.noise import gumbel


def largest_values(law: JointLaw, keys: UInt64[np.ndarray, " beams"], count: int) -> Float64[np.ndarray, " count"]:
    """Return the largest log-odds plus noise of the pairs of a law, largest first.

    Args:
        keys: the noise key of each beam; empty: no noise.
        count: number of values.
    """
    beams, columns = law.logits.shape
    if not cuts(law.truncation):
        every = np.ones(beams, dtype=np.bool_)
        values: Float64[np.ndarray, " count"] = drawn_pairs(law, keys, every, count)[1]
        return values
    pairs = all_pairs(law)
    values = np.log(odds_among(law, pairs))
    if len(keys):
        values = values + [gumbel(keys[pair // columns], token_of(law, pair)) for pair in pairs]
    return np.sort(values)[::-1][:count]

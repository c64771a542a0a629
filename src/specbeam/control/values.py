"""The values of draft layers, learnt from acceptance probabilities. Widths and shapes of drafts are chosen by them."""

from typing import NamedTuple

import numpy as np

from specbeam.core.steps import Array, step


class Values(NamedTuple):
    """What the rest of a turn gains, as sums over the layers judged so far, which `choose_most_valued` adds to."""

    sums: Array  # float64[depths + 1, drafts + 1]: of gains from a layer on, by drafted layers left and drafts of each
    count: Array  # float64[1]: number of layers in the sums, with the weight of the prior
    utility: float  # gain of doubling the number of beams, in layers of one beam


NO_VALUES = Values(np.zeros((0, 1)), np.ones(1), 0.0)


@step
def gain_of(utility: float, width: int) -> float:
    """Return the gain of a layer of `width` beams, in layers of one beam: 1 + utility * log2(width); 0 for no beam."""
    return 1.0 + utility * np.log2(width) if width > 0 else 0.0


@step
def choose_most_valued(values: Values, odds: Array, drafts: int, left: int, least: int) -> int:
    """Return the width of most value, argmax gain(w) + odds(w) * (mean gain of the layers after it), and add to `values`.

    Args:
        odds: float64[widths, drafts + 1], probability that 0, 1, ... draws are accepted in full, by number of drafts.
        drafts: number of drafts of this layer.
        left: number of layers that were to be drafted, this one included.
        least: the least width.
    """
    sums = values.sums
    most = len(odds) - 1
    means = sums / values.count[0]
    drafts = min(drafts, sums.shape[1] - 1)
    left = min(left, len(sums) - 1)
    best = most
    top = -np.inf
    for width in range(most, min(least, most) - 1, -1):
        value = gain_of(values.utility, width) + odds[width, drafts] * means[left - 1, drafts]
        if value > top:
            best = width
            top = value
    for number in range(sums.shape[1]):
        sums[0, number] += gain_of(values.utility, most)
        for depth in range(1, len(sums)):
            most_gained = 0.0
            for width in range(min(least, most), most + 1):
                value = gain_of(values.utility, width) + odds[width, number] * means[depth - 1, number]
                most_gained = max(most_gained, value)
            sums[depth, number] += most_gained
    values.count[0] += 1
    return best

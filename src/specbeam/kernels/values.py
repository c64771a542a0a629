"""What layers are worth, learnt from their odds: by it widths are chosen, and shapes of drafts."""

from typing import NamedTuple

import numpy as np

from specbeam.kernels.compiling import Array, compiled


class Values(NamedTuple):
    """Sums over the layers judged so far; changed by `most_valued`."""

    sums: Array  # float64[depths + 1, drafts + 1]: of gains from a layer on, by drafted layers left and drafts of each
    count: Array  # float64[1]
    worth: float  # what twice the beams are worth, in layers of one beam


@compiled
def gain(worth: float, width: int) -> float:
    """What a layer of so many beams is worth, in layers of one beam."""
    return 1.0 + worth * np.log2(width) if width > 0 else 0.0


@compiled
def most_valued(values: Values, odds: Array, drafts: int, left: int, least: int) -> int:
    """The width of a layer: argmax gain(w) + odds(w) * what the layers behind it are worth. The layer counts from here on.

    Args:
        odds: float64[widths, drafts + 1]: that 0, 1, ... draws are accepted in full, by the number of drafts.
        drafts: how many there are. left: layers that were to be drafted, this one included.
    """
    sums, count, most = values.sums, values.count[0], len(odds) - 1
    means = sums / count
    drafts, left = min(drafts, sums.shape[1] - 1), min(left, len(sums) - 1)
    best, top = most, -np.inf
    for width in range(most, min(least, most) - 1, -1):
        value = gain(values.worth, width) + odds[width, drafts] * means[left - 1, drafts]
        if value > top:
            best, top = width, value
    for number in range(sums.shape[1]):
        sums[0, number] += gain(values.worth, most)
        for depth in range(1, len(sums)):
            top = 0.0
            for width in range(min(least, most), most + 1):
                top = max(top, gain(values.worth, width) + odds[width, number] * means[depth - 1, number])
            sums[depth, number] += top
    values.count[0] += 1
    return best

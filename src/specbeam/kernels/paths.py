"""Texts of beams, from one turn to the next."""

import numpy as np

from specbeam.kernels.compiling import Array, compiled


@compiled
def prolonged(tails: Array, tokens: Array, above: Array, parents: Array, newest: Array) -> tuple[Array, Array]:
    """What all surviving beams have in common behind the settled text, and the rest of each.

    Args:
        tails: int64[roots, length], behind the settled text.
        tokens, above: of the forest's nodes; roots come first.
        parents, newest: forest node above each survivor, all equally deep, and its last token.
    """
    beams, before, depth = len(parents), tails.shape[1], 0
    if beams == 0:
        return np.empty(0, dtype=np.int64), np.empty((0, before + 1), dtype=np.int64)
    node = parents[0]
    while above[node] >= 0:
        node, depth = above[node], depth + 1
    length = before + depth + 1
    texts = np.empty((beams, length), dtype=np.int64)
    for beam in range(beams):
        texts[beam, length - 1], node = newest[beam], parents[beam]
        for place in range(length - 2, before - 1, -1):
            texts[beam, place] = tokens[node]
            node = above[node]
        texts[beam, :before] = tails[node]
    common = 0
    while common < length and (texts[:, common] == texts[0, common]).all():
        common += 1
    return texts[0, :common].copy(), texts[:, common:].copy()

"""Choice of the layers that a draft skips, by dynamic programming over hidden states of one token (CLaSp, ACL 2025)."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float32

States = Float32[np.ndarray, "rows hidden"]


def dispensable_layers(
    run: Callable[[int, States], States], first: Float32[np.ndarray, " hidden"], layers: int, count: int
) -> tuple[int, ...]:
    """Return the `count` layers whose removal changes the last hidden state of a token least, ascending.

    g(i, j) is the state after the first i layers with j of them skipped. It is either the output of layer i - 1 for
    g(i - 1, j), or g(i - 1, j - 1) unchanged, whichever has the larger cosine with g(i, 0), the state of the whole model.
    The search is greedy: it keeps one state for each i and j. The result is the layers skipped on the path to
    g(layers, count).

    Args:
        run: returns the output of the layer of a given index for states of the same token.
        first: the input of the first layer.
        layers: number of layers.
        count: less than `layers`.
    """
    states = first[None]
    was_run = np.zeros((layers + 1, count + 1), dtype=bool)  # whether the path to g(i, j) runs layer i - 1
    for done in range(1, layers + 1):
        after = run(done - 1, states)
        whole = after[0]
        most = min(done, count)
        next_states = np.empty((most + 1, len(first)), dtype=np.float32)
        for left_out in range(most + 1):
            can_run = left_out < len(states)
            can_skip = left_out > 0
            runs = can_run and not (can_skip and _cosine(states[left_out - 1], whole) > _cosine(after[left_out], whole))
            next_states[left_out] = after[left_out] if runs else states[left_out - 1]
            was_run[done, left_out] = runs
        states = next_states
    found = []
    left_out = count
    for done in range(layers, 0, -1):
        if not was_run[done, left_out]:
            found.append(done - 1)
            left_out -= 1
    return tuple(reversed(found))


def _cosine(one: Float32[np.ndarray, " hidden"], other: Float32[np.ndarray, " hidden"]) -> float:
    norms = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(one @ other) / norms if norms else 0.0

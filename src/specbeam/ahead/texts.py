"""The texts of beams while a loop runs ahead: those that live, and those that ended."""

from typing import NamedTuple

import numpy as np

from specbeam.ahead.books import SPAN
from specbeam.kernels.compiling import Array, compiled


class Texts(NamedTuple):
    """New tokens since the run began, behind those of the beam that each began as."""

    live: Array  # int64[beams, SPAN]
    origins: Array  # int64[beams]
    gone: Array  # int64[room, SPAN]: of the beams that ended
    gone_origins: Array
    lengths: Array
    logliks: Array


@compiled
def begun(beams: int, most: int) -> Texts:
    """For so many beams now, and so many at most."""
    room = max(beams, most)
    origins = np.zeros(room, dtype=np.int64)
    origins[:beams] = np.arange(beams)
    gone = np.empty((room * SPAN, SPAN), dtype=np.int64)
    numbers = np.zeros((2, room * SPAN), dtype=np.int64)
    return Texts(np.empty((room, SPAN), np.int64), origins, gone, numbers[0], numbers[1], np.empty(room * SPAN))


@compiled
def _written(row: Array, end: int, node: int, tree: tuple[Array, Array]) -> int:
    """Write the tokens on the path to a forest node, the last one before `end`; the root that it ends in."""
    while tree[1][node] >= 0:
        end -= 1
        row[end] = tree[0][node]
        node = tree[1][node]
    return node


@compiled
def put_aside(
    texts: Texts, gone: int, span: int, tree: tuple[Array, Array], parent: int, token: int, loglik: float
) -> None:
    """The text of a beam that ended, so many tokens behind the beginning of the run, as number `gone`."""
    row = texts.gone[gone]
    row[span - 1] = token
    depth, node = 0, parent
    while tree[1][node] >= 0:
        depth, node = depth + 1, tree[1][node]
    root = _written(row, span - 1, parent, tree)
    before = span - 1 - depth
    row[:before] = texts.live[root, :before]
    texts.gone_origins[gone], texts.lengths[gone], texts.logliks[gone] = texts.origins[root], span, loglik


@compiled
def moved_on(texts: Texts, before: int, span: int, tree: tuple[Array, Array], parents: Array, newest: Array) -> None:
    """The texts of the survivors of a turn, which were `before` tokens long and are `span`."""
    live, origins = texts.live.copy(), texts.origins.copy()
    for beam in range(len(parents)):
        row = texts.live[beam]
        row[span - 1] = newest[beam]
        root = _written(row, span - 1, parents[beam], tree)
        row[:before] = live[root, :before]
        texts.origins[beam] = origins[root]

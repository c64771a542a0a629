"""The fast twin of `BeamRule` under shared noise with a fixed width: layers judged by one loop, until a beam ends."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from specbeam.choice import way
from specbeam.forest import Forest
from specbeam.kernels.compiling import Array, compiled
from specbeam.kernels.truncation import Way, layer
from specbeam.probs import on_host
from specbeam.records import Beams, Step
from specbeam.session import Session


class Judged(NamedTuple):
    """Layers: the draws of layer n stand between ends[n - 1] and ends[n]."""

    parents: Array  # forest nodes
    nodes: Array  # -1 where a draw is no draft
    tokens: Array
    scores: Array
    keys: Array
    ended: Array
    ends: Array


@compiled
def judged(
    logits: Array, tree: tuple[Array, Array], live: tuple[Array, Array, Array, Array], by: Way, drafted: int, most: int
) -> Judged:
    """Judge up to `most` layers, of which the first ones are `drafted`: until a beam ends, or one is no draft.

    Args:
        tree: tokens and parents of the forest. live: nodes, scores, counts and keys of the beams.
    """
    nodes, scores, counts, keys = live
    size = max(by.core, 1) * most
    parents, found, tokens = np.empty((3, size), dtype=np.int64)
    logj, names, ended = np.empty(size), np.empty(size, dtype=np.uint64), np.zeros(size, dtype=np.bool_)
    ends, count, layers, going = np.empty(most, dtype=np.int64), 0, 0, True
    while going and layers < most:
        every = np.ones(len(nodes), dtype=np.bool_)
        _, above, drawn, values, below, over, core = layer(logits, nodes, scores, counts, keys, every, by)
        if core < 0:
            break
        here = slice(count, count + len(drawn))
        tokens[here], logj[here], names[here], ended[here] = drawn, values, below, over
        going = layers < drafted
        for place in range(len(drawn)):
            parent, node = nodes[above[place]], len(tree[0]) - 1
            while node >= 0 and not (tree[1][node] == parent and tree[0][node] == drawn[place]):
                node -= 1
            parents[count], found[count] = parent, node
            going &= node >= 0 and not over[place]
            count += 1
        nodes, scores, keys, counts = found[here], values, below, np.ones(len(drawn), dtype=np.int64)
        ends[layers] = count
        layers += 1
    return Judged(
        parents[:count], found[:count], tokens[:count], logj[:count], names[:count], ended[:count], ends[:layers]
    )


def steps_at_once(
    session: Session, forest: Forest, live: Beams, scored: Float[torch.Tensor, "nodes vocab"], width: int, done: int
) -> list[Step]:
    """The next steps of a turn of which `done` are done, as far as the loop can tell; perhaps none."""
    warp, limits = session.warp, session.limits
    if not warp.for_loops or not warp.cut.told_at_once or limits.stop_strings or not on_host(scored):
        return []
    most, drafted = limits.max_new_tokens - session.length - done, len(forest.groups) - done
    found = judged(
        np.ascontiguousarray(scored.numpy()), (forest.tokens, forest.parents),
        (live.nodes, live.scores, live.counts, live.keys), way(warp, limits, width, 0), drafted,
        max(min(most, drafted + 1), 1),
    )  # fmt: skip
    steps, start = list[Step](), 0
    for number, end in enumerate(found.ends.tolist()):
        here = slice(start, end)
        nodes, ended = found.nodes[here], found.ended[here]
        beams = Beams(nodes, found.tokens[here], found.scores[here], np.ones_like(nodes), found.keys[here])
        passed = number < drafted and bool((ended | (nodes >= 0)).all())
        steps.append(Step(found.parents[here], beams, ended, width, passed))
        start = end
    return steps

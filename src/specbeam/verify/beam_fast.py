"""The fast twin of `BeamRule` under shared noise: the layers of a turn judged by one loop."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from specbeam.choice import way
from specbeam.control.accepted import widths_by
from specbeam.control.width import FixedWidth
from specbeam.forest import Forest
from specbeam.kernels.compiling import Array, compiled
from specbeam.kernels.stopping import Stop, enough, normalised
from specbeam.kernels.sums import log_norm
from specbeam.kernels.truncation import Cut, Way, layer
from specbeam.kernels.widths import Fronts, Widths, chosen, joint
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
    asked: Array  # width of each layer
    told: bool  # False: the next layer is to be judged, and not by this loop


class Finished(NamedTuple):
    """The beams that ended so far, and what they are enough for."""

    stop: Stop
    scores: Array  # normalised; with room behind those of
    held: int
    length: int  # tokens before the first layer


@compiled
def _rows(logits: Array, nodes: Array) -> Array:
    x = np.empty((len(nodes), logits.shape[1]), dtype=logits.dtype)
    for beam in range(len(nodes)):
        x[beam] = logits[nodes[beam]]
    return x


@compiled
def _asked(
    x: Array,
    scores: Array,
    counts: Array,
    by: Way,
    widths: Widths,
    nodes: Array,
    fronts: Fronts,
    number: int,
    planned: int,
) -> int:
    """The width of a drafted layer; -1 where the loop cannot tell."""
    if not widths.dynamic:
        return widths.most
    norm = log_norm(x)
    if not norm.max() < np.inf:  # nor NaN
        return -1
    return chosen(widths, joint(x, scores, norm, counts, by.cut), nodes, fronts, number, planned)


@compiled
def _found(tree: tuple[Array, Array], parent: int, token: int) -> int:
    """The forest node that is this child; -1 if it is no draft."""
    node = len(tree[0]) - 1
    while node >= 0 and not (tree[1][node] == parent and tree[0][node] == token):
        node -= 1
    return node


@compiled
def judged(
    logits: Array, tree: tuple[Array, Array], live: tuple[Array, Array, Array, Array], by: Way, widths: Widths,
    fronts: Fronts, planned: int, drafted: int, most: int, finished: Finished,
) -> Judged:  # fmt: skip
    """Judge up to `most` layers, of which the first ones are `drafted`: until one has a beam that is no draft, or the beams
    that ended are enough; where the limit is of no tokens, until one ends.

    Args:
        tree: tokens and parents of the forest. live: nodes, scores, counts and keys of the beams.
        fronts: what the drafted layers were drawn from, of which so many were `planned`; nobody looks at these if the
            width is fixed.
    """
    nodes, scores, counts, keys = live
    size, none = max(widths.most, 1) * most, np.empty(0, dtype=np.int64)
    parents, found, tokens = np.empty((3, size), dtype=np.int64)
    logj, names, ended = np.empty(size), np.empty(size, dtype=np.uint64), np.zeros(size, dtype=np.bool_)
    ends, wide = np.empty((2, most), dtype=np.int64)
    stop, held, count, layers, going, told = finished.stop, finished.held, 0, 0, True, True
    while going and layers < most:
        x = _rows(logits, nodes)
        # `np.int64`: the loop would be compiled twice, for a literal and for a number.
        asked = widths.most
        if layers < drafted:
            asked = _asked(x, scores, counts, by, widths, nodes, fronts, np.int64(layers), planned)
        every = np.ones(len(nodes), dtype=np.bool_)
        told = asked >= 0
        if not told:
            break
        _, above, drawn, values, below, over, core = layer(
            x, none, scores, counts, keys, every, Way(by.noisy, by.cut, asked, 0, by.eos)
        )
        told = core >= 0
        if not told:
            break
        here = slice(count, count + len(drawn))
        tokens[here], logj[here], names[here], ended[here] = drawn, values, below, over
        going = layers < drafted
        for place in range(len(drawn)):
            parents[count] = nodes[above[place]]
            found[count] = node = _found(tree, parents[count], drawn[place])
            going &= node >= 0 or over[place]
            if over[place] and stop.most > 0:
                finished.scores[held] = normalised(stop, values[place], finished.length + layers + 1)
                held += 1
            count += 1
        alive = ~over
        nodes, scores, keys, counts = found[here][alive], values[alive], below[alive], np.ones(alive.sum(), np.int64)
        ends[layers], wide[layers] = count, asked
        layers += 1
        if stop.most > 0:
            going &= not enough(stop, finished.scores[:held], scores, finished.length + layers)
        else:
            going &= not over.any()
    return Judged(
        parents[:count], found[:count], tokens[:count], logj[:count], names[:count], ended[:count], ends[:layers],
        wide[:layers], told,
    )  # fmt: skip


_NO_ONES, _NO_ODDS = np.zeros(0, dtype=np.int64), np.zeros(0)
_UNSEEN = Fronts(
    _NO_ONES, _NO_ODDS, _NO_ONES, np.zeros((0, 1), dtype=np.float32), _NO_ODDS, _NO_ONES, _NO_ONES,
    Cut(1.0, 0, 1.0, 0.0, 1, 0),
)  # fmt: skip
_UNTIL_ONE_ENDS = Finished(Stop(0, 1, 1, 1.0), np.zeros(0), 0, 0)


def steps_at_once(
    session: Session, forest: Forest, live: Beams, scored: Float[torch.Tensor, "nodes vocab"], width: int, done: int
) -> list[Step]:
    """The next steps of a turn of which `done` are done, as far as the loop can tell; perhaps none."""
    warp, limits, widths = session.warp, session.limits, widths_by(FixedWidth(width), session.state)
    if not warp.for_loops or not warp.cut.told_at_once or limits.stop_strings or not on_host(scored):
        return []
    most, drafted = limits.max_new_tokens - session.length - done, len(forest.groups) - done
    found = judged(
        np.ascontiguousarray(scored.numpy()), (forest.tokens, forest.parents),
        (live.nodes, live.scores, live.counts, live.keys), way(warp, limits, width, 0), widths, _UNSEEN, drafted, drafted,
        max(min(most, drafted + 1), 1), _UNTIL_ONE_ENDS,
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

"""The fast twin of `BeamDrafter` for one session under shared noise: all layers of a draft as one loop, model included."""

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float

from specbeam.choice import way
from specbeam.forest import Forest, Group
from specbeam.kernels.compiling import Array, compiled
from specbeam.kernels.cycles import cycles
from specbeam.kernels.truncation import Way, layer
from specbeam.kernels.widths import Fronts
from specbeam.laws import JointLaw
from specbeam.lm.any_lane import AnyLane, scored_alone
from specbeam.lm.base import LM
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.records import Beams, Shape
from specbeam.session import Session
from specbeam.truncation import Truncation


class Front(NamedTuple):
    """Beams that go on, and which of them the draft model itself would have kept."""

    nodes: Array
    tokens: Array
    scores: Array
    counts: Array
    keys: Array
    core: Array


class Layers(NamedTuple):
    """A draft. The logits of its fronts go on behind those of the layers, if one more was scored and not decided."""

    tree: tuple[Array, Array]  # tokens and parents of all nodes
    draws: Array  # int64[3, draws]: row of the parent in the front, token, node or -1
    fronts: Fronts


@compiled
def drafted(one: AnyLane, front: Front, answered: int, depth: int, way: Way) -> tuple[Layers, Front, int, float]:
    """Draft up to `depth` layers. Gives the draft, the front behind it, how many passes there were, which part of the time
    these took. There is one pass more than layers if the last one could not be decided here.
    """
    began, inside, roots, vocab = cycles(), 0, len(front.tokens), one.model.vocab
    rows, most = roots + max(depth - 1, 0) * way.width, depth * way.width
    tree, draws = np.empty((2, roots + most), dtype=np.int64), np.empty((3, most), dtype=np.int64)
    tree[0, :roots], tree[1, :roots] = front.tokens, -1
    front_nodes, front_counts = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
    front_scores, norms = np.empty(rows), np.empty(rows)
    logits = np.empty((rows, vocab), dtype=np.float32)
    row_ends, draw_ends = np.empty(depth, dtype=np.int64), np.empty(depth, dtype=np.int64)
    nodes, row, draw, layers, passes = roots, 0, 0, 0, 0
    while layers < depth and len(front.nodes) > 0:
        size, before = len(front.nodes), cycles()
        scored = scored_alone(one, tree[0][:nodes], tree[1][:nodes], answered)
        inside += cycles() - before
        answered, passes = nodes, passes + 1
        logits[row : row + size] = scored
        norm, parents, tokens, scores, keys, ends, core = layer(
            scored, np.empty(0, dtype=np.int64), front.scores, front.counts, front.keys, front.core, way
        )
        if core < 0:
            break
        front_nodes[row : row + size], front_scores[row : row + size] = front.nodes, front.scores
        front_counts[row : row + size], norms[row : row + size] = front.counts, norm
        first = nodes
        for place in range(len(tokens)):
            draws[0, draw], draws[1, draw], draws[2, draw] = parents[place], tokens[place], -1
            if not ends[place]:
                draws[2, draw] = nodes
                tree[0, nodes], tree[1, nodes] = tokens[place], front.nodes[parents[place]]
                nodes += 1
            draw += 1
        going = ~ends
        front = Front(
            np.arange(first, nodes), tokens[going], scores[going], np.ones(nodes - first, dtype=np.int64), keys[going],
            (np.arange(len(tokens)) < core)[going],
        )  # fmt: skip
        row += size
        row_ends[layers], draw_ends[layers] = row, draw
        layers += 1
    fronts = Fronts(
        front_nodes, front_scores, front_counts, logits, norms, row_ends[:layers], draw_ends[:layers], way.cut
    )
    return Layers((tree[0][:nodes], tree[1][:nodes]), draws, fronts), front, passes, inside / max(cycles() - began, 1)


@dataclass(frozen=True, eq=False)
class Draft:
    """What the loop drafted, and how it goes on."""

    forest: Forest
    front: Beams
    core: Bool[np.ndarray, " beams"]
    layers: int
    passes: int
    undecided: Float[torch.Tensor, "beams vocab"] | None  # of the front, if its layer is still to be chosen


def draft_at_once(lm: LM, session: Session, shape: Shape, beams: int) -> Draft | None:
    """What `BeamDrafter` drafts by noise, as far as the loop can decide it; None where it cannot begin."""
    warp, live = session.warp, session.beams
    if shape.depth < 1 or not isinstance(lm, HuggingFaceLM) or not (warp.for_loops and warp.cut.told_at_once):
        return None
    by = way(warp, session.limits, min(beams, shape.width), shape.width)
    start = Front(live.nodes, live.tokens, live.scores, live.counts, live.keys, np.ones(len(live), dtype=bool))
    with lm.alone(session, shape.depth * shape.width) as alone:
        if alone is None:
            return None
        began = time.perf_counter()
        layers, front, passes, share = drafted(alone.arrays, start, alone.lane.answered, shape.depth, by)
        alone.ran(passes, began, share)
    return _told(layers, front, passes, None if warp.greedy else warp.cut)


def _told(layers: Layers, front: Front, passes: int, cut: Truncation | None) -> Draft:
    groups, row, draw, fronts = list[Group](), 0, 0, layers.fronts
    for row_end, draw_end in zip(fronts.row_ends.tolist(), fronts.draw_ends.tolist(), strict=True):
        rows, law = slice(row, row_end), None
        if cut is not None:
            logits, scores = torch.from_numpy(fronts.logits[rows]), fronts.scores[rows]
            law = JointLaw(logits, scores, fronts.norms[rows], fronts.counts[rows], cut)
        parents, tokens, nodes = layers.draws[:, draw:draw_end]
        groups.append(Group(fronts.nodes[rows], parents, tokens, nodes, law))
        row, draw = row_end, draw_end
    decided, size, (tokens, parents) = len(groups), len(front.nodes), layers.tree
    return Draft(
        Forest(tokens, parents, tuple(groups)),
        Beams(front.nodes, front.tokens, front.scores, front.counts, front.keys),
        front.core,
        decided,
        passes,
        torch.from_numpy(fronts.logits[row : row + size]) if passes > decided else None,
    )

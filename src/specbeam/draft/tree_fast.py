"""The fast twin of `TreeDrafter` for one session and trees of independent or distinct draws: all layers as one loop, model
included.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.dice import Dice
from specbeam.forest import Forest, Group, Row
from specbeam.kernels.compiling import Array, compiled
from specbeam.kernels.cycles import cycles
from specbeam.kernels.stopping import is_end
from specbeam.kernels.sums import picked
from specbeam.kernels.truncation import Cut, dense, truncated
from specbeam.lm.any_lane import AnyLane, scored_alone
from specbeam.lm.base import LM
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.probs import MOST
from specbeam.session import Session


class Draws(NamedTuple):
    """How children are drawn."""

    counts: Array  # int64[layers]: children of each node
    distinct: bool  # each struck out once drawn
    greedy: bool  # the best token; one child
    cut: Cut  # `looked` is 0 where nothing is cut
    eos: Array
    uniforms: Array  # as many as there may be draws


class Room(NamedTuple):
    """What there may be of a tree."""

    draws: int
    groups: int
    numbers: int  # of laws


class Grown(NamedTuple):
    """A tree, and a group of draws for each node that has children: ends are where the next group begins."""

    tree: Array  # int64[2, nodes]: tokens and parents
    logq: Array  # float64[nodes]
    draws: Array  # int64[2, draws]: tokens, and nodes or -1
    parents: Array  # int64[groups]
    draw_ends: Array
    law_tokens: Array  # of all groups, one behind the other; none where nothing is cut
    law_logp: Array
    law_ends: Array
    front: Array  # nodes whose laws come next
    undecided: Array  # float32[front, vocab], if the loop cannot say them; else empty


@compiled
def _laws(logits: Array, way: Draws, law_tokens: Array, law_logp: Array, law_ends: Array, group: int) -> bool:
    """Write the laws of these rows behind those of the groups before; False if a row has none, or is not told."""
    start = law_ends[group - 1] if group > 0 else 0
    if way.cut.looked == 0:
        for row in range(len(logits)):
            if not dense(logits[row], way.cut.temperature, law_logp[start : start + logits.shape[1]]):
                return False
            start += logits.shape[1]
            law_ends[group + row] = start
        return True
    by = (way.cut.temperature, way.cut.top_k, way.cut.top_p, way.cut.min_p, way.cut.least)
    tokens, logp, counts = truncated(logits, *by, max(MOST, way.cut.least))
    if counts.min() < 1 or start + len(tokens) > len(law_tokens):  # equals of the last one are kept, however many
        return False
    law_tokens[start : start + len(tokens)], law_logp[start : start + len(tokens)] = tokens, logp
    for row in range(len(logits)):
        start += counts[row]
        law_ends[group + row] = start
    return True


@compiled
def _draw(left: Array, count: int, way: Draws, first: int, tokens: Array) -> int:
    """Into `tokens`: places of up to `count` draws from the law `left`, which distinct ones strike out. How many it gave."""
    if way.greedy:
        tokens[0] = left.argmax()
        return 1
    for draw in range(count):
        if way.distinct and not (left > 0).any():
            return draw
        tokens[draw] = picked(left, way.uniforms[first + draw])
        if way.distinct:
            left[tokens[draw]] = 0.0
    return count


@compiled
def _born(tree: Array, nodes: int, siblings: int, parent: int, token: int, eos: Array) -> tuple[int, bool]:
    """The node of a drawn token, that of an earlier sibling or the next one; -1 for an end token. And whether it is new."""
    if is_end(token, eos):
        return -1, False
    for node in range(siblings, nodes):
        if tree[0, node] == token:
            return node, False
    tree[0, nodes], tree[1, nodes] = token, parent
    return nodes, True


@compiled
def drafted(one: AnyLane, roots: Array, answered: int, way: Draws, room: Room) -> tuple[Grown, int, int, float]:
    """Grow the layers that are counted in `way`. Gives the tree, the number of passes and of uniforms used, and which part
    of the time the passes took.
    """
    began, inside, vocab = cycles(), 0, one.model.vocab
    tree, draws = np.empty((2, len(roots) + room.draws), dtype=np.int64), np.empty((2, room.draws), dtype=np.int64)
    tree[0, : len(roots)], tree[1, : len(roots)] = roots, -1
    logq = np.zeros(len(roots) + room.draws)
    parents, draw_ends, law_ends = np.empty((3, room.groups), dtype=np.int64)
    law_tokens, law_logp = np.empty(room.numbers if way.cut.looked > 0 else 0, dtype=np.int64), np.empty(room.numbers)
    front, nodes, group, draw, used, passes = np.arange(len(roots)), len(roots), 0, 0, 0, 0
    undecided, places = (
        np.empty((0, vocab), dtype=np.float32),
        np.empty(way.counts.max() if len(way.counts) > 0 else 0, dtype=np.int64),
    )
    for count in way.counts:
        if len(front) == 0:
            break
        before = cycles()
        logits = scored_alone(one, tree[0][:nodes], tree[1][:nodes], answered)
        inside += cycles() - before
        answered, passes = nodes, passes + 1
        if not _laws(logits, way, law_tokens, law_logp, law_ends, group):
            undecided = logits
            break
        first = nodes
        for parent in front:
            start = law_ends[group - 1] if group > 0 else 0
            logp = law_logp[start : law_ends[group]]
            left = logp if way.greedy else np.exp(logp)
            drawn, siblings = _draw(left, count, way, used, places), nodes
            used += 0 if way.greedy else drawn
            for place in places[:drawn]:
                token = law_tokens[start + place] if way.cut.looked > 0 else place
                node, new = _born(tree, nodes, siblings, parent, token, way.eos)
                if new:
                    logq[node], nodes = logq[parent] + logp[place], nodes + 1
                draws[0, draw], draws[1, draw] = token, node
                draw += 1
            parents[group], draw_ends[group] = parent, draw
            group += 1
        front = np.arange(first, nodes)
    found = Grown(
        tree[:, :nodes], logq[:nodes], draws[:, :draw], parents[:group], draw_ends[:group], law_tokens, law_logp,
        law_ends[:group], front, undecided,
    )  # fmt: skip
    return found, passes, used, inside / max(cycles() - began, 1)


@dataclass(frozen=True, eq=False)
class Tree:
    """What the loop grew, and how it goes on."""

    forest: Forest
    front: Int64[np.ndarray, " front"]
    passes: int
    undecided: Float[torch.Tensor, "front vocab"] | None  # logits of the front, if its laws are still to be made


def tree_at_once(lm: LM, session: Session, counts: Sequence[int], distinct: bool) -> Tree | None:
    """So many independent or distinct draws below each node of a layer, as far as the loop can say the laws; None where it
    cannot begin.
    """
    if not counts or not isinstance(lm, HuggingFaceLM):
        return None
    way, room = draws_of(session, counts, distinct), room_for(lm, session, counts)
    if way is None or room is None:
        return None
    dice, roots = session.dice, session.beams.tokens
    with lm.alone(session, room.draws) as alone:
        if alone is None:
            return None
        way = way._replace(uniforms=dice.ahead(room.draws))
        began = time.perf_counter()
        found, passes, used, share = drafted(alone.arrays, roots, alone.lane.answered, way, room)
        alone.ran(passes, began, share)
    dice.use(used)
    undecided = torch.from_numpy(found.undecided) if len(found.undecided) else None
    return Tree(_forest(found, way, lm.vocab), found.front, passes, undecided)


LARGEST = 10_000_000  # numbers of laws that are worth their room


def draws_of(session: Session, counts: Sequence[int], distinct: bool) -> Draws | None:
    """How a loop draws such children, without the uniforms; None where it cannot."""
    warp = session.warp
    if type(session.dice) is not Dice or not warp.for_loops or warp.cut.looked < 0 or (warp.greedy and max(counts) > 1):
        return None
    sizes = np.array(counts, dtype=np.int64)
    return Draws(sizes, distinct, warp.greedy, warp.cut.for_loops, session.limits.ending, np.zeros(0))


def room_for(lm: HuggingFaceLM, session: Session, counts: Sequence[int]) -> Room | None:
    """For such trees under all beams; None if it is too much."""
    cut, groups = session.warp.cut, [len(session.beams)]
    for count in counts[:-1]:
        groups.append(groups[-1] * count)
    draws = sum(size * count for size, count in zip(groups, counts, strict=True))
    kept = max(cut.top_k, cut.least) if cut.top_k else max(MOST, cut.least)
    numbers = sum(groups) * (kept if cut.cuts else lm.vocab)
    return Room(draws, sum(groups), numbers) if numbers <= LARGEST else None


def _forest(found: Grown, way: Draws, vocab: int) -> Forest:
    groups, draw, law, replacement = list[Group](), 0, 0, not (way.distinct or way.greedy)
    ends = zip(found.parents.tolist(), found.draw_ends.tolist(), found.law_ends.tolist(), strict=True)
    for parent, draw_end, law_end in ends:
        row = None
        if not way.greedy:
            tokens = found.law_tokens[law:law_end] if way.cut.looked else None
            row = Row(found.law_logp[law:law_end], vocab, tokens)
        drawn, nodes = found.draws[:, draw:draw_end]
        above = np.zeros_like(drawn)
        groups.append(Group(np.array([parent]), above, drawn, nodes, row, replacement, sure=way.greedy))
        draw, law = draw_end, law_end
    tokens, parents = found.tree
    return Forest(tokens, parents, tuple(groups), found.logq if parents[-1] >= 0 else None)

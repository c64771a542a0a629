"""DRAFT: chains whose tokens have siblings, more where the draft model is less sure (SWIFT, arXiv 2410.06916)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specbeam.core.beams import Beams, is_end
from specbeam.core.control.planning import NO_STOP, StopSpec
from specbeam.core.dice import pick
from specbeam.core.draft.tree import (
    NODES,
    Complete,
    StatedLaws,
    add_draw,
    bear,
    close_group,
    condition_after,
    finish_growth,
    grow_one_layer,
    law_after,
    likeliest_places,
    logq_of,
    most_draws,
    register_growth,
    room_for_children,
    room_for_laws,
    start_growth,
    with_layer,
    with_nodes,
)
from specbeam.core.draft.turns import Cut, nodes_of, uncut
from specbeam.core.forest import CHOSEN, DISTINCT, Forest
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.reduce import BROKEN, SOUND, UNDECIDED, exponentials
from specbeam.core.laws.rows import RowLaw, is_law_decided
from specbeam.core.steps import Array, borrowed, step

Counts = tuple[tuple[float, int], ...]  # (odds, number of children), by descending odds; the first exceeded odds count
OF_BEST: Counts = ((0.95, 3), (0.8, 5), (0.5, 8), (0.0, 10))
OF_DRAWN: Counts = ((0.95, 1), (0.8, 3), (0.5, 5), (0.0, 10))


@borrowed
class CaterpillarSpec(NamedTuple):
    """The number of children of a node by the odds of the first, as numbers for steps."""

    odds: (
        Array  # float64[classes], descending: a first draw is of the first class whose odds it exceeds, or of the last
    )
    counts: Array  # int64[classes]: number of children, the first included
    greedy: bool  # True: children are the likeliest tokens; False: they are drawn without replacement
    truncation: Truncation
    eos: Array  # int64[ends]
    stops: StopSpec = NO_STOP  # how the controller may end a draft between layers


class CaterpillarDraft(NamedTuple):
    """Chains while they grow, with the siblings of their tokens, which become nodes after the last layer."""

    forest: Forest  # of the chains alone
    frontier: Array  # int64[frontier]: nodes whose children are drawn next
    parents: Array  # int64[groups]: the node above each group of siblings
    spine: Array  # int64[groups]: the node of its first draw; -1 if that is an end
    draw_ends: Array  # int64[groups]
    tokens: Array  # int64[draws]
    logp: Array  # float64[draws]: draft log-probabilities
    law_ends: Array  # int64[groups]
    laws: StatedLaws  # without spare capacity
    vocab: int
    surest: float  # largest draft probability of a first draw of the newest layer that goes on; 1 if there is none


@start_growth.of(CaterpillarSpec)
@step
def start_chains(roots: Forest, spec: CaterpillarSpec, live: Beams, depth: int, width: int) -> CaterpillarDraft:
    """Return chains without layers; see `start_growth`."""
    none = np.empty(0, dtype=np.int64)
    frontier = np.arange(len(roots.tokens))
    return CaterpillarDraft(roots, frontier, none, none, none, none, np.empty(0), none, room_for_laws(0), 0, 1.0)


@step
def number_of_children(spec: CaterpillarSpec, odds: float) -> int:
    """Return the number of children of a node, given the odds of the first."""
    for place in range(len(spec.odds)):
        if odds > spec.odds[place]:
            return spec.counts[place]
    return spec.counts[len(spec.counts) - 1]


@step
def draw_family(logp: Array, odds: Array, spec: CaterpillarSpec, dice: Any) -> Array:
    """Return the children of a node as indices into its law, int64[children]; the chain continues with the first one."""
    if spec.greedy:
        return likeliest_places(logp, number_of_children(spec, odds.max()))
    left = odds.copy()
    first = pick(dice, left)
    count = number_of_children(spec, odds[first])
    places = np.empty(count, dtype=np.int64)
    places[0] = first
    left[first] = 0.0
    drawn = 1
    while drawn < count and (left > 0).any():
        places[drawn] = pick(dice, left)
        left[places[drawn]] = 0.0
        drawn += 1
    return places[:drawn]


@grow_one_layer.of(CaterpillarSpec)
@step
def grow_chains(draft: CaterpillarDraft, rows: Any, spec: CaterpillarSpec, dice: Any) -> tuple[CaterpillarDraft, int]:
    """Return chains with one more layer; see `grow_one_layer`. A node after which everything is banned is a leaf."""
    grown = _with_frontier(draft, np.empty(0, dtype=np.int64), -1.0)
    for number in range(len(draft.frontier)):
        condition = condition_after(rows, number)
        if condition == BROKEN:
            return draft, BROKEN
        if condition == SOUND:
            law = law_after(rows, number, spec.truncation)
            if not is_law_decided(law):
                return draft, UNDECIDED
            grown = _with_family(grown, draft.frontier[number], law, spec, dice)
    surest = grown.surest if grown.surest >= 0 else 1.0
    return _with_frontier(grown, grown.frontier, surest), SOUND


@step
def _with_frontier(draft: CaterpillarDraft, frontier: Array, surest: float) -> CaterpillarDraft:
    """Return the same chains with another frontier."""
    return CaterpillarDraft(
        draft.forest, frontier, draft.parents, draft.spine, draft.draw_ends, draft.tokens, draft.logp, draft.law_ends,
        draft.laws, draft.vocab, surest,
    )  # fmt: skip


@step
def _with_family(
    draft: CaterpillarDraft, parent: int, law: RowLaw, spec: CaterpillarSpec, dice: Any
) -> CaterpillarDraft:
    """Return chains with the children of one node: the first becomes a node now, unless it is an end, the others later."""
    odds = exponentials(law.logp)
    places = draw_family(law.logp, odds, spec, dice)
    first = places[0]
    tokens = law.tokens[places] if len(law.tokens) > 0 else places
    node = -1
    forest = draft.forest
    frontier = draft.frontier
    surest = draft.surest
    if not is_end(tokens[0], spec.eos):
        node = len(forest.tokens)
        logq = logq_of(forest, parent) + law.logp[first]
        forest = with_nodes(forest, tokens[:1], np.full(1, parent), np.full(1, logq))
        frontier = np.append(frontier, node)
        surest = max(surest, odds[first])
    stated = np.arange(len(odds)) if len(law.tokens) == 0 else law.tokens
    if spec.greedy:
        stated = stated[:0]
        odds = odds[:0]
    laws = StatedLaws(np.concatenate((draft.laws.tokens, stated)), np.concatenate((draft.laws.odds, odds)))
    return CaterpillarDraft(
        forest,
        frontier,
        np.append(draft.parents, parent),
        np.append(draft.spine, node),
        np.append(draft.draw_ends, len(draft.tokens) + len(tokens)),
        np.concatenate((draft.tokens, tokens)),
        np.concatenate((draft.logp, law.logp[places])),
        np.append(draft.law_ends, len(laws.odds)),
        laws,
        law.vocab,
        surest,
    )


@finish_growth.of(CaterpillarSpec)
@step
def finish_chains(draft: CaterpillarDraft, spec: CaterpillarSpec) -> Cut:
    """Return the chains followed by all siblings; ends get no node. See `finish_growth`."""
    forest = draft.forest
    groups = len(draft.parents)
    born = room_for_children(len(forest.tokens), len(draft.tokens), groups)
    start = 0
    for group in range(groups):
        parent = draft.parents[group]
        base = logq_of(forest, parent)
        siblings_from = born.sizes[NODES]
        add_draw(born, draft.tokens[start], draft.spine[group])
        for draw in range(start + 1, draft.draw_ends[group]):
            bear(born, siblings_from, parent, draft.tokens[draw], base + draft.logp[draw], 0, spec.eos)
        close_group(born, CHOSEN if spec.greedy else DISTINCT, parent, draft.law_ends[group])
        start = draft.draw_ends[group]
    return uncut(with_layer(forest, born, draft.laws, len(draft.laws.odds), draft.vocab))


@most_draws.of(CaterpillarSpec)
def most_draws_of_chains(draft: CaterpillarDraft, spec: CaterpillarSpec) -> int:
    """Return the maximum number of draws of a layer; see `most_draws`."""
    return len(draft.frontier) * int(spec.counts.max())


@nodes_of.of(CaterpillarSpec)
@step
def most_nodes_of_chains(spec: CaterpillarSpec, roots: int, depth: int, width: int) -> int:
    """Return the maximum number of nodes of chains with siblings; see `nodes_of`."""
    return roots * depth * spec.counts.max()


register_growth(CaterpillarSpec)


@dataclass(frozen=True)
class Caterpillar(Complete):
    """A growth of chains in which each token has siblings, which are leaves and never scored by the draft model.

    The chain continues with the first draw under a node. The number of further draws depends on the odds of the first
    one, which is tried before them, so each draw still has the law that it is tried against.

    Args:
        of_drawn: number of children by the odds of the first, if they are drawn (without replacement).
        of_best: the same for the likeliest tokens, at temperature 0.
    """

    of_drawn: Counts = OF_DRAWN
    of_best: Counts = OF_BEST

    def spec(self, truncation: Truncation, eos: Array, greedy: bool, constrained: bool) -> CaterpillarSpec:
        """Return how steps grow such chains."""
        counts = self.of_best if greedy else self.of_drawn
        odds = np.array([least for least, _ in counts])
        return CaterpillarSpec(odds, np.array([count for _, count in counts]), greedy, truncation, eos)

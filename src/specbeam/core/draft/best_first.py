"""DRAFT: trees with a budget of nodes, whose shape follows the draft model's confidence."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specbeam.core.beams import Beams, is_end
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.control.needs import no_node_odds
from specbeam.core.control.planning import NO_STOP, StopSpec
from specbeam.core.dice import pick
from specbeam.core.draft.tree import (
    ROOM,
    Complete,
    LayerDraws,
    StatedLaws,
    add_draws,
    condition_after,
    finish_growth,
    grow_one_layer,
    law_after,
    likeliest_places,
    most_draws,
    register_growth,
    room_for_laws,
    start_growth,
    with_nodes,
)
from specbeam.core.draft.turns import Cut, nodes_of, uniforms_of
from specbeam.core.forest import CHOSEN, Forest, depths_of, groups_without_laws, start_of
from specbeam.core.laws.ranking import Truncation, sorted_places
from specbeam.core.laws.reduce import BROKEN, SOUND, UNDECIDED, exponentials
from specbeam.core.laws.rows import is_law_decided, token_at
from specbeam.core.steps import Array, borrowed, open_step, step


@borrowed
class BestFirstSpec(NamedTuple):
    """The growth of a tree of the most valuable nodes; the value of a node is the product of the draft odds on its path."""

    top: int  # number of tokens considered after each expanded node
    widest: int  # number of nodes expanded per layer
    within_layer: bool  # whether only nodes of the newest layer are expanded
    least_gain: float  # a layer that adds at most this many expected tokens is the last
    truncation: Truncation
    eos: Array  # int64[ends]
    stops: StopSpec = NO_STOP  # how the controller may end a draft between layers


class Candidates(NamedTuple):
    """Candidate nodes, which are not expanded yet."""

    values: Array  # float64[n]: log values
    parents: Array  # int64[n]
    tokens: Array  # int64[n]
    logp: Array  # float64[n]: draft log-probabilities after the parents


class BestFirstDraft(NamedTuple):
    """A tree of the expanded nodes while it grows."""

    forest: Forest
    frontier: Array  # int64[frontier]: the nodes expanded last
    values: Array  # float64[nodes]: log values; those of the roots are relative to the best beam
    roots: int
    candidates: Candidates
    surest: float  # largest draft probability of an expanded node below the last frontier; 1 without one
    layers: int  # number of layers so far
    depth: int  # maximum number of layers
    width: int  # maximum number of nodes


@start_growth.of(BestFirstSpec)
@step
def start_best_first(roots: Forest, spec: BestFirstSpec, live: Beams, depth: int, width: int) -> BestFirstDraft:
    """Return a tree without layers; see `start_growth`."""
    count = len(roots.tokens)
    none = np.empty(0, dtype=np.int64)
    candidates = Candidates(np.empty(0), none, none, np.empty(0))
    values = live.scores - live.scores.max()
    return BestFirstDraft(roots, np.arange(count), values, count, candidates, 1.0, 0, depth, width)


@step
def _best_values(draft: BestFirstDraft, candidates: Candidates) -> Array:
    """Return the log values of the best nodes within the budget, expanded or not, best first."""
    every = np.concatenate((draft.values[draft.roots :], candidates.values))
    return every[sorted_places(every)[: draft.width]]


@open_step
def _considered(draft: BestFirstDraft, rows: Any, spec: BestFirstSpec) -> tuple[Candidates, int]:
    """Return the likeliest candidates below the frontier, and SOUND, or BROKEN if a row contains NaN or +inf."""
    most = len(draft.frontier) * spec.top
    values = np.empty(most)
    parents = np.empty(most, dtype=np.int64)
    tokens = np.empty(most, dtype=np.int64)
    logp = np.empty(most)
    held = 0
    for number in range(len(draft.frontier)):
        condition = condition_after(rows, number)
        if condition == BROKEN:
            return Candidates(values[:0], parents[:0], tokens[:0], logp[:0]), BROKEN
        if condition != SOUND:
            continue
        node = draft.frontier[number]
        law = law_after(rows, number, spec.truncation)
        if not is_law_decided(law):
            return Candidates(values[:0], parents[:0], tokens[:0], logp[:0]), UNDECIDED
        for place in likeliest_places(law.logp, spec.top):
            token = token_at(law, place)
            if is_end(token, spec.eos):
                continue
            values[held] = draft.values[node] + law.logp[place]
            parents[held] = node
            tokens[held] = token
            logp[held] = law.logp[place]
            held += 1
    return Candidates(values[:held], parents[:held], tokens[:held], logp[:held]), SOUND


@step
def _both(first: Candidates, second: Candidates) -> Candidates:
    """Return the candidates of both."""
    return Candidates(
        np.concatenate((first.values, second.values)),
        np.concatenate((first.parents, second.parents)),
        np.concatenate((first.tokens, second.tokens)),
        np.concatenate((first.logp, second.logp)),
    )


@step
def _picked(candidates: Candidates, which: Array) -> Candidates:
    """Return the candidates at these indices."""
    return Candidates(
        candidates.values[which], candidates.parents[which], candidates.tokens[which], candidates.logp[which]
    )


@step
def _comes_before(candidates: Candidates, one: int, other: int) -> bool:
    """Return whether a candidate is expanded before another: by value, then parent, then token, all descending."""
    if candidates.values[one] != candidates.values[other]:
        return candidates.values[one] > candidates.values[other]
    if candidates.parents[one] != candidates.parents[other]:
        return candidates.parents[one] > candidates.parents[other]
    return candidates.tokens[one] > candidates.tokens[other]


@step
def _next_expanded(candidates: Candidates, first: int, count: int, least: float) -> Array:
    """Return up to `count` candidates of value `least` or more, from index `first` on, in the order of expansion."""
    found = np.empty(count, dtype=np.int64)
    is_free = np.ones(len(candidates.values), dtype=np.bool_)
    for rank in range(count):
        best = -1
        for one in range(first, len(candidates.values)):
            if is_free[one] and candidates.values[one] >= least and (best < 0 or _comes_before(candidates, one, best)):
                best = one
        if best < 0:
            return found[:rank]
        found[rank] = best
        is_free[best] = False
    return found


@grow_one_layer.of(BestFirstSpec)
@step
def grow_best_first(draft: BestFirstDraft, rows: Any, spec: BestFirstSpec, dice: Any) -> tuple[BestFirstDraft, int]:
    """Add candidates below the frontier, and expand the best ones if they are worth a pass; see `grow_one_layer`."""
    fresh, condition = _considered(draft, rows, spec)
    if condition != SOUND:
        return draft, condition
    candidates = _both(draft.candidates, fresh)
    before = np.exp(_best_values(draft, draft.candidates)).sum()
    best = _best_values(draft, candidates)
    is_last = draft.layers + 1 >= draft.depth or np.exp(best).sum() - before <= spec.least_gain
    first = len(draft.candidates.values)
    chosen = np.empty(0, dtype=np.int64)
    if not is_last:
        least = best[draft.width - 1] if len(best) >= draft.width else -np.inf
        chosen = _next_expanded(candidates, first if spec.within_layer else 0, spec.widest, least)
    expanded = _picked(candidates, chosen)
    surest = -1.0
    for one in range(len(chosen)):
        if chosen[one] >= first:
            surest = max(surest, np.exp(expanded.logp[one]))
    is_left = np.ones(len(candidates.values), dtype=np.bool_)
    is_left[chosen] = False
    size = len(draft.forest.tokens)
    return BestFirstDraft(
        with_nodes(draft.forest, expanded.tokens, expanded.parents, expanded.values),
        size + np.arange(len(chosen)),
        np.concatenate((draft.values, expanded.values)),
        draft.roots,
        _picked(candidates, np.flatnonzero(is_left)),
        surest if surest >= 0 else 1.0,
        draft.layers + 1,
        draft.depth,
        draft.width,
    ), SOUND


@finish_growth.of(BestFirstSpec)
@step
def finish_best_first(draft: BestFirstDraft, spec: BestFirstSpec) -> Cut:
    """Return the best nodes within the budget, expanded or not; see `finish_growth`.

    Among equal values ancestors come first, so that no node is kept without its parent.
    """
    forest = draft.forest
    size = len(forest.tokens)
    inner = size - draft.roots
    candidates = draft.candidates
    depths = depths_of(forest.parents)
    values = np.concatenate((draft.values[draft.roots :], candidates.values))
    above = np.concatenate((np.arange(draft.roots, size), candidates.parents))
    ranks = np.concatenate((depths[draft.roots :], depths[candidates.parents] + 1)) * (size + 1) + above
    is_kept = np.zeros(size, dtype=np.bool_)
    is_kept[: draft.roots] = True
    is_free = np.ones(len(values), dtype=np.bool_)
    leaves = np.empty(min(draft.width, len(values)), dtype=np.int64)
    held = 0
    for _ in range(len(leaves)):
        best = -1
        for one in range(len(values)):
            if is_free[one] and (
                best < 0 or values[one] > values[best] or (values[one] == values[best] and ranks[one] < ranks[best])
            ):
                best = one
        is_free[best] = False
        if best < inner:
            is_kept[draft.roots + best] = True
        else:
            leaves[held] = best - inner
            held += 1
    added = _picked(candidates, leaves[:held])
    whole = with_nodes(forest, added.tokens, added.parents, added.values)
    node_map = np.concatenate((np.flatnonzero(is_kept), size + np.arange(held)))
    return Cut(chosen_forest(whole, node_map), whole, node_map, no_node_odds())


@step
def chosen_forest(whole: Forest, node_map: Array) -> Forest:
    """Return the forest of these nodes only, in which the children of each node are a CHOSEN group.

    Args:
        whole: a forest without groups.
        node_map: int64[n], ascending; all roots, and no node without its parent.
    """
    count = len(node_map)
    places = np.full(len(whole.tokens), -1)
    for place in range(count):
        places[node_map[place]] = place
    parents = np.empty(count, dtype=np.int64)
    for place in range(count):
        above = whole.parents[node_map[place]]
        parents[place] = places[above] if above >= 0 else -1
    tokens = whole.tokens[node_map]
    group_parents = np.empty(count, dtype=np.int64)
    draw_ends = np.empty(count, dtype=np.int64)
    draw_nodes = np.empty(count, dtype=np.int64)
    groups = 0
    draws = 0
    for parent in range(count):
        before = draws
        for node in range(parent + 1, count):
            if parents[node] == parent:
                draw_nodes[draws] = node
                draws += 1
        if draws > before:
            group_parents[groups] = parent
            draw_ends[groups] = draws
            groups += 1
    nodes = draw_nodes[:draws]
    siblings = groups_without_laws(CHOSEN, group_parents[:groups], draw_ends[:groups], tokens[nodes], nodes)
    logq = whole.logq[node_map] if len(whole.logq) > 0 else whole.logq
    return Forest(tokens, parents, siblings, logq, whole.beams, whole.frontier_rows, whole.known)


@most_draws.of(BestFirstSpec)
def no_draws(draft: BestFirstDraft, spec: BestFirstSpec) -> int:
    """Return 0: nothing is drawn."""
    return 0


@uniforms_of.of(BestFirstSpec)
def no_uniforms(drafts: BestFirstSpec, roots: int, depth: int, width: int) -> int:
    """Return 0: nothing is drawn."""
    return 0


@nodes_of.of(BestFirstSpec)
def most_best_nodes(drafts: BestFirstSpec, roots: int, depth: int, width: int) -> int:
    """Return the budget, and the number of nodes that may be expanded beyond it; see `nodes_of`."""
    return width + drafts.widest * max(depth - 1, 0)


register_growth(BestFirstSpec)


@dataclass(frozen=True)
class BestFirst(Complete):
    """A growth that keeps the `shape.width` nodes of largest value; nothing is drawn.

    The value of a node is the product of the draft probabilities on its path. Each layer expands the `widest` most valuable
    candidates, each by its `top` likeliest tokens. Values never increase along a path, so the best nodes include their
    parents.

    Sources: EAGLE-2 (arXiv 2406.16858) expands nodes of the newest layer, `within_layer=True`; OPT-Tree (2406.17276) and
    SpecExec (2406.02532) expand the most valuable nodes of all layers. OPT-Tree stops when a layer adds at most `least_gain`
    expected tokens.
    """

    top: int = 8
    widest: int = 8
    within_layer: bool = False
    least_gain: float = 0.0

    def spec(self, truncation: Truncation, eos: Array, greedy: bool, constrained: bool) -> BestFirstSpec:
        """Return how steps grow such trees."""
        return BestFirstSpec(
            int(self.top), int(self.widest), bool(self.within_layer), float(self.least_gain), truncation, eos
        )


@borrowed
class DrawsSpec(NamedTuple):
    """The growth of a tree by draws of the largest value."""

    least: float  # least value of a draw
    greedy: bool  # whether to take the likeliest tokens instead of drawing
    truncation: Truncation
    eos: Array  # int64[ends]
    stops: StopSpec = NO_STOP  # how the controller may end a draft between layers


class DrawsDraft(NamedTuple):
    """A tree while it grows by draws."""

    forest: Forest
    frontier: Array  # int64[frontier]: nodes whose children are drawn next
    values: Array  # float64[frontier]: their odds, with those of the beam, relative to the best beam
    roots: int
    laws: StatedLaws
    surest: float  # largest draft probability of a draw of the newest layer; 1 if it has none
    width: int  # maximum number of nodes


@start_growth.of(DrawsSpec)
@step
def start_draws(roots: Forest, spec: DrawsSpec, live: Beams, depth: int, width: int) -> DrawsDraft:
    """Return a tree without layers; see `start_growth`."""
    count = len(roots.tokens)
    values = np.exp(live.scores - live.scores.max())
    return DrawsDraft(roots, np.arange(count), values, count, room_for_laws(ROOM), 1.0, width)


@step
def _draw_best(draft: DrawsDraft, law_ends: Array, odds: Array, spec: DrawsSpec, dice: Any) -> tuple[LayerDraws, Array]:
    """Draw where the next draw is worth most, while it is worth `least` and the budget lasts. Returns draws and values.

    Args:
        law_ends: int64[frontier], the index after the law of each node in `odds`; nodes without allowed tokens have none.
        odds: float64[n], the laws; changed in place.
    """
    budget = draft.width - (len(draft.forest.tokens) - draft.roots)
    numbers = np.empty(max(budget, 0), dtype=np.int64)
    places = np.empty(max(budget, 0), dtype=np.int64)
    values = np.empty(max(budget, 0))
    next_value = draft.values.copy()
    draws = 0
    while draws < budget:
        number = int(np.argmax(next_value))
        value = next_value[number]
        if not value >= spec.least:
            break
        left = odds[start_of(law_ends, number) : law_ends[number]]
        mass = left.sum()
        if not mass > 0:
            next_value[number] = -1.0
            continue
        place = int(np.argmax(left)) if spec.greedy else pick(dice, left)
        share = left[place] / mass
        numbers[draws] = number
        places[draws] = place
        values[draws] = value * share
        left[place] = 0.0
        next_value[number] = value * (1 - share)
        draws += 1
    return LayerDraws(numbers[:draws], places[:draws]), values[:draws]


@grow_one_layer.of(DrawsSpec)
@step
def grow_draws(draft: DrawsDraft, rows: Any, spec: DrawsSpec, dice: Any) -> tuple[DrawsDraft, int]:
    """Return a tree with one more layer of draws; see `grow_one_layer`."""
    frontier = len(draft.frontier)
    law_ends = np.empty(frontier, dtype=np.int64)
    odds = np.empty(frontier * rows.vocab)
    end = 0
    for number in range(frontier):
        condition = condition_after(rows, number)
        if condition == BROKEN:
            return draft, BROKEN
        if condition == SOUND:
            law = law_after(rows, number, spec.truncation)
            if not is_law_decided(law):
                return draft, UNDECIDED
            copy_numbers(odds[end:], exponentials(law.logp))
            end += len(law.logp)
        law_ends[number] = end
    drawn, values = _draw_best(draft, law_ends, odds, spec, dice)
    layer = add_draws(draft.forest, draft.frontier, rows, drawn, spec, draft.laws)
    frontier_values = values[layer.draws]
    return DrawsDraft(
        layer.forest, layer.frontier, frontier_values, draft.roots, layer.laws, layer.surest, draft.width
    ), SOUND


@most_draws.of(DrawsSpec)
def most_draws_of_budget(draft: DrawsDraft, spec: DrawsSpec) -> int:
    """Return the budget; see `most_draws`."""
    return draft.width


@nodes_of.of(DrawsSpec)
def nodes_of_draws(drafts: DrawsSpec, roots: int, depth: int, width: int) -> int:
    """Return the budget; see `nodes_of`."""
    return width if depth > 0 else 0


@uniforms_of.of(DrawsSpec)
def uniforms_of_draws(drafts: DrawsSpec, roots: int, depth: int, width: int) -> int:
    """Return a bound: one uniform for each draw, and two for its trial; draws of end tokens get no node."""
    return 3 * depth * width


register_growth(DrawsSpec)


@dataclass(frozen=True)
class BestFirstDraws(Complete):
    """A growth that draws children of the largest value first (DySpec, arXiv 2410.11744, the variant with a threshold).

    The value of the next draw at a node is the value of the node times the draft probability that its earlier draws
    left over. Draws continue while the largest value is at least `least` and the tree has fewer than `shape.width`
    nodes. Values depend on laws and on earlier draws, never on the draw in question, so each draw has the draft law
    without its earlier siblings.
    """

    least: float = 0.05

    def spec(self, truncation: Truncation, eos: Array, greedy: bool, constrained: bool) -> DrawsSpec:
        """Return how steps grow such trees."""
        return DrawsSpec(float(self.least), greedy, truncation, eos)

"""DRAFT: trees whose shape follows the draft model's confidence, with a budget of nodes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specbeam.core.beams import Beams, is_end
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.control.needs import no_node_odds
from specbeam.core.control.planning import NO_STOP, StopSpec
from specbeam.core.dice import pick
from specbeam.core.draft.tree import (
    NODES,
    ROOM,
    Complete,
    bear,
    close_group,
    condition_after,
    draft_tree,
    finish_growth,
    grow_one_layer,
    keep_tosses_of_tree,
    law_after,
    learn_stop_of_tree,
    likeliest_places,
    logq_of,
    most_draws,
    room_for_children,
    start_growth,
    state_law,
    surest_of,
    tosses_of_tree,
    with_layer,
    with_room_for_laws,
)
from specbeam.core.draft.turns import Cut, draft_turn, keep_tosses, learn_from, nodes_of, tosses_of, uniforms_of
from specbeam.core.forest import CHOSEN, DISTINCT, Forest, Siblings, depths_of, start_of
from specbeam.core.laws.ranking import Truncation, sorted_places
from specbeam.core.laws.reduce import BROKEN, SOUND, exponentials
from specbeam.core.steps import Array, borrowed, open_step, step


@borrowed
class BestFirstSpec(NamedTuple):
    """How a tree of the most valuable nodes grows; the value of a node is the product of the draft odds on its path."""

    top: int  # number of tokens considered after each expanded node
    widest: int  # number of nodes expanded per layer
    within_layer: bool  # whether only nodes of the newest layer are expanded
    least_gain: float  # a layer that adds at most this many expected tokens is the last
    truncation: Truncation
    eos: Array  # int64[ends]
    stops: StopSpec = NO_STOP  # by what a draft may end between layers


class Unexpanded(NamedTuple):
    """Nodes to be, which were considered and not expanded yet."""

    values: Array  # float64[n]: log values
    parents: Array  # int64[n]
    tokens: Array  # int64[n]
    logp: Array  # float64[n]: draft log-probabilities after the parents


class BestFirstDraft(NamedTuple):
    """A tree while it grows: of the expanded nodes alone."""

    forest: Forest
    front: Array  # int64[front]: the nodes expanded last
    values: Array  # float64[nodes]: log values; those of the roots are relative to the best beam
    roots: int
    waiting: Unexpanded
    surest: float  # largest draft probability of an expanded node below the last front; 1 if there is none
    layers: int  # number of layers so far
    depth: int  # most layers
    width: int  # most nodes


@start_growth.of(BestFirstSpec)
@step
def start_best_first(roots: Forest, spec: BestFirstSpec, live: Beams, depth: int, width: int) -> BestFirstDraft:
    """Return a tree without layers; see `start_growth`."""
    count = len(roots.tokens)
    none = np.empty(0, dtype=np.int64)
    waiting = Unexpanded(np.empty(0), none, none, np.empty(0))
    values = live.scores - live.scores.max()
    return BestFirstDraft(roots, np.arange(count), values, count, waiting, 1.0, 0, depth, width)


@step
def _best_values(draft: BestFirstDraft, waiting: Unexpanded) -> Array:
    """Return the log values of the best nodes within the budget, expanded or waiting, best first."""
    every = np.concatenate((draft.values[draft.roots :], waiting.values))
    return every[sorted_places(every)[: draft.width]]


@open_step
def _considered(draft: BestFirstDraft, rows: Any, spec: BestFirstSpec) -> tuple[Unexpanded, int]:
    """Return the likeliest nodes to be below the front, and SOUND; or BROKEN if a row holds NaN or +inf."""
    most = len(draft.front) * spec.top
    values = np.empty(most)
    parents = np.empty(most, dtype=np.int64)
    tokens = np.empty(most, dtype=np.int64)
    logp = np.empty(most)
    held = 0
    for number in range(len(draft.front)):
        condition = condition_after(rows, number)
        if condition == BROKEN:
            return Unexpanded(values[:0], parents[:0], tokens[:0], logp[:0]), BROKEN
        if condition != SOUND:
            continue
        node = draft.front[number]
        law = law_after(rows, number, spec.truncation)
        for place in likeliest_places(law.logp, spec.top):
            token = law.tokens[place] if len(law.tokens) > 0 else place
            if is_end(token, spec.eos):
                continue
            values[held] = draft.values[node] + law.logp[place]
            parents[held] = node
            tokens[held] = token
            logp[held] = law.logp[place]
            held += 1
    return Unexpanded(values[:held], parents[:held], tokens[:held], logp[:held]), SOUND


@step
def _both(first: Unexpanded, second: Unexpanded) -> Unexpanded:
    """Return all nodes to be of both."""
    return Unexpanded(
        np.concatenate((first.values, second.values)),
        np.concatenate((first.parents, second.parents)),
        np.concatenate((first.tokens, second.tokens)),
        np.concatenate((first.logp, second.logp)),
    )


@step
def _picked(waiting: Unexpanded, which: Array) -> Unexpanded:
    """Return the nodes to be at these indices, or where the mask is True."""
    return Unexpanded(waiting.values[which], waiting.parents[which], waiting.tokens[which], waiting.logp[which])


@step
def _comes_before(waiting: Unexpanded, one: int, other: int) -> bool:
    """Return whether a node to be is expanded before another: by value, then by parent, then by token, all descending."""
    if waiting.values[one] != waiting.values[other]:
        return waiting.values[one] > waiting.values[other]
    if waiting.parents[one] != waiting.parents[other]:
        return waiting.parents[one] > waiting.parents[other]
    return waiting.tokens[one] > waiting.tokens[other]


@step
def _next_expanded(waiting: Unexpanded, first: int, count: int, least: float) -> Array:
    """Return up to `count` nodes to be of value `least` or more, from index `first` on, in the order of their ranks."""
    found = np.empty(count, dtype=np.int64)
    is_free = np.ones(len(waiting.values), dtype=np.bool_)
    for rank in range(count):
        best = -1
        for one in range(first, len(waiting.values)):
            if is_free[one] and waiting.values[one] >= least and (best < 0 or _comes_before(waiting, one, best)):
                best = one
        if best < 0:
            return found[:rank]
        found[rank] = best
        is_free[best] = False
    return found


@grow_one_layer.of(BestFirstSpec)
@step
def grow_best_first(draft: BestFirstDraft, rows: Any, spec: BestFirstSpec, dice: Any) -> tuple[BestFirstDraft, int]:
    """Consider nodes below the front, and expand the best ones, unless that is not worth a pass; see `grow_one_layer`."""
    fresh, condition = _considered(draft, rows, spec)
    if condition != SOUND:
        return draft, condition
    waiting = _both(draft.waiting, fresh)
    before = np.exp(_best_values(draft, draft.waiting)).sum()
    best = _best_values(draft, waiting)
    is_last = draft.layers + 1 >= draft.depth or np.exp(best).sum() - before <= spec.least_gain
    first = len(draft.waiting.values)
    chosen = np.empty(0, dtype=np.int64)
    if not is_last:
        least = best[draft.width - 1] if len(best) >= draft.width else -np.inf
        chosen = _next_expanded(waiting, first if spec.within_layer else 0, spec.widest, least)
    expanded = _picked(waiting, chosen)
    surest = -1.0
    for one in range(len(chosen)):
        if chosen[one] >= first:
            surest = max(surest, np.exp(expanded.logp[one]))
    is_left = np.ones(len(waiting.values), dtype=np.bool_)
    is_left[chosen] = False
    size = len(draft.forest.tokens)
    return BestFirstDraft(
        _with_nodes(draft.forest, expanded),
        size + np.arange(len(chosen)),
        np.concatenate((draft.values, expanded.values)),
        draft.roots,
        _picked(waiting, np.flatnonzero(is_left)),
        surest if surest >= 0 else 1.0,
        draft.layers + 1,
        draft.depth,
        draft.width,
    ), SOUND


@step
def _with_nodes(forest: Forest, more: Unexpanded) -> Forest:
    """Return a forest with more nodes."""
    before = forest.logq if len(forest.logq) > 0 else np.zeros(len(forest.tokens))
    return Forest(
        np.concatenate((forest.tokens, more.tokens)),
        np.concatenate((forest.parents, more.parents)),
        forest.siblings,
        np.concatenate((before, more.values)),
        forest.beams,
        forest.fronts,
        forest.known,
    )


@finish_growth.of(BestFirstSpec)
@step
def finish_best_first(draft: BestFirstDraft, spec: BestFirstSpec) -> Cut:
    """Return the best nodes within the budget, of those that were expanded and those that wait; see `finish_growth`.

    Among equal values an ancestor goes first, so that no node is kept without its parent.
    """
    forest = draft.forest
    size = len(forest.tokens)
    inner = size - draft.roots
    waiting = draft.waiting
    depths = depths_of(forest.parents)
    values = np.concatenate((draft.values[draft.roots :], waiting.values))
    above = np.concatenate((np.arange(draft.roots, size), waiting.parents))
    ranks = np.concatenate((depths[draft.roots :], depths[waiting.parents] + 1)) * (size + 1) + above
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
    whole = _with_nodes(forest, _picked(waiting, leaves[:held]))
    names = np.concatenate((np.flatnonzero(is_kept), size + np.arange(held)))
    return Cut(chosen_forest(whole, names), whole, names, no_node_odds())


@step
def chosen_forest(whole: Forest, names: Array) -> Forest:
    """Return the forest of these nodes only, in which the children of each node are a CHOSEN group.

    Args:
        whole: a forest without groups.
        names: int64[n], ascending; all roots, and no node without its parent.
    """
    count = len(names)
    places = np.full(len(whole.tokens), -1)
    for place in range(count):
        places[names[place]] = place
    parents = np.empty(count, dtype=np.int64)
    for place in range(count):
        above = whole.parents[names[place]]
        parents[place] = places[above] if above >= 0 else -1
    tokens = whole.tokens[names]
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
    none = whole.siblings
    siblings = Siblings(
        np.full(groups, CHOSEN), group_parents[:groups], np.arange(1, groups + 1), draw_ends[:groups],
        np.zeros(draws, dtype=np.int64), tokens[draw_nodes[:draws]], draw_nodes[:draws],
        np.zeros(groups, dtype=np.int64), none.law_pairs, none.law_odds, none.vocab,
    )  # fmt: skip
    logq = whole.logq[names] if len(whole.logq) > 0 else whole.logq
    return Forest(tokens, parents, siblings, logq, whole.beams, whole.fronts, whole.known)


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
    """Return the nodes within the budget, and those that may be expanded in vain; see `nodes_of`."""
    return width + drafts.widest * max(depth - 1, 0)


draft_turn.of(BestFirstSpec)(draft_tree)
learn_from.of(BestFirstSpec)(learn_stop_of_tree)
tosses_of.of(BestFirstSpec)(tosses_of_tree)
keep_tosses.of(BestFirstSpec)(keep_tosses_of_tree)


@dataclass(frozen=True)
class BestFirst(Complete):
    """A growth that keeps the `shape.width` nodes of largest value; nothing is drawn.

    The value of a node is the product of the draft probabilities on its path. Each layer expands the `widest` most valuable
    nodes that wait, each by its `top` likeliest tokens. Values never increase along a path, so the best nodes include their
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
    """How children are drawn where they are worth most."""

    least: float  # least worth of a draw
    greedy: bool  # whether the likeliest tokens are taken in place of draws
    truncation: Truncation
    eos: Array  # int64[ends]
    stops: StopSpec = NO_STOP  # by what a draft may end between layers


class DrawsDraft(NamedTuple):
    """A tree while it grows by draws."""

    forest: Forest
    front: Array  # int64[front]: nodes whose children are drawn next
    worths: Array  # float64[front]: their odds, with those of the beam, relative to the best beam
    roots: int
    law_tokens: Array  # int64[capacity]: buffer whose used part is `Siblings.law_pairs`
    law_odds: Array  # float64[capacity]
    surest: float  # largest draft probability of a draw of the newest layer; 1 if it has none
    width: int  # most nodes


class WorthyDraws(NamedTuple):
    """The draws of a layer, in the order in which they were drawn."""

    numbers: Array  # int64[draws]: of the parent in the front
    places: Array  # int64[draws]: of the token in the law of the parent
    worths: Array  # float64[draws]


@start_growth.of(DrawsSpec)
@step
def start_draws(roots: Forest, spec: DrawsSpec, live: Beams, depth: int, width: int) -> DrawsDraft:
    """Return a tree without layers; see `start_growth`."""
    count = len(roots.tokens)
    worths = np.exp(live.scores - live.scores.max())
    room = np.empty(ROOM, dtype=np.int64)
    return DrawsDraft(roots, np.arange(count), worths, count, room, np.empty(ROOM), 1.0, width)


@step
def _draw_worthiest(draft: DrawsDraft, law_ends: Array, odds: Array, spec: DrawsSpec, dice: Any) -> WorthyDraws:
    """Draw where the next draw is worth most, while that is enough and the budget lasts.

    Args:
        law_ends: int64[front], the index after the law of each node in `odds`; a node with no way on has none.
        odds: float64[n], the laws; changed in place.
    """
    budget = draft.width - (len(draft.forest.tokens) - draft.roots)
    numbers = np.empty(max(budget, 0), dtype=np.int64)
    places = np.empty(max(budget, 0), dtype=np.int64)
    worths = np.empty(max(budget, 0))
    next_worth = draft.worths.copy()
    draws = 0
    while draws < budget:
        number = int(np.argmax(next_worth))
        worth = next_worth[number]
        if not worth >= spec.least:
            break
        left = odds[start_of(law_ends, number) : law_ends[number]]
        mass = left.sum()
        if not mass > 0:
            next_worth[number] = -1.0
            continue
        place = int(np.argmax(left)) if spec.greedy else pick(dice, left)
        share = left[place] / mass
        numbers[draws] = number
        places[draws] = place
        worths[draws] = worth * share
        left[place] = 0.0
        next_worth[number] = worth * (1 - share)
        draws += 1
    return WorthyDraws(numbers[:draws], places[:draws], worths[:draws])


@grow_one_layer.of(DrawsSpec)
@step
def grow_draws(draft: DrawsDraft, rows: Any, spec: DrawsSpec, dice: Any) -> tuple[DrawsDraft, int]:
    """Return a tree with one more layer of draws; see `grow_one_layer`."""
    forest = draft.forest
    size = len(forest.tokens)
    front = len(draft.front)
    law_ends = np.empty(front, dtype=np.int64)
    odds = np.empty(front * rows.shape[1])
    end = 0
    for number in range(front):
        condition = condition_after(rows, number)
        if condition == BROKEN:
            return draft, BROKEN
        if condition == SOUND:
            law = law_after(rows, number, spec.truncation)
            copy_numbers(odds[end:], exponentials(law.logp))
            end += len(law.logp)
        law_ends[number] = end
    drawn = _draw_worthiest(draft, law_ends, odds, spec, dice)
    used = len(forest.siblings.law_odds)
    law_tokens = draft.law_tokens
    law_odds = draft.law_odds
    draws = len(drawn.numbers)
    born = room_for_children(draws, draws)
    for number in range(front):
        if not (drawn.numbers == number).any():
            continue
        node = draft.front[number]
        law = law_after(rows, number, spec.truncation)
        before = born.sizes[NODES]
        for draw in range(draws):
            if drawn.numbers[draw] == number:
                place = drawn.places[draw]
                token = law.tokens[place] if len(law.tokens) > 0 else place
                logp = law.logp[place]
                born.surest[0] = max(born.surest[0], np.exp(logp))
                bear(born, before, size, node, token, logq_of(forest, node) + logp, draw, spec.eos)
        if spec.greedy:
            close_group(born, CHOSEN, node, used)
        else:
            law_tokens, law_odds = with_room_for_laws(law_tokens, law_odds, used + 2 * len(law.logp))
            used = state_law(law, exponentials(law.logp), law_tokens, law_odds, used)
            close_group(born, DISTINCT, node, used)
    grown = with_layer(forest, born, law_tokens, law_odds, used, rows.shape[1])
    nodes = born.sizes[NODES]
    worths = drawn.worths[born.places[:nodes]]
    surest = surest_of(born)
    return DrawsDraft(
        grown, size + np.arange(nodes), worths, draft.roots, law_tokens, law_odds, surest, draft.width
    ), SOUND


@most_draws.of(DrawsSpec)
def most_worthy_draws(draft: DrawsDraft, spec: DrawsSpec) -> int:
    """Return the budget; see `most_draws`."""
    return draft.width


@nodes_of.of(DrawsSpec)
def nodes_of_draws(drafts: DrawsSpec, roots: int, depth: int, width: int) -> int:
    """Return the budget; see `nodes_of`."""
    return width if depth > 0 else 0


@uniforms_of.of(DrawsSpec)
def uniforms_of_draws(drafts: DrawsSpec, roots: int, depth: int, width: int) -> int:
    """Return one uniform for each draw, and two for its trial; those that end a text are no nodes, and come in addition."""
    return 3 * depth * width


draft_turn.of(DrawsSpec)(draft_tree)
learn_from.of(DrawsSpec)(learn_stop_of_tree)
tosses_of.of(DrawsSpec)(tosses_of_tree)
keep_tosses.of(DrawsSpec)(keep_tosses_of_tree)


@dataclass(frozen=True)
class BestFirstDraws(Complete):
    """A growth that draws children where they are worth most (DySpec, arXiv 2410.11744, the variant with a threshold).

    The worth of the next draw at a node is the worth of the node times the draft probability that its earlier draws left.
    The draw of most worth is next, while its worth is at least `least` and the tree has fewer than `shape.width` nodes.
    Worth depends on laws and on earlier draws, never on the draw in question, so each draw still has the draft law without
    its earlier siblings.
    """

    least: float = 0.05

    def spec(self, truncation: Truncation, eos: Array, greedy: bool, constrained: bool) -> DrawsSpec:
        """Return how steps grow such trees."""
        return DrawsSpec(float(self.least), greedy, truncation, eos)

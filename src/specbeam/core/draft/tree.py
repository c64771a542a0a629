"""DRAFT: token trees that a draft model grows layer by layer. A growth decides their shape.

Rules that try drafts against their law take one live beam, and so a tree with one root. Beam search needs only the
nodes: with several live beams a tree grows under each, and likelier beams get a larger part of the budget.
"""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from numbers import Integral
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from jaxtyping import Int64

from specbeam.core.beams import Beams, Layers, is_end
from specbeam.core.compiling.held import held_at
from specbeam.core.control.best_tree import Topology
from specbeam.core.control.planning import NO_STOP, StopSpec
from specbeam.core.control.stopping import Stopping, begin_draft, goes_on, learn_stop, stops_of
from specbeam.core.dice import Dice, pick
from specbeam.core.draft.by_steps import drafted_by_steps
from specbeam.core.draft.children import (
    KNOWN,
    LIKELIEST,
    LIKELIEST_AND_ONE,
    ONE_BY_ONE,
    STRUCK_OUT,
    STRUCK_OUT_THEN_ANY,
    Children,
    Draws,
)
from specbeam.core.draft.turns import (
    Cut,
    DraftTask,
    draft_all,
    draft_turn,
    keep_tosses,
    learn_from,
    nodes_of,
    own_spec,
    tosses_of,
    uncut,
)
from specbeam.core.errors import BadForest, BrokenProcessor, naming
from specbeam.core.forest import (
    CHOSEN,
    DISTINCT,
    INDEPENDENT,
    LOST,
    Forest,
    Siblings,
    TurnRows,
    drafted_layers,
    with_groups,
)
from specbeam.core.laws.edits import edited_rows
from specbeam.core.laws.listing import listing_for
from specbeam.core.laws.ranking import NO_TRUNCATION, Truncation, cuts, largest
from specbeam.core.laws.reduce import BROKEN, DEAD, SOUND, UNDECIDED, condition_of_norm, condition_of_row, exponentials
from specbeam.core.laws.rows import RowLaw, is_law_decided, law_of_row, token_at
from specbeam.core.laws.warp import Rows, on_host, processed_rows, row_laws
from specbeam.core.lm import LM, fill_prompts, takes_a_pass
from specbeam.core.passes import Asked, extend_all, run_ranked_pass
from specbeam.core.ranked import Listing, Ranked, are_whole, whole_rows
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session
from specbeam.core.steps import Array, borrowed, open_step, step, verb

ROOM = 4096  # initial capacity for the probabilities of stated laws


@borrowed
class TreeSpec(NamedTuple):
    """The topology of a tree and its way of drawing children, in the form that steps take.

    Each node has a place in the topology, 0 for roots. A node at place t gets counts[t] children; the k-th draw, from k = 0
    on, has the place first[t] + k * apart.
    """

    counts: Array  # int64[places]
    first: Array  # int64[places]
    apart: int  # 1; or 0, if all children of a node share a place because counts depend only on the layer
    way: int  # ONE_BY_ONE, STRUCK_OUT, STRUCK_OUT_THEN_ANY, LIKELIEST or LIKELIEST_AND_ONE
    truncation: Truncation
    eos: Array  # int64[ends]
    stops: StopSpec = NO_STOP  # how the controller may end a draft between layers


class OwnChildrenSpec(NamedTuple):
    """A `TreeSpec` for a user's own `Children`, which draws in Python."""

    counts: Array
    first: Array
    apart: int
    children: Children
    truncation: Truncation
    eos: Array
    stops: StopSpec = NO_STOP


class StatedLaws(NamedTuple):
    """Buffers with spare capacity whose used parts are `Siblings.law_pairs` and `Siblings.law_odds`."""

    tokens: Array  # int64[capacity]
    odds: Array  # float64[capacity]


@step
def room_for_laws(room: int) -> StatedLaws:
    """Return empty buffers with capacity for `room` probabilities."""
    return StatedLaws(np.empty(room, dtype=np.int64), np.empty(room))


class TreeDraft(NamedTuple):
    """A tree while it grows."""

    forest: Forest
    frontier: Array  # int64[frontier]: nodes whose children are drawn next, in the order of the forest
    places: Array  # int64[frontier]: their places in the topology
    laws: StatedLaws
    surest: float  # largest draft probability of a draw of the newest layer; 1 if it has none


@step
def start_tree(roots: Forest, room: int) -> TreeDraft:
    """Return a tree without layers, with capacity for `room` probabilities in stated laws."""
    size = len(roots.tokens)
    frontier = np.arange(size)
    places = np.zeros(size, dtype=np.int64)
    return TreeDraft(roots, frontier, places, room_for_laws(room), 1.0)


class Newborn(NamedTuple):
    """The children of a layer while they are drawn, in buffers with spare capacity."""

    size: int  # number of nodes of the forest before the layer
    tokens: Array  # int64[capacity]: of new nodes, as the next three
    parents: Array
    logq: Array  # float64[capacity]: draft log-likelihoods of the paths
    places: Array  # int64[capacity]: in the topology
    draw_tokens: Array  # int64[capacity]: of draws
    draw_nodes: Array
    kinds: Array  # int64[capacity]: of groups, as the next three
    group_parents: Array
    draw_ends: Array
    law_ends: Array
    sizes: Array  # int64[3]: number of NODES, DRAWS and GROUPS
    surest: Array  # float64[1]: the largest draft probability of a draw so far; negative if there is none


NODES, DRAWS, GROUPS = range(3)  # indices into `Newborn.sizes`


@step
def room_for_children(size: int, draws: int, groups: int) -> Newborn:
    """Return empty buffers for a layer after `size` nodes, with capacity for `draws` draws in `groups` groups."""
    return Newborn(
        size,
        np.empty(draws, dtype=np.int64),
        np.empty(draws, dtype=np.int64),
        np.empty(draws),
        np.empty(draws, dtype=np.int64),
        np.empty(draws, dtype=np.int64),
        np.empty(draws, dtype=np.int64),
        np.empty(groups, dtype=np.int64),
        np.empty(groups, dtype=np.int64),
        np.empty(groups, dtype=np.int64),
        np.empty(groups, dtype=np.int64),
        np.zeros(3, dtype=np.int64),
        np.full(1, -1.0),
    )


@step
def add_draw(born: Newborn, token: int, node: int) -> None:
    """Add a draw, given its forest node; -1 if it has none."""
    draw = born.sizes[DRAWS]
    born.draw_tokens[draw] = token
    born.draw_nodes[draw] = node
    born.sizes[DRAWS] = draw + 1


@step
def bear(born: Newborn, siblings_from: int, parent: int, token: int, logq: float, place: int, eos: Array) -> None:
    """Add a draw under a parent. End tokens get no node; draws of the same token share one.

    Args:
        siblings_from: number of nodes of the layer that were added before the first child of this parent.
        logq: draft log-likelihood of the path.
        place: in the topology.
    """
    if is_end(token, eos):
        add_draw(born, token, -1)
        return
    node = siblings_from
    while node < born.sizes[NODES] and born.tokens[node] != token:
        node += 1
    if node == born.sizes[NODES]:
        born.tokens[node] = token
        born.parents[node] = parent
        born.logq[node] = logq
        born.places[node] = place
        born.sizes[NODES] = node + 1
    add_draw(born, token, born.size + node)


@step
def close_group(born: Newborn, kind: int, parent: int, law_end: int) -> None:
    """Add a group of the draws since the last group, all under one parent."""
    group = born.sizes[GROUPS]
    born.kinds[group] = kind
    born.group_parents[group] = parent
    born.draw_ends[group] = born.sizes[DRAWS]
    born.law_ends[group] = law_end
    born.sizes[GROUPS] = group + 1


@step
def likeliest_places(logp: Array, count: int) -> Array:
    """Return the indices of the `count` largest log-probabilities, best first."""
    return largest(logp.reshape(1, len(logp)), np.zeros(1), count)[:count]


@verb(0)
def law_after(rows: Any, number: int, truncation: Truncation) -> RowLaw:
    """Return the law of row `number` of a frontier, which is SOUND."""
    found: RowLaw = rows.laws[number]
    return found


@law_after.of(Ranked)
@step
def law_after_row(rows: Ranked, number: int, truncation: Truncation) -> RowLaw:
    """Return the law that a truncation makes of a row, without tokens if a list does not decide it; see `law_after`."""
    return law_of_row(rows, number, truncation)


@verb(0)
def condition_after(rows: Any, number: int) -> int:
    """Return whether row `number` of a frontier is SOUND, DEAD or BROKEN."""
    return DEAD if rows.laws[number] is None else SOUND


@condition_after.of(Ranked)
@step
def condition_after_row(rows: Ranked, number: int) -> int:
    """Return the condition of a row; see `condition_after`."""
    if are_whole(rows):
        return condition_of_row(rows.logits[number])
    return condition_of_norm(rows.norms[number])


@dataclass(frozen=True, eq=False)
class FrontierLaws:
    """The laws of a frontier that Python makes, in place of its rows; None after a node without allowed tokens."""

    laws: list[RowLaw | None]
    vocab: int


class Parent(NamedTuple):
    """A node of the frontier while its children are drawn."""

    node: int
    logq: float  # draft log-likelihood of its path
    children: int  # number of children
    first: int  # place of the first child in the topology
    apart: int  # see `TreeSpec`
    siblings_from: int  # number of nodes of the layer that were added before its first child


@step
def grow_layer(draft: TreeDraft, rows: Any, spec: TreeSpec, dice: Any) -> tuple[TreeDraft, int]:
    """Return a tree with one more layer, and SOUND; or the same tree, and BROKEN if a row holds NaN or +inf.

    A node after which everything is banned is a leaf. UNDECIDED is returned if a list does not decide a law.

    Args:
        rows: the rows of the frontier, after the processors; or a `FrontierLaws`.
    """
    forest = draft.forest
    used = len(forest.siblings.law_odds)
    laws = draft.laws
    draws = 0
    for place in draft.places:
        draws += spec.counts[place]
    born = room_for_children(len(forest.tokens), draws, 2 * len(draft.frontier))
    vocab = rows.vocab
    for number in range(len(draft.frontier)):
        node = draft.frontier[number]
        place = draft.places[number]
        count = spec.counts[place]
        if count == 0:
            continue
        condition = condition_after(rows, number)
        if condition == BROKEN:
            return draft, BROKEN
        if condition != SOUND:
            continue
        law = law_after(rows, number, spec.truncation)
        if not is_law_decided(law):
            return draft, UNDECIDED
        stated = max(len(law.logp), vocab if spec.way == STRUCK_OUT_THEN_ANY else 0)
        laws = with_room_for_laws(laws, used + 2 * stated)
        parent = Parent(node, logq_of(forest, node), count, spec.first[place], spec.apart, born.sizes[NODES])
        used = _draw_children(born, law, parent, spec, dice, laws, used)
    return _with_children(draft, born, laws, used, vocab), SOUND


@step
def _with_children(draft: TreeDraft, born: Newborn, laws: StatedLaws, used: int, vocab: int) -> TreeDraft:
    """Return a tree with one more layer, the new children; see `with_layer`."""
    forest = with_layer(draft.forest, born, laws, used, vocab)
    nodes = born.sizes[NODES]
    return TreeDraft(forest, born.size + np.arange(nodes), born.places[:nodes], laws, surest_of(born))


@step
def with_room_for_laws(laws: StatedLaws, needed: int) -> StatedLaws:
    """Return the buffers of laws; longer ones with the same contents if they have no capacity for `needed` numbers."""
    if needed <= len(laws.odds):
        return laws
    return StatedLaws(np.append(laws.tokens, np.empty(needed, dtype=np.int64)), np.append(laws.odds, np.empty(needed)))


@step
def logq_of(forest: Forest, node: int) -> float:
    """Return the draft log-likelihood of the path to a node; 0 if the forest has none."""
    return forest.logq[node] if len(forest.logq) > 0 else 0.0


@step
def state_law(law: RowLaw, odds: Array, laws: StatedLaws, used: int) -> int:
    """Write probabilities of the tokens of a law into the buffers, from index `used` on. Returns the index after them."""
    stop = used + len(odds)
    if len(law.tokens) > 0:
        laws.tokens[used:stop] = law.tokens
    else:
        laws.tokens[used:stop] = np.arange(len(odds))
    laws.odds[used:stop] = odds
    return stop


@step
def _draw_children(
    born: Newborn, law: RowLaw, parent: Parent, spec: TreeSpec, dice: Any, laws: StatedLaws, used: int
) -> int:
    """Draw the children of one node, and write their laws into the buffers from index `used` on.

    Returns the index after the laws.
    """
    odds = exponentials(law.logp)
    drawn = 0
    if spec.way == LIKELIEST or spec.way == LIKELIEST_AND_ONE:
        wanted = parent.children if spec.way == LIKELIEST else parent.children - 1
        top = likeliest_places(law.logp, wanted)
        if spec.way == LIKELIEST_AND_ONE:
            rest = odds.copy()
            rest[top] = 0.0
            if rest.sum() > 0:
                rest /= rest.sum()
                used = state_law(law, rest, laws, used)
                bear_place(born, law, pick(dice, rest), parent, 0, spec.eos)
                close_group(born, DISTINCT, parent.node, used)
                drawn = 1
        for place in top:
            bear_place(born, law, place, parent, drawn, spec.eos)
            drawn += 1
        if len(top) > 0:
            close_group(born, CHOSEN, parent.node, used)
        return used
    used = state_law(law, odds, laws, used)
    left = odds.copy()
    while drawn < parent.children and (spec.way == ONE_BY_ONE or (left > 0).any()):
        place = pick(dice, left)
        bear_place(born, law, place, parent, drawn, spec.eos)
        if spec.way != ONE_BY_ONE:
            left[place] = 0.0
        drawn += 1
    close_group(born, INDEPENDENT if spec.way == ONE_BY_ONE else DISTINCT, parent.node, used)
    if spec.way == STRUCK_OUT_THEN_ANY and drawn < parent.children:
        used = _draw_any(born, law, parent, drawn, spec, dice, laws, used)
    return used


@step
def bear_place(born: Newborn, law: RowLaw, place: int, parent: Parent, drawn: int, eos: Array) -> None:
    """Add the draw at an index of a law, as child `drawn` of its parent."""
    logp = law.logp[place]
    born.surest[0] = max(born.surest[0], np.exp(logp))
    child_place = parent.first + drawn * parent.apart
    bear(born, parent.siblings_from, parent.node, token_at(law, place), parent.logq + logp, child_place, eos)


@step
def _draw_any(
    born: Newborn, law: RowLaw, parent: Parent, drawn: int, spec: TreeSpec, dice: Any, laws: StatedLaws, used: int
) -> int:
    """Draw the children that a law has too few tokens for, uniformly from the tokens that were not drawn yet.

    Returns the index after the laws.

    Args:
        drawn: number of children that the law had tokens for.
    """
    untried = np.ones(law.vocab)
    for draw in range(born.sizes[DRAWS] - drawn, born.sizes[DRAWS]):
        untried[born.draw_tokens[draw]] = 0.0
    if not untried.any():
        return used
    untried /= untried.sum()
    stop = used + law.vocab
    laws.tokens[used:stop] = np.arange(law.vocab)
    laws.odds[used:stop] = untried
    born.surest[0] = max(born.surest[0], 0.0)
    while drawn < parent.children and (untried > 0).any():
        token = pick(dice, untried)
        untried[token] = 0.0
        child_place = parent.first + drawn * parent.apart
        bear(born, parent.siblings_from, parent.node, token, -np.inf, child_place, spec.eos)
        drawn += 1
    close_group(born, DISTINCT, parent.node, stop)
    return stop


@step
def with_nodes(forest: Forest, tokens: Array, parents: Array, logq: Array) -> Forest:
    """Return a forest with more nodes, given the draft log-likelihoods of their paths."""
    before = forest.logq if len(forest.logq) > 0 else np.zeros(len(forest.tokens))
    return Forest(
        np.concatenate((forest.tokens, tokens)),
        np.concatenate((forest.parents, parents)),
        forest.siblings,
        np.concatenate((before, logq)),
        forest.beams,
        forest.frontier_rows,
        forest.known,
    )


@step
def with_layer(forest: Forest, born: Newborn, laws: StatedLaws, used: int, vocab: int) -> Forest:
    """Return a forest with one more layer, the new children.

    Args:
        laws: buffers of which the first `used` numbers are the laws of all groups.
    """
    groups = forest.siblings
    nodes = born.sizes[NODES]
    draws = born.sizes[DRAWS]
    count = born.sizes[GROUPS]
    more = Siblings(
        np.concatenate((groups.kinds, born.kinds[:count])),
        np.concatenate((groups.parents, born.group_parents[:count])),
        np.concatenate((groups.parent_ends, len(groups.parents) + 1 + np.arange(count))),
        np.concatenate((groups.draw_ends, len(groups.tokens) + born.draw_ends[:count])),
        np.concatenate((groups.rows, np.zeros(draws, dtype=np.int64))),
        np.concatenate((groups.tokens, born.draw_tokens[:draws])),
        np.concatenate((groups.nodes, born.draw_nodes[:draws])),
        np.concatenate((groups.law_ends, born.law_ends[:count])),
        laws.tokens[:used],
        laws.odds[:used],
        vocab,
    )
    grown = with_nodes(forest, born.tokens[:nodes], born.parents[:nodes], born.logq[:nodes])
    return with_groups(grown, more)


class LayerDraws(NamedTuple):
    """The draws of a layer under all nodes of its frontier, in the order in which they were drawn."""

    numbers: Array  # int64[draws]: of the parent in the frontier
    places: Array  # int64[draws]: of the token in the law of the parent


class DrawnLayer(NamedTuple):
    """A forest with a new layer of draws."""

    forest: Forest
    frontier: Array  # int64[nodes]: the new nodes
    draws: Array  # int64[nodes]: the draw that each of them is
    logp: Array  # float64[draws]: draft log-probabilities
    laws: StatedLaws
    surest: float  # largest draft probability of a draw; 1 if there is none


@open_step
def add_draws(forest: Forest, frontier: Array, rows: Any, drawn: LayerDraws, spec: Any, laws: StatedLaws) -> DrawnLayer:
    """Return a forest with one more layer, a group of draws under each node of the frontier that has any.

    Args:
        rows: the argument of `grow_one_layer`.
        spec: the spec of the growth; draws are CHOSEN if it is `greedy`, else DISTINCT.
    """
    used = len(forest.siblings.law_odds)
    draws = len(drawn.numbers)
    born = room_for_children(len(forest.tokens), draws, draws)
    logp = np.empty(draws)
    for number in range(len(frontier)):
        if not (drawn.numbers == number).any():
            continue
        node = frontier[number]
        law = law_after(rows, number, spec.truncation)
        siblings_from = born.sizes[NODES]
        for draw in range(draws):
            if drawn.numbers[draw] == number:
                place = drawn.places[draw]
                logp[draw] = law.logp[place]
                born.surest[0] = max(born.surest[0], np.exp(logp[draw]))
                logq = logq_of(forest, node) + logp[draw]
                bear(born, siblings_from, node, token_at(law, place), logq, draw, spec.eos)
        if spec.greedy:
            close_group(born, CHOSEN, node, used)
        else:
            laws = with_room_for_laws(laws, used + 2 * len(law.logp))
            used = state_law(law, exponentials(law.logp), laws, used)
            close_group(born, DISTINCT, node, used)
    nodes = born.sizes[NODES]
    new = born.size + np.arange(nodes)
    grown = with_layer(forest, born, laws, used, rows.vocab)
    return DrawnLayer(grown, new, born.places[:nodes], logp, laws, surest_of(born))


@step
def surest_of(born: Newborn) -> float:
    """Return the largest draft probability of a draw of a layer; 1 if it has none."""
    return born.surest[0] if born.surest[0] >= 0 else 1.0


@verb(1, has_body=False)
def start_growth(roots: Forest, spec: Any, live: Beams, depth: int, width: int) -> Any:
    """Return a draft without layers, as a spec grows it.

    Args:
        live: the live beams, which are the roots.
        depth, width: of the draft.
    """


@verb(2, has_body=False)
def grow_one_layer(draft: Any, rows: Ranked, spec: Any, dice: Any) -> tuple[Any, int]:  # type: ignore[empty-body]
    """Return a draft with one more layer, and SOUND; or the same draft, and the reason.

    The reason is BROKEN if a row holds NaN or +inf, or UNDECIDED if a list does not decide a law.

    Args:
        rows: the rows of the frontier, after the processors.
    """


@verb(1)
def finish_growth(draft: Any, spec: Any) -> Cut:
    """Return a draft after its last layer: the forest that is passed on, and all nodes that the draft model knows."""
    return uncut(draft.forest)


@verb(1)
def most_draws(draft: Any, spec: Any) -> int:
    """Return the maximum number of uniforms for the next layer of a draft."""
    return int(spec.counts[draft.places].sum())


@start_growth.of(TreeSpec, OwnChildrenSpec)
def start_tree_of_spec(roots: Forest, spec: Any, live: Beams, depth: int, width: int) -> TreeDraft:
    """Return a tree without layers; see `start_growth`."""
    return start_tree(roots, ROOM)


grow_one_layer.of(TreeSpec)(grow_layer)


@grow_one_layer.of(OwnChildrenSpec)
def grow_layer_in_python(draft: TreeDraft, rows: Any, spec: OwnChildrenSpec, dice: Dice) -> tuple[TreeDraft, int]:
    """Return a tree with one more layer, whose children the user's `Children` draws; see `grow_layer`."""
    forest = draft.forest
    families: list[tuple[int, RowLaw, list[Draws]]] = []
    for number, place in enumerate(draft.places):
        count = int(spec.counts[place])
        if count == 0:
            continue
        condition = condition_after(rows, number)
        if condition == BROKEN:
            return draft, BROKEN
        if condition == SOUND:
            law = law_after(rows, number, spec.truncation)
            families.append((number, law, _drawn(spec.children, law.p, count, dice)))
    groups = [group for _, _, family in families for group in family]
    born = room_for_children(forest.size, sum(len(group.tokens) for group in groups), len(groups))
    used = len(forest.siblings.law_odds)
    laws = with_room_for_laws(draft.laws, used + len(groups) * rows.vocab)
    for number, law, family in families:
        node = draft.frontier[number]
        place = draft.places[number]
        base = logq_of(forest, node)
        parent = Parent(node, base, spec.counts[place], spec.first[place], spec.apart, born.sizes[NODES])
        drawn = 0
        for group in family:
            for token in group.tokens:
                bear_place(born, law, token, parent, drawn, spec.eos)
                drawn += 1
            kind = CHOSEN if group.deterministic else LOST
            if kind == LOST and group.law is not None:
                kind = INDEPENDENT if group.replacement else DISTINCT
                used = state_law(law, group.law, laws, used)
            close_group(born, kind, node, used)
    return _with_children(draft, born, laws, used, rows.vocab), SOUND


def _drawn(children: Any, q: Any, count: int, dice: Dice) -> list[Draws]:
    """Return the draws of a user's `Children`. Raises `BadForest` if they do not fit the law, `BrokenPart` for errors."""
    size = len(q)
    with naming(children, "draw"):
        family: list[Draws] = children.draw(q, count, dice)
    if not isinstance(family, Sequence) or not all(isinstance(group, Draws) for group in family):
        raise BadForest(f"{type(children).__name__}.draw returned {str(family)[:80]}; expected a list of Draws")
    for group in family:
        of_law = size if group.law is None else len(group.law)
        if of_law != size or not all(isinstance(token, Integral) and 0 <= token < size for token in group.tokens):
            raise BadForest(
                f"{type(children).__name__}.draw returned tokens {[*group.tokens][:5]} and a law of {of_law} numbers; "
                f"expected indices into the draft law, and a law of its {size}"
            )
    return family


@step
def wants_whole_rows(listing: Listing, truncation: Truncation) -> bool:
    """Return whether the truncated laws of single rows cannot be decided from lists of this kind."""
    return listing.length == 0 or listing.by_noise or not cuts(truncation)


@step
def asked_by_tree(draft: Any, answered: int) -> Asked:
    """Return the rows that the next layer of a tree needs of the draft model.

    Args:
        answered: number of forest nodes that have been scored in this turn.
    """
    forest = draft.forest
    wanted = np.arange(answered, len(forest.tokens))
    keys = np.zeros(len(wanted), dtype=np.uint64)  # lists by noise are not asked for
    return Asked(forest.tokens, forest.parents, wanted, keys)


@step
def tree_with_next_layer(
    draft: Any, rows: Ranked, asked: Asked, spec: Any, task: DraftTask, dice: Any
) -> tuple[Any, int]:
    """Return a tree with one more layer, and SOUND; or the tree itself and the reason, see `grow_one_layer`.

    Args:
        rows: the rows of the draft model that `asked` names.
    """
    edited = edited_rows(rows, asked.wanted, asked.tokens, asked.parents, task.edits)
    return grow_one_layer(draft, edited, spec, dice)


@step
def may_grow(draft: Any, spec: Any) -> bool:
    """Return whether a tree with a new layer may get another one: whether it has leaves and the controller goes on."""
    return len(draft.frontier) > 0 and goes_on(spec.stops, draft.surest)


@step
def grow_tree(model: Any, draft: Any, task: DraftTask, spec: Any, dice: Any, spent: Array) -> tuple[Any, int]:
    """Return a tree with up to `task.depth` more layers, and SOUND; or BROKEN if a row of logits holds NaN or +inf.

    UNDECIDED is returned if a list does not decide a law. A tree has fewer layers if no node can have children, or if
    `spec.stops` ends it.

    Args:
        model: the cache of a session in a model that compiled steps can run, see `core.passes.run_ranked_pass`.
        draft, spec: a draft and its spec, of a kind that has a step `grow_one_layer`.
        spent: int64[2], to which the number of passes and the processor's cycles in the model are added.
    """
    begin_draft(spec.stops)
    whole = wants_whole_rows(task.listing, spec.truncation)
    answered = 0
    for _ in range(task.depth):
        if len(draft.frontier) == 0:
            break
        asked = asked_by_tree(draft, answered)
        rows = run_ranked_pass(model, asked.tokens, asked.parents, asked.wanted, asked.keys, whole, spent)
        answered = len(asked.tokens)
        draft, condition = tree_with_next_layer(draft, rows, asked, spec, task, dice)
        if condition != SOUND:
            return draft, condition
        if not may_grow(draft, spec):
            break
    return draft, SOUND


@step
def draft_tree(drafts: Any, model: Any, task: DraftTask, dice: Any, spent: Array) -> tuple[Cut, int]:
    """Grow a tree under each root; see `draft_turn`."""
    begun = start_growth(task.roots, drafts, task.live, task.depth, task.width)
    draft, condition = grow_tree(model, begun, task, drafts, dice, spent)
    return finish_growth(draft, drafts), condition


@step
def draft_trees_of_all(
    drafts: Any, like: Any, jobs: Array, models: list[Any], tasks: list[DraftTask], spent: Array
) -> list[tuple[Cut, int]]:
    """Grow the trees of many sessions, with a pass of the draft model for each layer of all; see `draft_all`."""
    # No comprehensions, see `compiling.held`.
    count = len(tasks)
    growing = []
    deepest = 0
    for number in range(count):
        job = held_at(jobs[number], like)
        task = tasks[number]
        spec = own_spec(job.spec.drafts, drafts)
        begin_draft(spec.stops)
        growing.append(start_growth(task.roots, spec, task.live, task.depth, task.width))
        deepest = max(deepest, task.depth)
    whole = wants_whole_rows(like.spec.listing, drafts.truncation)
    answered = np.zeros(count, dtype=np.int64)
    conditions = np.full(count, SOUND)
    is_growing = np.ones(count, dtype=np.bool_)
    for layer in range(deepest):
        asked = []
        for number in range(count):
            draft = growing[number]
            is_growing[number] &= layer < tasks[number].depth and len(draft.frontier) > 0
            one = asked_by_tree(draft, answered[number])
            asked.append(one if is_growing[number] else Asked(one.tokens, one.parents, one.wanted[:0], one.keys[:0]))
        if not is_growing.any():
            break
        rows = extend_all(like.draft, models, asked, whole, spent)
        for number in range(count):
            if not is_growing[number]:
                continue
            job = held_at(jobs[number], like)
            spec = own_spec(job.spec.drafts, drafts)
            answered[number] = len(asked[number].tokens)
            longer, condition = tree_with_next_layer(
                growing[number], rows[number], asked[number], spec, tasks[number], job.dice
            )
            growing[number] = longer
            conditions[number] = condition
            is_growing[number] = condition == SOUND and may_grow(longer, spec)
    found = []
    for number in range(count):
        job = held_at(jobs[number], like)
        done = finish_growth(growing[number], own_spec(job.spec.drafts, drafts))
        found.append((done, conditions[number]))
    return found


@step
def learn_stop_of_tree(drafts: Any, drafted: Cut, layers: Layers, rows: TurnRows) -> None:
    """Let the controller that ends drafts between layers learn from a turn; see `learn_from`."""
    learn_stop(drafts.stops, drafted_layers(drafted.forest), layers.passed.sum())


def tosses_of_tree(drafts: Any) -> int:
    """Return the number of coins used; see `tosses_of`."""
    return drafts.stops.coins.used[0]


def keep_tosses_of_tree(drafts: Any, used: int) -> None:
    """Undo the tosses after the first `used` coins; see `keep_tosses`."""
    drafts.stops.coins.used[0] = used


def register_growth(spec: type) -> None:
    """Register a spec so that turns grow trees by its steps, and end drafts by its field `stops`."""
    draft_turn.of(spec)(draft_tree)
    draft_all.of(spec)(draft_trees_of_all)
    learn_from.of(spec)(learn_stop_of_tree)
    tosses_of.of(spec)(tosses_of_tree)
    keep_tosses.of(spec)(keep_tosses_of_tree)


register_growth(TreeSpec)


@dataclass(eq=False)
class GrowingTree:
    """One session's tree while it grows. The draft model scores all nodes of `forest`, except leaves added at the end."""

    session: Session
    shape: Shape
    forest: Forest
    frontier: Int64[np.ndarray, " frontier"]  # nodes whose laws are computed next
    draft: Any = None  # the draft of a growth in steps; None before its first layer
    memory: dict[str, Any] = field(default_factory=dict)  # the state of a growth in Python
    kept: Int64[np.ndarray, " kept"] | None = None  # nodes that are passed on; None: all
    layers: int = 0  # number of layers drafted so far

    @classmethod
    def start(cls, session: Session, shape: Shape) -> "GrowingTree":
        """Return a tree without layers under each live beam."""
        forest = Forest.rooted(session.beams.tokens)
        return cls(session, shape, forest, np.arange(forest.size))

    @property
    def roots(self) -> range:
        """The root nodes, one per live beam."""
        return range(self.session.beams.size)

    def root_scores(self) -> dict[int, float]:
        """Return, by root, the log-likelihood of its beam minus that of the best beam."""
        scores = self.session.beams.scores
        return dict(enumerate((scores - scores.max()).tolist()))

    def processed(self, rows: Rows) -> Rows:
        """Return the rows of the frontier after the logits processors."""
        return processed_rows(rows, self.session.warp, lambda: self.session.paths(self.forest, self.frontier))

    def laws(self, rows: Rows) -> list[RowLaw]:
        """Return the draft laws of the frontier, without ends and nodes that allow no token, which leave the frontier.

        They leave because logits processors need not support paths after an end token.
        """
        eos = self.session.limits.eos
        frontier = self.frontier.tolist()
        going = [
            place
            for place, node in enumerate(frontier)
            if node in self.roots or int(self.forest.tokens[node]) not in eos
        ]
        if len(going) < len(frontier):
            self.frontier = self.frontier[going]
            rows = rows[going]
        laws = row_laws(self.processed(rows), self.session.warp)
        alive = [place for place, law in enumerate(laws) if law is not None]
        if len(alive) < len(laws):
            self.frontier = self.frontier[alive]
        return [law for law in laws if law is not None]


@runtime_checkable
class Growth(Protocol):
    """A part that decides the shape of a tree: by steps, with a method `spec` as in `Branching`, or as `GrowthInPython`.

    If its drafts cannot be tried, an attribute `no_law_reason` states the reason.
    """

    def finish(self, tree: GrowingTree) -> None:
        """After the last layer, add leaves that the draft model need not score, and choose which nodes are passed on."""


class GrowthInPython(Growth, Protocol):
    """A growth that adds layers in Python."""

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None:
        """Add layer `layer`, from 0 on, by the draft laws of the frontier, and set `tree.frontier` to the next frontier."""


@dataclass(frozen=True)
class TreeDrafter:
    """A drafter that grows trees by a draft model: up to `shape.depth` layers, one pass of the model for each.

    Args:
        lm: the draft model.
        counts_passes: whether to count the passes as draft passes; False if the model counts them itself.
    """

    lm: LM
    growth: Growth
    counts_passes: bool = True

    @property
    def models(self) -> tuple[LM, ...]:
        """The models that it runs."""
        return (self.lm,)

    @property
    def no_law_reason(self) -> str:
        """The reason why the law of the drafts is unknown, from an attribute of the growth; "" if it is known."""
        return getattr(self.growth, "no_law_reason", "")

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """Return one tree per session. A controller that is `Stopping` may end a draft between layers."""
        if len(sessions) == 1:
            forest = self._drafted_by_steps(sessions[0], shapes[0])
            if forest is not None:
                return [forest]
        trees = [GrowingTree.start(session, shape) for session, shape in zip(sessions, shapes, strict=True)]
        while active := [tree for tree in trees if self._wants_layer(tree)]:
            for tree in active:
                tree.session.count.draft_passes += self.counts_passes and takes_a_pass(self.lm, tree.layers)
            answers = self.lm.extend([tree.session for tree in active], [tree.forest for tree in active])
            for tree, answer in zip(active, answers, strict=True):
                with tree.session.failing_alone("draft model: "):
                    try:
                        self._grow(tree, on_host(answer.logits))
                    except BrokenProcessor:  # on a drafted path, which the target need not take
                        tree.frontier = tree.frontier[:0]
                tree.layers += 1
        return [self._finish(tree) for tree in trees]

    def spec(self, session: Session) -> Any:
        """Return the spec by which compiled turns grow trees; None if Python draws children or makes laws."""
        if session.warp.others or not self.counts_passes:
            return None
        spec = self._spec_of_layers(session)
        return None if isinstance(spec, OwnChildrenSpec) else spec

    def most_nodes(self, beams: int, shape: Shape) -> int:
        """Return the maximum number of nodes of the trees of a turn."""
        spec = None
        if hasattr(self.growth, "spec"):
            spec = self.growth.spec(NO_TRUNCATION, np.zeros(0, dtype=np.int64), True, False)
        return shape.depth * shape.width if spec is None else int(nodes_of(spec, beams, shape.depth, shape.width))

    def listing(self, session: Session, width: int) -> Listing | None:
        """Return the lists of tokens that decide the draft's laws; None if it reads whole rows of its model.

        The target's rows are not read, so they may be lists in any case.
        """
        warp = session.warp
        if warp.greedy or not warp.cut.cuts:
            return None
        return listing_for(warp.cut, False, 1)

    def _spec_of_layers(self, session: Session) -> Any:
        """Return the spec by which steps add a layer, given the rows or laws of the frontier; None if Python adds it."""
        if not hasattr(self.growth, "spec"):
            return None
        warp = session.warp
        shared = getattr(self.lm, "shared", None)
        is_constrained = warp.constraint is not None or (shared is not None and not shared.drafts_all)
        found = self.growth.spec(warp.cut, session.limits.ending, warp.greedy, is_constrained)
        if found is None or "vocab" not in found._fields:
            return found
        return found._replace(vocab=self.lm.vocab)

    def _drafted_by_steps(self, session: Session, shape: Shape) -> Forest | None:
        """Return the tree of one compiled call; None if Python has to see layers or rows."""
        spec = self.spec(session)
        stops = stops_of(session.parts.controller, session, shape.depth)
        if spec is None or stops is None:
            return None
        roots = Forest.rooted(session.beams.tokens)
        drafted = drafted_by_steps(self.lm, session, shape, spec._replace(stops=stops), roots)
        if drafted is None:
            return None
        return self._passed_on(GrowingTree.start(session, shape), drafted)

    def _passed_on(self, tree: GrowingTree, drafted: Cut) -> Forest:
        """Return the forest that the target scores; store the tree until the turn is settled if it has more nodes."""
        if len(drafted.node_map) < drafted.whole.size:
            tree.forest = drafted.whole
            tree.kept = drafted.node_map
            tree.session.state[self] = tree
        return drafted.forest

    def _grow(self, tree: GrowingTree, rows: Rows) -> None:
        """Add a layer, given the logits of the frontier; empty the frontier if the controller ends the draft."""
        session = tree.session
        controller = session.parts.controller
        may_stop = _may_stop(type(controller))
        spec = self._spec_of_layers(session)
        confidence = self._grow_in_python(tree, rows, may_stop) if spec is None else _grow_by_steps(tree, rows, spec)
        asks = may_stop and len(tree.frontier) > 0
        if asks and not cast(Stopping, controller).more(session, tree.layers + 1, confidence):
            tree.frontier = tree.frontier[:0]

    def _grow_in_python(self, tree: GrowingTree, rows: Rows, may_stop: bool) -> float:
        """Add a layer by the growth's `grow`; return the confidence of its draws, 1 if the controller cannot stop."""
        laws = tree.laws(rows)
        if not laws:
            return 1.0
        before = tree.forest
        law_of = dict(zip(tree.frontier.tolist(), laws, strict=True))
        cast(GrowthInPython, self.growth).grow(tree, tree.layers, laws)
        return _confidence(tree.forest, before, law_of) if may_stop else 1.0

    def _finish(self, tree: GrowingTree) -> Forest:
        """Return the forest that is passed on, after the growth has finished the tree."""
        if tree.draft is not None:
            done = finish_growth(tree.draft, self._spec_of_layers(tree.session))
            tree.forest = done.forest
            if len(done.node_map) < done.whole.size:
                return self._passed_on(tree, done)
        self.growth.finish(tree)
        if tree.kept is None:
            return tree.forest
        tree.session.state[self] = tree
        return tree.forest.selected(tree.kept)

    def fill(self, sessions: list[Session], most: int) -> list[bool]:
        """Store the next chunk of up to `most` long prompts; return whether each session may take a turn."""
        return fill_prompts(self.lm, sessions, None, most)

    def settle(self, session: Session, turn: Turn) -> None:
        """Settle the draft model's cache."""
        whole = session.state.pop(self, None)
        self.lm.settle(session, turn if whole is None else turn.on(whole.forest, whole.kept))

    def close(self, session: Session) -> None:
        """Free the draft model's state for the session."""
        self.lm.close(session)

    def _wants_layer(self, tree: GrowingTree) -> bool:
        """Return whether another layer is to be drafted."""
        return tree.layers < tree.shape.depth and len(tree.frontier) > 0 and tree.session.failure is None


def _grow_by_steps(tree: GrowingTree, rows: Rows, spec: Any) -> float:
    """Add a layer by the steps of a spec, given the logits of the frontier; return the confidence of its draws."""
    session = tree.session
    if tree.draft is None:
        tree.draft = start_growth(tree.forest, spec, session.beams, tree.shape.depth, tree.shape.width)
    dice: Any = session.dice
    if not isinstance(spec, OwnChildrenSpec):
        dice = session.dice.ready(most_draws(tree.draft, spec))
    grow = grow_one_layer.step_of(type(spec))
    rows = tree.processed(rows)
    frontier: Any = whole_rows(rows)
    if session.warp.others and not session.warp.greedy:
        frontier = FrontierLaws(row_laws(rows, session.warp), rows.shape[1])
        grow = getattr(grow, "py_func", grow)
    tree.draft, condition = grow(tree.draft, frontier, spec, dice)
    if condition == BROKEN:
        row_laws(rows, session.warp)  # raises a `BrokenLaw` that states the fault
    tree.forest = tree.draft.forest
    tree.frontier = tree.draft.frontier
    return float(tree.draft.surest)


@cache
def _may_stop(kind: type) -> bool:
    """Return whether controllers of this class are `Stopping`. Cached: checking a protocol takes as long as a layer."""
    return issubclass(kind, Stopping)


def _confidence(forest: Forest, before: Forest, laws: dict[int, RowLaw]) -> float:
    """Return the largest draft probability of a token of the newest layer; 1 if the layer is empty.

    Args:
        before: the forest before that layer.
        laws: draft laws after the parents of the layer, by node.
    """
    drawn: list[tuple[int, int]] = []
    for number in range(before.siblings.size, forest.siblings.size):
        group = forest.siblings.group(number)
        drawn += zip(group.draw_parents.tolist(), group.tokens.tolist(), strict=True)
    if not drawn:  # growths may add all groups at the end
        drawn += zip(forest.parents[before.size :].tolist(), forest.tokens[before.size :].tolist(), strict=True)
    odds: list[float] = []
    for parent, token in drawn:
        if parent in laws:
            place = laws[parent].place(token)
            odds.append(float(np.exp(laws[parent].logp[place])) if place >= 0 else 0.0)
    return max(odds, default=1.0)


@nodes_of.of(TreeSpec)
@step
def most_nodes_of_tree(spec: TreeSpec, roots: int, depth: int, width: int) -> int:
    """Return the number of nodes of complete trees; see `nodes_of`."""
    total = 0
    parents = np.zeros(len(spec.counts), dtype=np.int64)  # number of nodes in each place
    parents[0] = roots
    for _ in range(depth):
        below = np.zeros(len(spec.counts), dtype=np.int64)
        for place in np.flatnonzero(parents):
            total += parents[place] * spec.counts[place]
            for child in range(spec.counts[place]):
                below[spec.first[place] + child * spec.apart] += parents[place]
        parents = below
    return total


class Complete:
    """A base class of growths that pass on every node they have grown."""

    def finish(self, tree: GrowingTree) -> None:
        """Do nothing."""


DEEPEST = 64  # minimum number of layers in the layout of fixed counts


def _spec_of_layout(
    layout: tuple[Array, Array], apart: int, children: Any, truncation: Truncation, eos: Array, greedy: bool
) -> TreeSpec | OwnChildrenSpec:
    """Return the spec of a tree with this layout, `counts` and `first`. At temperature 0 children are the likeliest."""
    counts, first = layout
    if greedy:
        return TreeSpec(counts, first, apart, LIKELIEST, truncation, eos)
    if isinstance(children, KNOWN):
        return TreeSpec(counts, first, apart, children.way, truncation, eos)
    return OwnChildrenSpec(counts, first, apart, children, truncation, eos)


@dataclass(frozen=True)
class Branching(Complete):
    """A growth with a fixed number of children per node in each layer; the last count also holds for deeper layers."""

    counts: tuple[int, ...]  # (1,) is a chain
    children: Any  # a class of draft.children, or another `Children`

    @property
    def layers(self) -> tuple[int, ...]:
        """The number of draws of each layer under one root."""
        return tuple(itertools.accumulate(self.counts, operator.mul))

    def count(self, layer: int) -> int:
        """Return the number of children of each node whose children are layer `layer`, from 0 on."""
        return self.counts[min(layer, len(self.counts) - 1)]

    def spec(self, truncation: Truncation, eos: Array, greedy: bool, constrained: bool) -> TreeSpec | OwnChildrenSpec:
        """Return how steps grow such trees."""
        return _spec_of_layout(_layout_of(self.counts), 0, self.children, truncation, eos, greedy)


@lru_cache
def _layout_of(counts: tuple[int, ...]) -> tuple[Array, Array]:
    """Return `TreeSpec.counts` and `TreeSpec.first` of fixed counts, where the place of a node is its depth."""
    layers = np.arange(max(DEEPEST, len(counts)))
    return np.array(counts)[np.minimum(layers, len(counts) - 1)], np.minimum(layers + 1, len(layers) - 1)


@dataclass(frozen=True)
class FixedTree(Complete):
    """A growth of trees with a fixed topology, the number of children of each node (Sequoia, arXiv 2402.12374)."""

    topology: Topology
    children: Any  # a class of draft.children, or another `Children`

    def spec(self, truncation: Truncation, eos: Array, greedy: bool, constrained: bool) -> TreeSpec | OwnChildrenSpec:
        """Return how steps grow such trees."""
        spec = _spec_of_layout(self._layout, 1, self.children, truncation, eos, greedy)
        if constrained and isinstance(spec, TreeSpec) and spec.way == STRUCK_OUT_THEN_ANY:
            return spec._replace(
                way=STRUCK_OUT
            )  # no fallback: outside the support of a law nearly all tokens are banned
        return spec

    @cached_property
    def _layout(self) -> tuple[Array, Array]:
        """`TreeSpec.counts` and `TreeSpec.first`, where places number the nodes of the topology breadth first."""
        nodes: list[Topology] = [self.topology]
        counts: list[int] = []
        first: list[int] = []
        for node in nodes:  # the list grows during the loop
            counts.append(len(node))
            first.append(len(nodes))
            nodes += list(node)
        return np.array(counts), np.array(first)

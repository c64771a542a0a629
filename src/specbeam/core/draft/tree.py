"""DRAFT: token trees that a draft model grows layer by layer. A growth decides their shape.

Rules that try drafts against their law work with one live beam, and so with trees of one root. Beam search only needs the
nodes: with several live beams a tree grows under each, and the likelier beams get the larger part of a budget.
"""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from jaxtyping import Int64

from specbeam.core.beams import Beams, Layers, Texts, is_end
from specbeam.core.control.best_tree import Topology
from specbeam.core.control.needs import no_node_odds
from specbeam.core.control.planning import NO_STOP, StopSpec
from specbeam.core.control.stopping import Stopping, begin_draft, goes_on, learn_stop, stops_of
from specbeam.core.dice import pick
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
    distinct,
)
from specbeam.core.draft.turns import Cut, draft_turn, keep_tosses, learn_from, nodes_of, tosses_of
from specbeam.core.errors import BrokenProcessor
from specbeam.core.forest import (
    CHOSEN,
    DISTINCT,
    INDEPENDENT,
    LOST,
    Forest,
    Siblings,
    TurnRows,
    drafted_layers,
    siblings,
)
from specbeam.core.laws.edits import Edits, edited_rows
from specbeam.core.laws.ranking import Truncation, largest
from specbeam.core.laws.reduce import BROKEN, DEAD, SOUND, condition_of_row, exponentials
from specbeam.core.laws.rows import RowLaw, row_law
from specbeam.core.laws.warp import Rows, on_host, processed_rows, row_laws
from specbeam.core.lm import LM, fill_prompts, takes_a_pass
from specbeam.core.passes import run_pass
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session
from specbeam.core.steps import Array, borrowed, step, verb

ROOM = 4096  # initial capacity for the probabilities of stated laws


@borrowed
class TreeSpec(NamedTuple):
    """How a tree branches, and how children are drawn, as numbers for steps.

    Each node has a place in the topology, which is 0 at the roots. A node at place t gets counts[t] children; the k-th one
    drawn, from k = 0 on, has the place first[t] + k * apart.
    """

    counts: Array  # int64[places]
    first: Array  # int64[places]
    apart: int  # 1; or 0: all children of a node have the same place, as in a tree of fixed counts per layer
    way: int  # ONE_BY_ONE, STRUCK_OUT, STRUCK_OUT_THEN_ANY, LIKELIEST or LIKELIEST_AND_ONE
    truncation: Truncation
    eos: Array  # int64[ends]
    stops: StopSpec = NO_STOP  # by what a draft may end between layers


class TreeDraft(NamedTuple):
    """A tree while it grows."""

    forest: Forest
    front: Array  # int64[front]: nodes whose children are drawn next, in the order of the forest
    places: Array  # int64[front]: their places in the topology
    law_tokens: Array  # int64[capacity]: buffer whose used part is `Siblings.law_pairs`
    law_odds: Array  # float64[capacity]: buffer whose used part is `Siblings.law_odds`
    surest: float  # largest draft probability of a draw of the newest layer; 1 if it has none


@step
def start_tree(roots: Forest, room: int) -> TreeDraft:
    """Return a tree without layers, with capacity for `room` probabilities of stated laws."""
    size = len(roots.tokens)
    front = np.arange(size)
    places = np.zeros(size, dtype=np.int64)
    return TreeDraft(roots, front, places, np.empty(room, dtype=np.int64), np.empty(room), 1.0)


class Newborn(NamedTuple):
    """The children of a layer while they are drawn, in buffers with spare capacity."""

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
def room_for_children(draws: int, groups: int) -> Newborn:
    """Return empty buffers with capacity for `draws` draws in `groups` groups."""
    return Newborn(
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
def bear(
    born: Newborn, siblings_from: int, size: int, parent: int, token: int, logq: float, place: int, eos: Array
) -> None:
    """Add a draw under a parent. End tokens get no node, and draws of the same token share one.

    Args:
        siblings_from: number of nodes that were added before the first child of this parent.
        size: number of nodes of the forest before this layer.
        logq: draft log-likelihood of the path.
        place: in the topology.
    """
    draw = born.sizes[DRAWS]
    born.draw_tokens[draw] = token
    born.sizes[DRAWS] = draw + 1
    if is_end(token, eos):
        born.draw_nodes[draw] = -1
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
    born.draw_nodes[draw] = size + node


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
    """Return the law of row `number` of a front, which is SOUND."""
    found: RowLaw = rows.laws[number]
    return found


@law_after.of(np.ndarray)
def law_after_array(rows: Array, number: int, truncation: Truncation) -> RowLaw:
    """Return the law that a truncation makes of a row of an array; see `law_after`."""
    return row_law(rows[number], truncation)


@verb(0)
def condition_after(rows: Any, number: int) -> int:
    """Return whether row `number` of a front is SOUND, DEAD or BROKEN."""
    return DEAD if rows.laws[number] is None else SOUND


@condition_after.of(np.ndarray)
def condition_after_array(rows: Array, number: int) -> int:
    """Return the condition of a row of an array; see `condition_after`."""
    return condition_of_row(rows[number])


@dataclass(frozen=True, eq=False)
class LawsOfFront:
    """The laws after a front where Python makes them, in place of its rows; None after a node with no way on."""

    laws: list[RowLaw | None]
    shape: tuple[int, int]  # of the rows


@step
def grow_layer(draft: TreeDraft, rows: Array, spec: TreeSpec, dice: Any) -> tuple[TreeDraft, int]:
    """Return a tree with one more layer, and SOUND; or the same tree, and BROKEN if a row holds NaN or +inf.

    A node after which everything is banned is a leaf.

    Args:
        rows: float[front, vocab], logits of the front, after the processors.
    """
    forest = draft.forest
    size = len(forest.tokens)
    used = len(forest.siblings.law_odds)
    law_tokens = draft.law_tokens
    law_odds = draft.law_odds
    draws = 0
    for place in draft.places:
        draws += spec.counts[place]
    born = room_for_children(draws, 2 * len(draft.front))
    vocab = rows.shape[1]
    for number in range(len(draft.front)):
        node = draft.front[number]
        here = draft.places[number]
        count = spec.counts[here]
        if count == 0:
            continue
        condition = condition_of_row(rows[number])
        if condition == BROKEN:
            return draft, BROKEN
        if condition != SOUND:
            continue
        law = row_law(rows[number], spec.truncation)
        needed = used + 2 * max(len(law.logp), vocab if spec.way == STRUCK_OUT_THEN_ANY else 0)
        law_tokens, law_odds = with_room_for_laws(law_tokens, law_odds, needed)
        used = _draw_children(
            born, law, node, size, logq_of(forest, node), here, count, spec, dice, law_tokens, law_odds, used
        )
    grown = with_layer(forest, born, law_tokens, law_odds, used, vocab)
    nodes = born.sizes[NODES]
    return TreeDraft(grown, size + np.arange(nodes), born.places[:nodes], law_tokens, law_odds, surest_of(born)), SOUND


@step
def with_room_for_laws(law_tokens: Array, law_odds: Array, needed: int) -> tuple[Array, Array]:
    """Return the buffers of laws; longer ones with the same contents if there is no room for `needed` numbers."""
    if needed <= len(law_odds):
        return law_tokens, law_odds
    return np.append(law_tokens, np.empty(needed, dtype=np.int64)), np.append(law_odds, np.empty(needed))


@step
def logq_of(forest: Forest, node: int) -> float:
    """Return the draft log-likelihood of the path to a node; 0 if the forest has none."""
    return forest.logq[node] if len(forest.logq) > 0 else 0.0


@step
def state_law(law: RowLaw, odds: Array, law_tokens: Array, law_odds: Array, used: int) -> int:
    """Write probabilities on the tokens of a law into the buffers, from index `used` on. Returns the index after them."""
    stop = used + len(odds)
    if len(law.tokens) > 0:
        law_tokens[used:stop] = law.tokens
    else:
        law_tokens[used:stop] = np.arange(len(odds))
    law_odds[used:stop] = odds
    return stop


@step
def _draw_children(
    born: Newborn, law: RowLaw, parent: int, size: int, base: float, here: int, count: int, spec: TreeSpec, dice: Any,
    law_tokens: Array, law_odds: Array, used: int,
) -> int:  # fmt: skip
    """Draw the children of one node, and write their laws into the buffers from index `used` on.

    Returns the index after the laws.

    Args:
        size: number of nodes of the forest before this layer.
        base: draft log-likelihood of the path to the parent.
        here: place of the parent in the topology.
        count: number of children.
    """
    before = born.sizes[NODES]
    odds = exponentials(law.logp)
    drawn = 0
    if spec.way == LIKELIEST or spec.way == LIKELIEST_AND_ONE:
        wanted = count if spec.way == LIKELIEST else count - 1
        top = likeliest_places(law.logp, wanted)
        if spec.way == LIKELIEST_AND_ONE:
            rest = odds.copy()
            rest[top] = 0.0
            if rest.sum() > 0:
                rest /= rest.sum()
                used = state_law(law, rest, law_tokens, law_odds, used)
                _bear_place(born, law, pick(dice, rest), before, size, parent, base, here, 0, spec)
                close_group(born, DISTINCT, parent, used)
                drawn = 1
        for place in top:
            _bear_place(born, law, place, before, size, parent, base, here, drawn, spec)
            drawn += 1
        if len(top) > 0:
            close_group(born, CHOSEN, parent, used)
        return used
    used = state_law(law, odds, law_tokens, law_odds, used)
    left = odds.copy()
    while drawn < count and (spec.way == ONE_BY_ONE or (left > 0).any()):
        place = pick(dice, left)
        _bear_place(born, law, place, before, size, parent, base, here, drawn, spec)
        if spec.way != ONE_BY_ONE:
            left[place] = 0.0
        drawn += 1
    close_group(born, INDEPENDENT if spec.way == ONE_BY_ONE else DISTINCT, parent, used)
    if spec.way == STRUCK_OUT_THEN_ANY and drawn < count:
        used = _draw_any(born, law, before, size, parent, here, drawn, count, spec, dice, law_tokens, law_odds, used)
    return used


@step
def _bear_place(
    born: Newborn, law: RowLaw, place: int, before: int, size: int, parent: int, base: float, here: int, drawn: int,
    spec: TreeSpec,
) -> None:  # fmt: skip
    """Add the draw at an index of a law, as child `drawn` of its parent; see `_draw_children` for the other arguments."""
    token = law.tokens[place] if len(law.tokens) > 0 else place
    born.surest[0] = max(born.surest[0], np.exp(law.logp[place]))
    bear(born, before, size, parent, token, base + law.logp[place], spec.first[here] + drawn * spec.apart, spec.eos)


@step
def _draw_any(
    born: Newborn, law: RowLaw, before: int, size: int, parent: int, here: int, drawn: int, count: int, spec: TreeSpec,
    dice: Any, law_tokens: Array, law_odds: Array, used: int,
) -> int:  # fmt: skip
    """Draw the children that a law has too few tokens for, uniformly from the tokens that were not drawn yet.

    Returns the index after the laws; see `_draw_children` for the arguments.
    """
    untried = np.ones(law.vocab)
    for draw in range(born.sizes[DRAWS] - drawn, born.sizes[DRAWS]):
        untried[born.draw_tokens[draw]] = 0.0
    if not untried.any():
        return used
    untried /= untried.sum()
    law_tokens[used : used + law.vocab] = np.arange(law.vocab)
    law_odds[used : used + law.vocab] = untried
    used += law.vocab
    left = untried.copy()
    while drawn < count and (left > 0).any():
        token = pick(dice, left)
        left[token] = 0.0
        born.surest[0] = max(born.surest[0], 0.0)
        bear(born, before, size, parent, token, -np.inf, spec.first[here] + drawn * spec.apart, spec.eos)
        drawn += 1
    close_group(born, DISTINCT, parent, used)
    return used


@step
def with_layer(forest: Forest, born: Newborn, law_tokens: Array, law_odds: Array, used: int, vocab: int) -> Forest:
    """Return a forest with one more layer, the new children.

    Args:
        law_tokens, law_odds: buffers of which the first `used` numbers are the laws of all groups.
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
        law_tokens[:used],
        law_odds[:used],
        vocab,
    )
    before = forest.logq if len(forest.logq) > 0 else np.zeros(len(forest.tokens))
    return Forest(
        np.concatenate((forest.tokens, born.tokens[:nodes])),
        np.concatenate((forest.parents, born.parents[:nodes])),
        more,
        np.concatenate((before, born.logq[:nodes])),
        forest.beams,
        forest.fronts,
        forest.known,
    )


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
def grow_one_layer(draft: Any, rows: Array, spec: Any, dice: Any) -> tuple[Any, int]:  # type: ignore[empty-body]
    """Return a draft with one more layer, and SOUND; or the same draft, and BROKEN if a row holds NaN or +inf.

    Args:
        rows: float[front, vocab], logits of the front, after the processors.
    """


@verb(1)
def finish_growth(draft: Any, spec: Any) -> Cut:
    """Return a draft after its last layer, as it is passed on, and with all nodes that the draft model knows."""
    forest = draft.forest
    return Cut(forest, forest, np.arange(len(forest.tokens)), no_node_odds())


@verb(1)
def most_draws(draft: Any, spec: Any) -> int:
    """Return the most uniforms that the next layer of a draft takes."""
    return int(spec.counts[draft.places].sum())


@start_growth.of(TreeSpec)
@step
def start_tree_of_spec(roots: Forest, spec: TreeSpec, live: Beams, depth: int, width: int) -> TreeDraft:
    """Return a tree without layers; see `start_growth`."""
    return start_tree(roots, ROOM)


grow_one_layer.of(TreeSpec)(grow_layer)


@step
def grow_tree(
    model: Any, draft: Any, answered: int, depth: int, spec: Any, edits: Edits, dice: Any, spent: Array
) -> tuple[Any, int]:
    """Return a tree with up to `depth` more layers, and SOUND; or BROKEN if a row of logits holds NaN or +inf.

    It has fewer layers where nothing can go on, and where `spec.stops` ends it.

    Args:
        model: the cache of a session in a model that compiled steps can run, see `core.passes.run_pass`.
        draft, spec: a draft and its spec, of a kind that has a step `grow_one_layer`.
        answered: number of forest nodes whose logits were computed in this turn already.
        edits: changes of the model's rows.
        spent: int64[2], to which the number of passes and the processor's cycles in the model are added.
    """
    begin_draft(spec.stops)
    for _ in range(depth):
        if len(draft.front) == 0:
            break
        forest = draft.forest
        wanted = np.arange(answered, len(forest.tokens))
        rows = run_pass(model, forest.tokens, forest.parents, wanted, spent)
        rows = edited_rows(rows, wanted, forest.tokens, forest.parents, edits)
        answered = len(forest.tokens)
        draft, condition = grow_one_layer(draft, rows, spec, dice)
        if condition != SOUND:
            return draft, condition
        if len(draft.front) > 0 and not goes_on(spec.stops, draft.surest):
            break
    return draft, SOUND


@draft_turn.of(TreeSpec)
@step
def draft_tree(
    drafts: Any, model: Any, roots: Forest, live: Beams, texts: Texts, depth: int, width: int, edits: Edits, dice: Any,
    spent: Array,
) -> tuple[Cut, int]:  # fmt: skip
    """Grow a tree under each root; see `draft_turn`."""
    begun = start_growth(roots, drafts, live, depth, width)
    draft, condition = grow_tree(model, begun, 0, depth, drafts, edits, dice, spent)
    return finish_growth(draft, drafts), condition


@learn_from.of(TreeSpec)
@step
def learn_stop_of_tree(drafts: Any, drafted: Cut, layers: Layers, rows: TurnRows) -> None:
    """Let the controller that ends drafts between layers learn from a turn; see `learn_from`."""
    learn_stop(drafts.stops, drafted_layers(drafted.forest), layers.passed.sum())


@tosses_of.of(TreeSpec)
def tosses_of_tree(drafts: Any) -> int:
    """Return the number of coins used; see `tosses_of`."""
    return drafts.stops.coins.used[0]


@keep_tosses.of(TreeSpec)
def keep_tosses_of_tree(drafts: Any, used: int) -> None:
    """Take back the coins after the first `used`; see `keep_tosses`."""
    drafts.stops.coins.used[0] = used


@dataclass(eq=False)
class GrowingTree:
    """One session's tree while it grows. The draft model scores all nodes of `forest`; leaves may be added at the end."""

    session: Session
    shape: Shape
    forest: Forest
    front: Int64[np.ndarray, " front"]  # nodes whose laws are computed next
    memory: dict[str, Any] = field(default_factory=dict)  # what the growth stores from layer to layer
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
        """Return the rows of the front after the logits processors."""
        return processed_rows(rows, self.session.warp, lambda: self.session.paths(self.forest, self.front))

    def laws(self, rows: Rows) -> list[RowLaw]:
        """Cut the front to the nodes that may go on, and return their draft laws.

        After an end token no law is computed, because logits processors need not support that. A node after which everything
        is banned is a leaf.
        """
        eos = self.session.limits.eos
        front = self.front.tolist()
        going = [
            place for place, node in enumerate(front) if node in self.roots or int(self.forest.tokens[node]) not in eos
        ]
        if len(going) < len(front):
            self.front = self.front[going]
            rows = rows[going]
        laws = row_laws(self.processed(rows), self.session.warp)
        alive = [place for place, law in enumerate(laws) if law is not None]
        if len(alive) < len(laws):
            self.front = self.front[alive]
        return [law for law in laws if law is not None]

    def add_children(self, families: Sequence["Family"]) -> list[list[int]]:
        """Add siblings under nodes: one child per token, shared by draws of the same token; none for end tokens.

        Returns for each family the node of each draw, -1 for end tokens.
        """
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        groups: list[Siblings] = []
        eos = self.session.limits.eos
        size = self.forest.size
        logq = self.forest.logq
        known_under: dict[int, dict[int, int]] = {}
        for family in families:
            if family.parent not in known_under:
                known_under[family.parent] = self.children_of(family.parent) if family.law is None else {}
            known = known_under[family.parent]
            drawn = family.tokens
            base = float(logq[family.parent]) if len(logq) else 0.0
            nodes: list[int] = []
            for place, token in zip(family.draws.tokens, drawn, strict=True):
                if token not in known and token not in eos:
                    known[token] = size + len(tokens)
                    tokens.append(token)
                    parents.append(family.parent)
                    scores.append(np.nan if family.law is None else base + float(family.law.logp[place]))
                nodes.append(known.get(token, -1))
            groups.append(family.group(drawn, nodes))
        self.forest = self.forest.grown(tokens, parents, np.array(scores), groups)
        return [group.nodes.tolist() for group in groups]

    def children_of(self, parent: int) -> dict[int, int]:
        """Return the children of a node, by their tokens."""
        nodes = np.flatnonzero(self.forest.parents == parent)
        return dict(zip(self.forest.tokens[nodes].tolist(), nodes.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Family:
    """Children to add under `parent`. `draws.tokens` are indices into `law` if it is given, else token ids."""

    parent: int
    draws: Draws
    law: RowLaw | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens of the draws."""
        return self.draws.tokens if self.law is None else self.law.tokens_at(self.draws.tokens).tolist()

    def group(self, tokens: list[int], nodes: list[int]) -> Siblings:
        """Return the draws as a group of siblings, which have these tokens and nodes."""
        draws = self.draws
        if draws.deterministic:
            return siblings(CHOSEN, [self.parent], tokens, nodes)
        if draws.law is None:
            return siblings(LOST, [self.parent], tokens, nodes)
        assert self.law is not None
        law_tokens = self.law.tokens if len(self.law.tokens) else np.arange(self.law.size)
        kind = INDEPENDENT if draws.replacement else DISTINCT
        return siblings(
            kind, [self.parent], tokens, nodes, law=(law_tokens, np.asarray(draws.law)), vocab=self.law.vocab
        )


@runtime_checkable
class Growth(Protocol):
    """A part that decides the shape of a tree.

    If its drafts must not be tried, it gives the reason in an attribute `no_law_reason`. If steps grow its trees, it has a
    method `spec`, see `Branching`; if Python may have to, it is a `GrowthInPython`.
    """

    def finish(self, tree: GrowingTree) -> None:
        """Add leaves that the draft model need not score, and choose what is passed on. Called after the last layer."""


class GrowthInPython(Growth, Protocol):
    """A growth that adds layers in Python: always, or where steps do not know how to make laws or to draw children."""

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None:
        """Add layer `layer`, from 0 on, by the draft laws of the front, and set `tree.front` to the next front."""


@dataclass(frozen=True)
class TreeDrafter:
    """A drafter that grows trees by a draft model: up to `shape.depth` layers, one pass of the model for each.

    Args:
        lm: the draft model.
        counts_passes: count these passes as the draft's; False if the model counts them itself.
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
        """The reason why the law of the drafts is not known, from an attribute of the growth; "" if it is known."""
        return getattr(self.growth, "no_law_reason", "")

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """Return one tree per session; see `Growth`. A controller that is `Stopping` may end a draft between layers."""
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
                        tree.front = tree.front[:0]
                tree.layers += 1
        return [self._finish(tree) for tree in trees]

    def spec(self, session: Session) -> Any:
        """Return how steps grow trees for a session; None if only Python can, as for a growth that steps do not know."""
        return None if session.warp.others or not self.counts_passes else self._spec_of_layers(session)

    def _spec_of_layers(self, session: Session) -> Any:
        """Return how steps add layers by rows that Python hands them, or by laws; None if they cannot."""
        warp = session.warp
        in_python = hasattr(self.growth, "grow") and (warp.others or not self.counts_passes)
        if in_python or not hasattr(self.growth, "spec"):
            return None
        shared = getattr(self.lm, "shared", None)
        is_constrained = warp.constraint is not None or (shared is not None and not shared.knows_all)
        found = self.growth.spec(warp.cut, session.limits.ending, warp.greedy, is_constrained)
        if found is not None and "vocab" in found._fields:
            found = found._replace(vocab=self.lm.vocab)
        return found

    def _drafted_by_steps(self, session: Session, shape: Shape) -> Forest | None:
        """Return the tree of a session, grown in one compiled call; None if Python has to see layers or rows."""
        spec = self.spec(session)
        stops = stops_of(session.parts.controller, session, shape.depth)
        if spec is None or stops is None:
            return None
        roots = Forest.rooted(session.beams.tokens)
        drafted = drafted_by_steps(self.lm, session, shape, spec._replace(stops=stops), roots, self.counts_passes)
        if drafted is None:
            return None
        return self._passed_on(GrowingTree.start(session, shape), drafted)

    def _passed_on(self, tree: GrowingTree, drafted: Cut) -> Forest:
        """Return the forest that the target scores.

        If it lacks nodes of the draft, the tree is kept until the turn is settled.
        """
        if len(drafted.names) < drafted.whole.size:
            tree.forest = drafted.whole
            tree.kept = drafted.names
            tree.session.state[self] = tree
        return drafted.forest

    def _grow(self, tree: GrowingTree, rows: Rows) -> None:
        """Add a layer by the logits of the front; empty the front if the controller ends the draft."""
        session = tree.session
        spec = self._spec_of_layers(session)
        before = tree.forest
        controller = tree.session.parts.controller
        may_stop = _may_stop(type(controller))
        confidence = 1.0
        if spec is not None:
            if "draft" not in tree.memory:
                tree.memory["draft"] = start_growth(
                    tree.forest, spec, session.beams, tree.shape.depth, tree.shape.width
                )
            draft = tree.memory["draft"]
            rows = tree.processed(rows)
            dice = session.dice.ready(most_draws(draft, spec))
            grow = grow_one_layer.step_of(type(spec))
            if session.warp.others and not session.warp.greedy:
                laws_after = LawsOfFront(row_laws(rows, session.warp), rows.shape)
                draft, condition = getattr(grow, "py_func", grow)(draft, laws_after, spec, dice)
            else:
                draft, condition = grow(draft, rows, spec, dice)
            if condition == BROKEN:
                row_laws(rows, session.warp)  # raises `BrokenLaw`, which says what is wrong
            tree.memory["draft"] = draft
            tree.forest = draft.forest
            tree.front = draft.front
            confidence = draft.surest
        else:
            front_laws = tree.laws(rows)
            if not front_laws:
                return
            laws = dict(zip(tree.front.tolist(), front_laws, strict=True))
            cast(GrowthInPython, self.growth).grow(tree, tree.layers, front_laws)
            if may_stop:
                confidence = _confidence(tree.forest, before, laws)
        asks = may_stop and len(tree.front) > 0
        if asks and not cast(Stopping, controller).more(tree.session, tree.layers + 1, confidence):
            tree.front = tree.front[:0]

    def _finish(self, tree: GrowingTree) -> Forest:
        """Let the growth finish a tree, and return the forest that is passed on."""
        if "draft" in tree.memory:
            done = finish_growth(tree.memory["draft"], self._spec_of_layers(tree.session))
            tree.forest = done.forest
            if len(done.names) < done.whole.size:
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
        """Keep in the draft model's cache what the surviving beams need, and free the rest."""
        whole = session.state.pop(self, None)
        self.lm.settle(session, turn if whole is None else turn.on(whole.forest, whole.kept))

    def close(self, session: Session) -> None:
        """Free what the draft model stores for the session."""
        self.lm.close(session)

    def _wants_layer(self, tree: GrowingTree) -> bool:
        """Return whether another layer is to be drafted."""
        return tree.layers < tree.shape.depth and len(tree.front) > 0 and tree.session.failure is None


@cache
def _may_stop(kind: type) -> bool:
    """Return whether controllers of this class are `Stopping`. Cached: the check of a protocol takes as long as a layer."""
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
    if not drawn:  # the growth adds groups only at the end
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
    """Return the most nodes of trees of fixed counts or topology: all children of all places; see `nodes_of`."""
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
        """Do nothing: there is nothing to add."""


DEEPEST = 64  # least number of layers in the layout of fixed counts


@dataclass(frozen=True)
class Branching(Complete):
    """A growth with a fixed number of children per node in each layer; the last holds for deeper layers. (1,) is a chain."""

    counts: tuple[int, ...]
    children: Any  # a class of draft.children, or another `Children`

    @property
    def layers(self) -> tuple[int, ...]:
        """The number of draws of each layer under one root."""
        return tuple(itertools.accumulate(self.counts, operator.mul))

    def count(self, layer: int) -> int:
        """Return the number of children of each node whose children are layer `layer`, from 0 on."""
        return self.counts[min(layer, len(self.counts) - 1)]

    def spec(self, truncation: Truncation, eos: Array, greedy: bool, constrained: bool) -> TreeSpec | None:
        """Return how steps grow such trees; None if steps do not know `children`."""
        if not isinstance(self.children, KNOWN):
            return None
        counts, first = _layout_of(self.counts)
        return TreeSpec(counts, first, 0, LIKELIEST if greedy else self.children.way, truncation, eos)

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None:
        """Add a layer, whose children are drawn in Python."""
        families: list[Family] = []
        for node, law in zip(tree.front.tolist(), laws, strict=True):
            drawn = draw_children(self.children, law, self.count(layer), tree.session)
            families.extend(Family(node, draws, law) for draws in drawn)
        front = [node for nodes in tree.add_children(families) for node in nodes if node >= 0]
        tree.front = np.array(distinct(front), dtype=np.int64)


@lru_cache
def _layout_of(counts: tuple[int, ...]) -> tuple[Array, Array]:
    """Return `TreeSpec.counts` and `TreeSpec.first` of fixed counts, where the place of a node is its depth."""
    layers = np.arange(max(DEEPEST, len(counts)))
    return np.array(counts)[np.minimum(layers, len(counts) - 1)], np.minimum(layers + 1, len(layers) - 1)


def draw_children(children: Children, law: RowLaw, count: int, session: Session) -> list[Draws]:
    """Return the draws of the children of one node; at temperature 0 the likeliest tokens."""
    if session.warp.greedy:
        return [Draws(likeliest_places(law.logp, count).tolist(), deterministic=True)]
    return children.draw(law.p, count, session.dice)


@dataclass(frozen=True)
class FixedTree(Complete):
    """A growth of trees of a fixed topology, which says how many children each node gets (Sequoia, arXiv 2402.12374)."""

    topology: Topology
    children: Any  # a class of draft.children, or another `Children`

    def spec(self, truncation: Truncation, eos: Array, greedy: bool, constrained: bool) -> TreeSpec | None:
        """Return how steps grow such trees; None if steps do not know `children`."""
        if not isinstance(self.children, KNOWN):
            return None
        counts, first = self._layout
        way = LIKELIEST if greedy else self.children.way
        if constrained and way == STRUCK_OUT_THEN_ANY:
            way = STRUCK_OUT  # no fallback: outside of the law's support nearly all tokens are banned
        return TreeSpec(counts, first, 1, way, truncation, eos)

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

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None:
        """Add a layer, whose children are drawn in Python."""
        subtree_of = tree.memory.setdefault("subtree_of", dict.fromkeys(tree.roots, self.topology))
        nodes = tree.front.tolist()
        families: list[Family] = []
        for node, law in zip(nodes, laws, strict=True):
            siblings = draw_children(self.children, law, len(subtree_of[node]), tree.session)
            families.extend(Family(node, draws, law) for draws in siblings)
        drawn: dict[int, list[int]] = {node: [] for node in nodes}
        for family, born in zip(families, tree.add_children(families), strict=True):
            drawn[family.parent] += born
        front: list[int] = []
        for node in nodes:
            for child, subtree in zip(drawn[node], subtree_of[node], strict=False):
                if child >= 0 and child not in subtree_of:
                    subtree_of[child] = subtree
                    front.append(child)
        # All nodes are scored, in the order of the forest, so leaves are in the front too, and get no children.
        tree.front = np.array(front, dtype=np.int64)

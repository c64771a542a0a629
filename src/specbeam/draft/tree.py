"""DRAFT: token trees, grown layer by layer by a draft model. A growth decides the shape.

Rules that try drafts against their law work under one beam, and with it such trees have one root; beam search needs nodes
alone, so under several beams a tree grows under each, and the likelier beams get the better part of a budget.
"""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from jaxtyping import Int64

from specbeam.control.best_tree import Topology
from specbeam.control.confidence import Stopping
from specbeam.core.beams import is_end
from specbeam.core.dice import pick
from specbeam.core.forest import CHOSEN, DISTINCT, INDEPENDENT, LOST, Forest, Siblings, siblings
from specbeam.core.steps import Array, step
from specbeam.draft.children import (
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
from specbeam.engines.pass_steps import run_pass
from specbeam.errors import BrokenLaw, BrokenProcessor
from specbeam.laws.edits import NO_EDITS, Edits, edited_rows
from specbeam.laws.joint import BROKEN, SOUND
from specbeam.laws.ranking import Truncation, largest
from specbeam.laws.rows import RowLaw, condition_of_row, row_law
from specbeam.laws.warp import Rows, on_host, processed_rows, row_laws
from specbeam.lm.base import LM, fill_prompts
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.records import Shape, Turn
from specbeam.session import Session

ROOM = 4096  # numbers of laws that there is room for at first


class TreeSpec(NamedTuple):
    """How a tree branches, and how children are drawn.

    A node has a place in the topology, from 0 at the roots on. A node at place t gets counts[t] children, of which the k-th
    drawn has the place first[t] + k * apart.
    """

    counts: Array  # int64[places]
    first: Array  # int64[places]
    apart: int  # 0: all children of a node have the same place, as in a tree of fixed counts per layer
    way: int  # ONE_BY_ONE, STRUCK_OUT, STRUCK_OUT_THEN_ANY, LIKELIEST or LIKELIEST_AND_ONE
    truncation: Truncation
    eos: Array  # int64[ends]


class TreeDraft(NamedTuple):
    """A tree while it grows."""

    forest: Forest
    front: Array  # int64[front]: nodes whose laws come next, in the order of the forest
    places: Array  # int64[front]: where they stand in the topology
    law_tokens: Array  # int64[room]: what the laws of the siblings are written into, which see the first part of it
    law_odds: Array  # float64[room]


@step
def start_tree(roots: Forest, room: int) -> TreeDraft:
    """Return a tree without layers, with room for so many numbers of laws."""
    size = len(roots.tokens)
    front = np.arange(size)
    return TreeDraft(roots, front, np.zeros(size, dtype=np.int64), np.empty(room, dtype=np.int64), np.empty(room))


class Newborn(NamedTuple):
    """The children of a layer while they are drawn, with room for more."""

    tokens: Array  # int64[room]: of nodes
    parents: Array
    logq: Array  # float64[room]
    places: Array  # int64[room]
    draw_tokens: Array  # int64[room]: of draws
    draw_nodes: Array
    kinds: Array  # int64[room]: of groups
    group_parents: Array
    draw_ends: Array
    law_ends: Array
    sizes: Array  # int64[3]: nodes, draws, groups


NODES, DRAWS, GROUPS = range(3)


@step
def _room_for_children(draws: int, groups: int) -> Newborn:
    """Return room for so many draws in so many groups."""
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
    )


@step
def _bear(
    born: Newborn, siblings_from: int, size: int, parent: int, token: int, logq: float, place: int, eos: Array
) -> None:
    """Note a draw under a parent: end tokens have no node, and draws of one token share theirs.

    Args:
        siblings_from: number of nodes that were born before the first child of this parent.
        size: number of nodes of the forest before this layer.
        logq: log-likelihood of the path by the draft model.
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
def _close_group(born: Newborn, kind: int, parent: int, law_end: int) -> None:
    """End a group of draws of one parent."""
    group = born.sizes[GROUPS]
    born.kinds[group] = kind
    born.group_parents[group] = parent
    born.draw_ends[group] = born.sizes[DRAWS]
    born.law_ends[group] = law_end
    born.sizes[GROUPS] = group + 1


@step
def _likeliest(logp: Array, count: int) -> Array:
    """Return the places of the `count` largest, best first."""
    return largest(logp.reshape(1, len(logp)), np.zeros(1), count)[:count]


@step
def grow_layer(draft: TreeDraft, rows: Array, spec: TreeSpec, dice: Any) -> tuple[TreeDraft, int]:
    """Return a tree with one more layer, and SOUND; or BROKEN if a row of logits is none.

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
    born = _room_for_children(draws, 2 * len(draft.front))
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
        if needed > len(law_odds):
            law_tokens = np.append(law_tokens, np.empty(needed, dtype=np.int64))
            law_odds = np.append(law_odds, np.empty(needed))
        used = _draw_children(
            born, law, node, size, _logq_of(forest, node), here, count, spec, dice, law_tokens, law_odds, used
        )
    return _with_layer(draft, born, law_tokens, law_odds, used, vocab), SOUND


@step
def _logq_of(forest: Forest, node: int) -> float:
    """Return the log-likelihood of the path to a node by the draft model."""
    return forest.logq[node] if len(forest.logq) > 0 else 0.0


@step
def _state_law(law: RowLaw, odds: Array, law_tokens: Array, law_odds: Array, used: int) -> int:
    """Write odds on the tokens of a law after the numbers that are used. Returns how many are used then."""
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
    """Draw the children of one node, whose path has the draft log-likelihood `base`. Returns the numbers of laws used."""
    before = born.sizes[NODES]
    odds = np.exp(law.logp)
    drawn = 0
    if spec.way == LIKELIEST or spec.way == LIKELIEST_AND_ONE:
        wanted = count if spec.way == LIKELIEST else count - 1
        top = _likeliest(law.logp, wanted)
        if spec.way == LIKELIEST_AND_ONE:
            rest = odds.copy()
            rest[top] = 0.0
            if rest.sum() > 0:
                rest /= rest.sum()
                used = _state_law(law, rest, law_tokens, law_odds, used)
                _bear_place(born, law, pick(dice, rest), before, size, parent, base, here, 0, spec)
                _close_group(born, DISTINCT, parent, used)
                drawn = 1
        for place in top:
            _bear_place(born, law, place, before, size, parent, base, here, drawn, spec)
            drawn += 1
        if len(top) > 0:
            _close_group(born, CHOSEN, parent, used)
        return used
    used = _state_law(law, odds, law_tokens, law_odds, used)
    left = odds.copy()
    while drawn < count and (spec.way == ONE_BY_ONE or (left > 0).any()):
        place = pick(dice, left)
        _bear_place(born, law, place, before, size, parent, base, here, drawn, spec)
        if spec.way != ONE_BY_ONE:
            left[place] = 0.0
        drawn += 1
    _close_group(born, INDEPENDENT if spec.way == ONE_BY_ONE else DISTINCT, parent, used)
    if spec.way == STRUCK_OUT_THEN_ANY and drawn < count:
        used = _draw_any(born, law, before, size, parent, here, drawn, count, spec, dice, law_tokens, law_odds, used)
    return used


@step
def _bear_place(
    born: Newborn, law: RowLaw, place: int, before: int, size: int, parent: int, base: float, here: int, drawn: int,
    spec: TreeSpec,
) -> None:  # fmt: skip
    """Note a draw by its place in a law."""
    token = law.tokens[place] if len(law.tokens) > 0 else place
    _bear(born, before, size, parent, token, base + law.logp[place], spec.first[here] + drawn * spec.apart, spec.eos)


@step
def _draw_any(
    born: Newborn, law: RowLaw, before: int, size: int, parent: int, here: int, drawn: int, count: int, spec: TreeSpec,
    dice: Any, law_tokens: Array, law_odds: Array, used: int,
) -> int:  # fmt: skip
    """Draw the children that a law could not supply uniformly from the tokens that were not tried."""
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
        _bear(born, before, size, parent, token, -np.inf, spec.first[here] + drawn * spec.apart, spec.eos)
        drawn += 1
    _close_group(born, DISTINCT, parent, used)
    return used


@step
def _with_layer(
    draft: TreeDraft, born: Newborn, law_tokens: Array, law_odds: Array, used: int, vocab: int
) -> TreeDraft:
    """Return a tree with the children of one more layer, which are the next front."""
    forest = draft.forest
    groups = forest.siblings
    nodes = born.sizes[NODES]
    draws = born.sizes[DRAWS]
    count = born.sizes[GROUPS]
    size = len(forest.tokens)
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
    before = forest.logq if len(forest.logq) > 0 else np.zeros(size)
    grown = Forest(
        np.concatenate((forest.tokens, born.tokens[:nodes])),
        np.concatenate((forest.parents, born.parents[:nodes])),
        more,
        np.concatenate((before, born.logq[:nodes])),
        forest.beams,
        forest.fronts,
    )
    return TreeDraft(grown, size + np.arange(nodes), born.places[:nodes], law_tokens, law_odds)


@step
def grow_tree(
    model: Any, draft: TreeDraft, answered: int, depth: int, spec: TreeSpec, edits: Edits, dice: Any, spent: Array
) -> tuple[TreeDraft, int]:
    """Return a tree with up to `depth` more layers, and SOUND; or BROKEN if a row of logits is none.

    Args:
        model: a session in a model that compiled steps can run (see `lm.any_cache`).
        answered: number of forest nodes whose logits were given in this turn already.
        edits: of the model's rows.
        spent: int64[2], to which passes and the processor's cycles inside the model are added.
    """
    for _ in range(depth):
        if len(draft.front) == 0:
            break
        forest = draft.forest
        rows = run_pass(model, forest.tokens, forest.parents, answered, spent)
        rows = edited_rows(rows, answered, forest.tokens, forest.parents, edits)
        answered = len(forest.tokens)
        draft, condition = grow_layer(draft, rows, spec, dice)
        if condition != SOUND:
            return draft, condition
    return draft, SOUND


@dataclass(eq=False)
class GrowingTree:
    """One session's tree while it grows. The draft model scores every node of `forest`; leaves wait until the end."""

    session: Session
    shape: Shape
    forest: Forest
    front: Int64[np.ndarray, " front"]  # nodes whose laws come next
    memory: dict[str, Any] = field(default_factory=dict)  # what a growth keeps from layer to layer
    kept: Int64[np.ndarray, " kept"] | None = None  # nodes that are handed on; None: all
    layers: int = 0

    @classmethod
    def start(cls, session: Session, shape: Shape) -> "GrowingTree":
        """Return a tree without layers under each live beam."""
        forest = Forest.rooted(session.beams.tokens)
        return cls(session, shape, forest, np.arange(forest.size))

    @property
    def roots(self) -> range:
        """The roots."""
        return range(self.session.beams.size)

    def standing(self) -> dict[int, float]:
        """Return the log-likelihood of the beam above each root, that of the best one taken off."""
        scores = self.session.beams.scores
        return dict(enumerate((scores - scores.max()).tolist()))

    def processed(self, rows: Rows) -> Rows:
        """Return the rows of the front after the logits processors."""
        return processed_rows(rows, self.session.warp, lambda: self.session.paths(self.forest, self.front))

    def laws(self, rows: Rows) -> list[RowLaw]:
        """Return the draft laws of the nodes that may go on, which are the front from now on.

        After an end token there is no law to ask for: logits processors need not know one. A node after which everything is
        banned is a leaf.
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
        """Add siblings under nodes: one child per token, shared by draws of the same token.

        Returns the node of each draw, -1 for end tokens.
        """
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        groups: list[Siblings] = []
        eos = self.session.limits.eos
        size = self.forest.size
        above = self.forest.logq
        known_under: dict[int, dict[int, int]] = {}
        for one in families:
            if one.parent not in known_under:
                known_under[one.parent] = self.children_of(one.parent) if one.law is None else {}
            known = known_under[one.parent]
            drawn = one.tokens
            base = float(above[one.parent]) if len(above) else 0.0
            nodes: list[int] = []
            for place, token in zip(one.draws.tokens, drawn, strict=True):
                if token not in known and token not in eos:
                    known[token] = size + len(tokens)
                    tokens.append(token)
                    parents.append(one.parent)
                    scores.append(np.nan if one.law is None else base + float(one.law.logp[place]))
                nodes.append(known.get(token, -1))
            groups.append(one.group(drawn, nodes))
        self.forest = self.forest.grown(tokens, parents, np.array(scores), groups)
        return [group.nodes.tolist() for group in groups]

    def children_of(self, parent: int) -> dict[int, int]:
        """Return the node of each child token."""
        nodes = np.flatnonzero(self.forest.parents == parent)
        return dict(zip(self.forest.tokens[nodes].tolist(), nodes.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Family:
    """Children to add under `parent`. `draws.tokens` index into `law` if it is given, else they are token ids."""

    parent: int
    draws: Draws
    law: RowLaw | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens of the draws."""
        return self.draws.tokens if self.law is None else self.law.tokens_at(self.draws.tokens).tolist()

    def group(self, tokens: list[int], nodes: list[int]) -> Siblings:
        """Return the draws as a group of siblings."""
        draws = self.draws
        if draws.deterministic:
            return siblings(CHOSEN, [self.parent], tokens, nodes)
        if draws.law is None:
            return siblings(LOST, [self.parent], tokens, nodes)
        assert self.law is not None
        named = self.law.tokens if len(self.law.tokens) else np.arange(self.law.size)
        kind = INDEPENDENT if draws.replacement else DISTINCT
        return siblings(kind, [self.parent], tokens, nodes, law=(named, np.asarray(draws.law)), vocab=self.law.vocab)


@runtime_checkable
class Growth(Protocol):
    """The shape of a tree. `grow` is called with the draft laws of the front and sets the next front.

    One whose drafts must not be tried says why in an attribute `no_law_reason`. One that steps can grow has a method `spec`.
    """

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None: ...

    def finish(self, tree: GrowingTree) -> None:
        """Add leaves that the draft model need not score, choose what is handed on. Called after the last layer."""


@dataclass(frozen=True)
class TreeDrafter:
    """Grow a tree by a draft model: as many layers as the shape is deep, one pass of the model each.

    Args:
        counts_passes: count these passes as the draft's; False where the model counts them itself.
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
        """Why the law of what is grown is not known; a growth says so by an attribute of this name."""
        return getattr(self.growth, "no_law_reason", "")

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """Return one tree per session; see `Growth`. A controller that is `Stopping` may end a draft between layers."""
        trees = [GrowingTree.start(session, shape) for session, shape in zip(sessions, shapes, strict=True)]
        if len(trees) == 1:
            self._grow_alone(trees[0])
        while active := [one for one in trees if self._wants(one)]:
            for one in active:
                one.session.count.draft_passes += self.counts_passes
            scored = self.lm.extend([one.session for one in active], [one.forest for one in active])
            for one, found in zip(active, scored, strict=True):
                with one.session.failing_alone("draft model: "):
                    try:
                        self._grow(one, on_host(found.logits))
                    except BrokenProcessor:  # on a draft's path; the target need not go there
                        one.front = one.front[:0]
                one.layers += 1
        return [self._finished(one) for one in trees]

    def spec(self, session: Session) -> TreeSpec | None:
        """Return how steps grow trees for a session; None for a growth, or children, of one's own."""
        warp = session.warp
        if warp.others or not self.counts_passes or not hasattr(self.growth, "spec"):
            return None
        spec = self.growth.spec(warp.cut, session.limits.ending, warp.greedy, warp.constraint is not None)
        return cast("TreeSpec | None", spec)

    def _grow_alone(self, one: GrowingTree) -> None:
        """Grow all layers by one compiled call, where steps can run the model and Python need not look between layers."""
        session = one.session
        depth = one.shape.depth
        spec = self.spec(session)
        looks = _stops(type(session.parts.controller)) or not session.warp.takes_raw_rows
        if spec is None or looks or not isinstance(self.lm, HuggingFaceLM) or not self._wants(one):
            return
        draws = draws_of(spec, one.forest.size, depth)
        with self.lm.alone(session, draws) as alone:
            if alone is None:
                return
            spent = np.zeros(2, dtype=np.int64)
            draft = start_tree(one.forest, ROOM)
            with alone.booked(spent):
                draft, condition = grow_tree(
                    alone.arrays, draft, alone.cache.answered, depth, spec, NO_EDITS, session.dice.ready(draws), spent
                )
        session.count.draft_passes += self.counts_passes * int(spent[0])
        one.forest = draft.forest
        one.front = draft.front
        one.layers = depth
        if condition == BROKEN:
            with session.failing_alone("draft model: "):
                raise BrokenLaw(
                    "the model returned NaN or +inf logits; try float32, or look for overflow in the weights"
                )

    def _grow(self, one: GrowingTree, rows: Rows) -> None:
        spec = self.spec(one.session)
        before = one.forest
        parents = one.front
        controller = one.session.parts.controller
        stops = _stops(type(controller))
        if spec is not None:
            draft = one.memory.setdefault("draft", start_tree(one.forest, ROOM))
            rows = one.processed(rows)
            dice = one.session.dice.ready(int(spec.counts[draft.places].sum()))
            draft, condition = grow_layer(draft, rows, spec, dice)
            if condition == BROKEN:
                row_laws(rows, one.session.warp)  # says what is wrong
            one.memory["draft"] = draft
            one.forest = draft.forest
            one.front = draft.front
            laws: dict[int, RowLaw] = {}
            if stops:
                every = zip(parents.tolist(), row_laws(rows, one.session.warp), strict=True)
                laws = {node: law for node, law in every if law is not None}
        else:
            sound = one.laws(rows)
            if not sound:
                return
            laws = dict(zip(one.front.tolist(), sound, strict=True))
            self.growth.grow(one, one.layers, sound)
        if stops and len(one.front):
            sure = _confidence(one.forest, before, laws)
            if not cast(Stopping, controller).more(one.session, one.layers + 1, sure):
                one.front = one.front[:0]

    def _finished(self, one: GrowingTree) -> Forest:
        self.growth.finish(one)
        if one.kept is None:
            return one.forest
        one.session.state[self] = one
        return one.forest.selected(one.kept)

    def fill(self, sessions: list[Session], most: int) -> list[bool]:
        """Store a chunk of up to `most` prompts that are long; return which have no more to store."""
        return fill_prompts(self.lm, sessions, None, most)

    def settle(self, session: Session, turn: Turn) -> None:
        """Keep what the surviving beams need in the model's cache."""
        whole = session.state.pop(self, None)
        self.lm.settle(session, turn if whole is None else turn.on(whole.forest, whole.kept))

    def close(self, session: Session) -> None:
        """Forget the session."""
        self.lm.close(session)

    def _wants(self, one: GrowingTree) -> bool:
        return one.layers < one.shape.depth and len(one.front) > 0 and one.session.failure is None


@cache
def _stops(kind: type) -> bool:
    """Return whether controllers of this kind are `Stopping`; to ask it of a protocol costs as much as a layer."""
    return issubclass(kind, Stopping)


def _confidence(forest: Forest, before: Forest, laws: dict[int, RowLaw]) -> float:
    """Return the largest draft odds of a token of the newest layer."""
    drawn: list[tuple[int, int]] = []
    for number in range(before.siblings.size, forest.siblings.size):
        group = forest.siblings.group(number)
        drawn += zip(group.draw_parents.tolist(), group.tokens.tolist(), strict=True)
    if not drawn:  # a growth that groups its nodes at the end
        drawn += zip(forest.parents[before.size :].tolist(), forest.tokens[before.size :].tolist(), strict=True)
    odds: list[float] = []
    for parent, token in drawn:
        if parent in laws:
            place = laws[parent].place(token)
            odds.append(float(np.exp(laws[parent].logp[place])) if place >= 0 else 0.0)
    return max(odds, default=1.0)


def draws_of(spec: TreeSpec, roots: int, depth: int) -> int:
    """Return the most draws of a tree of that depth under so many roots."""
    places = [0] * roots
    total = 0
    for _ in range(depth):
        counts = [int(spec.counts[place]) for place in places]
        total += sum(counts)
        places = [
            int(spec.first[place]) + child * spec.apart
            for place, count in zip(places, counts, strict=True)
            for child in range(count)
        ]
    return total


class Complete:
    """A base of growths that hand on all they grew."""

    def finish(self, tree: GrowingTree) -> None:
        """Do nothing: there is nothing to add."""


DEEPEST = 64  # layers of fixed counts that are laid out


@dataclass(frozen=True)
class Branching(Complete):
    """A fixed number of children in each layer; the last number serves all deeper layers. (1,) is a chain."""

    counts: tuple[int, ...]
    children: Any  # one of draft.children, or of one's own: `Children`

    @property
    def layers(self) -> tuple[int, ...]:
        """Draws of each layer."""
        return tuple(itertools.accumulate(self.counts, operator.mul))

    def count(self, layer: int) -> int:
        """Return the children of each node of a layer."""
        return self.counts[min(layer, len(self.counts) - 1)]

    def spec(self, truncation: Truncation, eos: Array, greedy: bool, constrained: bool) -> TreeSpec | None:
        """Return how steps grow it; None for children of one's own."""
        if not isinstance(self.children, KNOWN):
            return None
        counts, first = self._laid_out
        return TreeSpec(counts, first, 0, LIKELIEST if greedy else self.children.way, truncation, eos)

    @cached_property
    def _laid_out(self) -> tuple[Array, Array]:
        layers = np.arange(max(DEEPEST, len(self.counts)))
        counts = np.array([self.count(layer) for layer in layers.tolist()])
        return counts, np.minimum(layers + 1, len(layers) - 1)

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None:
        """Add a layer of children of one's own."""
        families: list[Family] = []
        for node, law in zip(tree.front.tolist(), laws, strict=True):
            drawn = draw_children(self.children, law, self.count(layer), tree.session)
            families.extend(Family(node, draws, law) for draws in drawn)
        front = [node for nodes in tree.add_children(families) for node in nodes if node >= 0]
        tree.front = np.array(distinct(front), dtype=np.int64)


def draw_children(children: Children, law: RowLaw, count: int, session: Session) -> list[Draws]:
    """Return the children of one node; at temperature 0 the likeliest."""
    if session.warp.greedy:
        return [Draws(_likeliest(law.logp, count).tolist(), deterministic=True)]
    return children.draw(law.p, count, session.dice)


@dataclass(frozen=True)
class FixedTree(Complete):
    """A tree whose every node knows beforehand how many children it gets (Sequoia, arXiv 2402.12374)."""

    topology: Topology
    children: Any  # one of draft.children, or of one's own: `Children`

    def spec(self, truncation: Truncation, eos: Array, greedy: bool, constrained: bool) -> TreeSpec | None:
        """Return how steps grow it; None for children of one's own."""
        if not isinstance(self.children, KNOWN):
            return None
        counts, first = self._laid_out
        way = LIKELIEST if greedy else self.children.way
        if constrained and way == STRUCK_OUT_THEN_ANY:
            way = STRUCK_OUT  # no fallback: beyond the law's support nearly all is banned
        return TreeSpec(counts, first, 1, way, truncation, eos)

    @cached_property
    def _laid_out(self) -> tuple[Array, Array]:
        """Number of children of each node of the topology, and where the first of them stands; breadth first."""
        nodes: list[Topology] = [self.topology]
        counts: list[int] = []
        first: list[int] = []
        for node in nodes:  # grows while it is walked through
            counts.append(len(node))
            first.append(len(nodes))
            nodes += list(node)
        return np.array(counts), np.array(first)

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None:
        """Add a layer of children of one's own."""
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
        # Every node is scored, in the order of the forest, so leaves stand in the front and get no children.
        tree.front = np.array(front, dtype=np.int64)


@dataclass(frozen=True)
class StochasticBeam(Complete):
    """Stochastic beam search: the `shape.width` sequences of largest perturbed log-odds in each layer (RSD-S,
    arXiv 2402.14160). Siblings stand in descending perturbed order, which is their draw order; parents whose children all
    lost are leaves.

    Truncation looks at the perturbed values and never at the tokens, so each surviving sibling still has the draft law
    without its earlier siblings.
    """

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None:
        """Add the best sequences of a layer."""
        nodes = tree.front.tolist()
        width = tree.shape.width
        greedy = tree.session.warp.greedy
        phi = tree.memory.setdefault("phi", tree.standing())
        top = tree.memory.setdefault("top", tree.standing())
        found: list[tuple[float, int, int]] = []  # (minus the perturbed log-odds, number of the law, place)
        for number, (node, law) in enumerate(zip(nodes, laws, strict=True)):
            if greedy:
                places = _likeliest(law.logp, width)
                tops = phi[node] + law.logp[places]
            else:
                places, tops = perturbed(law.logp, phi[node], top[node], tree.session.dice.uniform((law.size,)), width)
            found += zip((-tops).tolist(), itertools.repeat(number), places.tolist(), strict=False)
        chosen = sorted(found)[:width]
        families: list[Family] = []
        values: list[tuple[float, float]] = []
        for number, (node, law) in enumerate(zip(nodes, laws, strict=True)):
            mine = [(value, place) for value, which, place in chosen if which == number]
            if not mine:
                continue
            drawn = [place for _, place in mine]
            draws = Draws(drawn, deterministic=True) if greedy else Draws(drawn, law.p)
            families.append(Family(node, draws, law))
            values += [(phi[node] + float(law.logp[place]), -value) for value, place in mine]
        children = [child for born in tree.add_children(families) for child in born]
        for child, (path, value) in zip(children, values, strict=True):
            if child >= 0:
                phi[child] = path
                top[child] = value
        tree.front = np.array([child for child in children if child >= 0], dtype=np.int64)


@step
def perturbed(logp: Array, path: float, top: float, u: Array, count: int) -> tuple[Array, Array]:
    """Return the `count` places of largest perturbed log-odds, ascending, and these, given that their maximum is `top`.

    Perturbed log-odds are path + log p - log(-log u), conditioned on their maximum, monotonously (Kool et al. 2019,
    app. B.3). The largest are the first to arrive of a race in which place i arrives at -log(u_i) / p_i; as
    -log(u) >= 1 - u, few logarithms are needed to know them.

    Args:
        u: float64[n] in (0, 1).
    """
    count = min(count, len(logp))
    arrivals = np.full(count, np.inf)
    places = np.full(count, -1, dtype=np.int64)
    held = 0
    for place in range(len(logp)):
        if logp[place] == -np.inf:
            continue
        p = np.exp(logp[place])
        if held == count and (1 - u[place]) / p > arrivals[count - 1] * (1 + 1e-9):
            continue
        arrival = -np.log(u[place]) / p
        if held == count and arrival >= arrivals[count - 1]:
            continue
        slot = held if held < count else count - 1
        held = min(held + 1, count)
        while slot > 0 and arrivals[slot - 1] > arrival:
            arrivals[slot] = arrivals[slot - 1]
            places[slot] = places[slot - 1]
            slot -= 1
        arrivals[slot] = arrival
        places[slot] = place
    chosen = np.sort(places[:held])
    values = np.empty(held)
    for number in range(held):
        place = chosen[number]
        values[number] = path + logp[place] - np.log(-np.log(u[place]))
    largest_value = values.max() if held > 0 else 0.0
    for number in range(held):
        if values[number] == largest_value:
            values[number] = top
        else:
            values[number] = _conditioned(values[number], largest_value, top)
    return chosen, values


@step
def _conditioned(value: float, largest_value: float, top: float) -> float:
    """Return a Gumbel value below the largest one, moved to where it stands if the largest one is `top`."""
    gap = value - largest_value
    log_rest = np.log(-np.expm1(gap)) if gap > -0.693 else np.log1p(-np.exp(gap))  # log(1 - exp(gap)), at both ends
    w = top - value + log_rest
    return top - max(0.0, w) - np.log1p(np.exp(-abs(w)))

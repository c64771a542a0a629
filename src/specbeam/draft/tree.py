"""DRAFT: token trees, grown layer by layer by a draft model. A growth decides the shape.

Rules that try drafts against their law work under one beam, and with it such trees have one root; beam search needs nodes
alone, so under several beams a tree grows under each, and the likelier beams get the better part of a budget.
"""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64

from specbeam.control.best_tree import Topology
from specbeam.control.confidence import Stopping
from specbeam.draft.children import Best, Children, Distinct, Draws, Independent, distinct
from specbeam.draft.tree_fast import tree_at_once
from specbeam.errors import BrokenProcessor
from specbeam.forest import Forest, Group, Row
from specbeam.lm.base import LM
from specbeam.probs import best, row_laws
from specbeam.records import Shape, Turn
from specbeam.session import Session


@dataclass(eq=False)
class Sprout:
    """One session's tree while it grows. The draft model scores every node of `forest`; leaves wait until the end."""

    session: Session
    shape: Shape
    forest: Forest
    front: Int64[np.ndarray, " front"]  # nodes whose laws come next
    memory: dict[str, Any] = field(default_factory=dict)  # what a growth keeps from layer to layer
    kept: Int64[np.ndarray, " kept"] | None = None  # nodes that are handed on; None: all
    layers: int = 0
    undecided: Float[torch.Tensor, "front vocab"] | None = None  # logits of the front, where they are known already

    @classmethod
    def start(cls, session: Session, shape: Shape) -> "Sprout":
        forest = Forest.rooted(session.beams.tokens)
        return cls(session, shape, forest, np.arange(len(forest)))

    @property
    def roots(self) -> range:
        return range(len(self.session.beams))

    def standing(self) -> dict[int, float]:
        """Log-likelihood of the beam above each root, that of the best one taken off."""
        scores = self.session.beams.scores
        return dict(enumerate((scores - scores.max()).tolist()))

    def laws(self, logits: Float[torch.Tensor, "front vocab"]) -> list[Row]:
        """Draft laws of the nodes that may go on, which are the front from now on: behind some no law is left.

        Behind an end token there is no law to ask for: logits processors need not know one.
        """
        eos, tokens, front = self.session.limits.eos, self.forest.tokens, self.front.tolist()
        going = [place for place, node in enumerate(front) if node in self.roots or int(tokens[node]) not in eos]
        if len(going) < len(front):
            self.front, logits = self.front[going], logits[going]
        rows = row_laws(logits, self.session.warp, lambda: self.session.paths(self.forest, self.front))
        alive = [place for place, row in enumerate(rows) if row.possible]
        if len(alive) < len(rows):  # a node behind which all is banned is a leaf
            self.front, rows = self.front[alive], [rows[place] for place in alive]
        return rows

    def bear(self, litters: Sequence["Litter"]) -> list[list[int]]:
        """Hang siblings under nodes: one child per token, shared by draws of the same token. Gives the node of each draw,
        -1 for end tokens.
        """
        tokens, parents, scores, groups = list[int](), list[int](), list[float](), list[Group]()
        eos, size, above = self.session.limits.eos, len(self.forest), self.forest.logq
        born: dict[int, dict[int, int]] = {}
        for one in litters:
            if one.parent not in born:
                born[one.parent] = self.children_of(one.parent) if one.row is None else {}
            known, drawn, nodes = born[one.parent], one.tokens, list[int]()
            base = 0.0 if above is None else float(above[one.parent])
            for place, token in zip(one.draws.tokens, drawn, strict=True):
                if token not in known and token not in eos:
                    known[token] = size + len(tokens)
                    tokens.append(token)
                    parents.append(one.parent)
                    scores.append(np.nan if one.row is None else base + float(one.row.logp[place]))
                nodes.append(known.get(token, -1))
            groups.append(one.group(drawn, nodes))
        self.forest = self.forest.grown(tokens, parents, np.array(scores), groups)
        return [group.draw_nodes.tolist() for group in groups]

    def children_of(self, parent: int) -> dict[int, int]:
        """Node of each child token."""
        nodes = np.flatnonzero(self.forest.parents == parent)
        return dict(zip(self.forest.tokens[nodes].tolist(), nodes.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Litter:
    """Siblings to be born: draws by their places in the law `row` of the parent; by their tokens where there is none."""

    parent: int
    draws: Draws
    row: Row | None = None

    @property
    def tokens(self) -> list[int]:
        return self.draws.tokens if self.row is None else self.row.named(self.draws.tokens)

    def group(self, tokens: list[int], nodes: list[int]) -> Group:
        law, draws = None, self.draws
        if draws.law is not None:
            assert self.row is not None
            law = self.row if draws.law is self.row.p else self.row.restated(draws.law)
        return Group(
            np.array([self.parent]),
            np.zeros(len(tokens), dtype=np.int64),
            np.array(tokens, dtype=np.int64),
            np.array(nodes, dtype=np.int64),
            law,
            draws.replacement,
            draws.sure,
        )


FEW = 64  # places that are not worth a search


@runtime_checkable
class Growth(Protocol):
    """The shape of a tree. `grow` is called with the draft laws of the front and sets the next front.

    One whose drafts must not be tried says why in an attribute `law_lost`.
    """

    def grow(self, sprout: Sprout, layer: int, rows: list[Row]) -> None: ...

    def finish(self, sprout: Sprout) -> None:
        """After the last layer: add leaves that the draft model need not score, choose what is handed on."""


@dataclass(frozen=True)
class TreeDrafter:
    """Grow a tree by a draft model: as many layers as the shape is deep, one pass of the model each.

    Args:
        books: count these passes as the draft's; False where the model counts them itself.
    """

    lm: LM
    growth: Growth
    books: bool = True
    at_once: bool = field(default=True, repr=False)  # False: layer by layer, as the oracle of the loop

    @property
    def law_lost(self) -> str:
        """Why the law of what is grown is not known; a growth says so by an attribute of this name."""
        return getattr(self.growth, "law_lost", "")

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """One tree per session; see `Growth`. A controller that is `Stopping` may end a draft between layers."""
        sprouts = [Sprout.start(session, shape) for session, shape in zip(sessions, shapes, strict=True)]
        if len(sprouts) == 1:
            self._ahead(sprouts[0])
        while active := [one for one in sprouts if self._wants(one)]:
            for one, logits in zip(active, self._rows(active), strict=True):
                with one.session.failing_alone("draft model: "):
                    try:
                        self._grow(one, one.laws(logits))
                    except BrokenProcessor:  # on a draft's path; the target need not go there
                        one.front = one.front[:0]
                one.layers += 1
        return [self._finished(one) for one in sprouts]

    def by_loops(self, session: Session, depth: int) -> tuple[list[int], bool] | None:
        """Children per node, by layer, and whether they are distinct; None where a loop cannot grow them."""
        growth = self.growth
        if not self.at_once or type(growth) is not Branching or not growth.loops:
            return None
        if _stops(type(session.parts.controller)):
            return None
        return [growth.count(layer) for layer in range(depth)], isinstance(growth.children, Distinct)

    def _ahead(self, one: Sprout) -> None:
        """What a loop can grow without asking anybody."""
        children = self.by_loops(one.session, one.shape.depth)
        if children is not None:
            tree = tree_at_once(self.lm, one.session, *children)
            if tree is not None:
                one.forest, one.front, one.undecided = tree.forest, tree.front, tree.undecided
                one.layers = tree.passes - (tree.undecided is not None)
                one.session.count.draft_passes += self.books * tree.passes

    def _rows(self, active: list[Sprout]) -> list[Float[torch.Tensor, "_ vocab"]]:
        if active[0].undecided is not None:  # then it is alone
            known, active[0].undecided = active[0].undecided, None
            return [known]
        for one in active:
            one.session.count.draft_passes += self.books
        return self.lm.extend([one.session for one in active], [one.forest for one in active])

    def _grow(self, one: Sprout, rows: list[Row]) -> None:
        if not rows:
            return
        before, parents = one.forest, one.front.tolist()
        self.growth.grow(one, one.layers, rows)
        controller = one.session.parts.controller
        if _stops(type(controller)) and len(one.front):
            sure = _confidence(one.forest, before, dict(zip(parents, rows, strict=True)))
            if not cast(Stopping, controller).more(one.session, one.layers + 1, sure):
                one.front = one.front[:0]

    def _finished(self, one: Sprout) -> Forest:
        self.growth.finish(one)
        if one.kept is None:
            return one.forest
        one.session.state[self] = one
        return one.forest.selected(one.kept)

    def settle(self, session: Session, turn: Turn) -> None:
        whole = session.state.pop(self, None)
        self.lm.settle(session, turn if whole is None else turn.on(whole.forest, whole.kept))

    def close(self, session: Session) -> None:
        self.lm.close(session)

    def _wants(self, one: Sprout) -> bool:
        return one.layers < one.shape.depth and len(one.front) > 0 and one.session.failure is None


@cache
def _stops(kind: type) -> bool:
    """Whether controllers of this kind are `Stopping`; to ask it of a protocol costs as much as a layer."""
    return issubclass(kind, Stopping)


def _confidence(forest: Forest, before: Forest, laws: dict[int, Row]) -> float:
    """The largest draft odds of a token of the newest layer."""
    drawn = [(int(g.parents[0]), token) for g in forest.groups[len(before.groups) :] for token in g.draw_tokens]
    if not drawn:  # a growth that groups its nodes at the end
        parents, tokens = forest.parents[len(before) :], forest.tokens[len(before) :]
        drawn = list(zip(parents.tolist(), tokens.tolist(), strict=True))
    odds = [laws[parent].at(np.array([token]))[0] for parent, token in drawn if parent in laws]
    return float(max(odds, default=1.0))


class Complete:
    """For growths that hand on all they grew."""

    def finish(self, sprout: Sprout) -> None:
        """Nothing to add."""


@dataclass(frozen=True)
class Branching(Complete):
    """A fixed number of children in each layer; the last number serves all deeper layers. (1,) is a chain."""

    counts: tuple[int, ...]
    children: Children

    @property
    def layers(self) -> tuple[int, ...]:
        """Draws of each layer."""
        return tuple(itertools.accumulate(self.counts, operator.mul))

    @property
    def loops(self) -> bool:
        """Whether `tree_fast` draws such children."""
        return type(self.children) is Independent or self.children == Distinct()

    def count(self, layer: int) -> int:
        return self.counts[min(layer, len(self.counts) - 1)]

    def grow(self, sprout: Sprout, layer: int, rows: list[Row]) -> None:
        count = self.count(layer)
        children = Best() if sprout.session.warp.greedy else self.children
        litters = [
            Litter(node, draws, row)
            for node, row in zip(sprout.front.tolist(), rows, strict=True)
            for draws in children.draw(row.p, count, sprout.session.dice)
        ]
        front = [node for nodes in sprout.bear(litters) for node in nodes if node >= 0]
        sprout.front = np.array(distinct(front), dtype=np.int64)


@dataclass(frozen=True)
class FixedTree(Complete):
    """A tree whose every node knows beforehand how many children it gets (Sequoia, arXiv 2402.12374)."""

    topology: Topology
    children: Children

    def grow(self, sprout: Sprout, layer: int, rows: list[Row]) -> None:
        subtree_of = sprout.memory.setdefault("subtree_of", dict.fromkeys(sprout.roots, self.topology))
        children = Best() if sprout.session.warp.greedy else self.children
        if sprout.session.warp.constraint is not None and isinstance(children, Distinct):
            children = Distinct()  # no fallback: beyond q's support nearly all is banned
        nodes, litters = sprout.front.tolist(), list[Litter]()
        for node, row in zip(nodes, rows, strict=True):
            count = len(subtree_of[node])
            if isinstance(children, Distinct) and children.fallback and count > len(row):
                row = row.spread()  # a fallback draws what the law does not hold
            litters += [Litter(node, draws, row) for draws in children.draw(row.p, count, sprout.session.dice)]
        drawn: dict[int, list[int]] = {node: [] for node in nodes}
        for litter, born in zip(litters, sprout.bear(litters), strict=True):
            drawn[litter.parent] += born
        front: list[int] = []
        for node in nodes:
            for child, subtree in zip(drawn[node], subtree_of[node], strict=False):
                if child >= 0 and child not in subtree_of:
                    subtree_of[child] = subtree
                    front.append(child)
        # Every node is scored, in the order of the forest, so leaves stand in the front and get no children.
        sprout.front = np.array(front, dtype=np.int64)


@dataclass(frozen=True)
class StochasticBeam(Complete):
    """Stochastic beam search: the `shape.width` sequences of largest perturbed log-odds in each layer (RSD-S,
    arXiv 2402.14160). Siblings stand in descending perturbed order, which is their draw order; parents whose children all
    lost are leaves.

    Truncation looks at the perturbed values and never at the tokens, so each surviving sibling still has the draft law
    without its earlier siblings.
    """

    def grow(self, sprout: Sprout, layer: int, rows: list[Row]) -> None:
        nodes, width, greedy = sprout.front.tolist(), sprout.shape.width, sprout.session.warp.greedy
        phi, top = (sprout.memory.setdefault(name, sprout.standing()) for name in ("phi", "top"))
        found: list[tuple[float, int, int]] = []  # (minus the perturbed log-odds, row, place)
        for number, (node, row) in enumerate(zip(nodes, rows, strict=True)):
            if greedy:
                places = best(row.logp, width)
                tops = phi[node] + row.logp[places]
            else:
                places, noise = first_in_race(row, sprout.session.dice.uniform((len(row),)), width)
                tops = truncated((phi[node] + row.logp[places] + noise)[None], np.array([top[node]]))[0]
            found += zip((-tops).tolist(), itertools.repeat(number), places.tolist(), strict=False)
        chosen = sorted(found)[:width]
        litters, values = list[Litter](), list[tuple[float, float]]()
        for number, (node, row) in enumerate(zip(nodes, rows, strict=True)):
            mine = [(value, place) for value, which, place in chosen if which == number]
            if mine:
                drawn = [place for _, place in mine]
                draws = Draws(drawn, sure=True) if greedy else Draws(drawn, row.p)
                litters.append(Litter(node, draws, row))
                values += [(phi[node] + float(row.logp[place]), -value) for value, place in mine]
        children = [child for born in sprout.bear(litters) for child in born]
        for child, (path, perturbed) in zip(children, values, strict=True):
            if child >= 0:
                phi[child], top[child] = path, perturbed
        sprout.front = np.array([child for child in children if child >= 0], dtype=np.int64)


def first_in_race(
    row: Row, u: Float64[np.ndarray, " n"], count: int
) -> tuple[Int64[np.ndarray, " k"], Float64[np.ndarray, " k"]]:
    """The `count` places of largest log-odds plus Gumbel noise, ascending, and their noise -log(-log(u)), a `u` per place.

    The same as the smallest -log(u) / p. As -log(u) >= 1 - u, few logarithms are needed to know which these are.
    """
    places = np.arange(len(u))
    if len(u) > max(FEW, 2 * count):
        with np.errstate(divide="ignore", invalid="ignore"):
            bound = (1 - u) / row.p  # NaN nowhere: u < 1
            near = np.argpartition(bound, count + 1)[: count + 1]
            edge = np.partition(-np.log(u[near]) / row.p[near], count - 1)[count - 1]
        places = np.flatnonzero(bound <= edge * (1 + 1e-9))
    noise = -np.log(-np.log(u[places]))
    chosen = np.sort(np.argsort(-(row.logp[places] + noise), kind="stable")[:count])
    chosen = chosen[row.logp[places[chosen]] > -np.inf]
    return places[chosen], noise[chosen]


def truncated(
    g: Float64[np.ndarray, "nodes vocab"], top: Float64[np.ndarray, " nodes"]
) -> Float64[np.ndarray, "nodes vocab"]:
    """Gumbel values `g` conditioned on their maximum in each row being `top`, monotonously (Kool et al. 2019, app. B.3)."""
    largest = g.max(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        w = top[:, None] - g + _log1mexp(g - largest)
        shifted = top[:, None] - np.maximum(0.0, w) - np.log1p(np.exp(-np.abs(w)))
    shifted = np.where(g == largest, top[:, None], shifted)
    return np.where(np.isneginf(g), -np.inf, shifted)


def _log1mexp(t: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """log(1 - exp(t)) for t <= 0, accurate at both ends."""
    return np.where(t > -0.693, np.log(-np.expm1(np.minimum(t, 0.0))), np.log1p(-np.exp(np.minimum(t, 0.0))))

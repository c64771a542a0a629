"""DRAFT: token trees under one beam, grown layer by layer by a draft model. A growth decides the shape."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64

from specbeam.control.best_tree import Topology
from specbeam.control.confidence import Stopping
from specbeam.draft.children import Best, Children, Distinct, Draws, distinct
from specbeam.errors import NotSupported
from specbeam.forest import Forest, Group, Row
from specbeam.lm.base import LM
from specbeam.probs import row_logp
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
    logq: Float64[np.ndarray, "front vocab"] | None = None  # draft log-laws of the front, while it is grown

    @classmethod
    def start(cls, session: Session, shape: Shape) -> "Sprout":
        if len(session.beams) != 1:
            raise NotSupported("a token tree grows under one beam; draft layers of beams with BeamDrafter")
        return cls(session, shape, Forest.rooted(session.beams.tokens), np.zeros(1, dtype=np.int64))

    def laws(self, logits: Float[torch.Tensor, "front vocab"]) -> Float64[np.ndarray, "going vocab"]:
        """Draft log-laws of the nodes that may go on, which are the front from now on.

        Behind an end token there is no law to ask for: logits processors need not know one.
        """
        going = ~np.isin(self.forest.tokens[self.front], self.session.limits.eos) | (self.front == 0)
        self.front = self.front[going]
        logits = logits[torch.from_numpy(going).to(logits.device)]
        return row_logp(logits, self.session.warp, lambda: self.session.paths(self.forest, self.front))

    def bear(self, parent: int, draws: Draws) -> Int64[np.ndarray, " draws"]:
        """Hang siblings under a node: one child per token, shared by draws of the same token; -1 for end tokens."""
        known = self.children_of(parent)
        fresh = [token for token in distinct(draws.tokens) if token not in known]
        going = [token for token in fresh if token not in self.session.limits.eos]
        start = len(self.forest)
        self.forest = self.forest.grown(going, [parent] * len(going), self._scores(parent, going))
        known |= {token: start + place for place, token in enumerate(going)}
        nodes = np.array([known.get(token, -1) for token in draws.tokens], dtype=np.int64)
        law = None if draws.law is None else Row(draws.law)
        self.forest = self.forest.with_group(
            Group(
                np.array([parent]),
                np.zeros(len(draws.tokens), dtype=np.int64),
                np.array(draws.tokens, dtype=np.int64),
                nodes,
                law,
                draws.replacement,
                draws.sure,
            )
        )
        return nodes

    def _scores(self, parent: int, tokens: list[int]) -> Float64[np.ndarray, " tokens"] | None:
        """Draft log-likelihoods of the paths to new children, for rules that judge paths by them."""
        if self.logq is None:
            return None
        above = 0.0 if self.forest.logq is None else float(self.forest.logq[parent])
        return above + self.logq[int(np.flatnonzero(self.front == parent)[0]), tokens]

    def children_of(self, parent: int) -> dict[int, int]:
        """Node of each child token."""
        nodes = np.flatnonzero(self.forest.parents == parent)
        return dict(zip(self.forest.tokens[nodes].tolist(), nodes.tolist(), strict=True))


@runtime_checkable
class Growth(Protocol):
    """The shape of a tree. `grow` is called with the draft log-laws of the front and sets the next front."""

    def grow(self, sprout: Sprout, layer: int, logq: Float64[np.ndarray, "front vocab"]) -> None: ...

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

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """One tree per session; see `Growth`. A controller that is `Stopping` may end a draft between layers."""
        sprouts = [Sprout.start(session, shape) for session, shape in zip(sessions, shapes, strict=True)]
        for layer in range(max(shape.depth for shape in shapes)):
            active = [one for one in sprouts if self._wants(one, layer)]
            if not active:
                break
            rows = self.lm.extend([one.session for one in active], [one.forest for one in active])
            for one, logits in zip(active, rows, strict=True):
                one.session.count.draft_passes += self.books
                with one.session.failing_alone("draft model: "):
                    self._grow(one, layer, one.laws(logits))
        return [self._finished(one) for one in sprouts]

    def _grow(self, one: Sprout, layer: int, logq: Float64[np.ndarray, "front vocab"]) -> None:
        alive = (logq > -np.inf).any(1)  # a node behind which all is banned is a leaf
        one.front, logq = one.front[alive], logq[alive]
        if not alive.any():
            return
        fathers, before = {node: row for row, node in enumerate(one.front.tolist())}, one.forest
        one.logq = logq
        self.growth.grow(one, layer, logq)
        one.logq = None
        controller = one.session.parts.controller
        if isinstance(controller, Stopping) and len(one.front):
            drawn = [
                (int(g.parents[0]), token) for g in one.forest.groups[len(before.groups) :] for token in g.draw_tokens
            ]
            if not drawn:  # a growth that groups its nodes at the end
                parents, tokens = one.forest.parents[len(before) :], one.forest.tokens[len(before) :]
                drawn = list(zip(parents.tolist(), tokens.tolist(), strict=True))
            odds = [logq[fathers[parent], token] for parent, token in drawn if parent in fathers]
            if not controller.more(one.session, layer + 1, float(np.exp(max(odds, default=0.0)))):
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

    def _wants(self, one: Sprout, layer: int) -> bool:
        return layer < one.shape.depth and len(one.front) > 0 and one.session.failure is None


class Complete:
    """For growths that hand on all they grew."""

    def finish(self, sprout: Sprout) -> None:
        """Nothing to add."""


@dataclass(frozen=True)
class Branching(Complete):
    """A fixed number of children in each layer; the last number serves all deeper layers. (1,) is a chain."""

    counts: tuple[int, ...]
    children: Children

    def grow(self, sprout: Sprout, layer: int, logq: Float64[np.ndarray, "front vocab"]) -> None:
        count = self.counts[min(layer, len(self.counts) - 1)]
        children = Best() if sprout.session.warp.greedy else self.children
        front: list[int] = []
        for node, row in zip(sprout.front.tolist(), np.exp(logq), strict=True):
            for draws in children.draw(row, count, sprout.session.dice):
                front += sprout.bear(node, draws).tolist()
        sprout.front = np.array(distinct([node for node in front if node >= 0]), dtype=np.int64)


@dataclass(frozen=True)
class FixedTree(Complete):
    """A tree whose every node knows beforehand how many children it gets (Sequoia, arXiv 2402.12374)."""

    topology: Topology
    children: Children

    def grow(self, sprout: Sprout, layer: int, logq: Float64[np.ndarray, "front vocab"]) -> None:
        subtree_of = sprout.memory.setdefault("subtree_of", {0: self.topology})
        children = Best() if sprout.session.warp.greedy else self.children
        if sprout.session.warp.constraint is not None and isinstance(children, Distinct):
            children = Distinct()  # no fallback: beyond q's support nearly all is banned
        front: list[int] = []
        for node, row in zip(sprout.front.tolist(), np.exp(logq), strict=True):
            subtrees = subtree_of[node]
            drawn = [
                child
                for draws in children.draw(row, len(subtrees), sprout.session.dice)
                for child in sprout.bear(node, draws).tolist()
            ]
            for child, subtree in zip(drawn, subtrees, strict=False):
                if child >= 0 and child not in subtree_of:
                    subtree_of[child] = subtree
                    front.append(child)
        # Every node is scored, in the order of the forest, so leaves stand in the front and get no children.
        sprout.front = np.array(front, dtype=np.int64)


def depth_of(topology: Topology) -> int:
    return 1 + max(map(depth_of, topology)) if topology else 0


def size_of(topology: Topology) -> int:
    """Nodes below the root."""
    return sum(1 + size_of(subtree) for subtree in topology)


@dataclass(frozen=True)
class StochasticBeam(Complete):
    """Stochastic beam search: the `shape.width` sequences of largest perturbed log-odds in each layer (RSD-S,
    arXiv 2402.14160). Siblings stand in descending perturbed order, which is their draw order; parents whose children all
    lost are leaves.

    Truncation looks at the perturbed values and never at the tokens, so each surviving sibling still has the draft law
    without its earlier siblings.
    """

    def grow(self, sprout: Sprout, layer: int, logq: Float64[np.ndarray, "front vocab"]) -> None:
        nodes = sprout.front.tolist()
        phi, top = sprout.memory.setdefault("phi", {0: 0.0}), sprout.memory.setdefault("top", {0: 0.0})
        if sprout.session.warp.greedy:
            noise = np.zeros_like(logq)
        else:
            noise = -np.log(-np.log(sprout.session.dice.uniform(logq.shape)))
        phis = np.array([phi[node] for node in nodes])[:, None] + logq
        tops = phis if sprout.session.warp.greedy else truncated(phis + noise, np.array([top[node] for node in nodes]))
        order = np.argsort(-tops, axis=None, kind="stable")[: sprout.shape.width]
        order = order[tops.ravel()[order] > -np.inf]
        front: list[int] = []
        for place, node in enumerate(nodes):
            tokens = [int(pair % logq.shape[1]) for pair in order if pair // logq.shape[1] == place]
            if not tokens:
                continue
            law = None if sprout.session.warp.greedy else np.exp(logq[place])
            for token, child in zip(tokens, sprout.bear(node, Draws(tokens, law, sure=law is None)), strict=True):
                if child >= 0:
                    phi[int(child)], top[int(child)] = float(phis[place, token]), float(tops[place, token])
                    front.append(int(child))
        sprout.front = np.array(front, dtype=np.int64)


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


def budget_of(counts: Sequence[int]) -> int:
    """Nodes below the root of a branching tree."""
    total, layer = 0, 1
    for count in counts:
        layer *= count
        total += layer
    return total

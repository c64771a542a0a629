"""DRAFT: trees made of trees: several draft models at once, repeated runs joined, hopeless nodes dropped."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.core.forest import Forest, Siblings
from specbeam.draft.batch import close_drafter, models_of
from specbeam.draft.lookup import retrieved
from specbeam.draft.tree import Complete, GrowingTree, TreeDrafter
from specbeam.laws.rows import RowLaw
from specbeam.laws.warp import best_places
from specbeam.lm.base import LM
from specbeam.records import Shape, Turn
from specbeam.session import Drafter, Session


def united(forests: list[Forest]) -> tuple[Forest, list[Int64[np.ndarray, " _"]]]:
    """Trees with the same roots as one: a path is there if one of them has it. Also the new name of each old node.

    Groups keep their order, so a node reached by two trees tries the drafts of the first before those of the second.
    """
    roots = forests[0].roots
    whole = Forest.rooted(forests[0].tokens[:roots])
    renamings = []
    for forest in forests:
        names = np.zeros(forest.size + 1, dtype=np.int64)
        names[:roots] = range(roots)
        names[-1] = -1
        for node in range(roots, forest.size):
            parent = names[forest.parents[node]]
            token = forest.tokens[node]
            known = int(whole.find(np.array([parent]), np.array([token]))[0])
            names[node] = known if known >= 0 else whole.size
            if known < 0:
                whole = whole.grown([int(token)], [int(parent)])
        whole = whole.grown([], [], groups=[_renamed(forest.siblings, names)])
        renamings.append(names[:-1])
    return whole, renamings


def _renamed(groups: Siblings, names: Int64[np.ndarray, " nodes"]) -> Siblings:
    return groups._replace(parents=names[groups.parents], nodes=names[groups.nodes])


def completed(
    own: Forest, whole: Forest, names: Int64[np.ndarray, " own"]
) -> tuple[Forest, Int64[np.ndarray, " whole"]]:
    """`own` with the nodes of `whole` that it lacks hung behind, and where it has each node of `whole`."""
    back = np.full(whole.size, -1, dtype=np.int64)
    back[names] = np.arange(len(names))
    for node in np.flatnonzero(back < 0).tolist():
        back[node] = own.size
        own = own.grown([int(whole.tokens[node])], [int(back[whole.parents[node]])])
    return own, back


@dataclass(frozen=True)
class ManyDrafters:
    """Several draft models, each growing its own tree; the target scores their union (SpecInfer, arXiv 2305.09781).

    At a node the drafts of the first model are tried first, each against the law of its own model.
    """

    drafters: tuple[TreeDrafter, ...]

    @property
    def models(self) -> tuple[LM, ...]:
        """The models that it runs."""
        return tuple(drafter.lm for drafter in self.drafters)

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        grown = [drafter.draft(sessions, shapes) for drafter in self.drafters]
        forests = []
        for session, *own in zip(sessions, *grown, strict=True):
            whole, renamings = united(list(own))
            session.state[self] = (own, renamings)
            forests.append(whole)
        return forests

    def fill(self, sessions: list[Session], most: int) -> list[bool]:
        """Store a chunk of up to `most` prompts that are long in each model; return which have no more to store."""
        each = [drafter.fill(sessions, most) for drafter in self.drafters]
        return [all(filled) for filled in zip(*each, strict=True)]

    def settle(self, session: Session, turn: Turn) -> None:
        own, renamings = session.state.pop(self)
        for drafter, forest, names in zip(self.drafters, own, renamings, strict=True):
            drafter.settle(session, turn.on(*completed(forest, turn.forest, names)))

    def close(self, session: Session) -> None:
        session.state.pop(self, None)
        for drafter in self.drafters:
            close_drafter(drafter, session)


@dataclass(frozen=True)
class Pruned:
    """Drop drafts that an early look of the target finds hopeless: a node stays if its token is among the `top` likeliest
    after its parent under `early`, the target's first layers (ProPD, arXiv 2402.13485).

    What is left says something about the drafts, so drawn ones lose their law; chosen ones stay sure.
    """

    drafter: Drafter
    early: LM
    top: int = 16

    @property
    def models(self) -> tuple[LM, ...] | None:
        """The models that it runs; None if its drafter does not say."""
        drafting = models_of(self.drafter)
        return None if drafting is None else (*drafting, self.early)

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        forests = self.drafter.draft(sessions, shapes)
        kept_forests = []
        for session, forest, found in zip(sessions, forests, self.early.extend(sessions, forests), strict=True):
            names = np.arange(forest.roots)
            with session.failing_alone("draft: "):
                names = self._hopeful(forest, _constrained(session, forest, found.logits))
            session.state[self] = (forest, names)
            kept_forests.append(forest.selected(names).lost())
        return kept_forests

    def _hopeful(self, forest: Forest, rows: Float[torch.Tensor, "nodes vocab"]) -> Int64[np.ndarray, " kept"]:
        likely = rows.topk(min(self.top, rows.shape[1]), dim=-1).indices.cpu().numpy()
        kept = np.ones(forest.size, dtype=bool)
        for node in range(forest.roots, forest.size):
            parent = forest.parents[node]
            kept[node] = kept[parent] and forest.tokens[node] in likely[parent]
        return np.flatnonzero(kept)

    def settle(self, session: Session, turn: Turn) -> None:
        whole = turn.on(*session.state.pop(self))
        self.drafter.settle(session, whole)
        self.early.settle(session, whole)

    def close(self, session: Session) -> None:
        session.state.pop(self, None)
        close_drafter(self.drafter, session)
        self.early.close(session)


def _constrained(
    session: Session, forest: Forest, rows: Float[torch.Tensor, "nodes vocab"]
) -> Float[torch.Tensor, "nodes vocab"]:
    """The rows of a forest's nodes without what the constraint bans."""
    bans = session.warp.constraint
    if bans is None:
        return rows
    rows = rows.clone()
    depths = forest.depths()
    for depth in range(int(depths.max()) + 1):
        nodes = np.flatnonzero(depths == depth)
        here = torch.from_numpy(nodes).to(rows.device)
        rows[here] = bans(torch.from_numpy(session.paths(forest, nodes)), rows[here])
    return rows


@dataclass(frozen=True)
class Graph(Complete):
    """Draft a repeated run of tokens once: a candidate that repeats an earlier node and the `context` tokens before it
    gets an edge to that node instead of a node of its own; the graph is unrolled into a tree (GSD, arXiv 2407.16207).

    An edge never leads to a node from which its start can be reached, so the graph has no cycles. Copies reuse what was
    drafted in another context, so their law is lost.

    Args:
        top: candidates per node.
        context: tokens before the candidate that must agree too; -1 never merges.
        least: a node with smaller draft odds gets no children.
        least_sibling: candidates below this share of their best sibling's odds are left out.
        most_nodes: of the unrolled trees, roots included.
    """

    top: int = 4
    context: int = 0
    least: float = 0.3
    least_sibling: float = 0.2
    most_nodes: int = 64
    no_law_reason: ClassVar[str] = "merges its drafts"

    def grow(self, tree: GrowingTree, layer: int, laws: list[RowLaw]) -> None:
        edges: dict[int, list[int]] = tree.memory.setdefault("edges", {root: [] for root in tree.roots})
        leaves: set[int] = tree.memory.setdefault("leaves", set())
        front: list[int] = []
        for node, law in zip(tree.front.tolist(), laws, strict=True):
            if node in leaves:
                continue
            p = law.p
            for place in best_places(p, self.top).tolist():
                odds = p[place]
                token = law.token(place)
                if odds < self.least_sibling * p.max() or token in tree.session.limits.eos:
                    continue
                twin = self._twin(tree, edges, node, token)
                if twin is None:
                    twin = tree.forest.size
                    tree.forest = tree.forest.grown([token], [node])
                    edges[twin] = []
                    front.append(twin)
                    if odds < self.least:
                        leaves.add(twin)
                edges[node].append(twin)
        tree.front = np.array(front, dtype=np.int64)
        if all(node in leaves for node in front):
            tree.front = tree.front[:0]

    def _twin(self, tree: GrowingTree, edges: dict[int, list[int]], node: int, token: int) -> int | None:
        """An earlier node that this candidate repeats and that does not lead back to `node`."""
        if self.context < 0:
            return None
        wanted = [*self._tail(tree, node, self.context), token]
        for other in range(len(tree.roots), tree.forest.size):
            same = self._tail(tree, other, self.context + 1) == wanted
            if same and other not in edges[node] and not _reaches(edges, other, node):
                return other
        return None

    def _tail(self, tree: GrowingTree, node: int, size: int) -> list[int]:
        if size == 0:
            return []
        root = int(tree.forest.root_of(np.array([node]))[0])
        before = [*tree.session.prompt[-size:], *tree.session.settled, *tree.session.tails[root].tolist()]
        return [*before, *tree.forest.path(node)][-size:]

    def finish(self, tree: GrowingTree) -> None:
        """Unroll; each copy hangs in the forest too, unscored, so that the draft model's cache knows where it is."""
        edges: dict[int, list[int]] = tree.memory.get("edges", {})
        kept = [*tree.roots]
        queue = [(root, root, 0) for root in kept]  # (node, node of the graph that it stands for, its depth)
        while queue and len(kept) < self.most_nodes:
            node, origin, depth = queue.pop(0)
            if depth >= tree.session.remaining - 1:  # merged edges may lead deeper than was drafted
                continue
            for target in edges.get(origin, []):
                if len(kept) == self.most_nodes:
                    break
                token = int(tree.forest.tokens[target])
                child = target if int(tree.forest.parents[target]) == node else tree.forest.size
                if child == tree.forest.size:
                    tree.forest = tree.forest.grown([token], [node])
                kept.append(child)
                queue.append((child, target, depth + 1))
        tree.kept = np.array(sorted(kept), dtype=np.int64)
        groups = []
        for parent in tree.kept.tolist():
            nodes = [node for node in kept if int(tree.forest.parents[node]) == parent]
            if nodes:
                tokens = tree.forest.tokens[nodes].tolist()
                groups.append(retrieved(tokens, parent, nodes))
        tree.forest = tree.forest.grown([], [], groups=groups)


def _reaches(edges: dict[int, list[int]], start: int, goal: int) -> bool:
    seen = {start}
    queue = [start]
    while queue:
        node = queue.pop()
        if node == goal:
            return True
        fresh = [one for one in edges.get(node, []) if one not in seen]
        seen.update(fresh)
        queue += fresh
    return False

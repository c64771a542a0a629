"""DRAFT: unions of trees, pruned trees, and trees unrolled from graphs that merge repeated tokens."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.core.draft.batch import close_drafter, models_of
from specbeam.core.draft.lookup import retrieved
from specbeam.core.draft.tree import Complete, GrowingTree, TreeDrafter
from specbeam.core.forest import Forest, Siblings
from specbeam.core.laws.rows import RowLaw
from specbeam.core.laws.warp import best_places
from specbeam.core.lm import LM
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Drafter, Session


def united(forests: list[Forest]) -> tuple[Forest, list[Int64[np.ndarray, " _"]]]:
    """Return the union of trees with the same roots, and for each tree the node in the union of each of its nodes.

    A path is in the union if it is in one of the trees. Groups keep their order, so at a node of two trees the drafts of the
    first are tried before those of the second.
    """
    roots = forests[0].roots
    whole = Forest.rooted(forests[0].tokens[:roots])
    renamings = []
    for forest in forests:
        node_map = np.zeros(forest.size + 1, dtype=np.int64)
        node_map[:roots] = range(roots)
        node_map[-1] = -1
        for node in range(roots, forest.size):
            parent = node_map[forest.parents[node]]
            token = forest.tokens[node]
            known = int(whole.find(np.array([parent]), np.array([token]))[0])
            node_map[node] = known if known >= 0 else whole.size
            if known < 0:
                whole = whole.grown([int(token)], [int(parent)])
        whole = whole.grown([], [], groups=[_renamed(forest.siblings, node_map)])
        renamings.append(node_map[:-1])
    return whole, renamings


def _renamed(groups: Siblings, node_map: Int64[np.ndarray, " nodes"]) -> Siblings:
    """Return the groups with node `node_map[k]` in place of node k."""
    return groups._replace(parents=node_map[groups.parents], nodes=node_map[groups.nodes])


def completed(
    own: Forest, whole: Forest, node_map: Int64[np.ndarray, " own"]
) -> tuple[Forest, Int64[np.ndarray, " whole"]]:
    """Return `own` with the nodes of `whole` that it lacks after its own, and the node in it of each node of `whole`.

    Args:
        node_map: the node in `whole` of each node of `own`.
    """
    own_nodes = np.full(whole.size, -1, dtype=np.int64)
    own_nodes[node_map] = np.arange(len(node_map))
    for node in np.flatnonzero(own_nodes < 0).tolist():
        own_nodes[node] = own.size
        own = own.grown([int(whole.tokens[node])], [int(own_nodes[whole.parents[node]])])
    return own, own_nodes


@dataclass(frozen=True)
class ManyDrafters:
    """A drafter of several draft models, each with its own tree; the target scores the union of the trees.

    At each node the drafts of the first model are tried first, each against the law of its own model.

    Source: SpecInfer (arXiv 2305.09781).
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
        """Store the next chunk of up to `most` long prompts in each model; return whether each session may take a turn."""
        each = [drafter.fill(sessions, most) for drafter in self.drafters]
        return [all(filled) for filled in zip(*each, strict=True)]

    def settle(self, session: Session, turn: Turn) -> None:
        own, renamings = session.state.pop(self, ([turn.forest] * len(self.drafters), None))
        if renamings is None:  # nothing was drafted, because a model was not ready
            for drafter in self.drafters:
                drafter.settle(session, turn)
            return
        for drafter, forest, node_map in zip(self.drafters, own, renamings, strict=True):
            drafter.settle(session, turn.on(*completed(forest, turn.forest, node_map)))

    def close(self, session: Session) -> None:
        session.state.pop(self, None)
        for drafter in self.drafters:
            close_drafter(drafter, session)


@dataclass(frozen=True)
class Pruned:
    """A drafter that prunes the trees of another drafter by the target's first layers (ProPD, arXiv 2402.13485).

    A node stays if its token is among the `top` likeliest after its parent under `early`, the target's first layers. Pruning
    depends on the tokens, so drawn groups become LOST; CHOSEN groups stay CHOSEN.
    """

    drafter: Drafter
    early: LM
    top: int = 16

    @property
    def models(self) -> tuple[LM, ...] | None:
        """The models that it runs; None if its drafter has no attribute `models`."""
        drafting = models_of(self.drafter)
        return None if drafting is None else (*drafting, self.early)

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        forests = self.drafter.draft(sessions, shapes)
        answers = self.early.extend(sessions, forests)
        pruned = []
        for session, forest, answer in zip(sessions, forests, answers, strict=True):
            nodes = np.arange(forest.roots)
            with session.failing_alone("draft: "):
                nodes = self._likely_nodes(forest, _without_banned(session, forest, answer.logits))
            session.state[self] = (forest, nodes)
            pruned.append(forest.selected(nodes).lost())
        return pruned

    def _likely_nodes(self, forest: Forest, rows: Float[torch.Tensor, "nodes vocab"]) -> Int64[np.ndarray, " kept"]:
        """Return the roots, and the nodes whose path is likely token by token."""
        likely = rows.topk(min(self.top, rows.shape[1]), dim=-1).indices.cpu().numpy()
        kept = np.ones(forest.size, dtype=bool)
        for node in range(forest.roots, forest.size):
            parent = forest.parents[node]
            kept[node] = kept[parent] and forest.tokens[node] in likely[parent]
        return np.flatnonzero(kept)

    def settle(self, session: Session, turn: Turn) -> None:
        drafted = session.state.pop(self, None)
        whole = turn if drafted is None else turn.on(*drafted)  # None: nothing drafted, because a model was not ready
        self.drafter.settle(session, whole)
        self.early.settle(session, whole)

    def close(self, session: Session) -> None:
        session.state.pop(self, None)
        close_drafter(self.drafter, session)
        self.early.close(session)


def _without_banned(
    session: Session, forest: Forest, rows: Float[torch.Tensor, "nodes vocab"]
) -> Float[torch.Tensor, "nodes vocab"]:
    """Return the rows of a forest's nodes with -inf at the tokens that the constraint bans."""
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
    """A growth that drafts a repeated run of tokens only once (GSD, arXiv 2407.16207).

    A candidate that repeats an earlier node and the `context` tokens before it gets an edge to that node instead of a node
    of its own. At the end the graph is unrolled into a tree. No edge leads to a node from which its start can be
    reached, so the graph has no cycles. Copies reuse drafts from another context, so all groups are LOST.

    Args:
        top: number of candidates per node.
        context: number of tokens before the candidate that must agree as well; -1: never merge.
        least: a node of smaller draft probability gets no children.
        least_sibling: candidates whose draft probability is below this share of their best sibling's are left out.
        most_nodes: maximum number of nodes of the unrolled trees, including roots.
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
        frontier: list[int] = []
        for node, law in zip(tree.frontier.tolist(), laws, strict=True):
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
                    frontier.append(twin)
                    if odds < self.least:
                        leaves.add(twin)
                edges[node].append(twin)
        tree.frontier = np.array(frontier, dtype=np.int64)
        if all(node in leaves for node in frontier):
            tree.frontier = tree.frontier[:0]

    def _twin(self, tree: GrowingTree, edges: dict[int, list[int]], node: int, token: int) -> int | None:
        """Return an earlier node that this candidate repeats, from which `node` cannot be reached; None if there is none."""
        if self.context < 0:
            return None
        wanted = [*self._tail(tree, node, self.context), token]
        for other in range(len(tree.roots), tree.forest.size):
            same = self._tail(tree, other, self.context + 1) == wanted
            if same and other not in edges[node] and not _reaches(edges, other, node):
                return other
        return None

    def _tail(self, tree: GrowingTree, node: int, size: int) -> list[int]:
        """Return the last `size` tokens of the text that ends at a node."""
        if size == 0:
            return []
        root = int(tree.forest.root_of(np.array([node]))[0])
        before = [*tree.session.prompt[-size:], *tree.session.settled, *tree.session.tails[root].tolist()]
        return [*before, *tree.forest.path(node)][-size:]

    def finish(self, tree: GrowingTree) -> None:
        """Unroll the graph; copies are added to the forest without being scored."""
        edges: dict[int, list[int]] = tree.memory.get("edges", {})
        kept = [*tree.roots]
        queue = [(root, root, 0) for root in kept]  # (node, node of the graph that it stands for, its depth)
        while queue and len(kept) < self.most_nodes:
            node, origin, depth = queue.pop(0)
            if depth >= tree.session.remaining - 1:  # merged edges may lead deeper than the draft
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
    """Return whether edges lead from `start` to `goal`."""
    seen = {start}
    queue = [start]
    while queue:
        node = queue.pop()
        if node == goal:
            return True
        fresh = [target for target in edges.get(node, []) if target not in seen]
        seen.update(fresh)
        queue += fresh
    return False

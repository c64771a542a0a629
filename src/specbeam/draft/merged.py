"""DRAFT: trees made of trees: several draft models at once, repeated runs joined, hopeless nodes dropped."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.draft.lookup import retrieved
from specbeam.draft.tree import Complete, Sprout, TreeDrafter
from specbeam.forest import Forest, Group, Row
from specbeam.lm.base import LM
from specbeam.probs import best
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
        names = np.zeros(len(forest) + 1, dtype=np.int64)
        names[:roots], names[-1] = range(roots), -1
        for node in range(roots, len(forest)):
            parent, token = names[forest.parents[node]], forest.tokens[node]
            known = int(whole.find(np.array([parent]), np.array([token]))[0])
            names[node] = known if known >= 0 else len(whole)
            if known < 0:
                whole = whole.grown([int(token)], [int(parent)])
        for group in forest.groups:
            whole = whole.with_group(_renamed(group, names))
        renamings.append(names[:-1])
    return whole, renamings


def _renamed(group: Group, names: Int64[np.ndarray, " nodes"]) -> Group:
    fields = {name: getattr(group, name) for name in ("draw_parents", "draw_tokens", "law", "replacement", "sure")}
    return Group(parents=names[group.parents], draw_nodes=names[group.draw_nodes], **fields)


def completed(
    own: Forest, whole: Forest, names: Int64[np.ndarray, " own"]
) -> tuple[Forest, Int64[np.ndarray, " whole"]]:
    """`own` with the nodes of `whole` that it lacks hung behind, and where it has each node of `whole`."""
    back = np.full(len(whole), -1, dtype=np.int64)
    back[names] = np.arange(len(names))
    for node in np.flatnonzero(back < 0).tolist():
        back[node] = len(own)
        own = own.grown([int(whole.tokens[node])], [int(back[whole.parents[node]])])
    return own, back


@dataclass(frozen=True)
class ManyDrafters:
    """Several draft models, each growing its own tree; the target scores their union (SpecInfer, arXiv 2305.09781).

    At a node the drafts of the first model are tried first, each against the law of its own model.
    """

    drafters: tuple[TreeDrafter, ...]

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        grown = [drafter.draft(sessions, shapes) for drafter in self.drafters]
        forests = []
        for session, *own in zip(sessions, *grown, strict=True):
            whole, renamings = united(list(own))
            session.state[self] = (own, renamings)
            forests.append(whole)
        return forests

    def settle(self, session: Session, turn: Turn) -> None:
        own, renamings = session.state.pop(self)
        for drafter, forest, names in zip(self.drafters, own, renamings, strict=True):
            drafter.settle(session, turn.on(*completed(forest, turn.forest, names)))

    def close(self, session: Session) -> None:
        session.state.pop(self, None)
        for drafter in self.drafters:
            drafter.close(session)


@dataclass(frozen=True)
class Pruned:
    """Drop drafts that an early look of the target finds hopeless: a node stays if its token is among the `top` likeliest
    after its parent under `early`, the target's first layers (ProPD, arXiv 2402.13485).

    What is left says something about the drafts, so drawn ones lose their law; chosen ones stay sure.
    """

    drafter: Drafter
    early: LM
    top: int = 16

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        forests = self.drafter.draft(sessions, shapes)
        kept_forests = []
        for session, forest, rows in zip(sessions, forests, self.early.extend(sessions, forests), strict=True):
            names = np.arange(forest.roots)
            with session.failing_alone("draft: "):
                names = self._hopeful(forest, _constrained(session, forest, rows))
            session.state[self] = (forest, names)
            kept_forests.append(forest.selected(names).lost())
        return kept_forests

    def _hopeful(self, forest: Forest, rows: Float[torch.Tensor, "nodes vocab"]) -> Int64[np.ndarray, " kept"]:
        likely = rows.topk(min(self.top, rows.shape[1]), dim=-1).indices.cpu().numpy()
        kept = np.ones(len(forest), dtype=bool)
        for node in range(forest.roots, len(forest)):
            parent = forest.parents[node]
            kept[node] = kept[parent] and forest.tokens[node] in likely[parent]
        return np.flatnonzero(kept)

    def settle(self, session: Session, turn: Turn) -> None:
        whole = turn.on(*session.state.pop(self))
        self.drafter.settle(session, whole)
        self.early.settle(session, whole)

    def close(self, session: Session) -> None:
        session.state.pop(self, None)
        self.drafter.close(session)
        self.early.close(session)


def _constrained(
    session: Session, forest: Forest, rows: Float[torch.Tensor, "nodes vocab"]
) -> Float[torch.Tensor, "nodes vocab"]:
    """The rows of a forest's nodes without what the constraint bans."""
    bans = session.warp.constraint
    if bans is None:
        return rows
    rows, depths = rows.clone(), forest.depths()
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
    law_lost: ClassVar[str] = "merges its drafts"

    def grow(self, sprout: Sprout, layer: int, rows: list[Row]) -> None:
        edges: dict[int, list[int]] = sprout.memory.setdefault("edges", {root: [] for root in sprout.roots})
        leaves: set[int] = sprout.memory.setdefault("leaves", set())
        front: list[int] = []
        for node, row in zip(sprout.front.tolist(), rows, strict=True):
            if node in leaves:
                continue
            for place in best(row.p, self.top).tolist():
                odds, token = row.p[place], row.token(place)
                if odds < self.least_sibling * row.p.max() or token in sprout.session.limits.eos:
                    continue
                twin = self._twin(sprout, edges, node, token)
                if twin is None:
                    twin = len(sprout.forest)
                    sprout.forest = sprout.forest.grown([token], [node])
                    edges[twin] = []
                    front.append(twin)
                    if odds < self.least:
                        leaves.add(twin)
                edges[node].append(twin)
        sprout.front = np.array(front, dtype=np.int64)
        if all(node in leaves for node in front):
            sprout.front = sprout.front[:0]

    def _twin(self, sprout: Sprout, edges: dict[int, list[int]], node: int, token: int) -> int | None:
        """An earlier node that this candidate repeats and that does not lead back to `node`."""
        if self.context < 0:
            return None
        wanted = [*self._tail(sprout, node, self.context), token]
        for other in range(len(sprout.roots), len(sprout.forest)):
            same = self._tail(sprout, other, self.context + 1) == wanted
            if same and other not in edges[node] and not _reaches(edges, other, node):
                return other
        return None

    def _tail(self, sprout: Sprout, node: int, size: int) -> list[int]:
        if size == 0:
            return []
        root = int(sprout.forest.root_of(np.array([node]))[0])
        before = [*sprout.session.prompt[-size:], *sprout.session.settled, *sprout.session.tails[root].tolist()]
        return [*before, *sprout.forest.path(node)][-size:]

    def finish(self, sprout: Sprout) -> None:
        """Unroll; each copy hangs in the forest too, unscored, so that the draft model's cache knows where it is."""
        edges: dict[int, list[int]] = sprout.memory.get("edges", {})
        kept = [*sprout.roots]
        queue = [(root, root, 0) for root in kept]  # (node, node of the graph that it stands for, its depth)
        while queue and len(kept) < self.most_nodes:
            node, origin, depth = queue.pop(0)
            if depth >= sprout.session.remaining - 1:  # merged edges may lead deeper than was drafted
                continue
            for target in edges.get(origin, []):
                if len(kept) == self.most_nodes:
                    break
                token = int(sprout.forest.tokens[target])
                child = target if int(sprout.forest.parents[target]) == node else len(sprout.forest)
                if child == len(sprout.forest):
                    sprout.forest = sprout.forest.grown([token], [node])
                kept.append(child)
                queue.append((child, target, depth + 1))
        sprout.kept = np.array(sorted(kept), dtype=np.int64)
        for parent in sprout.kept.tolist():
            nodes = [node for node in kept if int(sprout.forest.parents[node]) == parent]
            if nodes:
                tokens = sprout.forest.tokens[nodes].tolist()
                sprout.forest = sprout.forest.with_group(retrieved(tokens, parent, nodes))


def _reaches(edges: dict[int, list[int]], start: int, goal: int) -> bool:
    seen, queue = {start}, [start]
    while queue:
        node = queue.pop()
        if node == goal:
            return True
        fresh = [one for one in edges.get(node, []) if one not in seen]
        seen.update(fresh)
        queue += fresh
    return False

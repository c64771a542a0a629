"""DRAFT without a model: Token Recycling (arXiv 2408.08696) drafts the tokens that the target last ranked highest."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from specbeam.core.beams import Layers, is_end
from specbeam.core.draft.lookup import RETRIEVED, permitted
from specbeam.core.draft.turns import Cut, DraftTask, draft_turn, learn_from, nodes_of, uncut
from specbeam.core.errors import BadSetting, MissingFile
from specbeam.core.forest import LOST, Forest, TurnRows, find_child, groups_without_laws, start_of, unknown_nodes
from specbeam.core.laws.ranking import largest
from specbeam.core.laws.reduce import SOUND
from specbeam.core.laws.warp import on_host
from specbeam.core.lm import LM
from specbeam.core.records import Needs, Shape, Turn
from specbeam.core.session import Session
from specbeam.core.steps import Array, borrowed, step
from specbeam.core.whole_files import whole

Ranks = tuple[int, ...]

# The ranks of the children of each rank path, by level, as in the paper: 80 nodes, 8 + 21 + 25 + 15 + 8 + 3.
_LEVELS: tuple[dict[str, str], ...] = (
    {"": "01234567"},
    {"0": "01234567", "1": "0123", "2": "012", "3": "01", "4": "0", "5": "0", "6": "0", "7": "0"},
    {
        "00": "01234567", "01": "012", "02": "01", "03": "0", "04": "0", "05": "0", "06": "0", "07": "0",
        "10": "01", "11": "0", "20": "0", "30": "0", "40": "0", "50": "0",
    },
    {
        "000": "01234", "001": "01", "002": "0", "003": "0", "004": "0", "010": "0", "020": "0",
        "100": "0", "200": "0", "300": "0",
    },
    {"0000": "012", "0001": "0", "0002": "0", "0010": "0", "0100": "0", "1000": "0"},
    {"00000": "01", "00010": "0"},
)  # fmt: skip


def template() -> list[Ranks]:
    """Return the rank paths of the published tree, level by level."""
    return [(*map(int, path), int(rank)) for level in _LEVELS for path, ranks in level.items() for rank in ranks]


def likeliest(nodes: int) -> tuple[Ranks, ...]:
    """Return the `nodes` paths of the template with the smallest sum of ranks plus depth, parents before children."""
    return tuple(sorted(template(), key=lambda path: (sum(path) + len(path), path))[:nodes])


@dataclass(eq=False)
class Successors:
    """A table of the `k` tokens that the target last found likeliest after each token.

    All sessions and calls share it, so drafts learn from other requests. Outputs never depend on it.
    """

    table: Int32[np.ndarray, "vocab k"]  # row t: the tokens after token t, likeliest first

    @classmethod
    def empty(cls, vocab: int, k: int = 8) -> "Successors":
        """Return a table of zeros."""
        return cls(np.zeros((vocab, k), dtype=np.int32))

    def learn(self, tokens: np.ndarray, best: np.ndarray) -> None:
        """Store each row of `best` for its token of `tokens`; for equal tokens the last (deepest) one counts."""
        for token, row in zip(tokens.tolist(), best, strict=True):
            self.table[token, : len(row)] = row

    def save(self, path: str | Path) -> None:
        """Write the table to a file in NumPy's format; the suffix .npy is added if it is missing."""
        path = Path(path)
        goal = path if path.suffix == ".npy" else path.with_name(f"{path.name}.npy")
        with whole(goal) as part, part.open("wb") as file:
            np.save(file, self.table)

    @classmethod
    def load(cls, path: str | Path) -> "Successors":
        """Return the table in a file that `save` wrote. Raises `MissingFile`, or `BadSetting` if it holds another array."""
        path = Path(path)
        if not path.is_file():
            raise MissingFile(f"there is no file {path}; save a table with Successors.save")
        table = np.load(path)
        if table.ndim != 2 or table.dtype != np.int32:
            raise BadSetting(f"{path} holds {table.dtype}{list(table.shape)}; expected int32[vocab, k]")
        return cls(table)


@borrowed
class RankTree(NamedTuple):
    """A fixed tree of rank paths as numbers for steps. Path 0 is the empty one; a family is the children of one path."""

    parents: Array  # int64[families]: the path above each family, in the order in which layers are drafted
    depths: Array  # int64[families]: depth of its children
    ends: Array  # int64[families]: the index after its last child
    ranks: Array  # int64[children]: the last rank of each child's path
    paths: Array  # int64[children]: the path of each child
    nodes: Array  # int64[depths + 1]: number of paths of at most each depth, without the empty one
    total: int  # number of paths, with the empty one


@lru_cache
def rank_tree(ranks: tuple[Ranks, ...]) -> RankTree:
    """Return a tree of rank paths as numbers for steps; parents come before children."""
    number: dict[Ranks, int] = {(): 0}
    families: dict[Ranks, list[Ranks]] = {}
    for path in sorted(ranks, key=len):
        if path[:-1] in number and path not in number:
            number[path] = len(number)
            families.setdefault(path[:-1], []).append(path)
    children = [path for family in families.values() for path in family]
    depths = [len(path) for path in number if path]
    return RankTree(
        parents=np.array([number[path] for path in families], dtype=np.int64),
        depths=np.array([len(path) + 1 for path in families], dtype=np.int64),
        ends=np.cumsum([len(family) for family in families.values()], dtype=np.int64),
        ranks=np.array([path[-1] for path in children], dtype=np.int64),
        paths=np.array([number[path] for path in children], dtype=np.int64),
        nodes=np.array([sum(depth <= most for depth in depths) for most in range(max(depths, default=0) + 1)]),
        total=len(number),
    )


@borrowed
class RecyclingSpec(NamedTuple):
    """How a tree is filled from a table of successors."""

    table: Array  # int32[vocab, k], see `Successors`; changed by `learn_from`
    tree: RankTree
    eos: Array  # int64[ends]


class FilledTree(NamedTuple):
    """A tree under each root while it is filled, in buffers with spare capacity."""

    tokens: Array  # int64[capacity]: of the nodes, as the next
    parents: Array
    begun: int  # number of nodes that the forest started with
    places: Array  # int64[paths, roots]: the node of each path; -1: none
    draw_ends: Array  # int64[capacity]: of groups, as the next
    group_parents: Array
    draw_tokens: Array  # int64[capacity]: of draws, as the next
    draw_nodes: Array
    sizes: Array  # int64[3]: number of NODES, GROUPS and DRAWS


NODES, GROUPS, DRAWS = range(3)  # indices into `FilledTree.sizes`


@step
def start_filling(tokens: Array, parents: Array, spec: RecyclingSpec) -> FilledTree:
    """Return a tree without layers, given the beginning of a turn's forest."""
    begun = len(tokens)
    roots = (parents < 0).sum()
    most = roots * (spec.tree.total - 1)
    places = np.full((spec.tree.total, roots), -1)
    for root in range(roots):
        places[0, root] = root
    none = np.empty(most, dtype=np.int64)
    return FilledTree(
        np.concatenate((tokens, none)),
        np.concatenate((parents, none)),
        begun,
        places,
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.int64),
        np.array([begun, 0, 0]),
    )


@step
def nodes_with_children(filled: FilledTree, depth: int, spec: RecyclingSpec) -> Array:
    """Return the nodes that get children in layer `depth`, in the order in which these are drafted, int64[n]."""
    tree = spec.tree
    roots = filled.places.shape[1]
    found = np.empty(len(tree.parents) * roots, dtype=np.int64)
    held = 0
    for family in range(len(tree.parents)):
        if tree.depths[family] == depth:
            for root in range(roots):
                found[held] = filled.places[tree.parents[family], root]
                held += found[held] >= 0
    return found[:held]


@step
def fill_layer(filled: FilledTree, depth: int, spec: RecyclingSpec, followers: Array, counts: Array) -> None:
    """Add layer `depth` to a tree. Of equal siblings, the one with the smallest rank remains; end tokens get no node.

    Args:
        followers: int[n, k], the tokens in the table after each of `nodes_with_children`.
        counts: int64[n], how many of them there are.
    """
    tree = spec.tree
    row = 0
    for family in range(len(tree.parents)):
        if tree.depths[family] != depth:
            continue
        for root in range(filled.places.shape[1]):
            parent = filled.places[tree.parents[family], root]
            if parent >= 0:
                _fill_family(filled, parent, root, family, spec, followers[row, : counts[row]])
                row += 1


@step
def _fill_family(
    filled: FilledTree, parent: int, root: int, family: int, spec: RecyclingSpec, followers: Array
) -> None:
    """Add the children of one node, and their group if there are any."""
    tree = spec.tree
    sizes = filled.sizes
    first = start_of(tree.ends, family)
    stop = tree.ends[family]
    before = sizes[DRAWS]
    for child in range(first, stop):
        if tree.ranks[child] >= len(followers):
            continue
        token = int(followers[tree.ranks[child]])
        if is_end(token, spec.eos) or _comes_again(token, child + 1, stop, tree, followers):
            continue
        named = first
        while tree.ranks[named] >= len(followers) or followers[tree.ranks[named]] != token:
            named += 1
        node = -1
        if parent < filled.begun:
            begun = filled.begun
            node = find_child(filled.tokens[:begun], filled.parents[:begun], parent, token)
        if node < 0:
            node = sizes[NODES]
            filled.tokens[node] = token
            filled.parents[node] = parent
            sizes[NODES] = node + 1
        filled.places[tree.paths[named], root] = node
        filled.draw_tokens[sizes[DRAWS]] = token
        filled.draw_nodes[sizes[DRAWS]] = node
        sizes[DRAWS] += 1
    if sizes[DRAWS] > before:
        filled.group_parents[sizes[GROUPS]] = parent
        filled.draw_ends[sizes[GROUPS]] = sizes[DRAWS]
        sizes[GROUPS] += 1


@step
def _comes_again(token: int, child: int, stop: int, tree: RankTree, followers: Array) -> bool:
    """Return whether any of the children from `child` to before `stop` has this token."""
    found = False
    for other in range(child, stop):
        found |= tree.ranks[other] < len(followers) and followers[tree.ranks[other]] == token
    return found


@step
def filled_forest(roots: Forest, filled: FilledTree) -> Forest:
    """Return a tree as a forest with LOST groups, given the forest that the turn started with."""
    nodes = filled.sizes[NODES]
    groups = filled.sizes[GROUPS]
    draws = filled.sizes[DRAWS]
    parents = filled.group_parents[:groups]
    draw_ends = filled.draw_ends[:groups]
    siblings = groups_without_laws(LOST, parents, draw_ends, filled.draw_tokens[:draws], filled.draw_nodes[:draws])
    return Forest(
        filled.tokens[:nodes],
        filled.parents[:nodes],
        siblings,
        roots.logq,
        roots.beams,
        roots.frontier_rows,
        roots.known,
    )


@step
def recycled(roots: Forest, depth: int, spec: RecyclingSpec) -> Forest:
    """Return a forest with a tree of up to `depth` layers under each root, filled from the table."""
    filled = start_filling(roots.tokens, roots.parents, spec)
    for layer in range(1, depth + 1):
        parents = nodes_with_children(filled, layer, spec)
        if len(parents) == 0:
            break
        followers = spec.table[filled.tokens[parents]]
        fill_layer(filled, layer, spec, followers, np.full(len(parents), spec.table.shape[1]))
    return filled_forest(roots, filled)


@draft_turn.of(RecyclingSpec)
@step
def draft_recycled(drafts: RecyclingSpec, model: Any, task: DraftTask, dice: Any, spent: Array) -> tuple[Cut, int]:
    """Fill a tree under each root; see `draft_turn`."""
    return uncut(recycled(task.roots, task.depth, drafts)), SOUND


@nodes_of.of(RecyclingSpec)
@step
def most_recycled_nodes(drafts: RecyclingSpec, roots: int, depth: int, width: int) -> int:
    """Return the number of paths of at most this depth under each root; see `nodes_of`."""
    nodes = drafts.tree.nodes
    return roots * nodes[min(depth, len(nodes) - 1)]


@step
def learn_rows(table: Array, tokens: Array, rows: Array) -> None:
    """Store the likeliest tokens of each row for its token; for equal tokens the last (deepest) one counts.

    Args:
        table: int32[vocab, k], see `Successors`.
        tokens: int64[n].
        rows: float[n, vocab], logits.
    """
    count = min(table.shape[1], rows.shape[1])
    no_shift = np.zeros(1, dtype=rows.dtype)
    for row in range(len(rows)):
        best = largest(rows[row].reshape(1, rows.shape[1]), no_shift, count)
        for rank in range(min(count, len(best))):
            table[tokens[row], rank] = best[rank]


@learn_from.of(RecyclingSpec)
@step
def learn_successors(drafts: RecyclingSpec, drafted: Cut, layers: Layers, rows: TurnRows) -> None:
    """Learn from all rows of the turn's pass; see `learn_from`."""
    forest = drafted.forest
    scored = unknown_nodes(0, len(forest.tokens), forest.known.nodes)
    learn_rows(drafts.table, forest.tokens[scored], rows.fresh.logits)


@dataclass(frozen=True)
class TokenRecycling:
    """A drafter that fills a fixed tree of rank paths from a table of successors, which it updates from every scored row.

    Args:
        memory: the table.
        ranks: rank paths of the tree, parents before children: (0, 2) is the third likeliest token after the likeliest.
    """

    memory: Successors
    ranks: tuple[Ranks, ...] = field(default_factory=lambda: tuple(template()))
    models: ClassVar[tuple[LM, ...]] = ()
    keeps_nodes: ClassVar[bool] = True
    no_law_reason: ClassVar[str] = RETRIEVED
    needs: ClassVar[Needs] = Needs(logits=True)

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        return [self._tree(session, shape) for session, shape in zip(sessions, shapes, strict=True)]

    def _tree(self, session: Session, shape: Shape) -> Forest:
        spec = self._spec(session)
        roots = session.undrafted
        if session.warp.constraint is None:
            return recycled(roots, shape.depth, spec)
        filled = start_filling(roots.tokens, roots.parents, spec)
        for layer in range(1, shape.depth + 1):
            parents = nodes_with_children(filled, layer, spec)
            if len(parents) == 0:
                break
            fill_layer(filled, layer, spec, *self._allowed_followers(session, filled, parents))
        return filled_forest(roots, filled)

    def _allowed_followers(
        self, session: Session, filled: FilledTree, nodes: Int64[np.ndarray, " n"]
    ) -> tuple[Int32[np.ndarray, "n k"], Int64[np.ndarray, " n"]]:
        """Return the tokens in the table after each of these equally deep nodes, and the number of allowed ones.
        Allowed tokens come first.
        """
        size = int(filled.sizes[NODES])
        forest = Forest(filled.tokens[:size], filled.parents[:size])
        rows = self.memory.table[forest.tokens[nodes]]
        allowed = permitted(session, forest, np.repeat(nodes, rows.shape[1]), rows.ravel().astype(np.int64))
        allowed = allowed.reshape(rows.shape)
        order = np.argsort(~allowed, axis=1, kind="stable")
        return np.take_along_axis(rows, order, axis=1), allowed.sum(axis=1)

    def spec(self, session: Session) -> RecyclingSpec | None:
        """Return the spec by which steps fill trees; None if a constraint of the session has to see the drafts."""
        return None if session.warp.constraint is not None else self._spec(session)

    def _spec(self, session: Session) -> RecyclingSpec:
        return RecyclingSpec(self.memory.table, rank_tree(self.ranks), session.limits.ending)

    def settle(self, session: Session, turn: Turn) -> None:
        """Learn from the rows of a turn."""
        rows = turn.scored.logits
        tokens = turn.forest.tokens[turn.scored_nodes]
        if rows.device.type == "cpu":
            learn_rows(self.memory.table, tokens, on_host(rows))
        else:  # avoid copying rows, which is slow
            best = rows.topk(min(self.memory.table.shape[1], rows.shape[1]), dim=-1).indices
            self.memory.learn(tokens, best.cpu().numpy().astype(np.int32))

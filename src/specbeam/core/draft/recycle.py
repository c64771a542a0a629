"""DRAFT without a model: Token Recycling (arXiv 2408.08696) drafts what the target found likeliest after each token."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Int32

from specbeam.core.draft.lookup import RETRIEVED, permitted, retrieved, started_forest
from specbeam.core.errors import BadSetting, MissingFile
from specbeam.core.forest import Forest, Siblings, find_child, unknown_nodes
from specbeam.core.lm import LM
from specbeam.core.records import Needs, Shape, Turn
from specbeam.core.session import Session
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
    """Return the `nodes` paths of the template of smallest rank sum plus depth; parents always come before children."""
    return tuple(sorted(template(), key=lambda path: (sum(path) + len(path), path))[:nodes])


@dataclass(eq=False)
class Successors:
    """A table of the `k` tokens that the target last found likeliest after each token.

    All sessions share it and it is kept between calls: other requests draft from what one request has taught. Outputs never
    depend on it.
    """

    table: Int32[np.ndarray, "vocab k"]  # row t: the tokens after token t, likeliest first

    @classmethod
    def empty(cls, vocab: int, k: int = 8) -> "Successors":
        """Return a table of zeros."""
        return cls(np.zeros((vocab, k), dtype=np.int32))

    def learn(self, tokens: np.ndarray, best: np.ndarray) -> None:
        """Store each row of `best` for its token of `tokens`; of equal tokens the last one counts, which is the deepest."""
        for token, row in zip(tokens.tolist(), best, strict=True):
            self.table[token, : len(row)] = row

    def save(self, path: str | Path) -> None:
        """Write the table to a file of NumPy's format .npy, an ending that is added where it is missing."""
        path = Path(path)
        goal = path if path.suffix == ".npy" else path.with_name(f"{path.name}.npy")
        with whole(goal) as part, part.open("wb") as file:
            np.save(file, self.table)

    @classmethod
    def load(cls, path: str | Path) -> "Successors":
        """Return the table in a file that `save` wrote. Raises `MissingFile`, or `BadSetting` if it holds something else."""
        path = Path(path)
        if not path.is_file():
            raise MissingFile(f"there is no file {path}; save a table with Successors.save")
        table = np.load(path)
        if table.ndim != 2 or table.dtype != np.int32:
            raise BadSetting(f"{path} holds {table.dtype}{list(table.shape)}; expected int32[vocab, k]")
        return cls(table)


@dataclass(frozen=True)
class TokenRecycling:
    """A drafter that fills a fixed tree of rank paths from a table of successors, which it updates from every scored row.

    Args:
        memory: the table.
        ranks: rank paths of the tree, parents before children: (0, 2) is the third likeliest token after the likeliest one.
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
        forest = started_forest(session)
        nodes_of: dict[Ranks, dict[int, int]] = {(): {root: root for root in range(forest.roots)}}  # root -> node
        groups = list[Siblings]()
        for depth in range(1, shape.depth + 1):
            wanted = self._children(depth, nodes_of)
            if not wanted:
                break
            after = self._successors(session, forest, [node for path in wanted for node in nodes_of[path].values()])
            tokens = list[int]()
            parents = list[int]()
            for path, ranks in wanted.items():
                for root, parent in nodes_of[path].items():
                    # End tokens get no node, equal siblings only one. Ranks past the allowed tokens have no token.
                    fresh = {rank: after[parent][rank] for rank in ranks if rank < len(after[parent])}
                    fresh = {token: rank for rank, token in reversed(fresh.items()) if token not in session.limits.eos}
                    siblings = list(reversed(fresh))
                    nodes = list[int]()
                    for token in siblings:
                        node = int(find_child(forest.tokens, forest.parents, parent, token))
                        if node < 0:  # it was not kept from an earlier turn
                            node = forest.size + len(tokens)
                            tokens.append(token)
                            parents.append(parent)
                        nodes_of.setdefault((*path, fresh[token]), {})[root] = node
                        nodes.append(node)
                    if siblings:
                        groups.append(retrieved(siblings, parent, nodes))
            forest = forest.grown(tokens, parents)
        return forest.grown([], [], groups=groups)

    def _children(self, depth: int, known: Collection[Ranks]) -> dict[Ranks, list[int]]:
        """Return the ranks of the children in layer `depth` of each known path, which has nodes."""
        children: dict[Ranks, list[int]] = {}
        for path in self.ranks:
            if len(path) == depth and path[:-1] in known:
                children.setdefault(path[:-1], []).append(path[-1])
        return children

    def _successors(self, session: Session, forest: Forest, nodes: list[int]) -> dict[int, list[int]]:
        """Return the tokens in the table after each of these equally deep nodes, without those that the constraint bans."""
        rows = self.memory.table[forest.tokens[nodes]]
        allowed = permitted(session, forest, np.repeat(nodes, rows.shape[1]), rows.ravel().astype(np.int64))
        allowed = allowed.reshape(rows.shape)
        return {node: row[mask].tolist() for node, row, mask in zip(nodes, rows, allowed, strict=True)}

    def settle(self, session: Session, turn: Turn) -> None:
        rows = turn.scored.logits
        forest = turn.forest
        k = min(self.memory.table.shape[1], rows.shape[1])
        best = rows.topk(k, dim=-1).indices.cpu().numpy().astype(np.int32)
        scored = unknown_nodes(0, forest.size, forest.known.nodes)
        self.memory.learn(forest.tokens[scored], best)

    def close(self, session: Session) -> None:
        """Do nothing: the table outlives the session."""

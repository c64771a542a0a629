"""Trees of tokens that a target drew, with the target's law at each node that has children, in files of many trees."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int64

from specbeam.core import whole
from specbeam.errors import BadSetting

Read = TypeVar("Read")


class Trees(NamedTuple):
    """Many trees in flat arrays. A tree is its prompt, which is a chain, and the beams that grew below it.

    The nodes of a tree are contiguous, parents before children. A node with children has a weight, the number of draws below
    it, and a law: the probabilities of the target's likeliest tokens at temperature 1.
    """

    starts: Int64[np.ndarray, " trees+1"]  # the first node of each tree, and the number of nodes
    tokens: Int64[np.ndarray, " nodes"]
    parents: Int64[np.ndarray, " nodes"]  # counted inside the tree; -1 for its first node
    weights: Float[np.ndarray, " nodes"]  # float32; 0 for nodes without a law
    law_of: Int64[np.ndarray, " nodes"]  # the row of `ids` and `logp`; -1 for nodes without a law
    ids: Int64[np.ndarray, " laws kept"]  # int32: the likeliest tokens
    logp: Float[np.ndarray, " laws kept"]  # float32: their log-probabilities

    @property
    def size(self) -> int:
        """The number of trees."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> Int64[np.ndarray, " trees"]:
        """The number of nodes of each tree."""
        return np.diff(self.starts)

    def first(self, trees: int) -> "Trees":
        """Return the first trees, with all laws."""
        starts = self.starts[: trees + 1]
        nodes = slice(0, int(starts[-1]))
        return self._replace(
            starts=starts,
            tokens=self.tokens[nodes],
            parents=self.parents[nodes],
            weights=self.weights[nodes],
            law_of=self.law_of[nodes],
        )

    def save(self, path: Path) -> None:
        """Write a file, atomically."""
        with whole(path) as part, part.open("wb") as file:
            np.savez(file, **self._asdict())

    @classmethod
    def read(cls, path: Path) -> "Trees":
        """Read a file that `save` wrote. Raises `BadSetting` for any other file."""

        def arrays_of_file() -> "Trees":
            with np.load(path) as arrays:
                return cls(**{name: arrays[name] for name in cls._fields})

        return read_or_refuse(path, arrays_of_file)

    @staticmethod
    def count(path: Path) -> int:
        """Return the number of trees in a file, without reading them. Raises `BadSetting` for any other file."""

        def count_of_file() -> int:
            with np.load(path) as arrays:
                return len(arrays["starts"]) - 1

        return read_or_refuse(path, count_of_file)


def read_or_refuse(path: Path, read: Callable[[], Read]) -> Read:
    """Return the result of `read`, which reads a file of a training. Raises `BadSetting` if it is broken."""
    try:
        return read()
    except Exception as error:  # readers of archives and pickles raise all kinds of errors for broken bytes
        raise BadSetting(f"{path} is broken ({type(error).__name__}: {error}); delete it, or the folder") from error


class TreeBeingDrawn:
    """A tree that the target is drawing.

    Args:
        prompt: the tokens of the prompt, at least one.
    """

    def __init__(self, prompt: list[int]) -> None:
        self.tokens = list(prompt)
        self.parents = list(range(-1, len(prompt) - 1))
        self.weights = [0.0] * len(prompt)
        self.law_of = [-1] * len(prompt)
        self.prompt_size = len(prompt)
        self.live = [len(prompt) - 1]  # the nodes of the live beams
        self.ids: list[np.ndarray] = []
        self.logp: list[np.ndarray] = []

    def add_law(self, beam: int, ids: np.ndarray, logp: np.ndarray) -> None:
        """Store the law of the target at a live beam."""
        self.law_of[self.live[beam]] = len(self.ids)
        self.ids.append(ids)
        self.logp.append(logp)

    def add_layer(self, drawn_from: np.ndarray, live_from: np.ndarray, tokens: np.ndarray) -> None:
        """Add the layer that the target drew.

        Args:
            drawn_from: the live beam of each draw, whether it ended or not.
            live_from: the live beam that each new live beam extends.
            tokens: the last token of each new live beam.
        """
        for beam in drawn_from.tolist():
            self.weights[self.live[beam]] += 1.0
        nodes = []
        for beam, token in zip(live_from.tolist(), tokens.tolist(), strict=True):
            nodes.append(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(self.live[beam])
            self.weights.append(0.0)
            self.law_of.append(-1)
        self.live = nodes


def trees_of(grown: list[TreeBeingDrawn]) -> Trees:
    """Return the trees in flat arrays. Nodes without children are left out, and laws of which nothing was drawn."""
    kept = [_with_children(tree) for tree in grown]
    starts = np.cumsum([0, *(len(nodes) for nodes in kept)])
    tokens: list[int] = []
    parents: list[int] = []
    weights: list[float] = []
    law_of: list[int] = []
    ids: list[np.ndarray] = []
    logp: list[np.ndarray] = []
    for tree, nodes in zip(grown, kept, strict=True):
        place = {node: index for index, node in enumerate(nodes)} | {-1: -1}
        for node in nodes:
            tokens.append(tree.tokens[node])
            parents.append(place[tree.parents[node]])
            weights.append(tree.weights[node])
            law_of.append(len(ids) if tree.weights[node] > 0 else -1)
            if tree.weights[node] > 0:
                ids.append(tree.ids[tree.law_of[node]])
                logp.append(tree.logp[tree.law_of[node]])
    return Trees(
        starts=starts.astype(np.int64),
        tokens=np.array(tokens, dtype=np.int64),
        parents=np.array(parents, dtype=np.int64),
        weights=np.array(weights, dtype=np.float32),
        law_of=np.array(law_of, dtype=np.int64),
        ids=np.array(ids, dtype=np.int32),
        logp=np.array(logp, dtype=np.float32),
    )


def _with_children(tree: TreeBeingDrawn) -> list[int]:
    """Return the nodes of the prompt, and the nodes with drawn children."""
    return [node for node in range(len(tree.tokens)) if tree.weights[node] > 0 or node < tree.prompt_size]

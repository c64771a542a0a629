"""Chains: root-to-leaf texts that cover the nodes of a forest, for engines that score plain texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int64

from specbeam.core.beams import Texts, paths_to
from specbeam.core.forest import Forest


class Chain(NamedTuple):
    """A text of which some rows are wanted.

    Attributes:
        tokens: the whole text, the prompt included.
        first: position of the first token whose row is wanted; the row of a token is the law of the token after it.
        listed: number of likeliest tokens to return for each row.
        namespace: texts of different namespaces share no cached tokens.
    """

    tokens: list[int]
    first: int
    listed: int
    namespace: str = ""

    @property
    def rows(self) -> int:
        """The number of rows from `first` to the end of the text."""
        return len(self.tokens) - self.first


@dataclass(frozen=True, eq=False)
class Likeliest:
    """The likeliest tokens after each token of a chain from its `first` on.

    Attributes:
        tokens: token ids, in descending order of their log-probabilities.
        logp: log-probabilities under the model's whole law.
    """

    tokens: Int64[np.ndarray, "rows listed"]
    logp: Float[np.ndarray, "rows listed"]


@runtime_checkable
class Scorer(Protocol):
    """An engine that scores chains.

    Attributes:
        vocab: number of tokens.
        max_positions: the largest number of tokens of a text; None: no limit.
        most_listed: the largest `listed` of a chain; `vocab` for engines that return whole rows.
        more_listed: what a user can do to get longer lists, for errors.
        name: of the model, for errors and reports.
        engine: a short name of the kind of engine.
    """

    vocab: int
    max_positions: int | None
    most_listed: int
    more_listed: str
    name: str
    engine: str

    def score(self, chains: Sequence[Chain]) -> list[Likeliest]:
        """Return the likeliest tokens of all rows of each chain, in one round trip if possible.

        Raises `ServerGone` if the engine does not answer, and `ServerRefused` if it refuses a chain.
        """
        ...

    def close(self) -> None:
        """Free the engine if it was made for this scorer. Later calls of `score` raise `ServerGone`."""
        ...


class ForestChains(NamedTuple):
    """The chains of a forest, with the places of the wanted nodes in them.

    Attributes:
        chains: they cover all wanted nodes.
        chain_of: the number of the chain of each wanted node.
        row_of: the row of each wanted node in its chain, counted from `Chain.first`.
    """

    chains: list[Chain]
    chain_of: Int64[np.ndarray, " wanted"]
    row_of: Int64[np.ndarray, " wanted"]


def chains_of(
    texts: Texts,
    prompt: Sequence[int],
    forest: Forest,
    wanted: Int64[np.ndarray, " wanted"],
    listed: int,
    namespace: str,
) -> ForestChains:
    """Return as few chains as cover the wanted nodes of a forest.

    Args:
        texts: the new tokens of the live beams, whose last tokens are the roots.
        prompt: the tokens before them.
        wanted: forest nodes, ascending.
        listed: see `Chain`.
        namespace: see `Chain`.
    """
    depths = forest.depths()
    before = np.array(prompt, dtype=np.int64)
    place_of = {int(node): place for place, node in enumerate(wanted)}
    chain_of = np.empty(len(wanted), dtype=np.int64)
    depth_of = np.empty(len(wanted), dtype=np.int64)
    chains: list[Chain] = []
    firsts: list[int] = []
    for leaf in reversed(wanted.tolist()):
        if leaf not in place_of:
            continue  # a longer chain covers it
        tokens = paths_to(texts, before, forest, np.array([leaf]))[0].tolist()
        position = len(tokens) - 1
        first = position
        for node in _path_up(forest, leaf):
            place = place_of.pop(node, None)
            if place is not None:
                chain_of[place] = len(chains)
                depth_of[place] = depths[node]
                first = position
            position -= 1
        firsts.append(first - (len(tokens) - 1 - int(depths[leaf])))  # as a depth
        chains.append(Chain(tokens, first, listed, namespace))
    row_of = depth_of - np.array(firsts, dtype=np.int64)[chain_of] if len(wanted) else depth_of
    return ForestChains(chains, chain_of, row_of)


def _path_up(forest: Forest, node: int) -> Iterator[int]:
    """Yield a node and all nodes above it, up to its root."""
    while node >= 0:
        yield node
        node = int(forest.parents[node])


def single_rows(chain: Chain) -> list[Chain]:
    """Return chains that each end with one wanted row of a chain."""
    return [
        chain._replace(tokens=chain.tokens[: stop + 1], first=stop) for stop in range(chain.first, len(chain.tokens))
    ]


def joined(parts: Sequence[Likeliest]) -> Likeliest:
    """Return the rows of several answers as one."""
    return Likeliest(np.concatenate([one.tokens for one in parts]), np.concatenate([one.logp for one in parts]))

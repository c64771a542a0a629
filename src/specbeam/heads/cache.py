"""What a head keeps of one session: a trie of pairs, their keys and values, and the features of the nodes above them."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from specbeam.core.forest import Forest, unknown_nodes
from specbeam.engines.kv.trie import Feed, KVTrie
from specbeam.heads.layers import LayerSizes, attended
from specbeam.records import Turn

CHUNK = 512  # rows of a prompt that are run at once


@dataclass(frozen=True, eq=False)
class PairRows:
    """Rows of a session that a pass of the head computes."""

    cache: "PairCache"
    feed: Feed
    features: Float[Tensor, "rows width"]  # of the nodes above
    states: Float[Tensor, "rows width"]  # the head's own, of the nodes above
    is_scored: Bool[Tensor, " rows"]  # whether the target has scored the node above, so that the row reads its feature

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store keys and values of the rows; return what they and the rows above them make of the queries."""
        return self.cache.attend(self.feed, layer, queries, keys, values)


class PairCache:
    """The rows of one session in a pair trunk.

    Row v is that of the pair (feature of the node above v, token of v). The first token of a text has no row: it is the
    empty path at the top of the trie, whose feature is known.

    Rows that were computed from the head's own states are for the drafts of one turn. `settle` takes them back, so that
    those which survive are computed again, from the features of the target.

    Args:
        prompt: the tokens of the prompt.
        first: features of the prompt's tokens but the last one, float[tokens - 1, width].
    """

    def __init__(self, prompt: list[int], first: Float[Tensor, "before width"], sizes: LayerSizes, layers: int) -> None:
        self.trie = KVTrie(prompt[1:])
        self.sizes = sizes
        # By local node: its feature, whether the target has scored it, and the head's own state.
        self.features = first.new_zeros(len(prompt), first.shape[1])
        self.features[: len(first)] = first
        self.is_scored = np.arange(len(prompt)) < len(first)
        self.states = torch.zeros_like(self.features)
        empty = first.new_zeros(0, sizes.kv_heads, sizes.head_size)
        self.keys = [empty] * layers
        self.values = [empty] * layers
        self.answered = 0  # number of forest nodes whose rows were asked for in this turn

    def enter(self, forest: Forest) -> Int64[np.ndarray, " wanted"]:
        """Add the new nodes of a forest; return the local nodes that are asked for: those that are new and not known."""
        self.trie.enter(forest)
        self._make_rows()
        wanted = unknown_nodes(self.answered, forest.size, forest.known.nodes)
        self.answered = forest.size
        return self.trie.local[wanted]

    def _make_rows(self) -> None:
        more = self.trie.size - len(self.features)
        if more > 0:
            self.features = torch.cat([self.features, self.features.new_zeros(more, self.features.shape[1])])
            self.states = torch.cat([self.states, self.states.new_zeros(more, self.states.shape[1])])
            self.is_scored = np.concatenate([self.is_scored, np.zeros(more, dtype=bool)])

    def next_rows(self) -> "PairRows | None":
        """Give slots to the next pending nodes that have something to read, and return them; None if none is left."""
        trie = self.trie
        start = trie.stored
        above = trie.parents[start : start + CHUNK]
        is_ready = self.is_scored[above] | (above < start)
        count = len(above) if is_ready.all() else int(is_ready.argmin())
        if count == 0:
            return None
        above = above[:count]
        read = torch.from_numpy(above).to(self.features.device)
        is_scored = torch.from_numpy(self.is_scored[above]).to(self.features.device)
        feed = trie.feed(count)
        for kept in (self.keys, self.values):
            for layer, rows in enumerate(kept):
                missing = trie.capacity - len(rows)
                if missing > 0:
                    kept[layer] = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
        return PairRows(self, feed, self.features[read], self.states[read], is_scored)

    def attend(self, feed: Feed, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store keys and values of fed rows; return what they and the rows above them make of the queries."""
        device = queries.device
        slots = torch.from_numpy(feed.slots).to(device)
        self.keys[layer][slots] = keys
        self.values[layer][slots] = values
        extent = self.trie.extent
        seen = torch.from_numpy(np.ascontiguousarray(feed.seen[:, :extent])).to(device)
        return attended(queries, self.keys[layer][:extent], self.values[layer][:extent], seen)

    def learn(self, count: int, states: Float[Tensor, "rows width"]) -> None:
        """Keep the head's states of the `count` nodes that were stored last."""
        stored = self.trie.stored
        self.states[stored - count : stored] = states

    def settle(self, turn: Turn, features: Float[Tensor, "nodes width"]) -> None:
        """Keep what the surviving beams need.

        Args:
            features: of the forest nodes that the target has scored in this turn, ascending.
        """
        forest = turn.forest
        kept = int((forest.parents[forest.known.nodes] >= 0).sum())
        start = forest.roots + kept  # what the forest began with, none of which is a draft of this turn
        self.rewind(start)
        self.trie.enter(forest)
        self._make_rows()
        fresh = self.trie.local[turn.scored_nodes]
        self.features[torch.from_numpy(fresh).to(self.features.device)] = features
        self.is_scored[fresh] = True
        former, _ = self.trie.settle(turn)
        self._keep(former)
        self.answered = 0

    def rewind(self, nodes: int) -> None:
        """Take back the rows of all nodes of this turn's forest but the first `nodes`."""
        if self.trie.known > nodes:
            self._keep(self.trie.rewind(nodes))
        self.answered = min(self.answered, nodes)

    def _keep(self, former: Int64[np.ndarray, " left"]) -> None:
        """Keep the rows of the local nodes that remain; -1 and numbers beyond stand for nodes without any."""
        known = former < len(self.features)
        at = torch.from_numpy(np.where(known, former, 0)).to(self.features.device)
        self.features = self.features[at]
        self.states = self.states[at]
        self.is_scored = self.is_scored[np.where(known, former, 0)] & known

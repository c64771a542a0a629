"""An exit layer of the compiled forward: a layer and a norm between the first layers of a model and its head."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from specbeam.engines.kv.trie import Feed


@dataclass(frozen=True, eq=False)
class ExitLayer:
    """A layer that reads what leaves the first layers of a model. The head of the model makes logits of its normed output.

    Its keys and values are in the same slots as those of the model, in a layer of their own, so each token that the model
    stores has one row more.

    Attributes:
        after: the number of layers that run before it.
        weights: its weights, as `decoder.Weights` of one layer.
        norm: float32[hidden], the weight of its norm.
        kinds: int64[1], the kind of its attention, an index into `CompiledDecoder.names`.
        place: its layer in the store.
    """

    after: int
    weights: Any
    norm: Float32[np.ndarray, " hidden"]
    kinds: Int64[np.ndarray, " 1"]
    place: int


@dataclass(frozen=True, eq=False)
class Behind:
    """Nodes of a session that the first layers have seen and the exit layer has not, such as the last layer of a draft.

    Most of them are refused. Those that live on go through the exit layer together with the next draft.

    Attributes:
        feed: these nodes, with copies of the slots that they see.
        states: what left the first layers.
        nodes: the stored local node of each; -1 if it has no number any more, as it is above those that have.
    """

    feed: Feed
    states: Float32[np.ndarray, "n hidden"]
    nodes: Int64[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.nodes)

    def among(self, rows: Int64[np.ndarray, " kept"], nodes: Int64[np.ndarray, " kept"]) -> "Behind":
        """Return some of these rows, of which the nodes have new numbers."""
        return Behind(self.feed.only(rows), self.states[rows], nodes)

    def moved(self, source: Int64[np.ndarray, " n"], goal: Int64[np.ndarray, " n"]) -> "Behind":
        """Return the same nodes after tokens were moved from slots to others."""
        slots = self.feed.slots.copy()
        seen = self.feed.seen.copy()
        for before, after in zip(source.tolist(), goal.tolist(), strict=True):
            slots[self.feed.slots == before] = after
        known = source < seen.shape[1]  # slots that the trie got later are seen by none of these rows
        columns = self.feed.seen[:, source[known]]
        seen[:, source[known]] = False
        seen[:, goal[known]] = columns
        return Behind(replace(self.feed, slots=slots, seen=seen), self.states, self.nodes)

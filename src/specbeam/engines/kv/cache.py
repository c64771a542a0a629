"""A session's cache for models that transformers runs: its trie, its row of the store, and the logits of a turn."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.core.answers import scored_rows
from specbeam.core.forest import Forest, unknown_nodes
from specbeam.core.records import Scored, Turn
from specbeam.engines.kv.member import RowMember
from specbeam.engines.kv.rows import rows_at
from specbeam.engines.kv.trie import KVTrie

Nodes = Int64[np.ndarray, " _"]
Logits = Float[torch.Tensor, "_ vocab"]
Columns = tuple[torch.Tensor, ...]  # tensors of the same rows: logits, and hidden states if a part needs them


class PaddedCache(RowMember):
    """A session's cache for models whose outputs are logits, in batches that are padded.

    Rows of logits are kept until the turn is settled; rows of nodes that become roots, for the next turn.
    """

    def __init__(self, row: int, prompt: list[int]) -> None:
        super().__init__(row, prompt)
        self.trie = KVTrie(prompt)
        self.answered = 0  # number of forest nodes whose logits were handed out in this turn
        # Rows by ascending local node: first of roots that were stored in an earlier turn, then of this turn's passes.
        self._blocks: list[tuple[Nodes, Columns]] = []

    def enter(self, forest: Forest) -> Nodes:
        """Add the new nodes of a forest; return the local nodes whose logits the next pass has to compute."""
        self.trie.enter(forest)
        wanted = self._wanted(forest)
        if self.answered:  # then these nodes are new in this turn, and none of them is stored yet
            return wanted
        return wanted[wanted >= self.trie.stored]

    def learn(self, nodes: Nodes, columns: Columns) -> None:
        """Keep the outputs of a pass for the nodes that `enter` returned."""
        if self.answered == 0 and (nodes[1:] < nodes[:-1]).any():  # roots are in the order of their beams
            order = nodes.argsort()
            nodes = nodes[order]
            columns = tuple(rows_at(rows, order) for rows in columns)
        self._blocks.append((nodes, columns))

    def _wanted(self, forest: Forest) -> Nodes:
        return self.trie.local[unknown_nodes(self.answered, self.trie.known, forest.known.nodes)]

    def answer(self, forest: Forest) -> Scored:
        """Return the rows of the forest nodes that were not handed out yet and are not known; mark all as handed out."""
        wanted = self._wanted(forest)
        later = self.answered > 0
        self.answered = self.trie.known
        nodes, columns = self._blocks[-1]
        newest = len(wanted) > 0 if later else np.array_equal(nodes, wanted)
        return hand_out(self, *(columns if newest else self._rows(wanted)))

    def settle(self, turn: Turn) -> None:
        """Keep the surviving beams in the trie, and the rows of those roots of the next turn that were scored already."""
        _, before = self.trie.settle(turn)
        now = self.trie.root_at
        scored = np.concatenate([nodes for nodes, _ in self._blocks] or [before[:0]])
        kept = np.flatnonzero((now < self.trie.stored) & np.isin(before, scored))
        kept = kept[now[kept].argsort()]
        self._blocks = [(now[kept], self._rows(before[kept]))] if len(kept) else []
        self.answered = 0

    def _rows(self, wanted: Nodes) -> Columns:
        """Return the rows of these local nodes; raise `IndexError` if any was not scored."""
        pieces: list[tuple[Nodes, Columns]] = []  # places among the wanted nodes, and their rows
        for nodes, columns in self._blocks:
            at = nodes.searchsorted(wanted)
            at[at == len(nodes)] = 0  # beyond the last node; no node is there if the pass needed no rows
            places = np.flatnonzero(nodes[at] == wanted) if len(nodes) else np.flatnonzero(nodes)
            if len(places) == len(wanted):
                return tuple(rows_at(rows, at) for rows in columns)
            pieces.append((places, tuple(rows_at(rows, at[places]) for rows in columns)))
        if sum(len(places) for places, _ in pieces) != len(wanted):
            raise IndexError(f"the rows of local nodes {wanted} are needed, but some of them were not scored")
        outs = tuple(rows.new_empty(len(wanted), rows.shape[1]) for rows in pieces[0][1])
        for places, columns in pieces:
            for out, rows in zip(outs, columns, strict=True):
                out[torch.from_numpy(places).to(out.device)] = rows
        return outs


def hand_out(cache: Any, logits: torch.Tensor, *hidden: torch.Tensor) -> Scored:
    """Return these rows as the parts of a session need them, with the hidden states of the prompt that the cache holds.

    The cache gives up its hidden states of the prompt, so that they are handed out only once.

    Args:
        hidden: one tensor, the hidden states of the same rows; needed only if a part needs hidden states.
    """
    if not cache.needs.states:
        return scored_rows(cache.needs, logits)
    (states,) = hidden
    prompt_rows = cache.prompt_rows
    cache.prompt_rows = []
    prompt = torch.cat(prompt_rows) if prompt_rows else states[:0]
    return scored_rows(cache.needs, logits, states if cache.needs.hidden or cache.needs.taps else states[:0], prompt)

"""A session's cache for models run by transformers: its trie, its row of the store, and the logits of a turn."""

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
Columns = tuple[torch.Tensor, ...]  # logits, and hidden states if a part needs them, of the same rows


class PaddedCache(RowMember):
    """A session's cache for models that run padded batches.

    It keeps rows of logits until the turn is settled, and the rows of new roots for the next turn.
    """

    def __init__(self, row: int, prompt: list[int]) -> None:
        super().__init__(row, prompt)
        self.trie = KVTrie(prompt)
        self.answered = 0  # number of forest nodes whose logits were returned in this turn
        # Rows by ascending local node: first those of roots stored in an earlier turn, then those of this turn's passes.
        self._blocks: list[tuple[Nodes, Columns]] = []
        self.has_stale_rows = False  # whether runs have moved the roots without their logits

    @property
    def takes_embeddings(self) -> bool:
        """Whether some rows of the session may have embeddings instead of tokens."""
        return self.extra_inputs is not None or self.vectors is not None

    @property
    def is_for_steps(self) -> bool:
        """Whether compiled runs can run its passes: all inputs are tokens."""
        return self.extra_inputs is None and self.context is None and not self.has_vectors

    def finish_run(self, roots: int) -> None:
        """Read the `roots` roots from the arrays, in which steps have settled the last turn of a run."""
        self.trie.settle_roots(roots)
        self.answered = 0
        self._blocks = []
        self.has_stale_rows = True

    def put_rows(self, nodes: Nodes, logits: Logits) -> None:
        """Store the logits of local nodes, ascending, that a pass has computed again."""
        self._blocks.insert(0, (nodes, (logits,)))

    def enter(self, forest: Forest) -> Nodes:
        """Add the new nodes of a forest; return the local nodes whose logits the next pass must compute."""
        self.trie.enter(forest)
        wanted = self._wanted(forest)
        if self.answered:  # these nodes are new in this turn, so none is stored
            return wanted
        return wanted[wanted >= self.trie.stored]

    def learn(self, nodes: Nodes, columns: Columns) -> None:
        """Store the outputs of a pass for the nodes that `enter` returned."""
        if self.answered == 0 and (nodes[1:] < nodes[:-1]).any():  # roots are in the order of their beams
            order = nodes.argsort()
            nodes = nodes[order]
            columns = tuple(rows_at(rows, order) for rows in columns)
        self._blocks.append((nodes, columns))

    def _wanted(self, forest: Forest) -> Nodes:
        return self.trie.local[unknown_nodes(self.answered, self.trie.known, forest.known.nodes)]

    def answer(self, forest: Forest) -> Scored:
        """Return the rows of the forest nodes that were not returned before and are not known; mark all as returned."""
        wanted = self._wanted(forest)
        later = self.answered > 0
        self.answered = self.trie.known
        nodes, columns = self._blocks[-1]
        newest = len(wanted) > 0 if later else np.array_equal(nodes, wanted)
        return hand_out(self, *(columns if newest else self._rows(wanted)))

    def settle(self, turn: Turn) -> None:
        """Keep the surviving beams in the trie, and the rows of new roots that are already scored."""
        _, before = self.trie.settle(turn)
        now = self.trie.root_at
        scored = np.concatenate([nodes for nodes, _ in self._blocks] or [before[:0]])
        roots = np.flatnonzero((now < self.trie.stored) & np.isin(before, scored))
        roots = roots[now[roots].argsort()]
        self._blocks = [(now[roots], self._rows(before[roots]))] if len(roots) else []
        self.answered = 0

    def _rows(self, wanted: Nodes) -> Columns:
        """Return the rows of these local nodes. Raises `IndexError` if any was not scored."""
        pieces: list[tuple[Nodes, Columns]] = []  # indices into the wanted nodes, and their rows
        for nodes, columns in self._blocks:
            at = nodes.searchsorted(wanted)
            at[at == len(nodes)] = 0  # beyond the last node; a block may be empty
            places = np.flatnonzero(nodes[at] == wanted) if len(nodes) else np.flatnonzero(nodes)
            if len(places) == len(wanted):
                return tuple(rows_at(rows, at) for rows in columns)
            pieces.append((places, tuple(rows_at(rows, at[places]) for rows in columns)))
        if sum(len(places) for places, _ in pieces) != len(wanted):
            raise IndexError(f"the logits of local nodes {wanted} are needed, but some of these were not scored")
        outs = tuple(rows.new_empty(len(wanted), rows.shape[1]) for rows in pieces[0][1])
        for places, columns in pieces:
            for out, rows in zip(outs, columns, strict=True):
                out[torch.from_numpy(places).to(out.device)] = rows
        return outs


def hand_out(cache: Any, logits: torch.Tensor, *hidden: torch.Tensor) -> Scored:
    """Return these rows in the form that the session's parts need, with the prompt's hidden states in the cache.

    The cache drops the prompt's hidden states, so that they are returned only once.

    Args:
        hidden: one tensor, the hidden states of the same rows; required if a part needs hidden states.
    """
    if not cache.needs.states:
        return scored_rows(cache.needs, logits)
    (states,) = hidden
    prompt_rows = cache.prompt_rows
    cache.prompt_rows = []
    prompt = torch.cat(prompt_rows) if prompt_rows else states[:0]
    return scored_rows(cache.needs, logits, states if cache.needs.hidden or cache.needs.taps else states[:0], prompt)

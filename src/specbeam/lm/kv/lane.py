"""One session in one model: its trie, its row of the store's buffers, and the outputs of the nodes that a turn asks for."""

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.core.forest import Forest
from specbeam.lm.kv.rows import picked
from specbeam.lm.kv.trie import KVTrie
from specbeam.records import Turn

Nodes = Int64[np.ndarray, " _"]
Logits = Float[torch.Tensor, "_ vocab"]


class Lane:
    """For models whose outputs are logits."""

    def __init__(self, row: int, prompt: list[int]) -> None:
        self.row = row
        self.trie = KVTrie(prompt)
        self.answered = 0  # forest nodes whose logits were handed out in this turn
        # By ascending local nodes: those of roots that were stored in an earlier turn, then those of this turn's passes.
        self._blocks: list[tuple[Nodes, Logits]] = []

    def enter(self, forest: Forest) -> Nodes:
        """Take in new nodes; give the local nodes whose logits a pass has to compute."""
        self.trie.enter(forest)
        wanted = self.trie.local[self.answered :]
        if self.answered:  # then it came in this turn, and is not stored yet
            return wanted.copy()
        return wanted[wanted >= self.trie.stored]

    def learn(self, nodes: Nodes, rows: Logits) -> None:
        """Logits of what `enter` gave."""
        if self.answered == 0 and (nodes[1:] < nodes[:-1]).any():  # roots stand in the order of their beams
            order = nodes.argsort()
            nodes, rows = nodes[order], picked(rows, order)
        self._blocks.append((nodes, rows))

    def answer(self) -> Logits:
        """Logits of the forest nodes not handed out yet."""
        wanted, later = self.trie.local[self.answered :], self.answered > 0
        self.answered = self.trie.known
        nodes, rows = self._blocks[-1]
        newest = len(wanted) > 0 if later else np.array_equal(nodes, wanted)
        return rows if newest else self._rows(wanted)

    def settle(self, turn: Turn) -> None:
        _, before = self.trie.settle(turn)
        now = self.trie.root_at
        kept = np.flatnonzero(now < self.trie.stored)
        kept = kept[now[kept].argsort()]
        self._blocks = [(now[kept], self._rows(before[kept]))] if len(kept) else []
        self.answered = 0

    def _rows(self, wanted: Nodes) -> Logits:
        found: list[tuple[Nodes, Logits]] = []
        for nodes, rows in self._blocks:
            at = np.minimum(nodes.searchsorted(wanted), len(nodes) - 1)
            mine = np.flatnonzero(nodes[at] == wanted)
            if len(mine) == len(wanted):
                return picked(rows, at)
            found.append((mine, picked(rows, at[mine])))
        if sum(len(mine) for mine, _ in found) != len(wanted):
            raise IndexError(f"local nodes {wanted} were asked for, of which some were not scored")
        out = found[0][1].new_empty(len(wanted), found[0][1].shape[1])
        for mine, rows in found:
            out[torch.from_numpy(mine).to(out.device)] = rows
        return out

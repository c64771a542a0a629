"""One session in one model: its trie, its row of the store's buffers, and the outputs of the nodes that a turn asks for."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.core.forest import Forest
from specbeam.engines.answers import answered
from specbeam.engines.kv.member import RowMember
from specbeam.engines.kv.rows import picked
from specbeam.engines.kv.trie import KVTrie
from specbeam.records import Scored, Turn

Nodes = Int64[np.ndarray, " _"]
Logits = Float[torch.Tensor, "_ vocab"]
Columns = tuple[torch.Tensor, ...]  # what is known of the same rows: logits, and hidden states where a part needs them


class PaddedCache(RowMember):
    """For models whose outputs are logits."""

    def __init__(self, row: int, prompt: list[int]) -> None:
        super().__init__(row, prompt)
        self.trie = KVTrie(prompt)
        self.answered = 0  # forest nodes whose logits were handed out in this turn
        # By ascending local nodes: those of roots that were stored in an earlier turn, then those of this turn's passes.
        self._blocks: list[tuple[Nodes, Columns]] = []

    def enter(self, forest: Forest) -> Nodes:
        """Take in new nodes; give the local nodes whose logits a pass has to compute."""
        self.trie.enter(forest)
        wanted = self.trie.local[self.answered :]
        if self.answered:  # then it came in this turn, and is not stored yet
            return wanted.copy()
        return wanted[wanted >= self.trie.stored]

    def learn(self, nodes: Nodes, columns: Columns) -> None:
        """Take in what a pass found of the nodes that `enter` gave."""
        if self.answered == 0 and (nodes[1:] < nodes[:-1]).any():  # roots stand in the order of their beams
            order = nodes.argsort()
            nodes = nodes[order]
            columns = tuple(picked(rows, order) for rows in columns)
        self._blocks.append((nodes, columns))

    def answer(self) -> Scored:
        """Return what is known of the forest nodes not handed out yet."""
        wanted = self.trie.local[self.answered :]
        later = self.answered > 0
        self.answered = self.trie.known
        nodes, columns = self._blocks[-1]
        newest = len(wanted) > 0 if later else np.array_equal(nodes, wanted)
        return told(self, *(columns if newest else self._rows(wanted)))

    def settle(self, turn: Turn) -> None:
        """Keep the rows of roots that are stored, and what the surviving beams need in the trie."""
        _, before = self.trie.settle(turn)
        now = self.trie.root_at
        kept = np.flatnonzero(now < self.trie.stored)
        kept = kept[now[kept].argsort()]
        self._blocks = [(now[kept], self._rows(before[kept]))] if len(kept) else []
        self.answered = 0

    def _rows(self, wanted: Nodes) -> Columns:
        found: list[tuple[Nodes, Columns]] = []
        for nodes, columns in self._blocks:
            at = np.minimum(nodes.searchsorted(wanted), len(nodes) - 1)
            mine = np.flatnonzero(nodes[at] == wanted)
            if len(mine) == len(wanted):
                return tuple(picked(rows, at) for rows in columns)
            found.append((mine, tuple(picked(rows, at[mine]) for rows in columns)))
        if sum(len(mine) for mine, _ in found) != len(wanted):
            raise IndexError(f"local nodes {wanted} were asked for, of which some were not scored")
        outs = tuple(rows.new_empty(len(wanted), rows.shape[1]) for rows in found[0][1])
        for mine, columns in found:
            for out, rows in zip(outs, columns, strict=True):
                out[torch.from_numpy(mine).to(out.device)] = rows
        return outs


def told(cache: Any, logits: torch.Tensor, *hidden: torch.Tensor) -> Scored:
    """Return what the parts of a session need of these rows, and once what there is of the prompt's."""
    if not cache.needs.states:
        return answered(cache.needs, logits)
    (states,) = hidden
    waiting = cache.prompt_rows
    cache.prompt_rows = []
    prompt = torch.cat(waiting) if waiting else states[:0]
    return answered(cache.needs, logits, states if cache.needs.hidden else states[:0], prompt)

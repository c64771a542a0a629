"""One session in a compiled model: its trie, and what logits of stored nodes are made from."""

import numpy as np
from jaxtyping import Float32

from specbeam.engines.kv.member import RowMember
from specbeam.engines.kv.steps import BLOCK
from specbeam.engines.kv.trie import Feed, KVTrie, widened
from specbeam.records import Turn

SHORT = 4 * BLOCK  # tokens of a short text, and of the drafts of a turn: to widen costs more than to have room


class CpuCache(RowMember):
    """For the compiled forward, whose outputs are what logits are made from: few numbers a row, kept for every node."""

    def __init__(self, row: int, prompt: list[int], hidden: int) -> None:
        super().__init__(row, prompt)
        self.trie = KVTrie(prompt, SHORT)
        self.answered = 0
        self.outputs = np.zeros((0, hidden), dtype=np.float32)  # by stored local node
        # Where the first layers are run ahead of the others: what is behind them, by stored local node; of how many forest
        # nodes it was handed out in this turn; and the newest nodes, which the other layers have not seen yet.
        self.early = np.zeros((0, hidden), dtype=np.float32)
        self.answered_early = 0
        self.half: list[Feed] = []
        self.half_prompt: list[tuple[int, int]] = []

    @property
    def waiting_half(self) -> int:
        """How many stored nodes the layers behind the first ones have not seen; they are the newest."""
        return sum(len(feed) for feed in self.half)

    def make_room(self, fresh: int) -> None:
        """For a forest with so many new nodes, all of which are to be stored."""
        self.trie.make_room(fresh)
        self.trie.make_slots(self.trie.waiting + fresh)
        self._make_rows()

    def _make_rows(self) -> None:
        rows = len(self.trie.arrays.seen)
        if rows > len(self.outputs):
            self.outputs = widened(self.outputs, rows, self.outputs.shape[1])
        if self.early_layers is not None and rows > len(self.early):
            self.early = widened(self.early, rows, self.early.shape[1])

    def ran(self) -> None:
        """A loop has settled it."""
        self.trie.root_at = self.trie.local.copy()
        self.answered = 0

    def learn(self, rows: Float32[np.ndarray, "n hidden"]) -> None:
        """Outputs of the nodes that were stored last."""
        self._make_rows()
        stored = self.trie.stored
        self.outputs[stored - len(rows) : stored] = rows

    def learn_early(self, feed: Feed, rows: Float32[np.ndarray, "n hidden"], prompt: tuple[int, int]) -> None:
        """What is behind the first layers of the nodes that were stored last; the others have to see them yet.

        Args:
            prompt: the first of these nodes, and how many of them stand before the first root.
        """
        self._make_rows()
        stored = self.trie.stored
        self.early[stored - len(rows) : stored] = rows
        self.half.append(feed)
        self.half_prompt.append(prompt)

    def answer_early(self) -> Float32[np.ndarray, "n hidden"]:
        """What is behind the first layers of the forest nodes not handed out yet."""
        wanted = self.trie.local[self.answered_early :]
        self.answered_early = self.trie.known
        return self.early[wanted]

    def answer(self) -> Float32[np.ndarray, "n hidden"]:
        """Outputs of the forest nodes not handed out yet."""
        wanted = self.trie.local[self.answered :]
        self.answered = self.trie.known
        return self.outputs[wanted]

    def settle(self, turn: Turn) -> None:
        former, _ = self.trie.settle(turn)
        self._make_rows()
        stored = self.trie.stored
        self.outputs[:stored] = self.outputs[former[:stored]]
        self.answered = 0
        if self.early_layers is not None:
            self.early[:stored] = self.early[former[:stored]]
            self.answered_early = 0

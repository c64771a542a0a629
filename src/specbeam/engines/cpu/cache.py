"""A session's cache for the compiled forward: its trie, and the hidden states of its stored nodes."""

import numpy as np
from jaxtyping import Float32, Int64

from specbeam.core.forest import Forest, unknown_nodes
from specbeam.engines.kv.member import RowMember
from specbeam.engines.kv.steps import BLOCK
from specbeam.engines.kv.trie import Feed, KVTrie, widened
from specbeam.records import Turn

# Tokens of a short text with the drafts of a turn. There is room for them from the start, as growing costs more.
SHORT = 4 * BLOCK


class CpuCache(RowMember):
    """A session's cache for the compiled forward.

    The forward returns hidden states, from which logits are computed when they are wanted: as these are few numbers per row,
    they are kept for every stored node.

    If the first layers are run ahead of the others (see `LiveLayers`), a node goes through two passes: `early` and
    `answered_early` belong to the first one, and nodes that have yet to go through the second one are `unfinished`.

    Attributes:
        answered: number of forest nodes whose logits were handed out in this turn.
        outputs: float32[room, hidden], the output of the last layer by stored local node.
        taps: float32[room, taps * hidden], the states that enter the layers of `needs.taps`, by stored local node.
        early: float32[room, hidden], the output of the first layers by stored local node.
        answered_early: number of forest nodes whose output of the first layers was handed out in this turn.
        unfinished: the feeds of the newest nodes, which the other layers have not seen yet.
        unfinished_prompt: for each of these feeds, its first stored local node and its number of nodes before the first
            root.
    """

    def __init__(self, row: int, prompt: list[int], hidden: int) -> None:
        super().__init__(row, prompt)
        self.trie = KVTrie(prompt, SHORT)
        self.answered = 0
        self.outputs = np.zeros((0, hidden), dtype=np.float32)  # by stored local node
        self.taps = np.zeros((0, 0), dtype=np.float32)
        self.early = np.zeros((0, hidden), dtype=np.float32)
        self.answered_early = 0
        self.unfinished: list[Feed] = []
        self.unfinished_prompt: list[tuple[int, int]] = []

    @property
    def is_for_steps(self) -> bool:
        """Whether a step can run its passes: it looks tokens up, and runs all layers at once."""
        return self.vectors is None and self.early_layers is None

    @property
    def unfinished_nodes(self) -> int:
        """The number of stored nodes that only the first layers have seen; they are the newest ones."""
        return sum(len(feed) for feed in self.unfinished)

    def make_room(self, fresh: int) -> None:
        """Make room for `fresh` new forest nodes, and to store them and all pending nodes."""
        self.trie.make_room(fresh)
        self.trie.make_slots(self.trie.pending + fresh)
        self._make_rows()

    def _make_rows(self) -> None:
        rows = len(self.trie.arrays.seen)
        if rows > len(self.outputs):
            self.outputs = widened(self.outputs, rows, self.outputs.shape[1])
            self.taps = widened(self.taps, rows, len(self.needs.taps) * self.outputs.shape[1])
        if self.early_layers is not None and rows > len(self.early):
            self.early = widened(self.early, rows, self.early.shape[1])

    def finish_run(self, roots: int) -> None:
        """Take over the `roots` roots from the arrays, after steps have settled the last turn of a run there."""
        self.trie.root_at = self.trie.local[:roots].copy()
        self.answered = 0

    def learn(self, rows: Float32[np.ndarray, "n hidden"], tapped: Float32[np.ndarray, "n tapped"]) -> None:
        """Keep the outputs of the last layer for the nodes that were stored last, and the states at their taps."""
        self._make_rows()
        stored = self.trie.stored
        self.outputs[stored - len(rows) : stored] = rows
        self.taps[stored - len(rows) : stored] = tapped

    def learn_early(self, feed: Feed, rows: Float32[np.ndarray, "n hidden"], prompt: tuple[int, int]) -> None:
        """Keep the outputs of the first layers for the nodes that were stored last, and mark these as unfinished.

        Args:
            feed: these nodes.
            prompt: the first of these local nodes, and how many of them come before the first root.
        """
        self._make_rows()
        stored = self.trie.stored
        self.early[stored - len(rows) : stored] = rows
        self.unfinished.append(feed)
        self.unfinished_prompt.append(prompt)

    def answer_early(self) -> Float32[np.ndarray, "n hidden"]:
        """Return the outputs of the first layers for the forest nodes not handed out yet, and mark these as handed out."""
        wanted = self.trie.local[self.answered_early :]
        self.answered_early = self.trie.known
        return self.early[wanted]

    def answer(self, forest: Forest) -> Int64[np.ndarray, " n"]:
        """Return the local nodes of the forest nodes that were not handed out yet and are not known.

        All nodes are then marked as handed out.
        """
        wanted = unknown_nodes(self.answered, self.trie.known, forest.known.nodes)
        self.answered = self.trie.known
        return self.trie.local[wanted]

    def settle(self, turn: Turn) -> None:
        former, _ = self.trie.settle(turn)
        self._make_rows()
        stored = self.trie.stored
        self.outputs[:stored] = self.outputs[former[:stored]]
        self.taps[:stored] = self.taps[former[:stored]]
        self.answered = 0
        if self.early_layers is not None:
            self.early[:stored] = self.early[former[:stored]]
            self.answered_early = 0

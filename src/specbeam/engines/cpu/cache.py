"""A session's cache for the compiled forward: its trie, and the hidden states of its stored nodes."""

import numpy as np
from jaxtyping import Float32, Int64

from specbeam.core.forest import Forest, unknown_nodes
from specbeam.engines.cpu.exit import Behind
from specbeam.engines.kv.member import RowMember
from specbeam.engines.kv.steps import BLOCK
from specbeam.engines.kv.trie import Feed, KVTrie, widened
from specbeam.errors import BadForest
from specbeam.records import Turn

# Tokens of a short text with the drafts of a turn. There is room for them from the start, as growing costs more.
SHORT = 4 * BLOCK


class CpuCache(RowMember):
    """A session's cache for the compiled forward.

    The forward returns hidden states, from which logits are computed when they are wanted: as these are few numbers per row,
    they are kept for every stored node.

    If the first layers are run ahead of the others (see `LiveLayers`), a node goes through two passes: `early` and
    `answered_early` belong to the first one, and nodes that have yet to go through the second one are `unfinished`. An exit
    layer (see `ExitLM`) runs between the two, on the nodes that are drafted from.

    Attributes:
        answered: number of forest nodes whose logits were handed out in this turn.
        outputs: float32[room, hidden], the output of the last layer by stored local node.
        taps: float32[room, taps * hidden], the states that enter the layers of `needs.taps`, by stored local node.
        early: float32[room, hidden], the output of the first layers by stored local node.
        exited: float32[room, hidden], the output of the exit layer by stored local node, where it has run.
        behind: nodes that the first layers have seen, and the exit layer has not.
        answered_early: number of forest nodes whose output of the first layers was handed out in this turn.
        early_forest: the forest of this turn as the first layers have seen it.
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
        self.exited = np.zeros((0, hidden), dtype=np.float32)
        self.behind: list[Behind] = []
        self.answered_early = 0
        self.early_forest = Forest.rooted([])
        self.unfinished: list[Feed] = []
        self.unfinished_prompt: list[tuple[int, int]] = []

    @property
    def is_for_steps(self) -> bool:
        """Whether a step can run its passes: it looks tokens up, and runs all layers at once."""
        return self.vectors is None and self.extra_inputs is None and self.early_layers is None

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
        if self.needs.exit_layer is not None and rows > len(self.exited):
            self.exited = widened(self.exited, rows, self.exited.shape[1])

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
        if self.needs.exit_layer is not None:
            lasting = feed.only(np.arange(len(feed)))  # a copy, as the arrays of the trie change
            self.behind.append(Behind(lasting, rows, np.arange(stored - len(rows), stored)))

    def learn_exits(self, rows: Float32[np.ndarray, "n hidden"]) -> None:
        """Keep the outputs of the exit layer for all nodes that were `behind`; then none is."""
        self._make_rows()
        nodes = np.concatenate([behind.nodes for behind in self.behind])
        self.exited[nodes[nodes >= 0]] = rows[nodes >= 0]
        self.behind = []

    def answer_early(self, forest: Forest) -> Float32[np.ndarray, "n hidden"]:
        """Return what logits of early drafts are made of, for the forest nodes not handed out yet that are not known.

        That is the output of the exit layer if there is one, else of the first layers. All nodes are then marked as handed
        out.
        """
        wanted = self.trie.local[unknown_nodes(self.answered_early, self.trie.known, forest.known.nodes)]
        self.answered_early = self.trie.known
        return (self.early if self.needs.exit_layer is None else self.exited)[wanted]

    def fit(self, forest: Forest) -> None:
        """Take back what the first layers have seen in this turn and a forest does not hold, and free its slots.

        Raises `BadForest` if the forest holds nodes that they have seen after others that they have not.
        """
        if self.unfinished:
            kept = _nodes_in_both(self.early_forest, forest)
            if len(kept) < self.early_forest.size:
                self._select(kept)

    def _select(self, nodes: Int64[np.ndarray, " kept"]) -> None:
        """Take back all forest nodes that the first layers have seen in this turn but these, see `KVTrie.select`."""
        trie = self.trie
        first = trie.stored - self.unfinished_nodes
        late = np.arange(first, trie.stored)
        before_roots = late[~np.isin(late, trie.local)]
        slots = np.concatenate([feed.slots for feed in self.unfinished])
        former = trie.select(nodes, before_roots)
        self._rename(former)
        names = np.full(self.early_forest.size + 1, -1)  # the last entry renames -1 to itself
        names[nodes] = np.arange(len(nodes))
        parents = names[self.early_forest.parents[nodes]]
        self.early_forest = Forest(self.early_forest.tokens[nodes], parents)
        self.answered_early = len(nodes)
        start = int(np.searchsorted(former, first))
        fed = trie.arrays.nodes[:, start : trie.stored]
        kept_slots = slots[np.isin(late, former)]
        feed = Feed(fed[0], fed[2], kept_slots, trie.arrays.seen[start : trie.stored], fed[1] - start)
        self.unfinished = [feed] if len(feed) else []
        self.unfinished_prompt = [
            (int(np.searchsorted(former, node)), count) for node, count in self.unfinished_prompt if count
        ]

    def _rename(self, former: Int64[np.ndarray, " left"]) -> None:
        """Keep what there is of the local nodes that remain, given the number that each had before."""
        self._make_rows()
        stored = self.trie.stored
        for rows in (self.outputs, self.taps, self.early, self.exited):
            if len(rows):
                rows[:stored] = rows[former[:stored]]
        self.behind = [left for behind in self.behind if len(left := self._left_of(behind, former))]

    def _left_of(self, behind: Behind, former: Int64[np.ndarray, " left"]) -> Behind:
        """Return the nodes whose slots are still in use, with the numbers that they have now."""
        kept = np.flatnonzero(self.trie.used[behind.feed.slots])
        nodes = behind.nodes[kept]
        at = np.minimum(np.searchsorted(former, nodes), len(former) - 1)
        return behind.among(kept, np.where((former[at] == nodes) & (nodes >= 0), at, -1))

    def follow_slots(self, source: Int64[np.ndarray, " n"], goal: Int64[np.ndarray, " n"]) -> None:
        """See `RowMember.follow_slots`."""
        self.behind = [behind.moved(source, goal) for behind in self.behind]

    def answer(self, forest: Forest) -> Int64[np.ndarray, " n"]:
        """Return the local nodes of the forest nodes that were not handed out yet and are not known.

        All nodes are then marked as handed out.
        """
        wanted = unknown_nodes(self.answered, self.trie.known, forest.known.nodes)
        self.answered = self.trie.known
        return self.trie.local[wanted]

    def settle(self, turn: Turn) -> None:
        self.fit(turn.forest)
        former, _ = self.trie.settle(turn)
        self._rename(former)
        self.answered = 0
        self.answered_early = 0


def _nodes_in_both(seen: Forest, forest: Forest) -> Int64[np.ndarray, " both"]:
    """Return the nodes of `seen` that are in a forest, too, ascending; these must come first in it, in the same order.

    Raises `BadForest` if they do not.
    """
    size = seen.size
    if forest.size >= size and _begin_alike(seen, forest, size):
        return np.arange(size)
    roots = seen.roots
    places = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(seen.parents.tolist(), seen.tokens.tolist(), strict=True))
        if node >= roots
    }
    names = [*range(roots)]
    for parent, token in zip(forest.parents[roots:].tolist(), forest.tokens[roots:].tolist(), strict=True):
        above = names[parent] if 0 <= parent < len(names) else size
        names.append(places.get((above, token), size))  # `size` stands for a node that they have not seen
    kept = np.array(names)
    kept = kept[: int(np.count_nonzero(kept < size))]
    is_in_order = bool((kept < size).all() and (kept[1:] > kept[:-1]).all())
    if not is_in_order or not _begin_alike(seen, forest, roots):
        raise BadForest(
            f"the first layers have seen {size} nodes of this turn, and those of them that are in the forest of "
            f"{forest.size} do not come first in it, in the same order"
        )
    return kept


def _begin_alike(one: Forest, other: Forest, size: int) -> bool:
    """Return whether two forests begin with the same `size` nodes."""
    first, second = (np.stack([forest.tokens[:size], forest.parents[:size]]) for forest in (one, other))
    return np.array_equal(first, second)

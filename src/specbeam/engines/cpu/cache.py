"""A session's cache for the compiled forward: its trie and the hidden states of its stored nodes."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from specbeam.core.errors import BadForest
from specbeam.core.forest import Forest, unknown_nodes
from specbeam.core.records import Turn
from specbeam.engines.arrays import Integers, States, Tapped
from specbeam.engines.cpu.early import (
    MOST_WAITING,
    UNFINISHED,
    WAITING,
    Waiting,
    finish_early,
    keep_early,
    no_early_nodes,
    rename_early,
    take_back_drafts,
)
from specbeam.engines.kv.member import RowMember
from specbeam.engines.kv.steps import BLOCK
from specbeam.engines.kv.trie import Feed, KVTrie, widened

# Tokens of a short text with the drafts of a turn; caches start with capacity for them, because growing is slow.
SHORT = 4 * BLOCK


class CpuCache(RowMember):
    """A session's cache for the compiled forward.

    The forward returns hidden states, and logits are computed from them on request: hidden states are small, so the
    cache keeps one for every stored node.

    If the first layers are run ahead of the others, `early` holds their output, see `engines/cpu/early.py`.

    Attributes:
        answered: number of forest nodes whose logits were returned in this turn.
        outputs: float32[room, hidden], the output of the last layer by stored local node.
        taps: float32[room, taps * hidden], the states that enter the layers of `needs.taps`, by stored local node.
        early: nodes that only the first layers have processed, with the output of these layers.
        answered_early: number of forest nodes whose first-layer output was returned in this turn.
        unfinished_prompt: for each pass of the first layers that still lacks the pass of the other layers, its first stored
            local node and its number of nodes before the first root.
    """

    def __init__(self, row: int, prompt: list[int], hidden: int, trie: KVTrie | None = None) -> None:
        super().__init__(row, prompt)
        self.trie = KVTrie(prompt, SHORT) if trie is None else trie
        self.answered = 0
        self.outputs = np.zeros((0, hidden), dtype=np.float32)  # by stored local node
        self.taps = np.zeros((0, 0), dtype=np.float32)
        self.early = no_early_nodes(hidden)
        self.answered_early = 0
        self.unfinished_prompt: list[tuple[int, int]] = []

    def scratch(self, trie: KVTrie) -> "CpuCache":
        """Return a cache with its own trie in the same row of the store, for passes that leave this cache unchanged.

        Args:
            trie: uses slots that are free in this cache; see `KVTrie.scratch` and `KVTrie.before`.
        """
        return CpuCache(self.row, self.prompt, self.outputs.shape[1], trie)

    @property
    def is_for_steps(self) -> bool:
        """Whether compiled steps can run the passes: all inputs are tokens, and early passes need not keep prompt states."""
        return self.vectors is None and self.extra_inputs is None and not (self.needs.prompt and self.runs_ahead)

    @property
    def runs_ahead(self) -> bool:
        """Whether the first layers are run ahead of the others."""
        return self.early_layers is not None

    @property
    def has_exit(self) -> bool:
        """Whether an exit layer drafts after the first layers."""
        return self.needs.exit_layer is not None

    @property
    def unfinished(self) -> int:
        """The number of stored nodes that only the first layers have processed: the newest ones."""
        return int(self.early.counts[UNFINISHED])

    @property
    def waiting(self) -> int:
        """The number of nodes that wait for the exit layer."""
        return int(self.early.counts[WAITING])

    @property
    def prompt_whole(self) -> int:
        stored = self.trie.stored
        partly = self.trie.positions[stored - self.unfinished : stored]
        waiting = self.early.waiting.positions[: self.waiting]
        return int(np.concatenate([partly, waiting]).min(initial=self.trie.prompt_stored))

    def make_room(self, fresh: int) -> None:
        """Make room for `fresh` new forest nodes, and for storing them and all pending nodes."""
        # Nodes before the first root may be listed with the nodes of the forest, see `take_back_drafts`.
        self.trie.make_room(fresh + (self.trie.pending if self.runs_ahead else 0))
        self.trie.make_slots(self.trie.pending + fresh)
        self.make_rows(self.trie.pending + fresh)

    def make_rows(self, fresh: int = 0) -> None:
        """Make room for the outputs of all stored nodes, and for `fresh` more nodes that wait for the exit layer."""
        rows = len(self.trie.arrays.seen)
        if rows > len(self.outputs):
            self.outputs = widened(self.outputs, rows, self.outputs.shape[1])
            self.taps = widened(self.taps, rows, len(self.needs.taps) * self.outputs.shape[1])
        if self.runs_ahead:
            self._make_early_rows(rows, self.waiting + fresh + MOST_WAITING)

    def _make_early_rows(self, rows: int, waiting: int) -> None:
        """Make room for `rows` outputs of the first layers, and for `waiting` nodes that wait for the exit layer."""
        early = self.early
        hidden = self.outputs.shape[1]
        if rows > len(early.outputs):
            exited = widened(early.exited, rows, hidden) if self.has_exit else early.exited
            outputs = widened(early.outputs, rows, hidden)
            early = early._replace(slots=widened(early.slots, rows), outputs=outputs, exited=exited)
        known, slots = early.waiting.seen.shape
        if self.has_exit and (waiting > known or self.trie.capacity > slots):
            room = max(waiting, known)
            early = early._replace(
                waiting=Waiting(
                    widened(early.waiting.nodes, room),
                    widened(early.waiting.slots, room),
                    widened(early.waiting.positions, room),
                    widened(early.waiting.seen, room, max(self.trie.capacity, slots)),
                    widened(early.waiting.states, room, hidden),
                )
            )
        self.early = early

    def finish_run(self, roots: int) -> None:
        """Read the `roots` roots from the arrays, in which steps have settled the last turn of a run."""
        self.trie.root_at = self.trie.local[:roots].copy()
        self.answered = 0
        self.answered_early = 0

    def learn(self, rows: States, tapped: Tapped) -> None:
        """Keep the outputs of the last layer for the nodes that were stored last, and the states at their taps."""
        self.make_rows()
        stored = self.trie.stored
        self.outputs[stored - len(rows) : stored] = rows
        self.taps[stored - len(rows) : stored] = tapped
        finish_early(self.early)

    def learn_early(self, feed: Feed, rows: States, prompt: tuple[int, int]) -> None:
        """Keep the outputs of the first layers for the nodes that were stored last, and mark these as unfinished.

        Args:
            feed: these nodes.
            prompt: the first of these local nodes, and how many of them come before the first root.
        """
        self.make_rows(len(feed))
        keep_early(self.early, self.trie.arrays, rows, feed.slots, self.has_exit)
        self.unfinished_prompt.append(prompt)

    @property
    def unfinished_feed(self) -> Feed:
        """The unfinished nodes, as a feed for a pass."""
        trie = self.trie
        first = trie.stored - self.unfinished
        nodes = trie.arrays.nodes[:, first : trie.stored]
        slots = self.early.slots[first : trie.stored]
        return Feed(nodes[0], nodes[2], slots, trie.arrays.seen[first : trie.stored], nodes[1] - first)

    @property
    def waiting_feed(self) -> Feed:
        """The nodes that wait for the exit layer, as a feed for a pass that looks up no tokens."""
        waiting = self.early.waiting
        count = self.waiting
        no_tokens = np.zeros(count, dtype=np.int64)
        stored = np.full(count, -1)  # the parent of each is stored
        return Feed(no_tokens, waiting.positions[:count], waiting.slots[:count], waiting.seen[:count], stored)

    def answer_early(self, forest: Forest) -> States:
        """Return the states that make the early drafts' logits of new forest nodes; mark all nodes as returned.

        They are the output of the exit layer if there is one, otherwise of the first layers.
        """
        wanted = self.trie.local[unknown_nodes(self.answered_early, self.trie.known, forest.known.nodes)]
        self.answered_early = self.trie.known
        return (self.early.exited if self.has_exit else self.early.outputs)[wanted]

    def fit(self, forest: Forest) -> None:
        """Remove nodes that the first layers have processed in this turn and the forest lacks, and free their slots.

        Raises `BadForest` unless the nodes that the first layers have processed come first in the forest, in the same
        order.
        """
        if self.unfinished == 0:
            return
        kept = _nodes_in_both(self._seen_early(forest), forest)
        if len(kept) == self.trie.known:
            return
        self.trie.make_room(self.unfinished)
        former = take_back_drafts(self.early, self.trie.arrays, kept)
        self.trie.settle_roots(len(self.trie.root_at))
        self._rename(former)
        self.answered_early = len(kept)
        self.unfinished_prompt = [
            (int(np.searchsorted(former, node)), count) for node, count in self.unfinished_prompt if count
        ]

    def _seen_early(self, forest: Forest) -> Forest:
        """Return the forest of this turn as the first layers have processed it; it begins like `forest`."""
        trie = self.trie
        start = forest.roots + int((forest.parents[forest.known.nodes] >= 0).sum())
        places = np.full(trie.size, -1)
        places[trie.local] = np.arange(trie.known)
        parents = places[trie.parents[trie.local]]
        parents[:start] = forest.parents[: min(start, trie.known)]
        return Forest(trie.tokens[trie.local], parents)

    def _rename(self, former: Int64[np.ndarray, " left"]) -> None:
        """Keep the outputs of the remaining local nodes, given their former numbers."""
        self.make_rows()
        stored = self.trie.stored
        for rows in (self.outputs, self.taps):
            rows[:stored] = rows[former[:stored]]

    def follow_slots(self, source: Integers, goal: Integers) -> None:
        """See `RowMember.follow_slots`."""
        waiting = self.early.waiting
        count = self.waiting
        slots = waiting.slots[:count].copy()
        for before, after in zip(source.tolist(), goal.tolist(), strict=True):
            waiting.slots[:count][slots == before] = after
        known = source < waiting.seen.shape[1]  # these nodes do not attend to slots that the trie got later
        columns = waiting.seen[:count, source[known]]
        waiting.seen[:count, source[known]] = False
        waiting.seen[:count, goal[known]] = columns

    def answer(self, forest: Forest) -> Integers:
        """Return the local nodes of new forest nodes, neither returned nor known, and mark all nodes as returned."""
        wanted = unknown_nodes(self.answered, self.trie.known, forest.known.nodes)
        self.answered = self.trie.known
        return self.trie.local[wanted]

    def settle(self, turn: Turn) -> None:
        self.fit(turn.forest)
        former, _ = self.trie.settle(turn)
        rename_early(self.early, self.trie.arrays, former)
        self._rename(former)
        self.answered = 0
        self.answered_early = 0


@dataclass(frozen=True)
class Drafting:
    """A session's cache as used by the layers that are run ahead, whose rows are for drafts."""

    cache: CpuCache

    @property
    def trie(self) -> KVTrie:
        """The session's trie, shared by both passes of a node."""
        return self.cache.trie

    @property
    def answered(self) -> int:
        """The number of forest nodes whose draft logits were returned in this turn."""
        return self.cache.answered_early


def _nodes_in_both(seen: Forest, forest: Forest) -> Int64[np.ndarray, " both"]:
    """Return the nodes of `seen` that are also in a forest, ascending.

    Raises `BadForest` unless they come first in the forest, in the same order.
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
        names.append(places.get((above, token), size))  # `size`: an unseen node
    kept = np.array(names)
    kept = kept[: int(np.count_nonzero(kept < size))]
    is_in_order = bool((kept < size).all() and (kept[1:] > kept[:-1]).all())
    if not is_in_order or not _begin_alike(seen, forest, roots):
        raise BadForest(
            f"the first layers have processed {size} nodes of this turn; a forest of {forest.size} nodes must begin with "
            "those that it keeps, in the same order"
        )
    return kept


def _begin_alike(one: Forest, other: Forest, size: int) -> bool:
    first, second = (np.stack([forest.tokens[:size], forest.parents[:size]]) for forest in (one, other))
    return np.array_equal(first, second)

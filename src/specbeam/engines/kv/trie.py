"""The KV trie of one session: each live token is stored once, and beams share the keys and values of their common past.

A stored token occupies one *slot* of its cache. There are no pointers between slots: the trie holds, for each live leaf, the
set of slots on its path (`seen`). A slot that no leaf sees is free. So dropping and reordering beams copies nothing, and new
nodes fill the free slots.

Live tokens that are not stored yet are *pending*: first the whole prompt, later the tokens that the target has chosen. The
next pass stores each of them once, for all beams that share it.

    between turns                     during a turn
    anchors  stored leaves, and the   local nodes: anchors, then pending nodes, then draft nodes in their order;
             stored parents of        a parent always comes before its children
             pending nodes
    pending  a small forest on them
    root_at  local node of each root

All of this is in arrays with spare capacity at their ends, which the steps of `engines/kv/steps.py` update.
"""

import copy
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from specbeam.core.forest import Forest
from specbeam.core.records import LEARNT, Turn
from specbeam.engines.arrays import AnyArray, Integers
from specbeam.engines.kv.steps import (
    BLOCK,
    EXTENT,
    HELD,
    KNOWN,
    PEAK,
    SIZE,
    STORED,
    WASTE,
    Trie,
    add_survivors,
    copy_for_scratch,
    enter,
    feed_slots,
    prune,
)

AHEAD = 2**30  # position of the slots of a prefix, inside every sliding window
NO_NODES = np.zeros(0, dtype=np.int64)


def widened(array: AnyArray, *shape: int) -> AnyArray:
    """Return a copy of an array in a larger shape, padded with zeros."""
    wider = np.zeros(shape, dtype=array.dtype)
    wider[tuple(slice(size) for size in array.shape)] = array
    return wider


@dataclass(frozen=True, eq=False)
class Feed:
    """The nodes of one session that a pass stores, in order."""

    tokens: Integers
    positions: Integers
    slots: Integers
    seen: Bool[np.ndarray, "n capacity"]  # the slots on the path to each node, its own included
    parents: Integers  # the row above each node; negative if it was stored before

    def __len__(self) -> int:
        return len(self.tokens)

    def only(self, rows: Int64[np.ndarray, " kept"]) -> "Feed":
        """Return some of the rows, ascending."""
        new_rows = np.full(len(self) + 1, -1)  # the last entry maps -1 to itself
        new_rows[rows] = np.arange(len(rows))
        parents = new_rows[np.maximum(self.parents[rows], -1)]
        return Feed(self.tokens[rows], self.positions[rows], self.slots[rows], self.seen[rows], parents)

    def followed_by(self, other: "Feed") -> "Feed":
        """Return the rows of both; those of the other feed have no rows above them."""
        return Feed(
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.positions, other.positions]),
            np.concatenate([self.slots, other.slots]),
            np.concatenate([self.seen, other.seen]),
            np.concatenate([self.parents, other.parents]),
        )

    @property
    def learnt(self) -> Int64[np.ndarray, " rows"]:
        """The extra rows with inputs in `ExtraInputs`, ascending; they come after the rows of the text."""
        return np.flatnonzero(self.tokens <= LEARNT)

    @property
    def anchors(self) -> Int64[np.ndarray, " rows"]:
        """The nearest row of the text above each row of `learnt`; negative if it was stored before."""
        above = self.parents[self.learnt]
        while (among := np.flatnonzero((above >= 0) & (self.tokens[above] <= LEARNT))).size:
            above[among] = self.parents[above[among]]
        return above


class KVTrie:
    """The bookkeeping of one session's cache, on the host. The keys and values themselves are in a `KVStore`.

    Args:
        more: initial room for tokens after the prompt.

    Attributes:
        root_at: int64[beams], the local node of each root.
    """

    def __init__(self, prompt: list[int], more: int = BLOCK) -> None:
        # Local node 0 is the empty path before the prompt: it counts as stored and attends to nothing. Pending nodes
        # follow.
        size = 1 + len(prompt)
        room = -(-(size + more) // BLOCK) * BLOCK
        nodes = np.zeros((3, room), dtype=np.int64)
        numbers = np.zeros(2 * room, dtype=np.int64)
        nodes[0, :size] = [-1, *prompt]
        nodes[1:, :size] = np.arange(-1, len(prompt))
        # see `Trie.counts`
        numbers[0] = len(prompt)
        counts = np.array([size, 1, 1, 0, WASTE + 1, 0])
        seen = np.zeros((min(room, 2 * more), room), dtype=bool)
        self.arrays = Trie(nodes, numbers[:room], seen, np.zeros(room, dtype=bool), numbers[room:], counts)
        self.root_at = numbers[:1].copy()
        self.prefix = 0  # number of slots of a prefix, from slot 1 on, to which only learned rows attend
        self.reserved = 0  # number of slots from slot 1 that are not assigned to nodes

    def reserve_prefix(self, count: int) -> None:
        """Reserve the first `count` slots for a prefix of learned rows. Call it before anything is stored.

        Whole blocks are reserved, so that sums over slots have the same order as without a prefix, and rows of the text
        are bit-identical.
        """
        self.prefix = count
        self.reserved = -(-count // BLOCK) * BLOCK
        self._widen(self.capacity + self.reserved)
        self.slot_position[1 : 1 + count] = AHEAD
        self._mark_reserved()

    def _mark_reserved(self) -> None:
        """Mark the reserved slots as used."""
        if self.reserved:
            self.used[1 : 1 + self.reserved] = True
            counts = self.arrays.counts
            counts[EXTENT] = max(counts[EXTENT], 1 + self.reserved)

    def slots_of_beginning(self, count: int) -> Int64[np.ndarray, " count"]:
        """Return the slots of the first `count` tokens of the prompt, which must be stored, in the order of the text."""
        anchor = int((self.positions[: self.stored] >= count - 1).argmax())
        slots = np.flatnonzero(self.seen[anchor] & (self.slot_position < count))
        return slots[self.slot_position[slots].argsort()]

    def scratch(self, again: Int64[np.ndarray, " again"]) -> "KVTrie":
        """Return a scratch trie with the state of this one at the start of a turn, which assigns slots that are free here.

        It does not change this trie: no node here attends to its slots, and the next pass may overwrite them. It is
        valid until this trie changes.

        Args:
            again: stored forest nodes for it to store again, under their parents.
        """
        other = self.room_for_scratch(2 * len(again) + BLOCK)
        copy_for_scratch(self.arrays, other.arrays, again)
        other.root_at = other.local[: min(len(self.root_at), other.known)].copy()
        return other

    def room_for_scratch(self, more: int) -> "KVTrie":
        """Return a trie for `copy_for_scratch` to fill from this one; it is valid until this trie is widened.

        Args:
            more: room for nodes beyond the room of this trie.
        """
        arrays = self.arrays
        other = copy.copy(self)
        other.arrays = Trie(
            np.zeros((3, arrays.nodes.shape[1] + more), dtype=np.int64),
            np.zeros(len(arrays.local) + more, dtype=np.int64),
            np.zeros((len(arrays.seen) + more, self.capacity), dtype=bool),
            np.zeros(self.capacity, dtype=bool),
            np.zeros(self.capacity, dtype=np.int64),
            np.zeros(6, dtype=np.int64),
        )
        other.root_at = NO_NODES
        return other

    def before(self, node: int, position: int) -> "KVTrie":
        """Return a scratch trie with one stored node, the root, which attends only to the text before a position.

        Args:
            node: a stored local node; the text is the path to it.
            position: position of the first token that the scratch trie stores, at least 1.
        """
        seen = self.seen[node] & (self.slot_position < position)
        other = copy.copy(self)
        other.arrays = Trie(
            widened(np.array([[-1], [-1], [position - 1]]), 3, 1 + BLOCK),
            np.zeros(1 + BLOCK, dtype=np.int64),
            widened(seen[None], 1 + BLOCK, self.capacity),
            self.used.copy(),
            self.slot_position.copy(),
            np.array([1, 1, 1, self.held, self.extent, self.held]),
        )
        other.root_at = np.zeros(1, dtype=np.int64)
        return other

    def count_scratch(self, other: "KVTrie") -> None:
        """Include the tokens that a scratch trie has stored in `peak`."""
        counts = self.arrays.counts
        counts[PEAK] = max(counts[PEAK], other.peak)

    def leaf(self, root: int) -> int:
        """Return the nearest stored local node on the path to the root of this index, including the root."""
        node = int(self.root_at[root])
        while node >= self.stored:
            node = int(self.parents[node])
        return node

    @property
    def prompt_stored(self) -> int:
        """The number of stored tokens on the longest path; during prefill, the stored part of the prompt."""
        return int(self.positions[: self.stored].max()) + 1

    def _widen(self, slots: int) -> None:
        """Make room for a total of `slots` slots."""
        arrays = self.arrays
        if slots > self.capacity:
            self.arrays = arrays._replace(
                seen=widened(arrays.seen, len(arrays.seen), slots),
                used=widened(arrays.used, slots),
                slot_position=widened(arrays.slot_position, slots),
            )

    @property
    def capacity(self) -> int:
        """The number of slots with room in the arrays."""
        return len(self.arrays.used)

    @property
    def size(self) -> int:
        """The number of local nodes."""
        return int(self.arrays.counts[SIZE])

    @property
    def stored(self) -> int:
        """The number of stored local nodes, which come first."""
        return int(self.arrays.counts[STORED])

    @property
    def known(self) -> int:
        """The number of forest nodes known in this turn."""
        return int(self.arrays.counts[KNOWN])

    @property
    def held(self) -> int:
        """The number of stored tokens."""
        return int(self.arrays.counts[HELD])

    @property
    def extent(self) -> int:
        """One past the last slot in use: the number of slots that attention runs over."""
        return int(self.arrays.counts[EXTENT])

    @property
    def peak(self) -> int:
        """The largest number of tokens stored at the same time so far."""
        return int(self.arrays.counts[PEAK])

    @property
    def tokens(self) -> Int64[np.ndarray, " size"]:
        """The token of each local node; negative for embedding rows, and -1 for the empty path."""
        return self.arrays.nodes[0, : self.size]

    @property
    def parents(self) -> Int64[np.ndarray, " size"]:
        """The parent of each local node; -1 if there is none."""
        return self.arrays.nodes[1, : self.size]

    @property
    def positions(self) -> Int64[np.ndarray, " size"]:
        """The position in the text of each local node; -1 for the empty path."""
        return self.arrays.nodes[2, : self.size]

    @property
    def local(self) -> Int64[np.ndarray, " known"]:
        """The local node of each forest node known in this turn."""
        return self.arrays.local[: self.known]

    @property
    def seen(self) -> Bool[np.ndarray, "stored capacity"]:
        """The slots on the path to each stored node, its own included."""
        return self.arrays.seen[: self.stored]

    @property
    def used(self) -> Bool[np.ndarray, " capacity"]:
        """Whether each slot is in use."""
        return self.arrays.used

    @property
    def slot_position(self) -> Int64[np.ndarray, " capacity"]:
        """The position in the text of the token in each slot."""
        return self.arrays.slot_position

    @property
    def pending(self) -> int:
        """The number of pending local nodes."""
        return self.size - self.stored

    @property
    def pending_before_roots(self) -> int:
        """The number of pending nodes before the first root, whose logits are not needed."""
        return max(int(self.root_at.min()) - self.stored, 0)

    def enter(self, forest: Forest) -> None:
        """Add the new nodes of a turn's forest."""
        if forest.size > self.known:
            self.make_room(forest.size - self.known)
            enter(self.arrays, forest.tokens, forest.parents)

    def make_room(self, more: int) -> None:
        """Make room for `more` further local nodes, without slots."""
        arrays = self.arrays
        size = self.size + more
        changed: dict[str, np.ndarray] = {}
        if size > arrays.nodes.shape[1]:
            changed["nodes"] = widened(arrays.nodes, 3, arrays.nodes.shape[1] + size)
        if self.known + more > len(arrays.local):
            changed["local"] = widened(arrays.local, len(arrays.local) + self.known + more)
        if changed:
            self.arrays = arrays._replace(**changed)

    def make_slots(self, more: int) -> None:
        """Make room for `more` further stored nodes and their slots.

        Arrays that are too small at least double, so the amortised cost is constant.
        """
        arrays = self.arrays
        rows = self.stored + more
        slots = self.held + more + 1 + self.reserved  # one more for the waste slot
        if rows > len(arrays.seen):
            rows = len(arrays.seen) + max(rows, len(arrays.seen))
            self.arrays = arrays._replace(seen=widened(arrays.seen, rows, self.capacity))
        if slots > self.capacity:
            self._widen(-(-max(2 * self.capacity, slots) // BLOCK) * BLOCK)

    def feed(self, most: int) -> Feed:
        """Assign slots to the first `most` pending nodes, count them as stored, and return them as a feed for a pass."""
        start = self.stored
        stop = min(self.stored + most, self.size)
        self.make_slots(stop - start)
        slots = np.empty(stop - start, dtype=np.int64)
        feed_slots(self.arrays, slots)
        nodes = self.arrays.nodes[:, start:stop]
        seen = self.arrays.seen[start:stop]
        if self.prefix:
            seen[nodes[0] <= LEARNT, 1 : 1 + self.prefix] = True
        return Feed(nodes[0], nodes[2], slots, seen, nodes[1] - start)

    def stored_feed(self, nodes: Int64[np.ndarray, " n"]) -> Feed:
        """Return stored nodes as rows of a pass that stores nothing for them: it writes to the waste slot."""
        found = self.arrays.nodes[:, nodes]
        slots = np.full(len(nodes), WASTE)
        return Feed(found[0], found[2], slots, self.seen[nodes], np.full(len(nodes), -1))

    def forget_inner(self) -> None:
        """Drop the stored nodes without pending children, between the chunks of a long prompt.

        Only the newest stored node remains. Do not call it inside a turn.
        """
        self._keep(self.root_at)

    def settle(self, turn: Turn) -> tuple[Int64[np.ndarray, " left"], Int64[np.ndarray, " beams"]]:
        """Keep the paths to the surviving beams and to the nodes that the verdict keeps, and free all other slots.

        Returns the former numbers of the remaining local nodes and of the new roots.
        """
        self.enter(turn.forest)
        survivors = turn.verdict.beams
        self.make_room(survivors.size)
        leaves = add_survivors(self.arrays, survivors.nodes, survivors.tokens, turn.verdict.parents)
        return self._keep(leaves, self.local[turn.verdict.kept]), leaves

    def rewind(self, nodes: int) -> Int64[np.ndarray, " left"]:
        """Remove all nodes of this turn's forest except the first `nodes`, whether they are stored or not.

        Returns the former numbers of the remaining local nodes.
        """
        return self._keep(self.local[:nodes].copy())

    def settle_roots(self, roots: int) -> None:
        """Set the first `roots` forest nodes as roots, after a step has dropped nodes from the arrays."""
        self._mark_reserved()
        self.root_at = self.local[:roots].copy()

    def _keep(
        self, leaves: Int64[np.ndarray, " beams"], others: Int64[np.ndarray, " kept"] = NO_NODES
    ) -> Int64[np.ndarray, " left"]:
        """Keep the paths to `leaves`, which become the roots, and to `others`, which follow them in the next forest.

        Returns the former numbers of the remaining local nodes.
        """
        both = np.concatenate([leaves, others])
        if len(both) > len(self.arrays.local):
            self.make_room(len(both))
        former = prune(self.arrays, both)
        self.settle_roots(len(leaves))
        return former

    def compact(self) -> tuple[Integers, Integers]:
        """Move the slots in use to the front; return the slots that the store must copy, and their new places.

        Slots before the first free one do not move.
        """
        used = np.flatnonzero(self.used)
        goal = np.arange(1, len(used) + 1)  # reserved slots are the first in use, and do not move
        seen = self.seen[:, used]
        self.seen[:] = False
        self.used[:] = False
        self.seen[:, goal] = seen
        self.used[goal] = True
        self.slot_position[goal] = self.slot_position[used]
        self.arrays.counts[EXTENT] = len(used) + 1
        moved = used != goal
        return used[moved], goal[moved]

"""The KV trie of one session: every live token is stored once, and beams share their past physically.

A stored token occupies one *slot* of its cache. Who may look at what is the only structure: for each live leaf, the set
of slots on its path (`seen`). A slot that no leaf sees is free, so dropping beams costs nothing and nothing is copied
when beams are reordered; the holes are filled by the next nodes.

Tokens that live but are not stored yet are *pending*: at first the whole prompt, later the tokens that the target chose
itself. They are stored with the next pass, each once, however many beams share them.

    between turns                     during a turn
    anchors  stored leaves and the    local nodes: anchors, then pending, then the draft nodes as they come;
             parents of pending ones  a parent always stands before its children
    pending  a small forest on them
    root_at  local node of each root

The counts are arrays with room behind what is used; loops of `engines/kv/steps.py` keep them.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64, Shaped

from specbeam.core.forest import Forest
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
    enter,
    feed_slots,
    hung,
    kept,
)
from specbeam.records import Turn


def widened(array: Shaped[np.ndarray, "..."], *shape: int) -> Shaped[np.ndarray, "..."]:
    """A copy of this shape, with zeros behind."""
    wider = np.zeros(shape, dtype=array.dtype)
    wider[tuple(slice(size) for size in array.shape)] = array
    return wider


@dataclass(frozen=True, eq=False)
class Feed:
    """Nodes of one session that a pass stores, in order."""

    tokens: Int64[np.ndarray, " n"]
    positions: Int64[np.ndarray, " n"]
    slots: Int64[np.ndarray, " n"]
    seen: Bool[np.ndarray, "n capacity"]

    def __len__(self) -> int:
        return len(self.tokens)


class KVTrie:
    """Bookkeeping of one cache, on the host. The keys and values themselves lie in a `KVStore`.

    Args:
        more: room for so many tokens behind the prompt, to begin with.
    """

    def __init__(self, prompt: list[int], more: int = BLOCK) -> None:
        # Local node 0 is the empty path before the prompt: stored, sees nothing. Pending nodes stand behind stored ones.
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
        self.company: list[KVTrie] = [self]  # all tries whose tokens are stored in the same cache

    def share(self, other: "KVTrie", prompt: list[int], count: int) -> None:
        """Begin with the first `count` tokens of the prompt where another trie of the company has stored them.

        To be called before anything is stored; the last token of the prompt is never shared.
        """
        anchor = int((other.positions[: other.stored] >= count - 1).argmax())
        slots = np.flatnonzero(other.seen[anchor] & (other.slot_position < count))
        self._widen(other.capacity)
        arrays = self.arrays
        rest = prompt[count:]
        size = 1 + len(rest)
        arrays.nodes[0, :size] = [prompt[count - 1], *rest]
        arrays.nodes[1, :size] = np.arange(-1, len(rest))
        arrays.nodes[2, :size] = np.arange(count - 1, len(prompt))
        arrays.local[0] = len(rest)
        arrays.seen[0, slots] = True
        arrays.used[slots] = True
        arrays.slot_position[slots] = other.slot_position[slots]
        arrays.counts[:] = size, 1, 1, count, slots.max() + 1, count
        self.root_at = arrays.local[:1].copy()

    @property
    def prompt_stored(self) -> int:
        """How many tokens of the prompt are stored; no fewer than that, where more than the prompt is."""
        return int(self.positions[: self.stored].max()) + 1

    def _taken(self) -> Bool[np.ndarray, " slots"]:
        """Return the slots that anybody of the company uses."""
        taken = np.zeros(max(other.capacity for other in self.company), dtype=bool)
        for other in self.company:
            taken[: other.capacity] |= other.seen.any(0)
        return taken

    def _widen(self, slots: int) -> None:
        """Make room for so many slots."""
        arrays = self.arrays
        if slots > self.capacity:
            self.arrays = arrays._replace(
                seen=widened(arrays.seen, len(arrays.seen), slots),
                used=widened(arrays.used, slots),
                slot_position=widened(arrays.slot_position, slots),
            )

    @property
    def capacity(self) -> int:
        return len(self.arrays.used)

    @property
    def size(self) -> int:
        """Local nodes."""
        return int(self.arrays.counts[SIZE])

    @property
    def stored(self) -> int:
        """Local nodes that are stored; they are the first ones."""
        return int(self.arrays.counts[STORED])

    @property
    def known(self) -> int:
        """Forest nodes known in this turn."""
        return int(self.arrays.counts[KNOWN])

    @property
    def held(self) -> int:
        """Tokens stored."""
        return int(self.arrays.counts[HELD])

    @property
    def extent(self) -> int:
        """One past the last slot in use: what attention has to look at."""
        return int(self.arrays.counts[EXTENT])

    @property
    def peak(self) -> int:
        """Most tokens stored so far."""
        return int(self.arrays.counts[PEAK])

    @property
    def tokens(self) -> Int64[np.ndarray, " size"]:
        return self.arrays.nodes[0, : self.size]

    @property
    def parents(self) -> Int64[np.ndarray, " size"]:
        return self.arrays.nodes[1, : self.size]

    @property
    def positions(self) -> Int64[np.ndarray, " size"]:
        return self.arrays.nodes[2, : self.size]

    @property
    def local(self) -> Int64[np.ndarray, " known"]:
        """Local node of each forest node known in this turn."""
        return self.arrays.local[: self.known]

    @property
    def seen(self) -> Bool[np.ndarray, "stored capacity"]:
        """The slots on the path to each stored node."""
        return self.arrays.seen[: self.stored]

    @property
    def used(self) -> Bool[np.ndarray, " capacity"]:
        """Slots that somebody sees."""
        return self.arrays.used

    @property
    def slot_position(self) -> Int64[np.ndarray, " capacity"]:
        return self.arrays.slot_position

    @property
    def waiting(self) -> int:
        """Local nodes that are not stored yet."""
        return self.size - self.stored

    @property
    def ahead(self) -> int:
        """Local nodes that are not stored yet before the first root, whose logits nobody asks for."""
        return max(int(self.root_at.min()) - self.stored, 0)

    def enter(self, forest: Forest) -> None:
        """Take in the nodes of the forest that are new."""
        if forest.size > self.known:
            self.make_room(forest.size - self.known)
            enter(self.arrays, forest.tokens, forest.parents)

    def make_room(self, more: int) -> None:
        """For so many more nodes, stored ones too."""
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
        """For so many more stored nodes. At least double, so that growing costs little in the long run."""
        arrays = self.arrays
        rows = self.stored + more
        taken = self._taken() if len(self.company) > 1 else None
        held = self.held if taken is None else int(taken.sum())
        slots = held + more + 1  # the waste slot is nobody's
        if rows > len(arrays.seen):
            rows = len(arrays.seen) + max(rows, len(arrays.seen))
            self.arrays = arrays._replace(seen=widened(arrays.seen, rows, self.capacity))
        if slots > self.capacity:
            self._widen(-(-max(2 * self.capacity, slots) // BLOCK) * BLOCK)
        if taken is not None:  # so that nothing is put where others are; until this one is settled
            size = min(len(taken), self.capacity)
            self.used[:size] |= taken[:size]

    def feed(self, most: int) -> Feed:
        """Give slots to the first `most` pending nodes; from here on they count as stored."""
        start = self.stored
        stop = min(self.stored + most, self.size)
        self.make_slots(stop - start)
        slots = np.empty(stop - start, dtype=np.int64)
        feed_slots(self.arrays, slots)
        nodes = self.arrays.nodes[:, start:stop]
        return Feed(nodes[0], nodes[2], slots, self.arrays.seen[start:stop])

    def forget_inner(self) -> None:
        """Between the chunks of a long prompt: only the newest stored node is still needed. Not inside a turn."""
        self._keep(self.root_at)

    def settle(self, turn: Turn) -> tuple[Int64[np.ndarray, " left"], Int64[np.ndarray, " beams"]]:
        """Keep the paths to the surviving beams, free the rest. Gives the names that the nodes that are left, and the roots,
        had in the turn.
        """
        self.enter(turn.forest)
        survivors = turn.verdict.beams
        self.make_room(len(survivors))
        leaves = hung(self.arrays, survivors.nodes, survivors.tokens, turn.verdict.parents)
        return self._keep(leaves), leaves

    def _keep(self, leaves: Int64[np.ndarray, " beams"]) -> Int64[np.ndarray, " left"]:
        if len(leaves) > len(self.arrays.local):
            self.make_room(len(leaves))
        former = kept(self.arrays, leaves)
        self.root_at = self.local.copy()
        return former

    def compact(self) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Close the holes: (from, to) slots that the store has to move. Slots before the first hole stay."""
        used = np.flatnonzero(self.used)
        goal = np.arange(1, len(used) + 1)
        seen = self.seen[:, used]
        self.seen[:] = False
        self.used[:] = False
        self.seen[:, goal] = seen
        self.used[goal] = True
        self.slot_position[goal] = self.slot_position[used]
        self.arrays.counts[EXTENT] = len(used) + 1
        moved = used != goal
        return used[moved], goal[moved]

"""The KV trie of one session: every live token is stored once, and beams share their past physically.

A stored token occupies one *slot* of its lane. Who may look at what is the only structure: for each live leaf, the set
of slots on its path (`seen`). A slot that no leaf sees is free, so dropping beams costs nothing and nothing is copied
when beams are reordered; the holes are filled by the next nodes.

Tokens that live but are not stored yet are *pending*: at first the whole prompt, later the tokens that the target chose
itself. They are stored with the next pass, each once, however many beams share them.

    between turns                     during a turn
    anchors  stored leaves and the    local nodes: anchors, then pending, then the draft nodes as they come;
             parents of pending ones  a parent always stands before its children
    pending  a small forest on them
    root_at  local node of each root
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from specbeam.forest import Forest
from specbeam.kernels.compiling import Array, compiled
from specbeam.records import Turn

WASTE = 0  # a slot that nobody sees: padding is written there
BLOCK = 64  # capacities are multiples of it


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
    """Bookkeeping of one lane, on the host. The keys and values themselves lie in a `KVStore`."""

    def __init__(self, prompt: list[int]) -> None:
        self.capacity = BLOCK
        self.slot_position = np.zeros(self.capacity, dtype=np.int64)
        self.used = np.zeros(self.capacity, dtype=bool)  # slots that somebody sees
        self.peak = 0
        # Local node 0 is the empty path before the prompt: stored, sees nothing. Pending nodes stand behind stored ones.
        self.tokens = np.array([-1, *prompt], dtype=np.int64)
        self.parents = np.arange(-1, len(prompt), dtype=np.int64)
        self.positions = self.parents.copy()
        self.stored = 1  # local nodes that are stored; they are the first ones
        self._seen = np.zeros(
            (BLOCK, self.capacity), dtype=bool
        )  # by local node, itself included; more rows than stored
        self.root_at = np.array([len(prompt)], dtype=np.int64)
        self.local = self.root_at  # local node of each forest node known in this turn

    @property
    def seen(self) -> Bool[np.ndarray, "stored capacity"]:
        """The slots on the path to each stored node."""
        return self._seen[: self.stored]

    @property
    def waiting(self) -> int:
        """Local nodes that are not stored yet."""
        return len(self.tokens) - self.stored

    @property
    def ahead(self) -> int:
        """Local nodes that are not stored yet before the first root, whose logits nobody asks for."""
        return max(int(self.root_at.min()) - self.stored, 0)

    @property
    def held(self) -> int:
        """Tokens stored."""
        return int(np.count_nonzero(self.used))

    @property
    def extent(self) -> int:
        """One past the last slot in use: what attention has to look at."""
        behind = int(self.used[::-1].argmax())  # free slots at the end; 0 also if all are free
        return self.capacity - behind if self.used[self.capacity - 1 - behind] else WASTE + 1

    def enter(self, forest: Forest) -> None:
        """Take in the nodes of the forest that are new."""
        known = len(self.local)
        start, fresh = len(self.tokens), len(forest) - known
        if fresh > 0:
            self.local = np.concatenate([self.local, np.arange(start, start + fresh)])
            self._append(forest.tokens[known:], self.local[forest.parents[known:]])

    def _append(self, tokens: Int64[np.ndarray, " n"], parents: Int64[np.ndarray, " n"]) -> None:
        if len(tokens) == 0:
            return
        start = len(self.tokens)
        self.tokens = np.concatenate([self.tokens, tokens])
        self.parents = np.concatenate([self.parents, parents])
        self.positions = np.concatenate([self.positions, parents])
        _count_down(self.parents, self.positions, start)

    def feed(self, most: int) -> Feed:
        """Give slots to the first `most` pending nodes; from here on they count as stored."""
        start, stop = self.stored, min(self.stored + most, len(self.tokens))
        parents, positions = self.parents[start:stop], self.positions[start:stop]
        slots = self._free(stop - start)
        if stop > len(self._seen):
            self._seen = np.pad(self._seen, ((0, max(stop, 2 * len(self._seen)) - len(self._seen)), (0, 0)))
        _look_back(self._seen, parents, slots, start)
        self.stored = stop
        self.used[slots] = True
        self.slot_position[slots] = positions
        self.peak = max(self.peak, self.held)
        return Feed(self.tokens[start:stop], positions, slots, self._seen[start:stop])

    def _free(self, count: int) -> Int64[np.ndarray, " n"]:
        free = np.flatnonzero(~self.used)[1:]  # all but the waste slot, which nobody uses
        if len(free) >= count:
            return free[:count]
        self._grow(self.capacity + count - len(free))
        return self._free(count)

    def _grow(self, least: int) -> None:
        """At least double, so that growing costs little in the long run."""
        capacity = -(-max(2 * self.capacity, least) // BLOCK) * BLOCK
        more = capacity - self.capacity
        self._seen = np.pad(self._seen, ((0, 0), (0, more)))
        self.slot_position, self.used = np.pad(self.slot_position, (0, more)), np.pad(self.used, (0, more))
        self.capacity = capacity

    def forget_inner(self) -> None:
        """Between the chunks of a long prompt: only the newest stored node is still needed. Not inside a turn."""
        self._keep(self.root_at)

    def settle(self, turn: Turn) -> Int64[np.ndarray, " beams"]:
        """Keep the paths to the surviving beams, free the rest; gives the names that the roots had in the turn."""
        self.enter(turn.forest)
        survivors, parents = turn.verdict.beams, turn.verdict.parents
        fresh = np.flatnonzero(survivors.nodes < 0)
        start = len(self.tokens)
        self._append(survivors.tokens[fresh], self.local[parents[fresh]])
        leaves = self.local[survivors.nodes]
        leaves[fresh] = np.arange(start, len(self.tokens))
        self._keep(leaves)
        return leaves

    def _keep(self, leaves: Int64[np.ndarray, " beams"]) -> None:
        """Rename the local nodes: stored leaves and stored parents of pending nodes first, then what is pending."""
        parents, front, kept = (
            self.parents.tolist(),
            set(leaves.tolist()),
            set[int](),
        )  # few nodes: arrays would cost more
        while front:
            kept.update(front)
            front = {parents[node] for node in front if node >= self.stored}
        names = sorted(kept)
        renamed = {node: name for name, node in enumerate(names)}
        stored = [node for node in names if node < self.stored]
        above = [-1] * len(stored) + [renamed[parents[node]] for node in names[len(stored) :]]
        self.parents = np.array(above, dtype=np.int64)
        self.tokens, self.positions = self.tokens[names], self.positions[names]
        self.stored = len(stored)
        self._seen[: self.stored] = self._seen[stored]
        self.used = np.asarray(self.seen.any(0))
        self.root_at = self.local = np.array([renamed[node] for node in leaves.tolist()], dtype=np.int64)

    def compact(self) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Close the holes: (from, to) slots that the store has to move. Slots before the first hole stay."""
        used = np.flatnonzero(self.used)
        goal = np.arange(1, len(used) + 1)
        kept = self.seen[:, used]
        self.seen[:], self.used[:] = False, False
        self.seen[:, goal], self.used[goal] = kept, True
        self.slot_position[goal] = self.slot_position[used]
        moved = used != goal
        return used[moved], goal[moved]


@compiled
def _count_down(parents: Array, positions: Array, start: int) -> None:
    """Positions of the nodes from `start` on; a parent stands before its children."""
    for node in range(start, len(parents)):
        positions[node] = positions[parents[node]] + 1


@compiled
def _look_back(seen: Array, parents: Array, slots: Array, start: int) -> None:
    """What the nodes from `start` on see: what their parents see, and their own slots."""
    for place in range(len(parents)):
        seen[start + place] = seen[parents[place]]
        seen[start + place, slots[place]] = True

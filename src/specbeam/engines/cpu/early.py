"""Nodes in a session's cache that only the first layers of a model have processed, and the steps that change them.

If the first layers are run ahead of the others (see `LiveLayers`, `ExitLM`), a node goes through two passes: the first
layers run when it is drafted, the other layers when the target scores it. An exit layer runs between the two.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from specbeam.core.compiling.compiler import Array, borrowed, compiled
from specbeam.core.compiling.copies import copy_numbers, copy_rows
from specbeam.engines.kv.steps import KNOWN, SIZE, STORED, Trie, prune

UNFINISHED, WAITING, FIRST_ROWS, EXIT_ROWS, LAST_ROWS = range(5)  # indices of `EarlyNodes.counts`
MOST_WAITING = 64  # maximum number of nodes that wait for the exit layer while nothing is drafted


@borrowed
class Waiting(NamedTuple):
    """Nodes that wait for the exit layer after the first layers, such as the last layer of a draft.

    Most of them are rejected. Survivors go through the exit layer together with the next draft. The arrays have spare
    capacity; the number of nodes is in `EarlyNodes.counts`.
    """

    nodes: (
        Array  # int64[room]: the stored local node of each; -1 for nodes above the roots, which have no number any more
    )
    slots: Array  # int64[room]
    positions: Array  # int64[room]
    seen: Array  # bool[room, slots]: the slots on the path to each, including its own
    states: Array  # float32[room, hidden]: output of the first layers


@borrowed
class EarlyNodes(NamedTuple):
    """The nodes of a cache between their two passes; the arrays have no rows if no layers are run ahead."""

    # int64[5]: the number of stored nodes that the other layers have not seen (UNFINISHED), the newest ones, and of nodes
    # that wait for the exit layer (WAITING); the number of rows that the first layers (FIRST_ROWS), the exit layer
    # (EXIT_ROWS) and the other layers (LAST_ROWS) have computed so far
    counts: Array
    slots: Array  # int64[nodes]: the slot of each stored local node that the first layers have processed
    outputs: Array  # float32[nodes, hidden]: the output of the first layers by stored local node
    exited: Array  # float32[nodes, hidden]: the output of the exit layer by stored local node, where it has run
    waiting: Waiting


@borrowed
class ExitWeights(NamedTuple):
    """An exit layer in the form that compiled layers read; no kinds: there is none."""

    weights: Any  # `Weights` of one layer
    norm: Array  # float32[hidden]: the weight of the norm in front of the head, for drafts
    kinds: Array  # int64[1]
    place: int  # its layer in the store


@dataclass(frozen=True, eq=False)
class ExitLayer:
    """A layer on the output of the first layers of a model; the model's head makes logits from its normed output.

    Its keys and values use the same slots as the model's, in an additional layer of the store.

    Attributes:
        after: the number of layers that run before it.
        weights: its weights, as `Weights` of one layer.
        norm: the weight of its norm, see `Weights`.
        kinds: int64[1], the kind of its attention, an index into `CompiledDecoder.names`.
        place: its layer in the store.
    """

    after: int
    weights: Any
    norm: Float32[np.ndarray, " weight"]
    kinds: Int64[np.ndarray, " 1"]
    place: int


def no_early_nodes(hidden: int) -> EarlyNodes:
    """Return the arrays of a cache without early nodes."""
    numbers = np.zeros(0, dtype=np.int64)
    states = np.zeros((0, hidden), dtype=np.float32)
    waiting = Waiting(numbers, numbers, numbers, np.zeros((0, 0), dtype=np.bool_), states)
    return EarlyNodes(np.zeros(5, dtype=np.int64), numbers, states, states, waiting)


@compiled
def keep_early(early: EarlyNodes, trie: Trie, rows: Array, slots: Array, has_exit: bool) -> None:
    """Store the first layers' output for the newest nodes, mark them as unfinished, and queue them for the exit layer.

    Args:
        rows: float32[n, hidden].
        slots: int64[n] of these nodes.
        has_exit: whether there is an exit layer.
    """
    stop = trie.counts[STORED]
    start = stop - len(rows)
    copy_rows(early.outputs[start:stop], rows)
    copy_numbers(early.slots[start:stop], slots)
    early.counts[UNFINISHED] += len(rows)
    early.counts[FIRST_ROWS] += len(rows)
    if not has_exit:
        return
    waiting = early.waiting
    first = early.counts[WAITING]
    for row in range(len(rows)):
        node = start + row
        waiting.nodes[first + row] = node
        waiting.slots[first + row] = slots[row]
        waiting.positions[first + row] = trie.nodes[2, node]
        copy_numbers(waiting.seen[first + row], trie.seen[node])
        waiting.seen[first + row, trie.seen.shape[1] :] = False
        copy_numbers(waiting.states[first + row], rows[row])
    early.counts[WAITING] = first + len(rows)


@compiled
def keep_exits(early: EarlyNodes, rows: Array) -> None:
    """Store the output of the exit layer for all nodes that waited for it."""
    for row in range(len(rows)):
        node = early.waiting.nodes[row]
        if node >= 0:
            copy_numbers(early.exited[node], rows[row])
    early.counts[EXIT_ROWS] += len(rows)
    early.counts[WAITING] = 0


@compiled
def finish_early(early: EarlyNodes) -> None:
    """Record that the other layers have processed all nodes."""
    early.counts[LAST_ROWS] += early.counts[UNFINISHED]
    early.counts[UNFINISHED] = 0


@compiled
def rename_early(early: EarlyNodes, trie: Trie, former: Array) -> None:
    """Follow a trie that has dropped nodes: keep the states of the remaining nodes, and of slots still in use.

    Args:
        former: the former number of each remaining local node, ascending.
    """
    if len(early.outputs) == 0:
        return
    for node in range(trie.counts[STORED]):  # in place: the number of a node never grows
        before = former[node]
        if before != node:
            early.slots[node] = early.slots[before]
            copy_numbers(early.outputs[node], early.outputs[before])
            if len(early.exited) > 0:
                copy_numbers(early.exited[node], early.exited[before])
    waiting = early.waiting
    left = 0
    for row in range(early.counts[WAITING]):
        if not trie.used[waiting.slots[row]]:
            continue
        node = waiting.nodes[row]
        at = min(np.searchsorted(former, node), len(former) - 1)
        waiting.nodes[left] = at if node >= 0 and former[at] == node else -1
        if left < row:
            waiting.slots[left] = waiting.slots[row]
            waiting.positions[left] = waiting.positions[row]
            copy_numbers(waiting.seen[left], waiting.seen[row])
            copy_numbers(waiting.states[left], waiting.states[row])
        left += 1
    early.counts[WAITING] = left


@compiled
def take_back_drafts(early: EarlyNodes, trie: Trie, nodes: Array) -> Array:
    """Remove the nodes of this turn's forest except `nodes`, and free their slots.

    Unfinished nodes before the first root stay, too. `trie.local` must have capacity for all of them.

    Args:
        nodes: int64[n], forest nodes that stay, ascending: the roots, and further nodes with their parents.

    Returns the former number of each remaining local node.
    """
    counts = trie.counts
    stored = counts[STORED]
    first = stored - early.counts[UNFINISHED]
    is_of_forest = np.zeros(counts[SIZE], dtype=np.bool_)
    for node in range(counts[KNOWN]):
        is_of_forest[trie.local[node]] = True
    others = first + np.flatnonzero(~is_of_forest[first:stored])
    former = prune(trie, np.concatenate((trie.local[nodes], others)))
    counts[KNOWN] = len(nodes)
    early.counts[UNFINISHED] = (former[: counts[STORED]] >= first).sum()
    rename_early(early, trie, former)
    return former


@compiled
def has_early_room(early: EarlyNodes, trie: Trie, size: int, fresh: int) -> bool:
    """Return whether there is room for `size` local nodes, and for `fresh` more nodes that wait for the exit layer."""
    if len(early.outputs) == 0:
        return True
    waits = len(early.exited) == 0 or early.counts[WAITING] + fresh <= len(early.waiting.nodes)
    return size <= len(early.outputs) and waits

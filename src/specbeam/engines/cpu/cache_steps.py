"""A whole pass of one session as one loop: what is new in its forest, the model's layers, logits."""

from typing import Any, NamedTuple

import numpy as np

from specbeam.engines.cpu.sums import WIDTH
from specbeam.engines.kv.steps import BLOCK, EXTENT, HELD, KNOWN, SIZE, STORED, Trie, enter, feed_slots, hung, kept
from specbeam.kernels.compiling import AVAILABLE, Array, compiled

if AVAILABLE:
    from specbeam.kernels.compiling import call_at


class CacheArrays(NamedTuple):
    """A session in a compiled model, as loops see it; with room for all that is going to be stored."""

    trie: Trie
    outputs: Array  # float32[nodes, hidden] by stored local node: what logits are made from
    model: Any  # compiled.Model
    windows: Array  # int64[kinds]: tokens that each kind of layer looks back on, itself included; 0: all
    keys: Array  # see `loops.attend`
    values: Array
    cache: int
    threads: int
    layers: int  # addresses of `loops.all_layers` and `loops.scored` for this model
    scored: int


@compiled
def _looked_at(trie: Trie, start: int, stop: int, windows: Array) -> Array:
    """bool[kinds, rows, slots]: what the stored nodes start .. stop look at in each kind of layer."""
    extent = -(-trie.counts[EXTENT] // BLOCK) * BLOCK
    seen = np.zeros((len(windows), stop - start, extent), dtype=np.bool_)
    for kind in range(len(windows)):
        for node in range(start, stop):
            row = seen[kind, node - start]
            position = trie.nodes[2, node]
            for slot in range(extent):
                near = windows[kind] == 0 or position - trie.slot_position[slot] < windows[kind]
                row[slot] = trie.seen[node, slot] and near
    return seen


@compiled
def _store(one: CacheArrays) -> None:
    """Run the layers on all pending nodes, and keep their outputs."""
    trie = one.trie
    model = one.model
    start = trie.counts[STORED]
    stop = trie.counts[SIZE]
    slots = np.empty(stop - start, dtype=np.int64)
    feed_slots(trie, slots)
    tokens = trie.nodes[0][start:stop]
    positions = trie.nodes[2][start:stop]
    if positions.max() >= model.angles.shape[1]:
        raise IndexError("a position is beyond those of the model")
    if tokens.min() < 0 or tokens.max() >= len(model.embedding):
        raise IndexError("a token is beyond those of the model")
    x = np.empty((stop - start, model.embedding.shape[1]), dtype=np.float32)
    for row in range(len(x)):
        x[row] = model.embedding[tokens[row]]
    rows = np.array([[one.cache, 0, len(x)]])
    seen = _looked_at(trie, start, stop, one.windows)
    call_at(one.layers, (
        x, model.weights, model.angles, model.eps, model.heads, positions, rows, slots, seen, model.kinds, one.keys,
        one.values, one.threads,
    ))  # fmt: skip
    one.outputs[start:stop] = x


@compiled
def extended(one: CacheArrays, tokens: Array, parents: Array, answered: int) -> Array:
    """`LM.extend` of one session: enter the forest, store what is pending, give the logits of all nodes from `answered` on.

    Raises `IndexError` for tokens and positions that the model does not have.
    """
    trie = one.trie
    enter(trie, tokens, parents)
    if trie.counts[SIZE] > trie.counts[STORED]:
        _store(one)
    x = np.empty((trie.counts[KNOWN] - answered, one.outputs.shape[1]), dtype=np.float32)
    for row in range(len(x)):
        x[row] = one.outputs[trie.local[answered + row]]
    model = one.model
    logits = np.empty((len(x), len(model.head) * WIDTH), dtype=np.float32)
    if len(x) > 0:
        call_at(one.scored, (x, model.last_norm, model.eps, model.head, logits, one.threads))
    if logits.shape[1] > model.vocab:
        logits = logits[:, : model.vocab].copy()
    return logits


@compiled
def has_room(one: CacheArrays, fresh: int, beams: int) -> bool:
    """For a turn of so many new forest nodes, behind which so many beams live."""
    trie = one.trie
    counts = one.trie.counts
    size = counts[SIZE] + fresh + beams
    slots = counts[HELD] + counts[SIZE] - counts[STORED] + fresh + 1
    rows = min(trie.nodes.shape[1], len(trie.seen), len(one.outputs))
    return size <= rows and counts[KNOWN] + fresh + beams <= len(trie.local) and slots <= len(trie.used)


@compiled
def settle_cache(one: CacheArrays, tree: tuple[Array, Array], nodes: Array, tokens: Array, parents: Array) -> None:
    """`LM.settle` of one session: keep the paths to the surviving beams, free the rest. There must be room.

    Args:
        tree: tokens and parents of the turn's forest.
        nodes, tokens, parents: of the survivors; nodes are -1 where they were no draft.
    """
    enter(one.trie, tree[0], tree[1])
    _keep(one, hung(one.trie, nodes, tokens, parents))


@compiled
def rewound(one: CacheArrays, roots: int) -> None:
    """Back to the beginning of a turn of so many roots."""
    _keep(one, one.trie.local[:roots].copy())


@compiled
def _keep(one: CacheArrays, leaves: Array) -> None:
    former = kept(one.trie, leaves)
    for node in range(one.trie.counts[STORED]):  # names only get smaller
        if former[node] != node:
            one.outputs[node] = one.outputs[former[node]]

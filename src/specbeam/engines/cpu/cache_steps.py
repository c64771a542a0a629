"""Steps on a session's cache in a compiled model: a whole pass in one call, settling a turn, and taking one back."""

from typing import Any, NamedTuple

import numpy as np

from specbeam.engines.cpu.sums import WIDTH
from specbeam.engines.kv.steps import (
    BLOCK,
    EXTENT,
    HELD,
    KNOWN,
    SIZE,
    STORED,
    Trie,
    add_survivors,
    enter,
    feed_slots,
    prune,
)
from specbeam.kernels.compiling import AVAILABLE, Array, compiled

if AVAILABLE:
    from specbeam.kernels.compiling import call_at


class CacheArrays(NamedTuple):
    """A session's cache in a compiled model, as steps take it, with room for all that they are going to store."""

    trie: Trie
    outputs: Array  # float32[nodes, hidden]: the output of the last layer by stored local node
    tapped: Array  # float32[nodes, taps * hidden]: what enters the layers `taps`, by stored local node
    taps: Array  # int64[taps], see `Needs.taps`
    model: Any  # `decoder.Model`
    windows: Array  # int64[kinds]: tokens that each kind of layer looks at, the row's own included; 0: all
    keys: Array  # of all layers, see `layers.attend`
    values: Array
    store_row: int  # the session's row of the store
    threads: int
    all_layers_at: int  # address of `layers.all_layers` for this model
    score_rows_at: int  # address of `layers.score_rows` for this model


@compiled
def _visible_slots(trie: Trie, start: int, stop: int, windows: Array) -> Array:
    """Return which slots the stored nodes start .. stop look at in each kind of layer, bool[kinds, rows, slots]."""
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
def _store(cache: CacheArrays) -> None:
    """Run the layers on all pending nodes, and keep their outputs."""
    trie = cache.trie
    model = cache.model
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
    rows = np.array([[cache.store_row, 0, len(x)]])
    tapped = np.empty((stop - start, cache.tapped.shape[1]), dtype=np.float32)
    seen = _visible_slots(trie, start, stop, cache.windows)
    call_at(cache.all_layers_at, (
        x, model.weights, model.angles, model.eps, model.heads, positions, rows, slots, seen, model.kinds, cache.keys,
        cache.values, cache.taps, tapped, cache.threads,
    ))  # fmt: skip
    cache.outputs[start:stop] = x
    cache.tapped[start:stop] = tapped


@compiled
def extend_cache(cache: CacheArrays, tokens: Array, parents: Array, wanted: Array) -> Array:
    """Do `LM.extend` for one session: store the forest and all pending nodes, return the logits of the `wanted` nodes.

    Raises `IndexError` for tokens and positions that the model does not have.

    Args:
        tokens, parents: int64[nodes] of the forest.
        wanted: int64[n], nodes of the forest.
    """
    trie = cache.trie
    enter(trie, tokens, parents)
    if trie.counts[SIZE] > trie.counts[STORED]:
        _store(cache)
    x = np.empty((len(wanted), cache.outputs.shape[1]), dtype=np.float32)
    for row in range(len(x)):
        x[row] = cache.outputs[trie.local[wanted[row]]]
    model = cache.model
    logits = np.empty((len(x), len(model.head) * WIDTH), dtype=np.float32)
    if len(x) > 0:
        call_at(cache.score_rows_at, (x, model.last_norm, model.eps, model.head, logits, cache.threads))
    if logits.shape[1] > model.vocab:
        logits = logits[:, : model.vocab].copy()
    return logits


@compiled
def has_room(cache: CacheArrays, fresh: int, beams: int) -> bool:
    """Return whether the cache has room for a turn of `fresh` new forest nodes after which at most `beams` beams live."""
    trie = cache.trie
    counts = trie.counts
    size = counts[SIZE] + fresh + beams
    slots = counts[HELD] + counts[SIZE] - counts[STORED] + fresh + 1
    rows = min(trie.nodes.shape[1], len(trie.seen), len(cache.outputs))
    return size <= rows and counts[KNOWN] + fresh + beams <= len(trie.local) and slots <= len(trie.used)


@compiled
def settle_cache(
    cache: CacheArrays, tree: tuple[Array, Array], nodes: Array, tokens: Array, parents: Array, kept: Array
) -> None:
    """Do `LM.settle` for one session: keep the paths to the surviving beams and to kept nodes, free the rest.

    There must be room.

    Args:
        tree: tokens and parents of the turn's forest.
        nodes, tokens, parents: int64[beams] of the survivors: forest node (-1 if it was no draft), token, parent node.
        kept: int64[n], see `Verdict.kept`.
    """
    enter(cache.trie, tree[0], tree[1])
    leaves = add_survivors(cache.trie, nodes, tokens, parents)
    _keep(cache, np.concatenate((leaves, cache.trie.local[kept])))


@compiled
def rewind_cache(cache: CacheArrays, nodes: int) -> None:
    """Take the cache back to the beginning of the turn, whose forest started with `nodes` nodes."""
    _keep(cache, cache.trie.local[:nodes].copy())


@compiled
def _keep(cache: CacheArrays, leaves: Array) -> None:
    """Keep the paths to these local nodes, and the outputs and tapped states of the stored nodes that remain."""
    former = prune(cache.trie, leaves)
    for node in range(cache.trie.counts[STORED]):  # in place, as the number of a node never grows
        if former[node] != node:
            cache.outputs[node] = cache.outputs[former[node]]
            cache.tapped[node] = cache.tapped[former[node]]

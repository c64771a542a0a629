"""Steps on a session's cache in a compiled model: run a whole pass in one call, settle a turn, undo a turn."""

from typing import Any, NamedTuple

import numpy as np

from specbeam.core.compiling.compiler import AVAILABLE, Array, borrowed, compiled
from specbeam.core.compiling.copies import copy_numbers, copy_rows
from specbeam.core.laws.listing import listed_rows
from specbeam.core.passes import (
    extend,
    extend_ranked,
    has_pending,
    has_room_for,
    keep_only,
    rewind,
    runs_layers,
    settle_target,
    whole_rows_again,
)
from specbeam.core.ranked import Listing, Ranked, are_whole, whole_rows
from specbeam.engines.cpu.early import (
    MOST_WAITING,
    UNFINISHED,
    WAITING,
    EarlyNodes,
    ExitWeights,
    finish_early,
    has_early_room,
    keep_early,
    keep_exits,
    rename_early,
    take_back_drafts,
)
from specbeam.engines.cpu.embedding import look_up_rows
from specbeam.engines.cpu.layers import normalise, shape_logits
from specbeam.engines.cpu.rows import KeyValues, LayerRows, Stack, Taps
from specbeam.engines.cpu.sources import Sources, layers_of_sources
from specbeam.engines.cpu.weights import layers_of_weights
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

if AVAILABLE:
    from specbeam.core.compiling.compiler import call_at


# The layers that passes on a cache run: all layers; for drafts, the first layers ahead of the others; or the other
# layers, after the first layers have processed all nodes. FIRST and LAST share their arrays.
ALL, FIRST, LAST = range(3)


@borrowed
class CacheArrays(NamedTuple):
    """A session's cache in a compiled model as arrays for steps, with capacity for everything that they store."""

    trie: Trie
    outputs: Array  # float32[nodes, hidden]: the output of the last layer by stored local node
    tapped: Array  # float32[nodes, taps * hidden]: input of the layers `taps`, by stored local node
    taps: Array  # int64[taps], see `Needs.taps`
    model: Any  # `decoder.Model`
    windows: Array  # int64[kinds]: attention window of each kind of layer in tokens, the row's own included; 0: none
    keys: Array  # of all layers, see `KeyValues`
    values: Array
    store_row: int  # the session's row of the store
    threads: int
    all_layers_at: int  # address of `layers.all_layers` for this model
    score_rows_at: int  # address of `layers.score_rows` for this model
    part: int  # ALL, FIRST or LAST
    first_layers: int  # number of layers that are run ahead of the others
    exit: ExitWeights
    early: EarlyNodes
    sources: Sources  # of the model; the session reads the first of `Sources.rows`
    listing: Listing  # the lists that `extend_ranked` returns


@compiled
def extent_of(trie: Trie) -> int:
    """Return the number of slots that rows read: up to the last slot in use, rounded up to whole blocks."""
    return -(-trie.counts[EXTENT] // BLOCK) * BLOCK


@compiled
def pass_rows(cache: CacheArrays, positions: Array, slots: Array, seen: Array, sources: Sources) -> LayerRows:
    """Return the rows of a pass of one session.

    Args:
        seen: bool[rows, slots], the slots on the path to each row, its own included.
    """
    trie = cache.trie
    windows = cache.windows
    extent = extent_of(trie)
    visible = np.zeros((len(windows), len(positions), extent), dtype=np.bool_)
    for kind in range(len(windows)):
        for number in range(len(positions)):
            row = visible[kind, number]
            for slot in range(extent):
                near = windows[kind] == 0 or positions[number] - trie.slot_position[slot] < windows[kind]
                row[slot] = seen[number, slot] and near
    sessions = np.array([[cache.store_row, 0, len(positions)]])
    places = trie.slot_position[:extent].copy().reshape(1, extent)
    return LayerRows(positions, slots, sessions, visible, places, sources)


@compiled
def fed_rows(cache: CacheArrays, sources: Sources) -> LayerRows:
    """Assign slots to all pending nodes, and return them as the rows of a pass through layers that read these sources."""
    trie = cache.trie
    start = trie.counts[STORED]
    stop = trie.counts[SIZE]
    slots = np.empty(stop - start, dtype=np.int64)
    feed_slots(trie, slots)
    tokens = trie.nodes[0][start:stop]
    positions = trie.nodes[2][start:stop]
    if positions.max() >= cache.model.angles.shape[2]:
        raise IndexError("a position is beyond the model's last position")
    if tokens.min() < 0 or tokens.max() >= _known_tokens(cache):
        raise IndexError("a token is outside the model's vocabulary")
    return pass_rows(cache, positions, slots, trie.seen[start:stop], sources)


@compiled
def _known_tokens(cache: CacheArrays) -> int:
    """Return the number of tokens that the model reads."""
    model = cache.model
    return len(model.embedding) if len(model.read_as) == 0 else len(model.read_as)


@compiled
def is_feedable(cache: CacheArrays) -> bool:
    """Return whether the model has the tokens and positions of all pending nodes; otherwise `fed_rows` raises."""
    counts = cache.trie.counts
    nodes = cache.trie.nodes[:, counts[STORED] : counts[SIZE]]
    known = _known_tokens(cache)
    places = cache.model.angles.shape[2]
    is_fine = True
    for place in range(nodes.shape[1]):
        is_fine &= 0 <= nodes[0, place] < known and nodes[2, place] < places
    return is_fine


@compiled
def first_inputs(cache: CacheArrays, count: int) -> Array:
    """Return the first layer's input of the newest stored nodes, float32[count, hidden]."""
    trie = cache.trie
    model = cache.model
    first = trie.counts[STORED] - count
    tokens = trie.nodes[0, first : first + count]
    if len(model.read_as) > 0:
        tokens = model.read_as[tokens]
    x = np.empty((count, model.embedding.shape[1]), dtype=np.float32)
    look_up_rows(model.embedding, tokens, x)
    for row in range(count):
        for place in range(x.shape[1]):
            x[row, place] *= model.embedding_scale
    if len(model.places) > 0:
        for row in range(count):
            if tokens[row] != model.unplaced:
                added = model.places[trie.nodes[2, first + row]]
                for place in range(x.shape[1]):
                    x[row, place] += added[place]
    if len(model.first_norm) > 0:
        normalise(x, model.first_norm, model.eps, x)
    return x


@compiled
def run_layers(
    cache: CacheArrays, x: Array, rows: LayerRows, weights: Any, kinds: Array, stored: KeyValues, tapped: Array
) -> None:
    """Run layers on x, float32[rows, hidden], in place, and store keys and values.

    Args:
        weights, kinds, stored: of these layers.
        tapped: see `Taps`.
    """
    model = cache.model
    stack = Stack(weights, model.angles, model.eps, model.heads, stored.keys.shape[2], stored.keys.shape[4])
    taps = Taps(cache.taps, tapped)
    call_at(cache.all_layers_at, (x, stack, rows, kinds, stored, taps, cache.threads))


@compiled
def _store(cache: CacheArrays) -> None:
    """Run all layers on all pending nodes, and store the outputs."""
    rows = fed_rows(cache, cache.sources)
    model = cache.model
    x = first_inputs(cache, len(rows.slots))
    tapped = np.empty((len(x), cache.tapped.shape[1]), dtype=np.float32)
    run_layers(cache, x, rows, model.weights, model.kinds, KeyValues(cache.keys, cache.values), tapped)
    stop = cache.trie.counts[STORED]
    start = stop - len(x)
    copy_rows(cache.outputs[start:stop], x)
    copy_rows(cache.tapped[start:stop], tapped)


@compiled
def _run_range(cache: CacheArrays, x: Array, rows: LayerRows, first: int, stop: int) -> None:
    """Run the layers first .. stop of the model on x, float32[rows, hidden], in place, and store keys and values."""
    model = cache.model
    weights = layers_of_weights(model.weights, first, stop)
    stored = KeyValues(cache.keys[first:stop], cache.values[first:stop])
    tapped = np.empty((len(x), 0), dtype=np.float32)
    run_layers(cache, x, rows, weights, model.kinds[first:stop], stored, tapped)


@compiled
def _store_early(cache: CacheArrays) -> None:
    """Run the first layers on all pending nodes, and store the outputs."""
    count = cache.first_layers
    rows = fed_rows(cache, layers_of_sources(cache.sources, 0, count))
    x = first_inputs(cache, len(rows.slots))
    _run_range(cache, x, rows, 0, count)
    keep_early(cache.early, cache.trie, x, rows.slots, len(cache.exit.kinds) > 0)


@compiled
def _run_exit(cache: CacheArrays) -> None:
    """Run the exit layer on all nodes that wait for it."""
    waiting = cache.early.waiting
    count = cache.early.counts[WAITING]
    place = cache.exit.place
    x = waiting.states[:count].copy()
    none = layers_of_sources(cache.sources, 0, 0)
    rows = pass_rows(cache, waiting.positions[:count].copy(), waiting.slots[:count].copy(), waiting.seen[:count], none)
    stored = KeyValues(cache.keys[place : place + 1], cache.values[place : place + 1])
    tapped = np.empty((count, 0), dtype=np.float32)
    run_layers(cache, x, rows, cache.exit.weights, cache.exit.kinds, stored, tapped)
    keep_exits(cache.early, x)


@compiled
def _finish(cache: CacheArrays) -> None:
    """Run the other layers on the nodes that only the first layers have processed, and store the outputs."""
    trie = cache.trie
    early = cache.early
    first = cache.first_layers
    total = len(cache.model.kinds)
    stop = trie.counts[STORED]
    start = stop - early.counts[UNFINISHED]
    x = early.outputs[start:stop].copy()
    positions = trie.nodes[2][start:stop]
    sources = layers_of_sources(cache.sources, first, total)
    rows = pass_rows(cache, positions, early.slots[start:stop].copy(), trie.seen[start:stop], sources)
    _run_range(cache, x, rows, first, total)
    copy_rows(cache.outputs[start:stop], x)
    finish_early(early)


@compiled
def _store_first_and_others(cache: CacheArrays) -> None:
    """Run the first layers on all pending nodes; then the exit layer for a draft, or the other layers for the target."""
    early = cache.early
    if cache.trie.counts[SIZE] > cache.trie.counts[STORED]:
        _store_early(cache)
    most = 0
    if cache.part == LAST:
        if early.counts[UNFINISHED] > 0:
            _finish(cache)
        most = MOST_WAITING
    if early.counts[WAITING] > most:
        _run_exit(cache)


@extend.of(CacheArrays)
@compiled
def extend_cache(cache: CacheArrays, tokens: Array, parents: Array, wanted: Array) -> Array:
    """Implement `LM.extend` for one session: store its nodes, pending and new, return the logits of `wanted` nodes.

    Raises `IndexError` for tokens and positions outside the model's range.

    Args:
        tokens, parents: int64[nodes] of the forest. With `part` LAST the forest must contain all nodes that the first
            layers have processed in this turn, see `keep_given`.
        wanted: int64[n], nodes of the forest.
    """
    trie = cache.trie
    model = cache.model
    enter(trie, tokens, parents)
    if cache.part != ALL:
        _store_first_and_others(cache)
    elif trie.counts[SIZE] > trie.counts[STORED]:
        _store(cache)
    if cache.part == FIRST:
        outputs = cache.early.exited if len(cache.exit.kinds) > 0 else cache.early.outputs
        return _logits_of(cache, outputs, cache.exit.norm, wanted)
    return _logits_of(cache, cache.outputs, model.last_norm, wanted)


@compiled
def _logits_of(cache: CacheArrays, outputs: Array, norm: Array, nodes: Array) -> Array:
    """Return the logits of stored forest nodes, float32[nodes, vocab].

    Args:
        outputs: float32[n, hidden], the output of the last layer that ran, by local node.
        norm: the weight of the norm before the head.
    """
    x = np.empty((len(nodes), outputs.shape[1]), dtype=np.float32)
    for row in range(len(nodes)):
        copy_numbers(x[row], outputs[cache.trie.local[nodes[row]]])
    return shaped_logits(cache, x, norm)


@compiled
def shaped_logits(cache: CacheArrays, x: Array, norm: Array) -> Array:
    """Return the logits of rows, float32[rows, vocab], given the output of the last layer, float32[rows, hidden]."""
    model = cache.model
    logits = np.empty((len(x), model.vocab), dtype=np.float32)
    if len(x) > 0:
        call_at(cache.score_rows_at, (x, norm, model.eps, model.leave, model.head, logits, cache.threads))
        shape_logits(logits, model.logits_divisor, model.logits_cap, model.logits_bias)
    return logits


@extend_ranked.of(CacheArrays)
@compiled
def extend_cache_ranked(
    cache: CacheArrays, tokens: Array, parents: Array, wanted: Array, keys: Array, whole: bool
) -> Ranked:
    """Run `extend_cache`, and return the rows as lists, if there is a listing; see `extend_ranked`."""
    logits = extend_cache(cache, tokens, parents, wanted)
    if whole or cache.listing.length == 0:
        return whole_rows(logits)
    return listed_rows(logits, keys, cache.listing)


@whole_rows_again.of(CacheArrays)
@compiled
def score_cache_again(cache: CacheArrays, known: Ranked, nodes: Array) -> Ranked:
    """Multiply the stored outputs of nodes by the head again, if their rows are lists; see `whole_rows_again`."""
    if are_whole(known):
        return known
    return whole_rows(_logits_of(cache, cache.outputs, cache.model.last_norm, nodes))


@keep_only.of(CacheArrays)
@compiled
def keep_given(cache: CacheArrays, nodes: Array) -> None:
    """Remove the nodes that the first layers have processed in this turn and the target does not score; see `keep_only`."""
    if cache.part != LAST or cache.early.counts[UNFINISHED] == 0:
        return
    known = cache.trie.counts[KNOWN]
    kept = nodes[nodes < known]
    if len(kept) < known:
        _follow(cache, take_back_drafts(cache.early, cache.trie, kept))


@runs_layers.of(CacheArrays)
@compiled
def cache_runs_layers(cache: CacheArrays, nodes: int) -> bool:
    """Return whether nodes are new, pending, or seen only by the first layers; see `runs_layers`."""
    counts = cache.trie.counts
    return counts[SIZE] > counts[STORED] or nodes > counts[KNOWN] or cache.early.counts[UNFINISHED] > 0


@has_pending.of(CacheArrays)
@compiled
def has_pending_nodes(cache: Any) -> bool:
    """Return whether the trie of a cache has pending nodes; see `has_pending`."""
    return cache.trie.counts[SIZE] > cache.trie.counts[STORED]


@compiled
def has_trie_room(trie: Trie, states: Array, fresh: int, beams: int, listed: int) -> bool:
    """Return whether a trie has capacity for a turn of `fresh` new forest nodes that leaves at most `beams` beams.

    Args:
        states: an array by local node that needs room for the nodes, too.
        listed: number of further local nodes that may be listed as forest nodes.
    """
    counts = trie.counts
    size = counts[SIZE] + fresh + beams
    slots = counts[HELD] + counts[SIZE] - counts[STORED] + fresh + 1
    rows = min(trie.nodes.shape[1], len(trie.seen), len(states))
    return size <= rows and counts[KNOWN] + fresh + beams + listed <= len(trie.local) and slots <= len(trie.used)


@has_room_for.of(CacheArrays)
@compiled
def has_room(cache: CacheArrays, fresh: int, beams: int) -> bool:
    """Return whether the cache has capacity for a turn; see `has_trie_room`."""
    trie = cache.trie
    size = trie.counts[SIZE] + fresh + beams
    pending = trie.counts[SIZE] - trie.counts[STORED]
    listed = 0 if cache.part == ALL else pending  # see `take_back_drafts`
    has_nodes = has_trie_room(trie, cache.outputs, fresh, beams, listed)
    return has_nodes and has_early_room(cache.early, trie, size, pending + fresh)


@settle_target.of(CacheArrays)
@compiled
def settle_cache(
    cache: CacheArrays, tree: tuple[Array, Array], nodes: Array, tokens: Array, parents: Array, kept: Array
) -> None:
    """Implement `LM.settle` for one session: keep the paths to the surviving beams and to kept nodes, free the rest.

    The cache must have capacity. A cache with `part` FIRST is settled with the target's, whose arrays it shares.

    Args:
        tree: tokens and parents of the turn's forest.
        nodes, tokens, parents: int64[beams] of the survivors: forest node (-1: not a draft), token, parent node.
        kept: int64[n], see `Verdict.kept`.
    """
    if cache.part == FIRST:
        return
    enter(cache.trie, tree[0], tree[1])
    leaves = add_survivors(cache.trie, nodes, tokens, parents)
    _keep(cache, np.concatenate((leaves, cache.trie.local[kept])))


@rewind.of(CacheArrays)
@compiled
def rewind_cache(cache: CacheArrays, nodes: int) -> None:
    """Restore the cache to the beginning of the turn, whose forest started with `nodes` nodes."""
    if cache.part == FIRST:
        return
    if cache.early.counts[UNFINISHED] > 0:  # first run the other layers: nodes above the roots lose their numbers
        _finish(cache)
    _keep(cache, cache.trie.local[:nodes].copy())


@compiled
def _keep(cache: CacheArrays, leaves: Array) -> None:
    former = prune(cache.trie, leaves)
    rename_early(cache.early, cache.trie, former)
    _follow(cache, former)


@compiled
def _follow(cache: CacheArrays, former: Array) -> None:
    """Keep the outputs and tapped states of the remaining stored nodes, given their former numbers."""
    for node in range(cache.trie.counts[STORED]):  # in place: the number of a node never grows
        if former[node] != node:
            copy_numbers(cache.outputs[node], cache.outputs[former[node]])
            copy_numbers(cache.tapped[node], cache.tapped[former[node]])

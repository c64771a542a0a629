"""Steps on a session's cache in a compiled draft head: compute rows, settle a turn, undo a turn.

The cache is a trie of nodes with features made from the target's hidden states; engines/cpu/layers.py runs the layers. There
are two kinds of heads: a pair trunk (heads/trunk.py) has a row for each node, which reads the feature of the node above; a
block head (heads/block.py) makes the rows of a whole block below a node that the target has not scored.
"""

from typing import Any, NamedTuple

import numpy as np

from specbeam.core.compiling.compiler import AVAILABLE, Array, compiled
from specbeam.core.passes import (
    EACH,
    SettledTurn,
    blocks_made,
    extend,
    has_pending,
    has_room_for,
    rewind,
    settle_draft,
)
from specbeam.core.steps import borrowed, verb
from specbeam.engines.cpu.cache_steps import CacheArrays, extent_of, has_pending_nodes, has_trie_room
from specbeam.engines.cpu.layers import (
    all_layers,
    layer_room,
    normalise,
    normalise_row,
    projected,
    run_layer,
    store_keys_and_values,
    write_qkv,
)
from specbeam.engines.cpu.looks import look_at, looks_of
from specbeam.engines.cpu.rows import KeyValues, LayerRows, Stack, Taps
from specbeam.engines.cpu.sources import no_sources
from specbeam.engines.cpu.sums import WIDTH
from specbeam.engines.kv.steps import (
    BLOCK,
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

CHUNK = 512  # maximum number of rows of a prompt in a pass
# How a pair trunk joins features and embeddings, see `TrunkShape.pairs`.
ATTENTION, PROJECTION, NORMED_PROJECTION = range(3)
# Which of the target's hidden states are normed together before they make a feature.
NO_NORM, NORM_OF_ALL, NORM_OF_EACH = range(3)


@borrowed
class FeatureWeights(NamedTuple):
    """The weights that make features from the target's concatenated hidden states: norms, and an optional matrix."""

    reads_final: bool  # whether the first of the states is the last hidden state after the final norm
    norms: int  # NO_NORM, NORM_OF_ALL or NORM_OF_EACH
    norm: Array  # float32[states]
    each: int  # size of each hidden state
    matrix: Array  # in panels; no panels: the states are the feature
    width: int  # of a feature
    bias: Array  # float32[width], or no numbers
    norm_after: Array  # float32[width], or no numbers


@borrowed
class TrunkModel(NamedTuple):
    """A pair trunk in the form that compiled layers read."""

    features: FeatureWeights
    embedding: Array  # float32[vocab, embed]
    rows: int  # of a block: 0, a trunk makes no blocks
    pairs: int  # ATTENTION, PROJECTION or NORMED_PROJECTION
    swaps: bool  # see `TrunkShape.swaps`
    norms_residual: bool
    feeds_normed: bool
    embedding_norm: Array  # float32[embed], or no numbers
    feature_norm: Array  # float32[width], or no numbers
    join: Array  # the matrix of a projection, in panels
    join_bias: Array  # float32[width], or no numbers
    first: Any  # `Weights` of the first layer
    others: Any  # of the other layers
    kinds: Array  # int64[other layers]: zeros
    angles: Array
    eps: float
    heads: int
    last_norm: Array  # float32[width], or no numbers
    head: Array  # in panels
    tokens: Array  # int64[draft_vocab]: the target's token for each of the head's; no numbers: the same tokens
    vocab: int


@borrowed
class BlockModel(NamedTuple):
    """A block head in the form that compiled layers read."""

    features: FeatureWeights
    embedding: Array  # float32[vocab, width]
    mask: int  # the token that rows after the first one read
    rows: int  # of a block
    first_row: int
    weights: Any  # `Weights`
    kinds: Array  # int64[layers]: zeros
    angles: Array
    eps: float
    heads: int
    last_norm: Array  # float32[width]
    head: Array  # in panels
    correction_rows: Array  # float32[vocab, rank]; rank 0: no correction by the token above a draft
    correction: Array  # in panels
    tokens: Array
    vocab: int


@borrowed
class Blocks(NamedTuple):
    """The blocks of a turn: their logits before the correction by the token above."""

    at: Array  # int64[nodes]: the number of the block below each local node; -1: none
    made: Array  # int64[1]: number of blocks
    base: Array  # float32[blocks * rows, columns]


@borrowed
class HeadArrays(NamedTuple):
    """A session's cache in a compiled head as arrays for steps, with capacity for everything that they store."""

    trie: Trie
    features: Array  # float32[nodes, width]: of the local nodes that the target has scored
    is_scored: Array  # bool[nodes]
    states: Array  # float32[nodes, width]: the rows of a trunk by stored local node; width 0 for a block head
    blocks: Blocks  # of a block head
    model: Any  # TrunkModel or BlockModel
    keys: Array  # of all layers, see `attention.attend`
    values: Array
    store_row: int  # the session's row of the store
    threads: int
    layers_at: int  # address of `pair_layers` or `run_all` for this model
    context_at: int  # address of `context_layers`; 0 for a trunk
    score_rows_at: int  # address of `layers.score_rows` for this model


class PairFeed(NamedTuple):
    """The inputs of a pass of a trunk: rows of one session or of several."""

    tokens: Array  # int64[rows]
    given: Array  # float32[rows, width]: features of the nodes above
    positions: Array  # int64[rows]
    slots: Array  # int64[rows]
    seen: Array  # bool[1, rows, slots]
    places: Array  # int64[sessions, slots], see `LayerRows`


@compiled
def make_features(weights: FeatureWeights, eps: float, states: Array, threads: int) -> Array:
    """Return a head's features from the target's hidden states: float32[rows, states] -> float32[rows, width]."""
    rows = states
    if weights.norms != NO_NORM:
        rows = np.empty_like(states)
        each = weights.each if weights.norms == NORM_OF_EACH else states.shape[1]
        for row in range(len(states)):
            for start in range(0, states.shape[1], each):
                stop = start + each
                normalise_row(states[row][start:stop], weights.norm[start:stop], eps, rows[row][start:stop])
    if len(weights.matrix) == 0:
        return rows
    features = projected(rows, weights.matrix, weights.bias, threads)[:, : weights.width].copy()
    if len(weights.norm_after) > 0:
        normalise(features, weights.norm_after, eps, features)
    return features


@compiled
def pair_layers(x: Array, model: TrunkModel, feed: PairFeed, sessions: Array, cache: KeyValues, threads: int) -> None:
    """Write the states of rows of a trunk to x, float32[rows, width], and store keys and values.

    Args:
        sessions: see `LayerRows`.
        cache: of all layers.
    """
    count, width = x.shape
    embed = model.embedding.shape[1]
    both = np.empty((count, embed + width), dtype=np.float32)
    start = width if model.swaps else 0  # columns of the embedding
    after = 0 if model.swaps else embed
    for row in range(count):
        embedded = both[row][start : start + embed]
        feature = both[row][after : after + width]
        embedded[:] = model.embedding[feed.tokens[row]]
        feature[:] = feed.given[row]
        if len(model.embedding_norm) > 0:
            normalise_row(embedded, model.embedding_norm, model.eps, embedded)
            normalise_row(feature, model.feature_norm, model.eps, feature)
    _, _, kv_heads, _, size, _ = cache.keys.shape
    stack = Stack(model.first, model.angles, model.eps, model.heads, kv_heads, size)
    room = layer_room(count, width, stack, threads)
    read = both
    if model.pairs == ATTENTION:
        x[:] = feed.given
        if model.norms_residual:
            x[:] = both[:, after : after + width]
    else:
        x[:] = projected(both, model.join, model.join_bias, threads)[:, :width]
        read = room.normed
        if model.pairs == PROJECTION:
            read[:] = x
        else:
            normalise(x, model.first.before_attention[0], model.eps, read)
    rows = LayerRows(feed.positions, feed.slots, sessions, feed.seen, feed.places, no_sources())
    look = look_at(rows, looks_of(rows), 0)
    run_layer(x, read, stack, 0, rows, look, KeyValues(cache.keys[0], cache.values[0]), room)
    if len(model.kinds) > 0:
        others = Stack(model.others, model.angles, model.eps, model.heads, kv_heads, size)
        run_all(x, others, rows, model.kinds, KeyValues(cache.keys[1:], cache.values[1:]), threads)


@compiled
def run_all(x: Array, stack: Stack, rows: LayerRows, kinds: Array, cache: KeyValues, threads: int) -> None:
    """Run `layers.all_layers` without taps."""
    taps = Taps(np.empty(0, dtype=np.int64), np.empty((len(x), 0), dtype=np.float32))
    all_layers(x, stack, rows, kinds, cache, taps, threads)


@compiled
def context_layers(
    features: Array, model: BlockModel, positions: Array, sessions: Array, slots: Array, cache: KeyValues, threads: int
) -> None:
    """Store the keys and values of scored nodes in all layers of a block head, which read the same features."""
    _, _, kv_heads, _, size, _ = cache.keys.shape
    stack = Stack(model.weights, model.angles, model.eps, model.heads, kv_heads, size)
    qkv = np.empty((len(features), model.weights.qkv.shape[1] * WIDTH), dtype=np.float32)
    for layer in range(len(model.kinds)):
        write_qkv(features, stack, layer, positions, qkv, threads)
        own = KeyValues(cache.keys[layer], cache.values[layer])
        store_keys_and_values(qkv, model.heads, sessions, slots, own)


@extend.of(HeadArrays)
@compiled
def extend_head_cache(cache: HeadArrays, tokens: Array, parents: Array, wanted: Array) -> Array:
    """Return the logits of the `wanted` nodes of a forest, float32[wanted, vocab]; see `extend`."""
    return head_rows(cache.model, cache, entered(cache, tokens, parents, wanted))


@compiled
def entered(cache: HeadArrays, tokens: Array, parents: Array, wanted: Array) -> Array:
    """Add the new nodes of a forest; return the local nodes of the `wanted` ones."""
    trie = cache.trie
    size = trie.counts[SIZE]
    enter(trie, tokens, parents)
    cache.is_scored[size : trie.counts[SIZE]] = False
    cache.blocks.at[size : trie.counts[SIZE]] = -1
    nodes = np.empty(len(wanted), dtype=np.int64)
    for place in range(len(wanted)):
        nodes[place] = trie.local[wanted[place]]
    return nodes


@verb(0, has_body=False)
def head_rows(model: Any, cache: HeadArrays, nodes: Array) -> Array:
    """Return the logits of local nodes; each kind of head has its own step."""


@head_rows.of(TrunkModel)
@compiled
def trunk_rows(model: TrunkModel, cache: HeadArrays, nodes: Array) -> Array:
    """Compute all pending rows of a trunk whose input is known, and return the logits of local nodes."""
    count = pairs_ready(cache)
    while count > 0:
        feed = begin_pairs(cache, count)
        x = np.empty((count, cache.states.shape[1]), dtype=np.float32)
        sessions = np.array([[cache.store_row, 0, count]])
        call_at(cache.layers_at, (x, model, feed, sessions, KeyValues(cache.keys, cache.values), cache.threads))
        finish_pairs(cache, x)
        count = pairs_ready(cache)
    x = np.empty((len(nodes), cache.states.shape[1]), dtype=np.float32)
    for row in range(len(nodes)):
        x[row] = cache.states[nodes[row]]
    return of_all_tokens(model, scored(cache, x))


@compiled
def pairs_ready(cache: HeadArrays) -> int:
    """Return the number of next pending rows of a trunk whose input is known, at most `CHUNK`.

    The input is the target's feature of the node above, or the head's own state there.
    """
    trie = cache.trie
    start = trie.counts[STORED]
    most = min(trie.counts[SIZE] - start, CHUNK)
    count = 0
    while count < most:
        above = trie.nodes[1, start + count]
        if above >= start and not cache.is_scored[above]:
            break
        count += 1
    return count


@compiled
def begin_pairs(cache: HeadArrays, count: int) -> PairFeed:
    """Assign slots to the next `count` pending rows of a trunk, and return the inputs of their pass."""
    trie = cache.trie
    model = cache.model
    start = trie.counts[STORED]
    stop = start + count
    width = cache.states.shape[1]
    slots = np.empty(count, dtype=np.int64)
    feed_slots(trie, slots)
    given = np.empty((count, width), dtype=np.float32)
    for row in range(count):
        above = trie.nodes[1, start + row]
        if cache.is_scored[above]:
            given[row] = cache.features[above]
            continue
        given[row] = cache.states[above]
        if model.feeds_normed:
            normalise_row(given[row], model.last_norm, model.eps, given[row])
    extent = extent_of(trie)
    seen = np.empty((1, count, extent), dtype=np.bool_)
    seen[0] = trie.seen[start:stop, :extent]
    places = trie.slot_position[:extent].copy().reshape(1, extent)
    return PairFeed(trie.nodes[0][start:stop].copy(), given, trie.nodes[2][start:stop].copy(), slots, seen, places)


@compiled
def finish_pairs(cache: HeadArrays, x: Array) -> None:
    """Store the states of the newest stored rows of a trunk."""
    stored = cache.trie.counts[STORED]
    cache.states[stored - len(x) : stored] = x


@compiled
def scored(cache: HeadArrays, x: Array) -> Array:
    """Return the logits of the head's own tokens for rows, float32[rows, columns], with padded columns."""
    model = cache.model
    logits = np.empty((len(x), len(model.head) * WIDTH), dtype=np.float32)
    if len(x) > 0:
        head = model.head
        call_at(cache.score_rows_at, (x, model.last_norm, model.eps, head[:0], head, logits, cache.threads))
    return logits


@compiled
def of_all_tokens(model: Any, logits: Array) -> Array:
    """Return logits of all tokens of the target; -inf for tokens that the head does not have."""
    vocab = model.vocab
    if len(model.tokens) == 0:
        return logits[:, :vocab].copy() if logits.shape[1] > vocab else logits
    rows = np.full((len(logits), vocab), -np.inf, dtype=np.float32)
    for row in range(len(logits)):
        for place in range(len(model.tokens)):
            rows[row, model.tokens[place]] = logits[row, place]
    return rows


@head_rows.of(BlockModel)
@compiled
def block_rows(model: BlockModel, cache: HeadArrays, nodes: Array) -> Array:
    """Make the missing blocks, and return the logits of local nodes."""
    trie = cache.trie
    blocks = cache.blocks
    _store_context(cache)
    stored = trie.counts[STORED]
    roots = np.empty(len(nodes), dtype=np.int64)
    far = np.zeros(len(nodes), dtype=np.int64)
    for place in range(len(nodes)):
        node = nodes[place]
        while trie.nodes[1, node] >= stored:
            node = trie.nodes[1, node]
            far[place] += 1
        roots[place] = node
    _make_blocks(cache, roots)
    logits = np.empty((len(nodes), blocks.base.shape[1]), dtype=np.float32)
    for place in range(len(nodes)):
        row = min(model.first_row + far[place], model.rows - 1)
        logits[place] = blocks.base[blocks.at[roots[place]] * model.rows + row]
    rank = model.correction_rows.shape[1]
    if rank > 0 and len(nodes) > 0:
        read = np.empty((len(nodes), rank), dtype=np.float32)
        for place in range(len(nodes)):
            read[place] = model.correction_rows[trie.nodes[0, nodes[place]]]
        logits += projected(read, model.correction, np.empty(0, dtype=np.float32), cache.threads)
    return of_all_tokens(model, logits)


@compiled
def _store_context(cache: HeadArrays) -> None:
    """Store the keys and values of pending nodes, up to the first one that the target has not scored."""
    trie = cache.trie
    while True:
        start = trie.counts[STORED]
        stop = start
        while stop < min(trie.counts[SIZE], start + CHUNK) and cache.is_scored[stop]:
            stop += 1
        if stop == start:
            return
        slots = np.empty(stop - start, dtype=np.int64)
        feed_slots(trie, slots)
        sessions = np.array([[cache.store_row, 0, stop - start]])
        features = cache.features[start:stop].copy()
        positions = trie.nodes[2][start:stop].copy()
        stored = KeyValues(cache.keys, cache.values)
        call_at(cache.context_at, (features, cache.model, positions, sessions, slots, stored, cache.threads))


@compiled
def _make_blocks(cache: HeadArrays, roots: Array) -> None:
    """Make the missing blocks below these local nodes, in one pass.

    The keys and values of their rows go into slots after those of the trie, which are not read again.
    """
    trie = cache.trie
    model = cache.model
    blocks = cache.blocks
    first = blocks.made[0]
    for root in roots:
        if blocks.at[root] < 0:
            blocks.at[root] = blocks.made[0]
            blocks.made[0] += 1
    count = (blocks.made[0] - first) * model.rows
    if count == 0:
        return
    extent = extent_of(trie)
    seen = np.zeros((1, count, extent + -(-count // BLOCK) * BLOCK), dtype=np.bool_)
    x = np.empty((count, model.embedding.shape[1]), dtype=np.float32)
    positions = np.empty(count, dtype=np.int64)
    for root in roots:
        start = (blocks.at[root] - first) * model.rows
        if start < 0:  # an earlier pass has made this block
            continue
        for place in range(model.rows):
            row = start + place
            x[row] = model.embedding[trie.nodes[0, root] if place == 0 else model.mask]
            positions[row] = trie.nodes[2, root] + place
            seen[0, row, :extent] = trie.seen[trie.nodes[1, root], :extent]
            seen[0, row, extent + start : extent + start + model.rows] = True
    slots = extent + np.arange(count)
    places = np.zeros((1, seen.shape[2]), dtype=np.int64)
    places[0, :extent] = trie.slot_position[:extent]
    places[0, extent : extent + count] = positions
    sessions = np.array([[cache.store_row, 0, count]])
    rows = LayerRows(positions, slots, sessions, seen, places, no_sources())
    stored = KeyValues(cache.keys, cache.values)
    _, _, kv_heads, _, size, _ = cache.keys.shape
    stack = Stack(model.weights, model.angles, model.eps, model.heads, kv_heads, size)
    call_at(cache.layers_at, (x, stack, rows, model.kinds, stored, cache.threads))
    blocks.base[first * model.rows : first * model.rows + count] = scored(cache, x)


@has_room_for.of(HeadArrays)
@compiled
def head_has_room(cache: HeadArrays, fresh: int, beams: int) -> bool:
    """Return whether the cache has capacity for a turn; see `has_trie_room`."""
    blocks = cache.trie.counts[KNOWN] + fresh
    has_blocks = blocks * cache.model.rows <= len(cache.blocks.base)
    return has_trie_room(cache.trie, cache.features, fresh, beams, 0) and has_blocks


has_pending.of(HeadArrays)(has_pending_nodes)


@blocks_made.of(HeadArrays)
@compiled
def blocks_of_head(cache: HeadArrays) -> int:
    """Return the number of blocks of a block head; see `blocks_made`."""
    return cache.blocks.made[0] if cache.model.rows > 0 else EACH


@compiled
def states_of(cache: CacheArrays, nodes: Array, reads_final: bool) -> Array:
    """Return the concatenated hidden states of forest nodes that the target has stored: the inputs of a head.

    Args:
        reads_final: whether the last hidden state after the final norm comes first.
    """
    hidden = cache.outputs.shape[1] if reads_final else 0
    states = np.empty((len(nodes), hidden + cache.tapped.shape[1]), dtype=np.float32)
    for row in range(len(nodes)):
        local = cache.trie.local[nodes[row]]
        if reads_final:
            normalise_row(cache.outputs[local], cache.model.last_norm, cache.model.eps, states[row][:hidden])
        states[row, hidden:] = cache.tapped[local]
    return states


@compiled
def settle_head_cache(cache: HeadArrays, turn: SettledTurn, scored_nodes: Array, states: Array) -> None:
    """Implement `LM.settle` for one session: keep the paths to the surviving beams and to kept nodes, free the rest.

    Rows computed from the head's own states serve the drafts of one turn only, and are removed first. The cache must
    have capacity.

    Args:
        scored_nodes: int64[n], the nodes of the head's forest that the target has scored in this turn.
        states: the target's hidden states there.
    """
    trie = cache.trie
    model = cache.model
    rewind_head_cache(cache, turn.start)
    fresh = entered(cache, turn.tokens, turn.parents, scored_nodes)
    features = make_features(model.features, model.eps, states, cache.threads)
    for row in range(len(fresh)):
        cache.features[fresh[row]] = features[row]
        cache.is_scored[fresh[row]] = True
    size = trie.counts[SIZE]
    leaves = add_survivors(trie, turn.survivors, turn.survivor_tokens, turn.survivor_parents)
    cache.is_scored[size : trie.counts[SIZE]] = False
    _keep(cache, np.concatenate((leaves, trie.local[turn.kept])))


@settle_draft.of(HeadArrays)
@compiled
def settle_head(draft: HeadArrays, target: CacheArrays, turn: SettledTurn) -> None:
    """Settle a head with the target's hidden states of the nodes that the target scored; see `settle_draft`."""
    states = states_of(target, turn.scored, draft.model.features.reads_final)
    settle_head_cache(draft, turn, turn.node_map[turn.scored], states)


@rewind.of(HeadArrays)
@compiled
def rewind_head_cache(cache: HeadArrays, nodes: int) -> None:
    """Remove all nodes of this turn's forest except the first `nodes`."""
    if cache.trie.counts[KNOWN] > nodes:
        _keep(cache, cache.trie.local[:nodes].copy())


@compiled
def _keep(cache: HeadArrays, leaves: Array) -> None:
    """Keep the paths to these local nodes, with their features and states; forget all blocks."""
    former = prune(cache.trie, leaves)
    for node in range(len(former)):  # in place: the number of a node never grows
        before = former[node]
        if before != node:
            cache.features[node] = cache.features[before]
            cache.states[node] = cache.states[before]
            cache.is_scored[node] = cache.is_scored[before]
    cache.blocks.at[:] = -1
    cache.blocks.made[0] = 0

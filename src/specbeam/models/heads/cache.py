"""Caches of heads, one per session: a trie of nodes with their keys, values and features of the target."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Int64
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from specbeam.core.forest import Forest, unknown_nodes
from specbeam.core.records import Turn
from specbeam.engines.kv.trie import Feed, KVTrie
from specbeam.models.heads.arrays import Flags, Nodes, PerRow, Rows
from specbeam.models.heads.layers import View, attended, view_of

CHUNK = 512  # rows of a prompt in a pass
Views = tuple[View, ...]


class NodeCache:
    """A trie of the live nodes of a session, with the features of nodes that the target has scored.

    Args:
        prompt: the tokens of the trie at first.
        first: features of the first local nodes, float[nodes, width]. Local node 0 is the empty path, before all tokens.
        is_scored: which local nodes have a feature.
    """

    def __init__(self, prompt: list[int], first: Rows, is_scored: Flags) -> None:
        self.trie = KVTrie(prompt)
        # By local node: its feature, and whether the target has scored it.
        self.features = first.new_zeros(len(is_scored), first.shape[1])
        self.features[torch.from_numpy(is_scored)] = first
        self.is_scored = is_scored
        self.answered = 0  # number of forest nodes whose rows were returned in this turn

    @property
    def peak(self) -> int:
        """The largest number of rows that were stored at the same time."""
        return self.trie.peak

    def on_device(self, array: np.ndarray) -> Tensor:
        """Return an array of the host on the head's device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.features.device)

    def enter(self, forest: Forest) -> Nodes:
        """Add the new nodes of a forest; return the local nodes whose rows are wanted: new ones whose rows are not known."""
        self.trie.enter(forest)
        self.make_rows()
        wanted = unknown_nodes(self.answered, forest.size, forest.known.nodes)
        self.answered = forest.size
        return self.trie.local[wanted]

    def make_rows(self) -> None:
        """Make room for the features of all local nodes."""
        more = self.trie.size - len(self.is_scored)
        if more > 0:
            self.features = with_more_rows(self.features, more)
            self.is_scored = np.concatenate([self.is_scored, np.zeros(more, dtype=bool)])

    def settle(self, turn: Turn, features: Rows | None) -> None:
        """Keep the rows that the surviving beams need.

        Args:
            features: features of the forest nodes that the target has scored in this turn, ascending; None: rows do not
                read them.
        """
        forest = turn.forest
        kept = forest.parents[forest.known.nodes] >= 0
        self.rewind(forest.roots + int(kept.sum()))  # the nodes that the forest began with
        self.trie.enter(forest)
        self.make_rows()
        fresh = self.trie.local[turn.scored_nodes]
        if features is not None:
            self.give(fresh, features)
        self.note_scored(fresh)
        former, _ = self.trie.settle(turn)
        self.keep(former)
        self.answered = 0

    def give(self, nodes: Nodes, features: Rows) -> None:
        """Set the features of local nodes."""
        self.features[self.on_device(nodes)] = features
        self.is_scored[nodes] = True

    def note_scored(self, nodes: Nodes) -> None:
        """Handle the local nodes that the target has scored in this turn, in the order of its rows."""

    def rewind(self, nodes: int) -> None:
        """Take back the rows of all nodes of this turn's forest except the first `nodes`."""
        if self.trie.known > nodes:
            self.keep(self.trie.rewind(nodes))
        self.answered = min(self.answered, nodes)

    def keep(self, former: Nodes) -> None:
        """Keep the rows of the remaining local nodes.

        Args:
            former: the former numbers of these nodes; -1 and numbers beyond the last one mark nodes without rows.
        """
        known = former < len(self.is_scored)
        at = np.where(known, former, 0)
        self.take(self.on_device(at))
        self.is_scored = self.is_scored[at] & known

    def take(self, at: PerRow) -> None:
        """Keep the rows of these local nodes."""
        self.features = self.features[at]

    def store_scored(self) -> Feed:
        """Assign slots to the next pending nodes, at most `CHUNK`, up to the first one that the target has not scored."""
        start = self.trie.stored
        is_scored = self.is_scored[start : start + CHUNK]
        return self.trie.feed(_count_before_false(is_scored))

    def scored_above(self, node: int) -> tuple[int, int]:
        """Return the nearest scored node above a local node, and the distance to it."""
        parents = self.trie.parents
        above = int(parents[node])
        far = 1
        while above > 0 and not self.is_scored[above]:
            above = int(parents[above])
            far += 1
        return above, far

    def in_window(self, seen: np.ndarray, origins: np.ndarray, view: View) -> np.ndarray:
        """Return which of the seen slots are in the window of a view.

        Args:
            origins: positions at which the windows end.
        """
        if not view.within:
            return seen
        first = origins[..., None] - view.within
        return seen & (self.trie.slot_position[: seen.shape[-1]] > first)


def with_more_rows(rows: Tensor, more: int) -> Tensor:
    """Return rows with `more` rows of zeros after them."""
    return torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])])


def _count_before_false(flags: Flags) -> int:
    """Return the number of flags before the first false one."""
    return len(flags) if flags.all() else int(flags.argmin())


class StoredRows:
    """The keys and values of the stored nodes of a session, by layer and slot.

    The first rows stored in a layer determine its size and type.
    """

    def __init__(self, layers: int) -> None:
        self.slots = 0
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers

    def reserve(self, slots: int) -> None:
        """Make room for this number of slots."""
        self.slots = max(slots, self.slots)

    def store(self, layer: int, slots: Nodes, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of a layer in slots, float[rows, kv_heads, keys * size] each."""
        at = torch.from_numpy(slots).to(keys.device)
        for stored, fresh in ((self.keys, keys), (self.values, values)):
            rows = stored[layer]
            if rows is None:
                rows = fresh[:0]
            if self.slots > len(rows):
                rows = with_more_rows(rows, self.slots - len(rows))
            rows[at] = fresh
            stored[layer] = rows

    def first(self, layer: int, slots: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first `slots` slots of a layer, float[slots, kv_heads, size] each."""
        keys = self.keys[layer]
        values = self.values[layer]
        assert keys is not None
        assert values is not None
        return keys[:slots], values[:slots]


@dataclass(frozen=True, eq=False)
class PairRows:
    """Rows of a session in a pass of the head."""

    cache: "PairCache"
    nodes: Nodes  # local
    feed: Feed
    tokens: Nodes | Int64[np.ndarray, "nodes history"]  # the last ones of the path to each
    features: Rows  # of the nodes above
    states: Rows  # the head's own, of the nodes above
    is_scored: Bool[Tensor, " rows"]  # whether the target has scored the node above, so that the row reads its feature
    starts: Nodes  # positions at which windows end: of the first row of each row's draft


class PairCache(NodeCache):
    """The rows of one session in a pair trunk.

    Row v reads the pair (feature of the node above v, token of v). The first token of a text has no row: it is the empty
    path at the top of the trie, whose feature is known.

    Rows computed from the head's own states serve the drafts of one turn. `settle` takes them back, so that surviving nodes
    get rows computed from the features of the target.

    Args:
        prompt: the tokens of the prompt.
        first: features of the prompt's tokens but the last one, float[tokens - 1, width].
        views: see `TrunkShape.views`.
        history: number of last tokens that a row reads.
    """

    def __init__(self, prompt: list[int], first: Rows, layers: int, views: Views = (), history: int = 1) -> None:
        super().__init__(prompt[1:], first, np.arange(len(prompt)) < len(first))
        self.states = torch.zeros_like(self.features)  # the head's own states, by local node
        self.stored = StoredRows(layers)
        self.views = views
        self.history = history
        # The trie forgets the nodes above stored ones. Short paths are padded with the text's first token.
        padded = np.array([*prompt[:1] * (history - 1), *prompt])
        self.last_tokens = sliding_window_view(padded, history).copy()

    def make_rows(self) -> None:
        super().make_rows()
        self.states = with_more_rows(self.states, len(self.features) - len(self.states))
        self._note_tokens(len(self.last_tokens))

    def _note_tokens(self, first: int) -> None:
        """Set the last tokens of the paths to local nodes from `first` on, given their parents' last tokens."""
        trie = self.trie
        if self.history == 1 or trie.size <= first:
            return
        more = np.empty((trie.size - first, self.history), dtype=np.int64)
        found = np.concatenate([self.last_tokens[:first], more])
        for node in range(first, trie.size):
            found[node, :-1] = found[trie.parents[node], 1:]
            found[node, -1] = trie.tokens[node]
        self.last_tokens = found

    def keep(self, former: Nodes) -> None:
        """See `NodeCache.keep`. New nodes come last, and get their last tokens."""
        if self.history > 1:
            known = former[former < len(self.last_tokens)]
            self.last_tokens = self.last_tokens[known]
            self._note_tokens(len(known))
        super().keep(former)

    def take(self, at: PerRow) -> None:
        super().take(at)
        self.states = self.states[at]

    def next_rows(self) -> PairRows | None:
        """Assign slots to the next pending nodes whose input is known, and return them; None if there are none."""
        start = self.trie.stored
        above = self.trie.parents[start : start + CHUNK]
        count = _count_before_false(self.is_scored[above] | (above < start))
        if count == 0:
            return None
        feed = self.trie.feed(count)
        self.stored.reserve(self.trie.capacity)
        return self.rows(np.arange(start, start + count), feed)

    def rows(self, nodes: Nodes, feed: Feed) -> PairRows:
        """Return the rows of local nodes with assigned slots, and their inputs."""
        above = self.trie.parents[nodes]
        read = self.on_device(above)
        is_scored = self.on_device(self.is_scored[above])
        tokens = feed.tokens if self.history == 1 else self.last_tokens[nodes]
        starts = self._starts(nodes) if self.views else self.trie.positions[nodes]
        return PairRows(self, nodes, feed, tokens, self.features[read], self.states[read], is_scored, starts)

    def _starts(self, nodes: Nodes) -> Nodes:
        """Return for each local node the position of the nearest node on its path whose parent was scored."""
        parents = self.trie.parents
        at = nodes.copy()
        while len(below := np.flatnonzero(~self.is_scored[parents[at]] & (parents[at] > 0))):
            at[below] = parents[at[below]]
        return self.trie.positions[at]

    def attend(self, rows: PairRows, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store keys and values of rows; return the mixed values of the rows above them and of themselves."""
        feed = rows.feed
        self.stored.store(layer, feed.slots, keys, values)
        extent = self.trie.extent
        view = view_of(self.views, layer)
        origins = feed.positions if view.from_row else rows.starts
        seen = self.in_window(feed.seen[:, :extent], origins, view)
        return attended(queries, *self.stored.first(layer, extent), self.on_device(seen))

    def learn(self, nodes: Nodes, states: Rows) -> None:
        """Store the head's states of local nodes."""
        self.states[self.on_device(nodes)] = states


class ModuleCache(PairCache):
    """A session's rows in one module of several in a row (see heads/modules.py).

    The features of its nodes are the states of the module before. A node without a feature above it, or with too few nodes
    above, has a slot without a row, which no row sees. It gets a row after the target has scored the nodes above it, because
    drafts are entered again when a turn is settled; or never, if there are too few nodes above.

    The caches of all modules get the same nodes but drop different ones, because a cache keeps nodes that it has not
    stored yet. So each node has a name, a number that is the same in all caches.

    Args:
        prompt: the tokens of the prompt.
        first: features for the first module, see `PairCache`; no rows for the others.
        number: the number of the module, from 0.
        is_last: whether drafts deeper than the number of modules get rows, too.
    """

    def __init__(self, prompt: list[int], first: Rows, layers: int, number: int, is_last: bool) -> None:
        super().__init__(prompt, first, layers)
        self.number = number
        self.is_last = is_last
        self.names = np.arange(len(prompt))  # the name of each local node, ascending; all caches use the same names
        self.named = len(prompt)  # number of names given so far
        self.has_row = np.zeros(0, dtype=bool)  # by slot

    def make_rows(self) -> None:
        super().make_rows()
        self.names = np.concatenate([self.names, self._new_names(len(self.is_scored) - len(self.names))])

    def keep(self, former: Nodes) -> None:
        """See `NodeCache.keep`. Nodes without a former number are survivors that were not drafted; they get names."""
        known = former < len(self.names)
        names = np.empty(len(former), dtype=np.int64)
        names[known] = self.names[former[known]]
        names[~known] = self._new_names(int((~known).sum()))
        super().keep(former)
        self.names = names

    def _new_names(self, count: int) -> Nodes:
        first = self.named
        self.named = first + count
        return np.arange(first, self.named)

    def local_of(self, names: Nodes) -> Nodes:
        """Return the local nodes of these names; -1 for nodes that have left the cache."""
        at = np.searchsorted(self.names, names).clip(max=len(self.names) - 1)
        return np.where(self.names[at] == names, at, -1)

    def next_rows(self) -> PairRows | None:
        """See `PairCache.next_rows`. All nodes get slots; nodes whose input is known get rows."""
        trie = self.trie
        while trie.pending:
            start = trie.stored
            gets_row = self._with_something_to_read(start)
            feed = trie.feed(len(gets_row))
            self.stored.reserve(trie.capacity)
            fresh = np.zeros(trie.capacity - len(self.has_row), dtype=bool)
            self.has_row = np.concatenate([self.has_row, fresh])
            self.has_row[feed.slots] = gets_row
            if gets_row.any():
                rows = np.flatnonzero(gets_row)
                return self.rows(start + rows, feed.only(rows))
        return None

    def _with_something_to_read(self, start: int) -> Flags:
        """Return whether each of the next pending nodes has a known input, up to the first that waits for its parent."""
        above = self.trie.parents[start : start + CHUNK]
        is_deep = self.trie.positions[start : start + CHUNK] >= self.number
        reads_feature = is_deep & self.is_scored[above]
        if not self.is_last:
            return reads_feature
        reads = reads_feature | (is_deep & (above < start))
        count = _count_before_false(reads | ~is_deep)
        return reads[:count]

    def attend(self, rows: PairRows, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `PairCache.attend`: slots without rows are not seen."""
        feed = rows.feed
        seen = feed.seen & self.has_row[: feed.seen.shape[1]]
        shown = replace(rows, feed=replace(feed, seen=seen))
        return super().attend(shown, layer, queries, keys, values)


class ModulesCache:
    """A session's rows in all modules of several in a row.

    Args:
        prompt: the tokens of the prompt.
        first: features of the prompt's tokens but the last one, float[tokens - 1, width].
        layers: number of layers of each module.
    """

    def __init__(self, prompt: list[int], first: Rows, layers: list[int]) -> None:
        last = len(layers) - 1
        self.caches = [ModuleCache(prompt, first, layers[0], 0, last == 0)]
        for number in range(1, len(layers)):
            self.caches.append(ModuleCache(prompt, first[:0], layers[number], number, number == last))

    @property
    def peak(self) -> int:
        """The sum over modules of the largest number of rows that were stored at the same time."""
        return sum(cache.peak for cache in self.caches)

    @property
    def answered(self) -> int:
        """The number of forest nodes whose rows were returned in this turn."""
        return self.caches[0].answered

    def enter(self, forest: Forest) -> Int64[np.ndarray, "modules wanted"]:
        """Add the new nodes of a forest; return the local nodes whose rows are wanted, in the cache of each module."""
        return np.stack([cache.enter(forest) for cache in self.caches])

    def settle(self, turn: Turn, features: Rows) -> None:
        """Keep the rows that the surviving beams need; see `NodeCache.settle`."""
        first, *others = self.caches
        first.settle(turn, features)
        for cache in others:
            cache.settle(turn, None)

    def rewind(self, nodes: int) -> None:
        """Take back the rows of all nodes of this turn's forest except the first `nodes`."""
        for cache in self.caches:
            cache.rewind(nodes)

    def drafts_above(self, nodes: Nodes) -> Nodes:
        """Return the number of unscored drafts above each of the first module's local nodes.

        The module of this number makes the law below the node.
        """
        first = self.caches[0]
        parents = first.trie.parents
        found = np.zeros(len(nodes), dtype=np.int64)
        for place, node in enumerate(nodes.tolist()):
            above = int(parents[node])
            while above >= 0 and not first.is_scored[above]:
                found[place] += 1
                above = int(parents[above])
        return found

    def hand_on(self, number: int, nodes: Nodes, features: Rows) -> None:
        """Pass the features that the module `number` has made at local nodes on to the next module, if there is one."""
        if number + 1 == len(self.caches):
            return
        cache = self.caches[number + 1]
        at = cache.local_of(self.caches[number].names[nodes])
        found = at >= 0
        cache.give(at[found], features[cache.on_device(found)])


class RootCache(NodeCache):
    """The cache of a head that drafts a block of rows below each root: the first unscored node of a path.

    The target has scored all stored nodes. A block lasts for one turn.

    Args:
        prompt: the tokens of the trie at first.
        first: features of the first local nodes.
        is_scored: which local nodes have a feature, see `NodeCache`.
        views: the views of the layers; see `View`.
    """

    def __init__(self, prompt: list[int], first: Rows, is_scored: Flags, layers: int, views: Views) -> None:
        super().__init__(prompt, first, is_scored)
        self.stored = StoredRows(layers)
        self.views = views
        # In this turn: the block of each root, float[rows, width], and the correction's states for the children of each
        # node, both by local node.
        self.blocks: dict[int, Tensor] = {}
        self.carried: dict[int, Tensor] = {}

    def take(self, at: PerRow) -> None:
        super().take(at)
        self.blocks = {}
        self.carried = {}

    def root_above(self, node: int) -> tuple[int, int]:
        """Return the first local node on the path to `node` that the target has not scored, and the distance to it."""
        parents = self.trie.parents
        far = 0
        while parents[node] >= self.trie.stored:
            node = int(parents[node])
            far += 1
        return node, far

    def next_feed(self) -> Feed:
        """Assign slots to the next pending nodes that the target has scored, and make room for their rows."""
        feed = self.store_scored()
        self.stored.reserve(self.trie.capacity)
        return feed

    def seen_by_blocks(self, roots: Nodes, count: int, view: View) -> Bool[np.ndarray, "all seen"]:
        """Return which rows the rows of blocks attend to: slots of nodes above their root, and rows of all blocks.

        Args:
            count: number of rows of a block.
        """
        blocks = len(roots)
        extent = self.trie.extent
        above = self.trie.seen[self.trie.parents[roots], :extent]
        origins = self.trie.positions[roots][:, None] + np.arange(count) * view.from_row
        seen = np.zeros((blocks, count, extent + blocks * count), dtype=bool)
        seen[:, :, :extent] = self.in_window(above[:, None], origins, view)
        within = np.ones((count, count), dtype=bool)
        if view.is_causal:
            within = np.tri(count, dtype=bool)
        for block in range(blocks):
            start = extent + block * count
            seen[block, :, start : start + count] = within
        return seen.reshape(blocks * count, -1)

    def attended_with(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, seen: np.ndarray) -> Tensor:
        """Return the mixed values of stored rows and of further rows.

        Args:
            keys, values: the keys and values of the further rows.
            seen: bool[queries, stored and further rows].
        """
        stored_keys, stored_values = self.stored.first(layer, self.trie.extent)
        every_key = torch.cat([stored_keys, keys])
        every_value = torch.cat([stored_values, values])
        return attended(queries, every_key, every_value, self.on_device(seen))


@dataclass(frozen=True, eq=False)
class ContextRows:
    """Scored nodes of a session whose keys and values a pass of the head computes."""

    cache: "ContextCache"
    feed: Feed
    features: Rows


class ContextCache(RootCache):
    """The cache of one session in a block head: keys and values from the features of scored nodes, and blocks of a turn.

    Args:
        prompt: the tokens of the prompt.
        first: features of the prompt's tokens but the last one, float[tokens - 1, width].
        views: see `BlockShape.views`.
    """

    def __init__(self, prompt: list[int], first: Rows, layers: int, views: Views) -> None:
        nodes = np.arange(len(prompt) + 1)
        super().__init__(prompt, first, (nodes > 0) & (nodes <= len(first)), layers, views)

    def to_correct(self, nodes: Nodes, carries: bool) -> dict[int, tuple[int, int]]:
        """Return the nodes that a correction visits to reach `nodes`: by local node its root, and the distance to it.

        Args:
            carries: whether a node needs the state of its parent.
        """
        parents = self.trie.parents
        found = {}
        for node in nodes.tolist():
            root, far = self.root_above(node)
            while node not in found:
                found[node] = root, far
                node = int(parents[node])
                far -= 1
                if far < 0 or not carries or node in self.carried:
                    break
        return found

    def next_context(self) -> ContextRows | None:
        """Assign slots to the next pending nodes that the target has scored, and return them; None if there are none."""
        start = self.trie.stored
        feed = self.next_feed()
        if len(feed) == 0:
            return None
        return ContextRows(self, feed, self.features[start : start + len(feed)])

    def attend_blocks(self, roots: Nodes, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the mixed values for rows of blocks, float[blocks, rows, heads, size].

        The rows attend to the nodes above their root, and to the rows of their block.
        """
        count = queries.shape[1]
        seen = self.seen_by_blocks(roots, count, view_of(self.views, layer))
        flat_queries, flat_keys, flat_values = (rows.flatten(0, 1) for rows in (queries, keys, values))
        mixed = self.attended_with(layer, flat_queries, flat_keys, flat_values, seen)
        return mixed.unflatten(0, (len(roots), count))


@dataclass(frozen=True, eq=False)
class MaskRows:
    """Rows of a session in a pass of the head: pairs of scored nodes, and for each root its pair and mask rows."""

    cache: "MaskCache"
    feed: Feed  # of the scored nodes
    read: Rows  # the features of the nodes above these
    roots: Nodes  # local nodes


class MaskCache(RootCache):
    """The rows of one session in a pair trunk with mask rows.

    It stores the rows of pairs, as a `PairCache` does, of nodes that the target has scored. The block of a root is the row
    of its own pair and the mask rows after it; each row attends to the rows before it.

    Args:
        prompt: the tokens of the prompt.
        first: features of the prompt's tokens but the last one, float[tokens - 1, width].
        views: see `TrunkShape.views`.
    """

    def __init__(self, prompt: list[int], first: Rows, layers: int, views: Views) -> None:
        super().__init__(prompt[1:], first, np.arange(len(prompt)) < len(first), layers, views)

    @property
    def is_behind(self) -> bool:
        """Whether scored nodes lack rows."""
        trie = self.trie
        return trie.pending > 0 and bool(self.is_scored[trie.stored])

    def next_rows(self) -> tuple[Feed, Rows]:
        """Assign slots to the next pending nodes that the target has scored; return them and the features that they read."""
        start = self.trie.stored
        feed = self.next_feed()
        above = self.trie.parents[start : start + len(feed)]
        return feed, self.features[self.on_device(above)]

    def attend(self, rows: MaskRows, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store keys and values of scored nodes; return the mixed values for all rows.

        Rows of scored nodes come first, then rows of the blocks.
        """
        feed = rows.feed
        stored = len(feed)
        self.stored.store(layer, feed.slots, keys[:stored], values[:stored])
        extent = self.trie.extent
        view = view_of(self.views, layer)
        drafted = len(queries) - stored
        seen = np.zeros((stored + drafted, extent + drafted), dtype=bool)
        seen[:stored, :extent] = self.in_window(feed.seen[:, :extent], feed.positions, view)
        if drafted:
            count = drafted // len(rows.roots)
            seen[stored:] = self.seen_by_blocks(rows.roots, count, view._replace(is_causal=True))
        return self.attended_with(layer, queries, keys[stored:], values[stored:], seen)


class StateCache(NodeCache):
    """The cache of one session in a head on one feature: features of scored nodes, and the states below them in a turn.

    Args:
        prompt: the tokens of the prompt; only the last one is read.
        first: no rows: the target has not scored the last token yet.
    """

    def __init__(self, prompt: list[int], first: Rows) -> None:
        # The top of the trie represents all tokens before the last one; only timed passes draft from it.
        super().__init__(prompt[-1:], first.new_zeros(1, first.shape[1]), np.array([True, False]))
        # Of this turn, by local node: the state there, and the distance to the scored node above.
        self.states: dict[int, Tensor] = {}
        self.far: dict[int, int] = {}

    def take(self, at: PerRow) -> None:
        super().take(at)
        self.states = {}
        self.far = {}

    def missing(self, nodes: Nodes) -> list[tuple[int, int]]:
        """Return the local nodes on the paths to `nodes` without a state, and their distances to the scored nodes above."""
        parents = self.trie.parents
        found: dict[int, int] = {}
        for node in nodes.tolist():
            path = [node]
            while node not in self.far and not self.is_scored[parents[node]]:
                node = int(parents[node])
                path.append(node)
            first = self.far.get(node, 1)
            found |= {one: far for far, one in enumerate(reversed(path), first) if one not in self.far}
        return list(found.items())

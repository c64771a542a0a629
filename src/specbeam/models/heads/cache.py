"""What a head keeps of one session: a trie of pairs, their keys and values, and the features of the nodes above them."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from specbeam.core.forest import Forest, unknown_nodes
from specbeam.core.records import Turn
from specbeam.engines.kv.trie import Feed, KVTrie
from specbeam.models.heads.layers import View, attended, view_of

CHUNK = 512  # rows of a prompt that are run at once


@dataclass(frozen=True, eq=False)
class PairRows:
    """Rows of a session that a pass of the head computes."""

    cache: "PairCache"
    nodes: Int64[np.ndarray, " rows"]  # local
    feed: Feed
    tokens: Int64[np.ndarray, " rows"] | Int64[np.ndarray, "rows history"]  # the last ones of the path to each
    features: Float[Tensor, "rows width"]  # of the nodes above
    states: Float[Tensor, "rows width"]  # the head's own, of the nodes above
    is_scored: Bool[Tensor, " rows"]  # whether the target has scored the node above, so that the row reads its feature
    starts: Int64[np.ndarray, " rows"]  # positions that windows count from: of the first row of each row's draft

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store keys and values of the rows; return what they and the rows above them make of the queries."""
        return self.cache.attend(self, layer, queries, keys, values)


class NodeCache:
    """A trie of the live nodes of a session, with the features of those that the target has scored.

    Args:
        prompt: the tokens of the trie at first.
        first: features of the first local nodes, float[nodes, width]; there is one local node more than tokens, the first of
            which is the empty path.
        is_scored: bool[tokens + 1], which local nodes have such a feature.
    """

    def __init__(
        self, prompt: list[int], first: Float[Tensor, "nodes width"], is_scored: Bool[np.ndarray, " all"]
    ) -> None:
        self.trie = KVTrie(prompt)
        # By local node: its feature, and whether the target has scored it.
        self.features = first.new_zeros(len(is_scored), first.shape[1])
        self.features[torch.from_numpy(is_scored)] = first
        self.is_scored = is_scored
        self.answered = 0  # number of forest nodes whose rows were asked for in this turn

    @property
    def peak(self) -> int:
        """The largest number of rows that were stored at the same time."""
        return self.trie.peak

    def enter(self, forest: Forest) -> Int64[np.ndarray, " wanted"]:
        """Add the new nodes of a forest; return the local nodes that are asked for: those that are new and not known."""
        self.trie.enter(forest)
        self.make_rows()
        wanted = unknown_nodes(self.answered, forest.size, forest.known.nodes)
        self.answered = forest.size
        return self.trie.local[wanted]

    def make_rows(self) -> None:
        """Make room for what is kept of all local nodes."""
        more = self.trie.size - len(self.is_scored)
        if more > 0:
            self.features = with_more_rows(self.features, more)
            self.is_scored = np.concatenate([self.is_scored, np.zeros(more, dtype=bool)])

    def settle(self, turn: Turn, features: Float[Tensor, "nodes width"] | None) -> None:
        """Keep what the surviving beams need.

        Args:
            features: of the forest nodes that the target has scored in this turn, ascending; None: rows read something else.
        """
        forest = turn.forest
        kept = int((forest.parents[forest.known.nodes] >= 0).sum())
        start = forest.roots + kept  # what the forest began with, none of which is a draft of this turn
        self.rewind(start)
        self.trie.enter(forest)
        self.make_rows()
        fresh = self.trie.local[turn.scored_nodes]
        if features is not None:
            self.give(fresh, features)
        self.note_scored(fresh)
        former, _ = self.trie.settle(turn)
        self.keep(former)
        self.answered = 0

    def give(self, nodes: Int64[np.ndarray, " nodes"], features: Float[Tensor, "nodes width"]) -> None:
        """Take the features of local nodes."""
        self.features[torch.from_numpy(nodes).to(self.features.device)] = features
        self.is_scored[nodes] = True

    def note_scored(self, nodes: Int64[np.ndarray, " nodes"]) -> None:
        """Take note of the local nodes that the target has scored in this turn, in the order of its rows."""

    def rewind(self, nodes: int) -> None:
        """Take back the rows of all nodes of this turn's forest but the first `nodes`."""
        if self.trie.known > nodes:
            self.keep(self.trie.rewind(nodes))
        self.answered = min(self.answered, nodes)

    def keep(self, former: Int64[np.ndarray, " left"]) -> None:
        """Keep what there is of the local nodes that remain; -1 and numbers beyond stand for nodes without any."""
        known = former < len(self.is_scored)
        at = np.where(known, former, 0)
        self.take(torch.from_numpy(at).to(self.features.device))
        self.is_scored = self.is_scored[at] & known

    def take(self, at: Int64[Tensor, " left"]) -> None:
        """Keep the rows of these local nodes."""
        self.features = self.features[at]

    def store_scored(self, most: int = CHUNK) -> Feed:
        """Give slots to the next pending nodes, at most `most`, up to the first that the target has not scored."""
        start = self.trie.stored
        is_scored = self.is_scored[start : start + most]
        return self.trie.feed(len(is_scored) if is_scored.all() else int(is_scored.argmin()))


def with_more_rows(rows: Float[Tensor, "rows width"], more: int) -> Float[Tensor, "all width"]:
    """Return rows with `more` rows of zeros after them."""
    return torch.cat([rows, rows.new_zeros(more, rows.shape[1])])


class KeptRows:
    """The keys and values of the stored nodes of a session, by layer and slot.

    Their sizes and types are those of the first rows that are stored in a layer.
    """

    def __init__(self, layers: int) -> None:
        self.slots = 0
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers

    def reserve(self, slots: int) -> None:
        """Make room for this number of slots."""
        self.slots = max(slots, self.slots)

    def store(self, layer: int, slots: Int64[np.ndarray, " rows"], keys: Tensor, values: Tensor) -> None:
        """Keep the keys and values of a layer in slots, float[rows, kv_heads, keys * size] each."""
        at = torch.from_numpy(slots).to(keys.device)
        for kept, fresh in ((self.keys, keys), (self.values, values)):
            rows = kept[layer]
            if rows is None:
                rows = fresh.new_zeros(0, *fresh.shape[1:])
            missing = self.slots - len(rows)
            if missing > 0:
                rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
            rows[at] = fresh
            kept[layer] = rows

    def first(self, layer: int, slots: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first `slots` slots of a layer, float[slots, kv_heads, size] each."""
        keys = self.keys[layer]
        values = self.values[layer]
        assert keys is not None
        assert values is not None
        return keys[:slots], values[:slots]


class PairCache(NodeCache):
    """The rows of one session in a pair trunk.

    Row v is that of the pair (feature of the node above v, token of v). The first token of a text has no row: it is the
    empty path at the top of the trie, whose feature is known.

    Rows that were computed from the head's own states are for the drafts of one turn. `settle` takes them back, so that
    those which survive are computed again, from the features of the target.

    Args:
        prompt: the tokens of the prompt.
        first: features of the prompt's tokens but the last one, float[tokens - 1, width].
        views: see `TrunkShape.views`.
        history: number of last tokens that a row reads.
    """

    def __init__(
        self,
        prompt: list[int],
        first: Float[Tensor, "before width"],
        layers: int,
        views: tuple[View, ...] = (),
        history: int = 1,
    ) -> None:
        super().__init__(prompt[1:], first, np.arange(len(prompt)) < len(first))
        self.states = torch.zeros_like(self.features)  # the head's own, by local node
        self.kept = KeptRows(layers)
        self.views = views
        self.history = history
        # By local node; the trie forgets what is above stored nodes. Texts repeat their first token before it.
        self.last_tokens = sliding_window_view(np.array([*prompt[:1] * (history - 1), *prompt]), history).copy()

    def make_rows(self) -> None:
        """See `NodeCache.make_rows`."""
        super().make_rows()
        self.states = with_more_rows(self.states, len(self.features) - len(self.states))
        self._note_tokens(len(self.last_tokens))

    def _note_tokens(self, first: int) -> None:
        """Note the last tokens of the paths to local nodes, from `first` on; those above them are known."""
        if self.history > 1 and self.trie.size > first:
            trie = self.trie
            more = np.empty((trie.size - first, self.history), dtype=np.int64)
            self.last_tokens = np.concatenate([self.last_tokens[:first], more])
            for node in range(first, trie.size):
                self.last_tokens[node, :-1] = self.last_tokens[trie.parents[node], 1:]
                self.last_tokens[node, -1] = trie.tokens[node]

    def keep(self, former: Int64[np.ndarray, " left"]) -> None:
        """See `NodeCache.keep`. New nodes, which come last, are noted."""
        if self.history > 1:
            known = former[former < len(self.last_tokens)]
            self.last_tokens = self.last_tokens[known]
            self._note_tokens(len(known))
        super().keep(former)

    def take(self, at: Int64[Tensor, " left"]) -> None:
        """See `NodeCache.take`."""
        super().take(at)
        self.states = self.states[at]

    def next_rows(self) -> "PairRows | None":
        """Give slots to the next pending nodes that have something to read, and return them; None if none is left."""
        trie = self.trie
        start = trie.stored
        above = trie.parents[start : start + CHUNK]
        is_ready = self.is_scored[above] | (above < start)
        count = len(above) if is_ready.all() else int(is_ready.argmin())
        if count == 0:
            return None
        nodes = np.arange(start, start + count)
        feed = trie.feed(count)
        self.kept.reserve(trie.capacity)
        return self.rows(nodes, feed)

    def scored_above(self, nodes: Int64[np.ndarray, " nodes"]) -> list[tuple[int, int]]:
        """Return for each local node the nearest one above it that the target has scored, and how far above that is."""
        parents = self.trie.parents
        found = []
        for node in nodes.tolist():
            above = int(parents[node])
            far = 1
            while above > 0 and not self.is_scored[above]:
                above = int(parents[above])
                far += 1
            found.append((above, far))
        return found

    def rows(self, nodes: Int64[np.ndarray, " rows"], feed: Feed) -> PairRows:
        """Return the rows of local nodes that have been given slots, with what they read."""
        above = self.trie.parents[nodes]
        read = torch.from_numpy(above).to(self.features.device)
        is_scored = torch.from_numpy(self.is_scored[above]).to(self.features.device)
        tokens = feed.tokens if self.history == 1 else self.last_tokens[nodes]
        starts = self._starts(nodes) if self.views else self.trie.positions[nodes]
        return PairRows(self, nodes, feed, tokens, self.features[read], self.states[read], is_scored, starts)

    def _starts(self, nodes: Int64[np.ndarray, " rows"]) -> Int64[np.ndarray, " rows"]:
        """Return, for local nodes, the position of the nearest on the path to each whose parent was scored."""
        parents = self.trie.parents
        at = nodes.copy()
        while len(below := np.flatnonzero(~self.is_scored[parents[at]] & (parents[at] > 0))):
            at[below] = parents[at[below]]
        return self.trie.positions[at]

    def attend(self, rows: PairRows, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store keys and values of fed rows; return what they and the rows above them make of the queries."""
        feed = rows.feed
        self.kept.store(layer, feed.slots, keys, values)
        extent = self.trie.extent
        seen = feed.seen[:, :extent]
        view = view_of(self.views, layer)
        if view.within:
            origins = feed.positions if view.from_row else rows.starts
            seen = seen & (self.trie.slot_position[:extent] > origins[:, None] - view.within)
        shown = torch.from_numpy(np.ascontiguousarray(seen)).to(queries.device)
        return attended(queries, *self.kept.first(layer, extent), shown)

    def learn(self, nodes: Int64[np.ndarray, " rows"], states: Float[Tensor, "rows width"]) -> None:
        """Keep the head's states of local nodes."""
        self.states[torch.from_numpy(nodes).to(self.states.device)] = states


class ModuleCache(PairCache):
    """The rows of one session in one of several modules in a row (see heads/modules.py).

    The features of its nodes are the states of the module before. A node that has none above it, or too few nodes, has a
    slot without a row, which nothing sees. It never has a row in this module, or gets it once the target has scored the
    nodes above it, for drafts are entered anew when a turn is settled.

    The caches of all modules are given the same nodes, and forget different ones: what one has not stored yet it still
    keeps. So nodes have names, numbers that are the same in all of them.

    Args:
        prompt: the tokens of the prompt.
        first: what the first module reads, see `PairCache`; no rows for the others.
        number: of the module, from 0.
        is_last: whether drafts deeper than there are modules get rows, too.
    """

    def __init__(
        self, prompt: list[int], first: Float[Tensor, "before width"], layers: int, number: int, is_last: bool
    ) -> None:
        super().__init__(prompt, first, layers)
        self.number = number
        self.is_last = is_last
        self.names = np.arange(len(prompt))  # of local nodes, ascending: the same in the caches of all modules
        self.named = len(prompt)  # number of names given so far
        self.has_row = np.zeros(0, dtype=bool)  # by slot

    def make_rows(self) -> None:
        """See `NodeCache.make_rows`."""
        super().make_rows()
        self.names = np.concatenate([self.names, self._new_names(len(self.is_scored) - len(self.names))])

    def keep(self, former: Int64[np.ndarray, " left"]) -> None:
        """See `NodeCache.keep`. Nodes without any row yet are survivors that were no drafts; all of them are left."""
        known = former < len(self.names)
        names = np.empty(len(former), dtype=np.int64)
        names[known] = self.names[former[known]]
        names[~known] = self._new_names(int((~known).sum()))
        super().keep(former)
        self.names = names

    def _new_names(self, count: int) -> Int64[np.ndarray, " count"]:
        first = self.named
        self.named = first + count
        return np.arange(first, self.named)

    def local_of(self, names: Int64[np.ndarray, " nodes"]) -> Int64[np.ndarray, " nodes"]:
        """Return the local nodes of these names; -1 for those that are not kept."""
        at = np.searchsorted(self.names, names).clip(max=len(self.names) - 1)
        return np.where(self.names[at] == names, at, -1)

    def next_rows(self) -> PairRows | None:
        """See `PairCache.next_rows`. All nodes get slots, and those with something to read get rows."""
        trie = self.trie
        while trie.pending:
            start = trie.stored
            gets_row = self._with_something_to_read(start)
            feed = trie.feed(len(gets_row))
            self.kept.reserve(trie.capacity)
            self.has_row = np.concatenate([self.has_row, np.zeros(trie.capacity - len(self.has_row), dtype=bool)])
            self.has_row[feed.slots] = gets_row
            if gets_row.any():
                rows = np.flatnonzero(gets_row)
                return self.rows(start + rows, feed.only(rows))
        return None

    def _with_something_to_read(self, start: int) -> Bool[np.ndarray, " nodes"]:
        """Return which of the next pending nodes have something to read, up to the first that has to wait for its parent."""
        above = self.trie.parents[start : start + CHUNK]
        is_deep = self.trie.positions[start : start + CHUNK] >= self.number
        reads_feature = is_deep & self.is_scored[above]
        if not self.is_last:
            return reads_feature
        reads_own = is_deep & (above < start)
        waits = is_deep & ~reads_feature & ~reads_own
        count = int(waits.argmax()) if waits.any() else len(waits)
        return (reads_feature | reads_own)[:count]

    def attend(self, rows: PairRows, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `PairCache.attend`: slots without rows are not seen."""
        feed = rows.feed
        seen = feed.seen & self.has_row[: feed.seen.shape[1]]
        shown = replace(feed, seen=seen)
        return super().attend(replace(rows, feed=shown), layer, queries, keys, values)


class ModulesCache:
    """The rows of one session in all of several modules in a row.

    Args:
        prompt: the tokens of the prompt.
        first: features of the prompt's tokens but the last one, float[tokens - 1, width].
        layers: number of layers of each module.
    """

    def __init__(self, prompt: list[int], first: Float[Tensor, "before width"], layers: list[int]) -> None:
        self.caches = [
            ModuleCache(prompt, first[: 0 if number else None], depth, number, number == len(layers) - 1)
            for number, depth in enumerate(layers)
        ]

    @property
    def peak(self) -> int:
        """The largest numbers of rows that were stored at the same time in each module, all together."""
        return sum(cache.peak for cache in self.caches)

    @property
    def answered(self) -> int:
        """The number of forest nodes whose rows were asked for in this turn."""
        return self.caches[0].answered

    def enter(self, forest: Forest) -> Int64[np.ndarray, "modules wanted"]:
        """Add the new nodes of a forest; return the local nodes that are asked for, in the cache of each module."""
        return np.stack([cache.enter(forest) for cache in self.caches])

    def settle(self, turn: Turn, features: Float[Tensor, "nodes width"]) -> None:
        """Keep what the surviving beams need; see `NodeCache.settle`."""
        first, *others = self.caches
        first.settle(turn, features)
        for cache in others:
            cache.settle(turn, None)

    def rewind(self, nodes: int) -> None:
        """Take back the rows of all nodes of this turn's forest but the first `nodes`."""
        for cache in self.caches:
            cache.rewind(nodes)

    def drafts_above(self, nodes: Int64[np.ndarray, " nodes"]) -> Int64[np.ndarray, " nodes"]:
        """Return how many drafts, which the target has not scored, are above each of the first module's local nodes.

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

    def hand_on(self, number: int, nodes: Int64[np.ndarray, " rows"], features: Float[Tensor, "rows width"]) -> None:
        """Give what the module `number` has made of local nodes to the next module, if there is one."""
        if number + 1 == len(self.caches):
            return
        cache = self.caches[number + 1]
        at = cache.local_of(self.caches[number].names[nodes])
        kept = at >= 0
        cache.give(at[kept], features[torch.from_numpy(kept).to(features.device)])


class RootCache(NodeCache):
    """A cache of a head that drafts a whole block of rows below each root: the nearest node above that was not scored.

    Stored nodes are those that the target has scored. A block is there for one turn.

    Args:
        prompt: the tokens of the trie at first.
        first: features of the first local nodes.
        is_scored: which local nodes have such a feature, see `NodeCache`.
        views: how far back the rows of each layer look.
    """

    def __init__(
        self,
        prompt: list[int],
        first: Float[Tensor, "before width"],
        is_scored: Bool[np.ndarray, " all"],
        layers: int,
        views: tuple[View, ...] = (),
    ) -> None:
        super().__init__(prompt, first, is_scored)
        self.kept = KeptRows(layers)
        self.views = views
        self.blocks: dict[int, Tensor] = {}  # float[rows, width] by the local node of the root, of this turn

    def take(self, at: Int64[Tensor, " left"]) -> None:
        """See `NodeCache.take`."""
        super().take(at)
        self.blocks = {}

    def root_above(self, node: int) -> tuple[int, int]:
        """Return the first local node on the path to `node` that the target has not scored, and how far above it is."""
        parents = self.trie.parents
        stored = self.trie.stored
        far = 0
        while parents[node] >= stored:
            node = int(parents[node])
            far += 1
        return node, far

    def seen_by_blocks(
        self, roots: Int64[np.ndarray, " blocks"], count: int, view: View
    ) -> Bool[np.ndarray, "all seen"]:
        """Return what the rows of blocks look at: the slots of nodes above their root, and all rows of all blocks.

        Args:
            count: number of rows of a block.
        """
        blocks = len(roots)
        extent = self.trie.extent
        above = self.trie.seen[self.trie.parents[roots], :extent]
        seen = np.zeros((blocks, count, extent + blocks * count), dtype=bool)
        seen[:, :, :extent] = above[:, None]
        if view.within:
            origins = self.trie.positions[roots][:, None] + np.arange(count) * view.from_row
            seen[:, :, :extent] &= self.trie.slot_position[:extent] > origins[:, :, None] - view.within
        within = np.tri(count, dtype=bool) if view.is_causal else np.ones((count, count), dtype=bool)
        for block in range(blocks):
            start = extent + block * count
            seen[block, :, start : start + count] = within
        return seen.reshape(blocks * count, -1)


@dataclass(frozen=True, eq=False)
class ContextRows:
    """Nodes of a session that the target has scored, and whose keys and values a pass of the head computes."""

    cache: "ContextCache"
    feed: Feed
    features: Float[Tensor, "rows width"]


class ContextCache(RootCache):
    """What a block head keeps of one session: keys and values of the features of scored nodes, and the blocks of a turn.

    Args:
        prompt: the tokens of the prompt.
        first: features of the prompt's tokens but the last one, float[tokens - 1, width].
        views: see `BlockShape.views`.
    """

    def __init__(
        self,
        prompt: list[int],
        first: Float[Tensor, "before width"],
        layers: int,
        views: tuple[View, ...] = (),
    ) -> None:
        nodes = np.arange(len(prompt) + 1)
        super().__init__(prompt, first, (nodes > 0) & (nodes <= len(first)), layers, views)
        # What the children of local nodes get of the head's correction, of this turn.
        self.carried: dict[int, Tensor] = {}

    def take(self, at: Int64[Tensor, " left"]) -> None:
        """See `NodeCache.take`."""
        super().take(at)
        self.carried = {}

    def to_correct(self, nodes: Int64[np.ndarray, " nodes"], carries: bool) -> dict[int, tuple[int, int]]:
        """Return which nodes a correction goes over to reach `nodes`: by local node its root, and how far above that is.

        Args:
            carries: whether a node needs what its parent hands down.
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
        """Give slots to the next pending nodes that the target has scored, and return them; None if none is left."""
        start = self.trie.stored
        feed = self.store_scored(CHUNK)
        if len(feed) == 0:
            return None
        self.kept.reserve(self.trie.capacity)
        return ContextRows(self, feed, self.features[start : start + len(feed)])

    def attend_blocks(
        self, roots: Int64[np.ndarray, " blocks"], layer: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Return what the rows of blocks, float[blocks, rows, heads, size], make of the nodes above and of each other."""
        blocks, count = queries.shape[:2]
        extent = self.trie.extent
        kept_keys, kept_values = self.kept.first(layer, extent)
        every_key = torch.cat([kept_keys, keys.flatten(0, 1)])
        every_value = torch.cat([kept_values, values.flatten(0, 1)])
        seen = self.seen_by_blocks(roots, count, view_of(self.views, layer))
        shown = torch.from_numpy(seen).to(queries.device)
        return attended(queries.flatten(0, 1), every_key, every_value, shown).unflatten(0, (blocks, count))


@dataclass(frozen=True, eq=False)
class MaskRows:
    """Rows of a session that a pass of the head computes: pairs of scored nodes, and below roots a pair and masks each."""

    cache: "MaskCache"
    feed: Feed  # of the scored nodes
    read: Float[Tensor, "rows width"]  # the features of the nodes above these
    roots: Int64[np.ndarray, " blocks"]  # local nodes

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store keys and values of scored nodes; return what all rows and those above them make of the queries."""
        return self.cache.attend(self, layer, queries, keys, values)


class MaskCache(RootCache):
    """The rows of one session in a pair trunk with mask rows.

    Stored are the rows of pairs, as in a `PairCache`, of nodes that the target has scored. The block of a root is the row of
    its own pair, and mask rows after it, each of which looks at those before.

    Args:
        prompt: the tokens of the prompt.
        first: features of the prompt's tokens but the last one, float[tokens - 1, width].
        views: see `TrunkShape.views`.
    """

    def __init__(
        self,
        prompt: list[int],
        first: Float[Tensor, "before width"],
        layers: int,
        views: tuple[View, ...] = (),
    ) -> None:
        super().__init__(prompt[1:], first, np.arange(len(prompt)) < len(first), layers, views)

    @property
    def is_behind(self) -> bool:
        """Whether there are scored nodes without a row."""
        trie = self.trie
        return trie.pending > 0 and bool(self.is_scored[trie.stored])

    def next_rows(self) -> tuple[Feed, Float[Tensor, "rows width"]]:
        """Give slots to the next pending nodes that the target has scored; return them, and the features that they read."""
        start = self.trie.stored
        feed = self.store_scored(CHUNK)
        self.kept.reserve(self.trie.capacity)
        above = self.trie.parents[start : start + len(feed)]
        return feed, self.features[torch.from_numpy(above).to(self.features.device)]

    def attend(self, rows: MaskRows, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `MaskRows.attend`: rows of scored nodes come first, then those of the blocks."""
        feed = rows.feed
        stored = len(feed)
        self.kept.store(layer, feed.slots, keys[:stored], values[:stored])
        extent = self.trie.extent
        view = view_of(self.views, layer)
        of_feed = feed.seen[:, :extent]
        if view.within:
            of_feed = of_feed & (self.trie.slot_position[:extent] > feed.positions[:, None] - view.within)
        drafted = len(queries) - stored
        seen = np.zeros((stored + drafted, extent + drafted), dtype=bool)
        seen[:stored, :extent] = of_feed
        if drafted:
            count = drafted // len(rows.roots)
            seen[stored:] = self.seen_by_blocks(rows.roots, count, view._replace(is_causal=True))
        kept_keys, kept_values = self.kept.first(layer, extent)
        every_key = torch.cat([kept_keys, keys[stored:]])
        every_value = torch.cat([kept_values, values[stored:]])
        return attended(queries, every_key, every_value, torch.from_numpy(seen).to(queries.device))


class StateCache(NodeCache):
    """What a head on one feature keeps of one session: features of scored nodes, and the states below them of a turn.

    Args:
        prompt: the tokens of the prompt, of which the last one alone is of interest.
        first: no features: the target has not scored the last token yet, and those before it are not read.
    """

    def __init__(self, prompt: list[int], first: Float[Tensor, "none width"]) -> None:
        # The top of the trie stands for what is before the last token; nothing is drafted there but to time a pass.
        super().__init__(prompt[-1:], first.new_zeros(1, first.shape[1]), np.array([True, False]))
        # Of this turn, by local node: the state there, and how far below a scored node it is.
        self.states: dict[int, Tensor] = {}
        self.far: dict[int, int] = {}

    def take(self, at: Int64[Tensor, " left"]) -> None:
        """See `NodeCache.take`."""
        super().take(at)
        self.states = {}
        self.far = {}

    def missing(self, nodes: Int64[np.ndarray, " nodes"]) -> list[tuple[int, int]]:
        """Return the local nodes on the paths to `nodes` that have no state yet, and how far below a scored node each is."""
        parents = self.trie.parents
        found: dict[int, int] = {}
        for node in nodes.tolist():
            path = [node]
            while path[-1] not in self.far and not self.is_scored[parents[path[-1]]]:
                path.append(int(parents[path[-1]]))
            far = self.far.get(path[-1], 1)
            for one in reversed(path):
                if one not in self.far:
                    found[one] = far
                far += 1
        return list(found.items())

"""The token trees of one turn as flat arrays, and how their nodes were drawn."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from specbeam.core.errors import BadForest, BrokenPart
from specbeam.core.ranked import NO_ROWS, Ranked, copy_row, room_for_rows, rows_between, whole_rows, with_logits
from specbeam.core.steps import Array, step

INDEPENDENT, DISTINCT, CHOSEN, SHARED, LOST = range(5)  # kinds of siblings, see `Siblings`
_HAVE_LAWS = (INDEPENDENT, DISTINCT, CHOSEN)
MOST_KEPT = 64  # maximum number of nodes that a turn keeps for the next one
_NO_NUMBERS = np.zeros(0, dtype=np.int64)
_NO_ODDS = np.zeros(0)


class Siblings(NamedTuple):
    """Groups of sibling draws, in draw order: draw_ends[k] is the index after the last draw of group k.

    A token tree has one group under each parent, or several that are tried one after the other; a layer of draft beams is
    one group with several parents. A rule *tries* a draw if it accepts it with a probability that depends on the draw's law;
    it *matches* draws if it draws from the target alone and looks the result up among them. The kind of the group decides
    which of the two is possible:

    - INDEPENDENT, DISTINCT: drawn from the stated law, with or without replacement; they can be tried.
    - CHOSEN: chosen, not drawn, like the likeliest tokens of a model; each is tried as a draw from a law with all
      mass on it.
    - SHARED: the best pairs of the draft model under the same noise as the target's; they can be matched.
    - LOST: of unknown law (pruned by content, merged, retrieved); they can be matched, not tried.
    """

    kinds: Array  # int64[groups]
    parents: Array  # int64[...]: the forest nodes that are the parents of each group
    parent_ends: Array  # int64[groups]: the index after the last parent of each group
    draw_ends: Array  # int64[groups]
    rows: Array  # int64[draws]: the index of each draw's parent among the parents of its group
    tokens: Array  # int64[draws]
    nodes: Array  # int64[draws]: the forest node of the draw; -1 if the draw ends its beam and needs no node
    law_ends: Array  # int64[groups]: the index after the last probability of each group's law
    law_pairs: Array  # int64[...]: row * vocab + token of each of `law_odds`, ascending; empty: all pairs, in order
    law_odds: Array  # float64[...]: probabilities, the laws of all groups; CHOSEN, SHARED and LOST groups state none
    vocab: int  # number of tokens in the vocabulary of the laws

    @property
    def size(self) -> int:
        """The number of groups."""
        return len(self.kinds)

    def group(self, number: int) -> "Siblings":
        """Return group `number` by itself."""
        draws = part(self.draw_ends, number)
        parents = part(self.parent_ends, number)
        law = part(self.law_ends, number)
        return Siblings(
            self.kinds[number : number + 1],
            self.parents[parents],
            np.array([parents.stop - parents.start]),
            np.array([draws.stop - draws.start]),
            self.rows[draws],
            self.tokens[draws],
            self.nodes[draws],
            np.array([law.stop - law.start]),
            self.law_pairs[law] if len(self.law_pairs) else self.law_pairs,
            self.law_odds[law],
            self.vocab,
        )

    def groups(self) -> "list[Siblings]":
        """Return each group by itself."""
        return [self.group(number) for number in range(self.size)]

    @property
    def draw_parents(self) -> Array:
        """The forest node above each draw, int64[draws]."""
        starts = np.append(0, self.parent_ends[:-1]) if self.size else self.parent_ends
        counts = np.diff(self.draw_ends, prepend=0)
        return self.parents[self.rows + np.repeat(starts, counts)]

    @property
    def have_laws(self) -> bool:
        """Whether every draw can be tried against the law that it was drawn from."""
        return bool(np.isin(self.kinds, _HAVE_LAWS).all())


NO_SIBLINGS = Siblings(
    kinds=_NO_NUMBERS,
    parents=_NO_NUMBERS,
    parent_ends=_NO_NUMBERS,
    draw_ends=_NO_NUMBERS,
    rows=_NO_NUMBERS,
    tokens=_NO_NUMBERS,
    nodes=_NO_NUMBERS,
    law_ends=_NO_NUMBERS,
    law_pairs=_NO_NUMBERS,
    law_odds=_NO_ODDS,
    vocab=0,
)


def part(ends: Array, number: int) -> slice:
    """Return the slice of part `number` of an array in which part k ends before index ends[k]."""
    return slice(int(ends[number - 1]) if number > 0 else 0, int(ends[number]))


@step
def start_of(ends: Array, number: int) -> int:
    """Return the index at which part `number` begins, in an array in which part k ends before index ends[k]."""
    return ends[number - 1] if number > 0 else 0


def siblings(
    kind: int,
    parents: Iterable[int],
    tokens: Sequence[int] | Array,
    nodes: Sequence[int] | Array,
    rows: Array | None = None,
    law: tuple[Array, Array] = (_NO_NUMBERS, _NO_ODDS),
    vocab: int = 0,
) -> Siblings:
    """Return one group of draws.

    Args:
        kind: INDEPENDENT, DISTINCT, CHOSEN, SHARED or LOST.
        parents: the forest nodes that are the parents of the group.
        tokens, nodes: of the draws, in draw order; node -1 for a draw without a node.
        rows: int64[draws], the index of each draw's parent among the parents; None: 0.
        law: `law_pairs` and `law_odds`, see `Siblings`.
        vocab: number of tokens in the vocabulary of the law.
    """
    above = np.asarray(list(parents), dtype=np.int64)
    pairs, odds = law
    return Siblings(
        kinds=np.array([kind]),
        parents=above,
        parent_ends=np.array([len(above)]),
        draw_ends=np.array([len(tokens)]),
        rows=np.zeros(len(tokens), dtype=np.int64) if rows is None else rows,
        tokens=np.asarray(tokens, dtype=np.int64),
        nodes=np.asarray(nodes, dtype=np.int64),
        law_ends=np.array([len(odds)]),
        law_pairs=pairs,
        law_odds=odds,
        vocab=vocab,
    )


def joined(parts: Sequence[Siblings]) -> Siblings:
    """Return the groups of all parts, one after the other."""
    parts = [groups for groups in parts if groups.size]
    if len(parts) < 2:
        return parts[0] if parts else NO_SIBLINGS

    def concatenated(name: str) -> Array:
        return np.concatenate([getattr(groups, name) for groups in parts])

    def ends(name: str) -> Array:
        shifted = []
        before = 0
        for groups in parts:
            shifted.append(getattr(groups, name) + before)
            before = shifted[-1][-1]
        return np.concatenate(shifted)

    with_laws = [groups for groups in parts if len(groups.law_odds)]
    must_name_pairs = any(len(groups.law_pairs) for groups in with_laws)
    pairs = [_named_pairs(groups) for groups in with_laws] if must_name_pairs else []
    return Siblings(
        kinds=concatenated("kinds"),
        parents=concatenated("parents"),
        parent_ends=ends("parent_ends"),
        draw_ends=ends("draw_ends"),
        rows=concatenated("rows"),
        tokens=concatenated("tokens"),
        nodes=concatenated("nodes"),
        law_ends=ends("law_ends"),
        law_pairs=np.concatenate([_NO_NUMBERS, *pairs]),
        law_odds=concatenated("law_odds"),
        vocab=max(groups.vocab for groups in parts),
    )


def _named_pairs(groups: Siblings) -> Array:
    """Return the pair of each of `law_odds`; where `law_pairs` is empty, all pairs in order."""
    if len(groups.law_pairs):
        return groups.law_pairs
    sizes = np.diff(groups.law_ends, prepend=0)
    return np.concatenate([np.arange(size) for size in sizes])


class FrontierRows(NamedTuple):
    """The logits that draft layers were drawn from: row_ends[k] is the index after the last row of layer k."""

    nodes: Array  # int64[rows]: the forest node of each row
    scores: Array  # float64[rows]: log-likelihood of the beam that ends at the node
    counts: Array  # int64[rows]: how often that beam was drawn
    row_ends: Array  # int64[layers]
    rows: Ranked  # of the draft model, after the processors; with spare capacity, or none if no rule reads them


def no_frontier_rows(rows: int = 0, vocab: int = 0, dtype: Any = np.float32) -> FrontierRows:
    """Return the rows of a draft without layers, with capacity for `rows` whole rows of logits."""
    room = whole_rows(np.empty((rows, vocab), dtype=dtype))
    return FrontierRows(_NO_NUMBERS, _NO_ODDS, _NO_NUMBERS, _NO_NUMBERS, room)


@step
def add_frontier_rows(
    frontier_rows: FrontierRows, nodes: Array, scores: Array, counts: Array, rows: Ranked
) -> FrontierRows:
    """Return the rows with a further layer, whose rows are copied into `frontier_rows.rows`."""
    start = len(frontier_rows.nodes)
    stop = start + len(nodes)
    for place in range(len(nodes)):
        copy_row(frontier_rows.rows, start + place, rows, place)
    return FrontierRows(
        np.concatenate((frontier_rows.nodes, nodes)),
        np.concatenate((frontier_rows.scores, scores)),
        np.concatenate((frontier_rows.counts, counts)),
        np.append(frontier_rows.row_ends, stop),
        frontier_rows.rows,
    )


class KnownRows(NamedTuple):
    """The target's logits, before the processors, of nodes that earlier turns scored: roots, and kept nodes below them."""

    nodes: Array  # int64[known]: forest nodes, ascending
    rows: Ranked  # a row per node


NO_KNOWN_ROWS = KnownRows(_NO_NUMBERS, NO_ROWS)


class Forest(NamedTuple):
    """Token trees, one under each live beam, as flat arrays. A parent always comes before its children; roots come first.

    >>> forest = Forest.rooted([7]).grown([4, 5], [0, 0]).grown([9], [2])
    >>> forest.parents.tolist(), forest.depths().tolist(), forest.path(3)
    ([-1, 0, 0, 2], [0, 1, 1, 2], [5, 9])
    """

    tokens: Array  # int64[nodes]; a root holds the last committed token of its beam
    parents: Array  # int64[nodes]: index of the parent node, -1 at a root
    siblings: Siblings = NO_SIBLINGS
    logq: Array = _NO_ODDS  # float64[nodes]: draft log-likelihood of the path from the root; NaN, or empty: unknown
    beams: Array = _NO_NUMBERS  # int64[beams]: the last nodes of the drafter's final beams, best first
    frontier_rows: FrontierRows = no_frontier_rows()
    known: KnownRows = NO_KNOWN_ROWS

    @classmethod
    def rooted(cls, tokens: Array | Sequence[int]) -> "Forest":
        """Return a forest of roots only, one per token."""
        tokens = np.asarray(tokens, dtype=np.int64)
        return cls(tokens, np.full(len(tokens), -1, dtype=np.int64))

    @property
    def size(self) -> int:
        """The number of nodes."""
        return len(self.tokens)

    @property
    def roots(self) -> int:
        """The number of roots, which are the nodes 0 to roots - 1."""
        return int(np.count_nonzero(self.parents < 0))

    def grown(
        self,
        tokens: Array | Sequence[int],
        parents: Array | Sequence[int],
        logq: Array | None = None,
        groups: Sequence[Siblings] = (),
    ) -> "Forest":
        """Return the forest with more nodes after the present ones, and more groups of siblings.

        Args:
            tokens, parents: of the new nodes; a parent may be a new node.
            logq: float64[new nodes], draft log-likelihoods of their paths; None: unknown.
        """
        together = joined([self.siblings, *groups]) if groups else self.siblings
        if len(tokens) == 0:
            return self._replace(siblings=together)
        tokens = np.asarray(tokens, dtype=np.int64)
        parents = np.asarray(parents, dtype=np.int64)
        scores = self.logq
        if logq is not None or len(scores):
            before = scores if len(scores) else np.where(self.parents < 0, 0.0, np.nan)
            scores = np.concatenate([before, np.full(len(tokens), np.nan) if logq is None else logq])
        return self._replace(
            tokens=np.concatenate([self.tokens, tokens]),
            parents=np.concatenate([self.parents, parents]),
            siblings=together,
            logq=scores,
        )

    def fitting(self, vocab: int, most_layers: int) -> "Forest":
        """Return the forest itself; raises `BadForest` for a token outside of the vocabulary, or too many layers.

        Args:
            vocab: the size of the target's vocabulary.
            most_layers: maximum number of drafted layers.
        """
        if self.size and not 0 <= int(self.tokens.min()) <= int(self.tokens.max()) < vocab:
            strange = sorted({token for token in self.tokens.tolist() if not 0 <= token < vocab})
            raise BadForest(
                f"the drafter returned tokens {strange[:5]}, but the target's vocabulary is 0 to {vocab - 1}"
            )
        layers = depths_of(self.parents).max() if self.size else 0
        if layers > most_layers:
            raise BadForest(f"the drafter returned {layers} layers of drafts; expected at most {most_layers}")
        return self

    @property
    def layers(self) -> int:
        """The number of layers that were drafted below the roots, including drafts that end their beam."""
        return int(drafted_layers(self))

    def groups_under(self, node: int) -> list[Siblings]:
        """Return the groups whose only parent is `node`, in the order in which they are tried."""
        groups = []
        for number in range(self.siblings.size):
            parents = part(self.siblings.parent_ends, number)
            if parents.stop - parents.start == 1 and self.siblings.parents[parents.start] == node:
                groups.append(self.siblings.group(number))
        return groups

    def selected(self, nodes: Int64[np.ndarray, " kept"]) -> "Forest":
        """Return the forest of these nodes only. They must ascend and include all roots and the parent of each node.

        Nodes with known rows must be among them, too.

        A group that loses a draw becomes LOST, because the selection may depend on the draws. If it loses all of its draws,
        it stays as an empty group, so that no rule takes its parent for a leaf. CHOSEN groups stay CHOSEN. If nodes are
        selected by their content, call `lost` on the result: even a group that kept all of its draws was selected by
        them.
        """
        node_map = np.full(self.size + 1, -1, dtype=np.int64)  # the last entry maps -1 to itself
        node_map[nodes] = np.arange(len(nodes))
        groups = []
        for group in self.siblings.groups():
            kept = (node_map[group.nodes] >= 0) | (group.nodes < 0)
            is_chosen = group.kinds[0] == CHOSEN
            if (node_map[group.parents] < 0).all() or (is_chosen and not kept.any()):
                continue
            whole = bool(kept.all())
            groups.append(
                siblings(
                    int(group.kinds[0]) if whole or is_chosen else LOST,
                    node_map[group.parents],
                    group.tokens[kept],
                    node_map[group.nodes[kept]],
                    group.rows[kept],
                    (group.law_pairs, group.law_odds) if whole else (_NO_NUMBERS, _NO_ODDS),
                    group.vocab,
                )
            )
        return Forest(
            tokens=self.tokens[nodes],
            parents=node_map[self.parents[nodes]],
            siblings=joined(groups),
            logq=self.logq[nodes] if len(self.logq) else self.logq,
            beams=node_map[self.beams][node_map[self.beams] >= 0],
            known=KnownRows(node_map[self.known.nodes], self.known.rows),
        )

    def lost(self) -> "Forest":
        """Return the forest with all groups LOST, without their laws, except CHOSEN groups."""
        groups = []
        for group in self.siblings.groups():
            if group.kinds[0] == CHOSEN:
                groups.append(group)
            else:
                groups.append(siblings(LOST, group.parents, group.tokens, group.nodes, group.rows))
        return self._replace(siblings=joined(groups))

    def depths(self) -> Int64[np.ndarray, " nodes"]:
        """Return the depth of each node: the number of nodes above it, 0 for a root."""
        return depths_of(self.parents)

    def path(self, node: int | np.integer) -> list[int]:
        """Return the tokens on the path to `node`, without that of the root."""
        tokens: list[int] = []
        while self.parents[node] >= 0:
            tokens.append(int(self.tokens[node]))
            node = self.parents[node]
        return tokens[::-1]

    def root_of(self, nodes: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Return the root above each node; for a root the root itself."""
        above = nodes
        while (self.parents[above] >= 0).any():
            above = np.where(self.parents[above] >= 0, self.parents[above], above)
        return above

    def below(self, nodes: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, "n depth"]:
        """Return the tokens below the root on the path to each node, a row per node; all must have the same depth."""
        columns: list[np.ndarray] = []
        above = nodes
        while len(above) and self.parents[above[0]] >= 0:
            columns.append(self.tokens[above])
            above = self.parents[above]
        if not columns:
            return np.zeros((len(nodes), 0), dtype=np.int64)
        return np.stack(columns[::-1], 1)

    def find(self, parents: Int64[np.ndarray, " n"], tokens: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Return the child of each parent by its token in `tokens`; -1 if there is none."""
        children = np.empty(len(parents), dtype=np.int64)
        for place in range(len(parents)):
            children[place] = find_child(self.tokens, self.parents, parents[place], tokens[place])
        return children


@step
def groups_without_laws(kind: int, parents: Array, draw_ends: Array, tokens: Array, nodes: Array) -> Siblings:
    """Return groups of draws that state no law, each under one parent; the arrays are those of `Siblings`."""
    count = len(parents)
    return Siblings(
        np.full(count, kind),
        parents,
        np.arange(1, count + 1),
        draw_ends,
        np.zeros(len(tokens), dtype=np.int64),
        tokens,
        nodes,
        np.zeros(count, dtype=np.int64),
        np.empty(0, dtype=np.int64),
        np.empty(0),
        0,
    )


@step
def with_groups(forest: Forest, groups: Siblings) -> Forest:
    """Return the forest with these groups of siblings in place of its own."""
    return Forest(forest.tokens, forest.parents, groups, forest.logq, forest.beams, forest.frontier_rows, forest.known)


@step
def depths_of(parents: Array) -> Array:
    """Return the depth of each node, int64[nodes], 0 for a root. Parents must come before their children."""
    depths = np.zeros(len(parents), dtype=np.int64)
    for node in range(len(parents)):
        if parents[node] >= 0:
            depths[node] = depths[parents[node]] + 1
    return depths


@step
def find_child(tokens: Array, parents: Array, parent: int, token: int) -> int:
    """Return the child of `parent` that has this token, the last one if there are several; -1 if there is none."""
    node = len(tokens) - 1
    while node >= 0 and not (parents[node] == parent and tokens[node] == token):
        node -= 1
    return node


class GroupsUnder(NamedTuple):
    """The groups of siblings under each node as linked lists, in the order of their trials."""

    first: Array  # int64[nodes]: the first group under each node, -1 for none
    after: Array  # int64[groups]: the next group under the same node, -1 for none


@step
def groups_by_node(groups: Siblings, nodes: int) -> GroupsUnder:
    """Return the groups under each of `nodes` forest nodes; groups with several parents are left out."""
    first = np.full(nodes, -1, dtype=np.int64)
    after = np.full(len(groups.kinds), -1, dtype=np.int64)
    last = np.full(nodes, -1, dtype=np.int64)
    for group in range(len(groups.kinds)):
        start = start_of(groups.parent_ends, group)
        if groups.parent_ends[group] - start != 1:
            continue
        node = groups.parents[start]
        if last[node] < 0:
            first[node] = group
        else:
            after[last[node]] = group
        last[node] = group
    return GroupsUnder(first, after)


@step
def drafted_layers(forest: Forest) -> int:
    """Return the number of layers that were drafted below the roots, including drafts that end their beam."""
    groups = forest.siblings
    if len(groups.parents) == 0:
        return 0
    return 1 + depths_of(forest.parents)[groups.parents].max()


@step
def most_layers(forest: Forest) -> int:
    """Return the most layers of beams that a forest can hold: the number of its groups or its depth, whichever is larger."""
    return max(len(forest.siblings.kinds), depths_of(forest.parents).max())


@step
def unknown_nodes(first: int, size: int, known: Array) -> Array:
    """Return the forest nodes from `first` to `size` - 1 that are not among `known`, int64[n], which ascend."""
    found = np.empty(max(size - first, 0), dtype=np.int64)
    held = 0
    place = np.searchsorted(known, first)
    for node in range(first, size):
        if place < len(known) and known[place] == node:
            place += 1
        else:
            found[held] = node
            held += 1
    return found[:held]


class TurnRows(NamedTuple):
    """The target's logits of all nodes of a forest: those that the turn's pass computed, and those known before."""

    fresh: Ranked  # of the other nodes, in order
    known: Ranked  # see `KnownRows`; in the form of `fresh`
    places: Array  # int64[nodes]: the row of each node in `fresh`; -1 - k for row k of `known`


@step
def turn_rows(fresh: Ranked, nodes: int, known: KnownRows) -> TurnRows:
    """Return the rows of all `nodes` nodes of a forest, given the rows `fresh` of the nodes that are not known."""
    places = np.empty(nodes, dtype=np.int64)
    held = 0
    for node in range(nodes):
        if held < len(known.nodes) and known.nodes[held] == node:
            held += 1
            places[node] = -held
        else:
            places[node] = node - held
    return TurnRows(fresh, known.rows, places)


def check_rows_of(forest: Forest, scored: Array) -> None:
    """Raise `BrokenPart` unless there is a row for each node that is not known, with an entry for each token of the forest.

    A user's rule may hand a rule of ours other rows than it was given.
    """
    fresh = forest.size - len(forest.known.nodes)
    if len(scored) != fresh or scored.shape[1] <= forest.tokens.max():
        raise BrokenPart(
            f"a rule was given logits of shape {[*scored.shape]}; expected a row for each of the {fresh} new nodes, with an "
            "entry for each token of the vocabulary"
        )


def scored_rows_of(forest: Forest, scored: Array) -> TurnRows:
    """Return the rows of all nodes of a forest.

    Args:
        scored: float[fresh, vocab], the logits of the nodes whose rows are not known.
    """
    known = forest.known
    check_rows_of(forest, scored)
    if known.rows.logits.dtype != scored.dtype:
        known = known._replace(rows=with_logits(known.rows, known.rows.logits.astype(scored.dtype)))
    found: TurnRows = turn_rows(whole_rows(scored), forest.size, known)
    return found


@step
def rows_of_nodes(rows: TurnRows, nodes: Array) -> Ranked:
    """Return a copy of the rows of these forest nodes."""
    like = rows.fresh if len(rows.fresh.logits) > 0 else rows.known
    found = room_for_rows(like, len(nodes))
    for place in range(len(nodes)):
        row = rows.places[nodes[place]]
        if row >= 0:
            copy_row(found, place, rows.fresh, row)
        else:
            copy_row(found, place, rows.known, -1 - row)
    return found


@step
def rows_in_place(rows: TurnRows, nodes: Array) -> Ranked:
    """Return `rows_of_nodes`, as views if the rows are adjacent in the pass's results; do not write to them."""
    first = rows.places[nodes[0]] if len(nodes) > 0 else -1
    follow = first >= 0
    for place in range(len(nodes)):
        follow &= rows.places[nodes[place]] == first + place
    return rows_between(rows.fresh, first, first + len(nodes)) if follow else rows_of_nodes(rows, nodes)


@step
def nodes_without(nodes: Array, known: Array) -> Array:
    """Return the nodes that are not among `known`, which ascend; int64[n], in their order."""
    found = np.empty(len(nodes), dtype=np.int64)
    held = 0
    for node in nodes:
        place = np.searchsorted(known, node)
        if place == len(known) or known[place] != node:
            found[held] = node
            held += 1
    return found[:held]


@step
def rows_with_known(nodes: Array, known: KnownRows, others: Ranked) -> Ranked:
    """Return the rows of forest nodes; `others` are the rows of the unknown nodes, in order."""
    if len(others.logits) == len(nodes):
        return others
    like = others if len(others.logits) > 0 else known.rows
    found = room_for_rows(like, len(nodes))
    used = 0
    for place in range(len(nodes)):
        row = np.searchsorted(known.nodes, nodes[place])
        if row < len(known.nodes) and known.nodes[row] == nodes[place]:
            copy_row(found, place, known.rows, row)
        else:
            copy_row(found, place, others, used)
            used += 1
    return found


@step
def kept_nodes(parents: Array, tops: Array) -> Array:
    """Return up to `MOST_KEPT` nodes below `tops`, the shallowest first, as ascending int64[n]; the next forest keeps them.

    Args:
        tops: int64[n], the forest nodes of the surviving beams; -1 for beams that were not drafted.
    """
    below = nodes_below(parents, tops)
    if len(below) <= MOST_KEPT:
        return below
    depths = depths_of(parents)
    is_kept = np.zeros(len(parents), dtype=np.bool_)
    left = MOST_KEPT
    for depth in range(depths.max() + 1):
        for node in below:
            if depths[node] == depth and left > 0:
                is_kept[node] = True
                left -= 1
    return np.flatnonzero(is_kept)


@step
def forest_of_nodes(forest: Forest, nodes: Array) -> Forest:
    """Return the forest of these nodes only, with the draws that have one of these nodes, or no node.

    Args:
        nodes: int64[n], ascending; all roots, all nodes with known rows, and no node without its parent. The groups must be
            SHARED.
    """
    node_map = np.full(len(forest.tokens), -1, dtype=np.int64)
    for place in range(len(nodes)):
        node_map[nodes[place]] = place
    parents = forest.parents[nodes]
    for place in range(len(nodes)):
        if parents[place] >= 0:
            parents[place] = node_map[parents[place]]
    groups = forest.siblings
    above = np.empty(len(groups.parents), dtype=np.int64)
    for place in range(len(above)):
        above[place] = node_map[groups.parents[place]]
    is_kept = np.zeros(len(groups.nodes), dtype=np.bool_)
    draw_ends = np.zeros(len(groups.kinds), dtype=np.int64)
    held = 0
    for group in range(len(groups.kinds)):
        start = start_of(groups.parent_ends, group)
        for draw in range(start_of(groups.draw_ends, group), groups.draw_ends[group]):
            is_there = groups.nodes[draw] < 0 or node_map[groups.nodes[draw]] >= 0
            is_kept[draw] = is_there and above[start + groups.rows[draw]] >= 0
            held += is_kept[draw]
        draw_ends[group] = held
    kept = np.flatnonzero(is_kept)
    renamed = groups.nodes[kept]
    for place in range(len(renamed)):
        if renamed[place] >= 0:
            renamed[place] = node_map[renamed[place]]
    fewer = Siblings(
        groups.kinds, above, groups.parent_ends, draw_ends, groups.rows[kept], groups.tokens[kept], renamed,
        groups.law_ends, groups.law_pairs, groups.law_odds, groups.vocab,
    )  # fmt: skip
    known = KnownRows(node_map[forest.known.nodes], forest.known.rows)
    return Forest(forest.tokens[nodes], parents, fewer, forest.logq, forest.beams, forest.frontier_rows, known)


@step
def nodes_below(parents: Array, tops: Array) -> Array:
    """Return the forest nodes below the nodes `tops`, int64[n], ascending; there are none below a top of -1."""
    is_inside = np.zeros(len(parents), dtype=np.bool_)
    is_below = np.zeros(len(parents), dtype=np.bool_)
    for top in tops:
        if top >= 0:
            is_inside[top] = True
    for node in range(len(parents)):
        above = parents[node]
        if above >= 0 and is_inside[above]:
            is_inside[node] = True
            is_below[node] = True
    return np.flatnonzero(is_below)


class Start(NamedTuple):
    """The beginning of a turn's forest: the roots, then kept nodes of earlier turns."""

    tokens: Array  # int64[nodes], as in `Forest`
    parents: Array  # int64[nodes]
    known: KnownRows


@step
def next_start(tokens: Array, parents: Array, rows: TurnRows, nodes: Array, newest: Array, kept: Array) -> Start:
    """Return the beginning of the next turn's forest.

    Args:
        tokens, parents: of the present forest.
        rows: of all of its nodes.
        nodes: int64[beams], the forest node of each surviving beam; -1 if it was not drafted.
        newest: int64[beams], the last token of each beam.
        kept: int64[n], the forest nodes to keep, ascending, each below a surviving beam and with its parent.
    """
    beams = len(nodes)
    size = beams + len(kept)
    node_map = np.full(len(tokens), -1, dtype=np.int64)
    next_tokens = np.empty(size, dtype=np.int64)
    next_parents = np.full(size, -1, dtype=np.int64)
    known = np.empty(size, dtype=np.int64)  # nodes of the next turn
    sources = np.empty(size, dtype=np.int64)  # the same nodes in this turn
    count = 0
    for beam in range(beams):
        next_tokens[beam] = newest[beam]
        if nodes[beam] >= 0:
            node_map[nodes[beam]] = beam
            known[count] = beam
            sources[count] = nodes[beam]
            count += 1
    for place in range(len(kept)):
        node = kept[place]
        node_map[node] = beams + place
        next_tokens[beams + place] = tokens[node]
        next_parents[beams + place] = node_map[parents[node]]
        known[count] = beams + place
        sources[count] = node
        count += 1
    return Start(next_tokens, next_parents, KnownRows(known[:count], rows_of_nodes(rows, sources[:count])))


@step
def start_of_roots(tokens: Array, rows: Ranked) -> Start:
    """Return the beginning of a forest of roots only, whose rows are not known; `rows` are any rows of the same form."""
    above = np.full(len(tokens), -1, dtype=np.int64)
    return Start(tokens, above, KnownRows(np.empty(0, dtype=np.int64), rows_between(rows, 0, 0)))

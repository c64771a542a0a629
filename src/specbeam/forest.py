"""The token trees of one turn, flat."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64

from specbeam.errors import BadForest, LostLaw


@runtime_checkable
class Law(Protocol):
    """Odds over (row, token) pairs, in sum 1."""

    def odds(self, rows: Int64[np.ndarray, " n"], tokens: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """Of single pairs; 0 in rows below 0."""
        ...

    def row(self, row: int) -> Float64[np.ndarray, " vocab"]: ...

    def masses(self, rows: Int64[np.ndarray, " n"], tokens: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """What was left of the law before each of these draws, of which each was struck out once drawn."""
        ...


def masses_left(p: Float64[np.ndarray, " n"], places: Int64[np.ndarray, " draws"]) -> Float64[np.ndarray, " draws"]:
    """`Law.masses`, for draws by their places in the law. Summed anew each time: what is left may be tiny, and a difference
    of numbers near 1 would be noise.
    """
    left, masses = p.copy(), np.empty(len(places))
    for number, place in enumerate(places.tolist()):
        masses[number] = left.sum()
        left[place] = 0.0
    return masses


@dataclass(frozen=True, eq=False)
class Row:
    """The law of the token after one node, on the tokens that it keeps: a truncation keeps few of many thousands.

    >>> row = Row(np.log([0.25, 0.75]), vocab=10, tokens=np.array([3, 7]))
    >>> row.token(1), row.place(7), row.place(4), row.at(np.array([4, 7])).tolist()
    (7, 1, -1, [0.0, 0.75])
    """

    logp: Float64[np.ndarray, " n"]
    vocab: int
    tokens: Int64[np.ndarray, " n"] | None = None  # what `logp` is of, ascending; None: the whole vocabulary

    @cached_property
    def p(self) -> Float64[np.ndarray, " n"]:
        return np.exp(self.logp)

    def __len__(self) -> int:
        return len(self.logp)

    @property
    def possible(self) -> bool:
        """Whether any token has odds; without a truncation some may be banned and all stand here."""
        return len(self.logp) > 0 and (self.tokens is not None or bool(self.logp.max() > -np.inf))

    def token(self, place: int) -> int:
        """The token that `p[place]` is of."""
        return place if self.tokens is None else int(self.tokens[place])

    def named(self, places: list[int]) -> list[int]:
        return places if self.tokens is None else self.tokens[places].tolist()

    def place(self, token: int) -> int:
        """Where a token stands; -1 if it has no odds."""
        if self.tokens is None:
            return token
        place = int(self.tokens.searchsorted(token))
        return place if place < len(self.tokens) and self.tokens[place] == token else -1

    def at(self, tokens: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """The odds of tokens."""
        if self.tokens is None:
            return self.p[tokens]
        if len(self.tokens) == 0:
            return np.zeros(len(tokens))
        places = np.minimum(self.tokens.searchsorted(tokens), len(self.tokens) - 1)
        return np.where(self.tokens[places] == tokens, self.p[places], 0.0)

    def odds(self, rows: Int64[np.ndarray, " n"], tokens: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        return np.where(rows >= 0, self.at(tokens), 0.0)

    def row(self, row: int) -> Float64[np.ndarray, " vocab"]:
        return self.spread().p

    def masses(self, rows: Int64[np.ndarray, " n"], tokens: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        return masses_left(self.p, tokens if self.tokens is None else self.tokens.searchsorted(tokens))

    def spread(self) -> "Row":
        """The same law on the whole vocabulary."""
        if self.tokens is None:
            return self
        logp = np.full(self.vocab, -np.inf)
        logp[self.tokens] = self.logp
        return Row(logp, self.vocab)

    def restated(self, p: Float64[np.ndarray, " n"]) -> "Row":
        """Another law on the same tokens."""
        with np.errstate(divide="ignore"):
            return Row(np.log(p), self.vocab, self.tokens)


def spread(rows: Sequence[Row]) -> Float64[np.ndarray, "rows vocab"]:
    """Log-laws on the whole vocabulary."""
    return np.stack([row.spread().logp for row in rows])


@dataclass(frozen=True, eq=False)
class Group:
    """Draws that were made together from one law over (parent, token) pairs, in the order in which they were drawn.

    A token tree has one group per parent, or several that are tried one after the other; a layer of draft beams is one
    group over all its parents. What a rule may do with the draws depends on what is known of them:

    - `law` is given: they were drawn from it, with or without `replacement`;
    - `sure`: they were chosen and not drawn, like the best tokens of a model; each stands for all the mass of its law;
    - neither: their law is lost (pruned by content, merged, retrieved); they can be matched, not tried.
    """

    parents: Int64[np.ndarray, " parents"]  # forest nodes that the law ranges over
    draw_parents: Int64[np.ndarray, " draws"]  # index into `parents`
    draw_tokens: Int64[np.ndarray, " draws"]
    draw_nodes: Int64[np.ndarray, " draws"]  # the drawn forest node; -1 where the draw ends its beam and needs no node
    law: Law | None  # rho over (parent, token) pairs
    replacement: bool = False
    sure: bool = False

    @property
    def lawful(self) -> bool:
        """Whether every draw can be tried against the law that it was drawn from."""
        return self.law is not None or self.sure

    @property
    def odds(self) -> Float64[np.ndarray, " draws"]:
        """rho of each draw, as if it were the first."""
        return self._stated.odds(self.draw_parents, self.draw_tokens)

    @property
    def masses(self) -> Float64[np.ndarray, " draws"]:
        """Mass of the law before each draw, once the draws before it are struck out; 1 with replacement."""
        if self.replacement:
            return np.ones(len(self.draw_tokens))
        return self._stated.masses(self.draw_parents, self.draw_tokens)

    @property
    def _stated(self) -> Law:
        if self.law is None:
            raise LostLaw("these drafts follow no stated law: verify them by matching, not by rejection")
        return self.law


@dataclass(frozen=True, eq=False)
class Forest:
    """Token trees, one under each live beam. A parent always stands before its children; roots come first.

    >>> forest = Forest.rooted([7]).grown([4, 5], [0, 0]).grown([9], [2])
    >>> forest.parents.tolist(), forest.depths().tolist(), forest.path(3)
    ([-1, 0, 0, 2], [0, 1, 1, 2], [5, 9])
    """

    tokens: Int64[np.ndarray, " nodes"]  # a root holds the last committed token of its beam
    parents: Int64[np.ndarray, " nodes"]  # index of the parent node, -1 at a root
    groups: tuple[Group, ...] = ()
    logq: Float64[np.ndarray, " nodes"] | None = (
        None  # of the path from the root, by the draft model; NaN, None: unknown
    )
    beams: Int64[np.ndarray, " beams"] | None = None  # last nodes of the beams that the drafter ended with, best first

    @classmethod
    def rooted(cls, tokens: Int64[np.ndarray, " roots"] | list[int]) -> "Forest":
        tokens = np.asarray(tokens, dtype=np.int64)
        return cls(tokens, np.full(len(tokens), -1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def roots(self) -> int:
        """How many roots there are; they are the nodes 0 .. roots - 1."""
        return int(np.count_nonzero(self.parents < 0))

    def grown(
        self,
        tokens: Int64[np.ndarray, " n"] | list[int],
        parents: Int64[np.ndarray, " n"] | list[int],
        logq: Float64[np.ndarray, " n"] | None = None,
        groups: Sequence[Group] = (),
    ) -> "Forest":
        """The forest with more nodes behind the present ones, and more groups."""
        if len(tokens) == 0:
            return replace(self, groups=(*self.groups, *groups))
        tokens, parents = np.asarray(tokens, dtype=np.int64), np.asarray(parents, dtype=np.int64)
        scores = self.logq
        if logq is not None or scores is not None:
            before = np.where(self.parents < 0, 0.0, np.nan) if scores is None else scores
            scores = np.append(before, np.full(len(tokens), np.nan) if logq is None else logq)
        return Forest(
            np.concatenate([self.tokens, tokens]),
            np.concatenate([self.parents, parents]),
            (*self.groups, *groups),
            scores,
        )

    def fitting(self, vocab: int) -> "Forest":
        """Itself, if a model of so many tokens can read it."""
        if len(self.tokens) and not 0 <= int(self.tokens.min()) <= int(self.tokens.max()) < vocab:
            strange = sorted({token for token in self.tokens.tolist() if not 0 <= token < vocab})
            raise BadForest(f"it holds tokens {strange[:5]}, and the target knows 0 to {vocab - 1}")
        return self

    def with_group(self, group: Group) -> "Forest":
        return replace(self, groups=(*self.groups, group))

    @property
    def lawful(self) -> bool:
        """Whether the law of every draw is known, so that drafts may be tried and not only matched."""
        return all(group.lawful for group in self.groups)

    @property
    def layers(self) -> int:
        """How many layers were drafted below the roots, drafts that end their beam included."""
        if not self.groups:
            return 0
        depths = self.depths()
        return 1 + max(int(depths[group.parents].max()) for group in self.groups)

    def groups_under(self, node: int) -> list[Group]:
        """The sibling groups of one parent, in the order in which they are tried."""
        return self._groups_of.get(node, [])

    @cached_property
    def _groups_of(self) -> dict[int, list[Group]]:
        found: dict[int, list[Group]] = {}
        for group in self.groups:
            if len(group.parents) == 1:
                found.setdefault(int(group.parents[0]), []).append(group)
        return found

    def selected(self, nodes: Int64[np.ndarray, " kept"]) -> "Forest":
        """The forest of these nodes alone: ascending, roots and all parents among them.

        A group that loses a draw loses its law, for which draws are left says something about them; one that loses all of
        them stays, without a draw, so that no rule takes its parent for a leaf. Guesses that were chosen and not drawn stay
        sure. Where nodes are selected by what they hold, `lost` has to follow: that all draws are left says something too.
        """
        names = np.full(len(self) + 1, -1, dtype=np.int64)  # the last entry renames -1 to itself
        names[nodes] = np.arange(len(nodes))
        groups = []
        for group in self.groups:
            kept = (names[group.draw_nodes] >= 0) | (group.draw_nodes < 0)
            lost = not kept.all()
            if (names[group.parents] < 0).all() or (group.sure and not kept.any()):
                continue
            groups.append(
                replace(
                    group,
                    parents=names[group.parents],
                    draw_parents=group.draw_parents[kept],
                    draw_tokens=group.draw_tokens[kept],
                    draw_nodes=names[group.draw_nodes[kept]],
                    law=None if lost else group.law,
                )
            )
        scores = None if self.logq is None else self.logq[nodes]
        beams = None if self.beams is None else names[self.beams][names[self.beams] >= 0]
        return Forest(self.tokens[nodes], names[self.parents[nodes]], tuple(groups), scores, beams)

    def lost(self) -> "Forest":
        """The forest with no law for what was drawn; guesses that were chosen stay sure."""
        return replace(self, groups=tuple(one if one.sure else replace(one, law=None) for one in self.groups))

    def depths(self) -> Int64[np.ndarray, " nodes"]:
        """0 at roots."""
        depths = np.zeros(len(self), dtype=np.int64)
        above = self.parents.copy()
        while (alive := above >= 0).any():
            depths += alive
            above = np.where(alive, self.parents[above], -1)
        return depths

    def path(self, node: int | np.integer) -> list[int]:
        """The tokens from below the root down to `node`."""
        tokens: list[int] = []
        while self.parents[node] >= 0:
            tokens.append(int(self.tokens[node]))
            node = self.parents[node]
        return tokens[::-1]

    def root_of(self, nodes: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        above = nodes
        while (self.parents[above] >= 0).any():
            above = np.where(self.parents[above] >= 0, self.parents[above], above)
        return above

    def below(self, nodes: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, "n depth"]:
        """The tokens under the root on the paths to nodes of one depth, one row per node."""
        columns: list[np.ndarray] = []
        above = nodes
        while len(above) and self.parents[above[0]] >= 0:
            columns.append(self.tokens[above])
            above = self.parents[above]
        return np.stack(columns[::-1], 1) if columns else np.zeros((len(nodes), 0), dtype=np.int64)

    def find(self, parents: Int64[np.ndarray, " n"], tokens: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """The nodes that are the children `tokens` of `parents`; -1 where there is none."""
        known = self.parents * 2**32 + self.tokens
        if len(known) * len(parents) <= 4096:  # then looking at every pair is quicker than sorting
            same = known == (parents * 2**32 + tokens)[:, None]
            return np.where(same.any(1), same.argmax(1), -1)
        order = np.argsort(known, kind="stable")
        wanted = parents * 2**32 + tokens
        place = np.minimum(np.searchsorted(known[order], wanted), len(known) - 1)
        found = order[place]
        return np.where(known[found] == wanted, found, -1)

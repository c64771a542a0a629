"""VERIFY: from the leaves to the root. A node is judged when everything below it has failed."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Float64

from specbeam.forest import Forest
from specbeam.probs import NOTHING
from specbeam.records import Verdict
from specbeam.session import Session
from specbeam.verify.draws import Candidate
from specbeam.verify.single import Walk, check_lawful


@dataclass
class Standing:
    """What is left of one node while its subtree is judged."""

    node: int  # forest node; -1 at an end token
    token: int
    odds: float  # of ending at this node or below, given everything that failed so far
    law: Float64[np.ndarray, " n"] | None = None  # of the next token, given that, on `Walk.row`; None at a leaf
    drafts: list[tuple[Candidate, tuple[int, int]]] = field(
        default_factory=list
    )  # children not tried yet, in order: on trial, and as token and node


@dataclass(frozen=True)
class TraversalRule:
    """Follow the first drafts down to a leaf and accept the whole path with its odds; if not, drop the leaf, update what
    its parent still owes, and try what is left. On a chain this is block verification.

    On chains it accepts at least as many tokens on average as `PathRule`; on trees it was never found to accept fewer.

    Law: exact: the target's. Source: traversal verification (arXiv 2505.12398); block verification (2403.10444).
    """

    tries: ClassVar[bool] = True

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        check_lawful(forest, "TraversalRule")
        walk = Walk(session, forest, scored)
        path = [self._standing(walk, 0, int(forest.tokens[0]), 1.0)]
        while True:
            self._descend(walk, path)
            if len(path) == 1 or session.dice.flip(path[-1].odds):
                break
            self._give_up_leaf(path)
        return self._emitted(walk, path)

    def _standing(self, walk: Walk, node: int, token: int, odds: float) -> Standing:
        if node < 0:
            return Standing(node, token, odds)
        children = walk.candidates(node)
        drafts = list(zip(walk.trials_under(node), children, strict=True)) if children else []
        return Standing(node, token, odds, walk.row(node).p if drafts else None, drafts)

    def _descend(self, walk: Walk, path: list[Standing]) -> None:
        """Down to a leaf. A child's odds: what its parent can still give it."""
        while path[-1].drafts:
            above = path[-1]
            (place, law), (token, node) = above.drafts[0]
            assert above.law is not None
            odds = 0.0  # of a token that the target cannot say
            if place >= 0:
                share = above.odds * above.law[place]
                odds = 1.0 if share >= law[place] else float(share / law[place])
            walk.watch_odds(above.odds * above.law, law, odds)
            path.append(self._standing(walk, node, token, odds))

    def _give_up_leaf(self, path: list[Standing]) -> None:
        path.pop()
        above = path[-1]
        (_, law), _ = above.drafts.pop(0)
        assert above.law is not None
        owed = np.maximum(above.odds * above.law - law, 0.0)
        total = float(owed.sum())
        if total > NOTHING:
            above.law = owed / total
            above.odds = total / (total + 1.0 - above.odds)
        else:
            above.odds = 1.0 if len(path) == 1 else 0.0

    def _emitted(self, walk: Walk, path: list[Standing]) -> Verdict:
        for standing in path[1:]:
            if not walk.emit(standing.token, standing.node):
                return walk.verdict()
        last = path[-1]
        if last.node >= 0:
            row = walk.row(last.node)
            walk.emit(row.token(walk.session.dice.pick(row.p if last.law is None else last.law)), -1)
        return walk.verdict()

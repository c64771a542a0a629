"""VERIFY: ordered trials down a tree (recursive rejection sampling)."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float

from specbeam.forest import Forest
from specbeam.records import Verdict
from specbeam.session import Session
from specbeam.verify.draws import draws
from specbeam.verify.path_fast import Laws, laws, walk_at_once
from specbeam.verify.single import Walk, check_lawful


@dataclass(frozen=True)
class PathRule:
    """At each node try the drafts in order, each against its own law; go down into the accepted one, or leave the tree.

    One rule for speculative sampling (arXiv 2211.17192), SpecInfer (2305.09781), RSD (2402.14160), Sequoia (2402.12374),
    SpecHub and greedy + 1 (2411.05289, 2502.18779): they differ in the laws of their drafts.

    Law: exact: the target's.
    """

    tries: ClassVar[bool] = True
    at_once: bool = field(default=True, repr=False)  # False: token by token, as the oracle of the loop

    def for_loops(self, session: Session) -> Laws | None:
        """What it tries drafts against, as loops see it; None if it is not for them."""
        return laws(session) if self.at_once else None

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        check_lawful(forest, "PathRule")
        walk = Walk(session, forest, scored)
        going = not (self.at_once and walk_at_once(session, forest, walk))
        while going and walk.node >= 0:
            here, row = walk.node, walk.row(walk.node)
            (taken,) = draws(walk.trials_under(here), row.p, 1, session.dice, watch=walk.watch)
            node = walk.candidates(here)[taken.draft][1] if taken.draft >= 0 else -1
            going = walk.emit(row.token(taken.token), node)
        return walk.verdict()

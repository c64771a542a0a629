"""VERIFY: best-first search, where every scored prefix is expanded and texts are given in the order of their scores."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.core.agenda import ROOT, Agenda, agenda_of, log_law
from specbeam.core.beams import Beams, first_layers, no_layers
from specbeam.core.constraint import MOST_PATHS
from specbeam.core.forest import Forest, unknown_nodes
from specbeam.core.laws.warp import on_host
from specbeam.core.records import Searched, Verdict
from specbeam.core.session import Session

LAW = "exact: the most probable texts in order, as far as they are certain"


@dataclass(frozen=True)
class BestRule:
    """Each scored prefix is replaced by its continuations, with their true scores, whatever the drafts were.

    A score is the sum of processed log-probabilities, which are not renormalised, as in beam search. No layer is decided:
    the prompt stays the only live beam, and the target keeps the prefixes that may still be continued.

    Args:
        most: maximum number of prefixes that the target scores.

    Law: the texts of largest score, best first. Each is certain if its score reaches its bound.
    """

    most: int
    law: ClassVar[str] = LAW
    keeps_nodes: ClassVar[bool] = True
    needs_bounds: ClassVar[bool] = True

    def ignores_drafts(self, session: Session) -> bool:
        """Return True: texts are independent of the drafts."""
        return True

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        """Return the texts that are decided, and the nodes to keep."""
        agenda = agenda_of(session, self.most)
        fresh = unknown_nodes(0, forest.size, forest.known.nodes)
        logp = log_law(session, forest, fresh, on_host(scored))
        row_of = {int(node): row for row, node in enumerate(fresh)}
        prefix_at = np.full(forest.size, -1)
        prefix_at[0] = ROOT
        if not agenda.is_begun:
            agenda.begin(logp[row_of[0]])
        drafted = 0
        for node in range(1, forest.size):
            above = int(prefix_at[forest.parents[node]])
            token = int(forest.tokens[node])
            known = agenda.children.get((above, token))
            drafted += known is None
            if above < 0:
                continue
            if known is None:
                known = agenda.expand(above, token, logp[row_of[node]])
            prefix_at[node] = known
        agenda.trim()
        texts = agenda.pop()
        agenda.trim()
        if session.warp.constraint is not None:
            session.warp.constraint.forget(MOST_PATHS)
        kept = self._kept(session, agenda, prefix_at)
        live = Beams(
            np.zeros(1, dtype=np.int64), forest.tokens[:1], np.zeros(1), np.ones(1, dtype=np.int64), session.beams.keys
        )
        if agenda.is_over:
            live = live.pick(np.zeros(0, dtype=np.int64))
        return Verdict(first_layers(no_layers(0, 0), 0), kept=kept, searched=Searched(live, texts, drafted))

    def _kept(
        self, session: Session, agenda: Agenda, prefix_at: Int64[np.ndarray, " nodes"]
    ) -> Int64[np.ndarray, " kept"]:
        """Return the forest nodes whose prefixes may still be continued, and store these prefixes in the agenda."""
        if not session.keeps_nodes or agenda.is_over:
            agenda.kept = np.zeros(0, dtype=np.int64)
            return agenda.kept
        is_needed = np.isin(prefix_at, agenda.needed())
        is_needed[0] = False
        kept = np.flatnonzero(is_needed)
        agenda.kept = prefix_at[kept]
        return kept

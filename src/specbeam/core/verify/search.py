"""VERIFY: beam search and beam sampling as in transformers, layer by layer, with any drafts."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float

from specbeam.core.control.width import FixedWidths
from specbeam.core.draft.beams import candidate_count
from specbeam.core.forest import Forest
from specbeam.core.laws.listing import listing_for
from specbeam.core.ranked import WHOLE, Listing
from specbeam.core.records import Verdict
from specbeam.core.session import Session
from specbeam.core.verify.beams import SearchSpec, can_be_lazy, judged_beams


@dataclass(frozen=True)
class SearchRule:
    """Each layer takes the target's own candidates; it passes if the beams that stay live are drafts.

    The semantics are those of transformers 5: per step max(2, 1 + end tokens) x `beams` candidates, the best ones or, in
    beam sampling, drawn without replacement from the softmax over all scores; of the candidates the first `beams` may
    finish, and the best-scored ones that did not end stay live. A score is the sum of processed log-probabilities,
    which are not renormalised.

    Args:
        beams: number of beams that stay live.
        coupling: "noise" draws by the noise of (seed, path, token), so that drafts made with the same noise pass more often;
            "dice" draws one pair after the other. Both have the same law.

    Law: the target's beam search or beam sampling; the output never depends on the drafts.
    """

    beams: int
    coupling: str = "noise"
    keeps_nodes: ClassVar[bool] = True

    def spec(self, session: Session) -> SearchSpec:
        """Return the spec by which steps judge layers for a session; nothing is drawn at temperature 0."""
        warp = session.warp
        by_dice = self.coupling == "dice" and not warp.greedy
        lazy = not by_dice and can_be_lazy(warp)
        return SearchSpec(not warp.greedy, by_dice, self.beams, warp.cut, session.limits.stop, lazy)

    def ignores_drafts(self, session: Session) -> bool:
        """Return True: texts are independent of the drafts, so drafts may be cut by their content."""
        return True

    def is_lazy(self, session: Session) -> bool:
        """Return whether layers are decided without the rows of beams whose scores cannot win."""
        spec = self.spec(session)
        return spec.lazy and not spec.noisy

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        """Return the verdict on a forest."""
        return judged_beams(session, forest, scored, self.spec(session), self.widths(session), trace=False)

    def listing(self, session: Session) -> Listing:
        """Return the lists of tokens by which layers are decided; see `Rule`."""
        spec = self.spec(session)
        if spec.by_dice and not spec.truncation.cuts:
            return WHOLE
        return listing_for(spec.truncation, spec.noisy, candidate_count(spec.beams, len(spec.stop.eos)))

    def widths(self, session: Session) -> FixedWidths:
        """Return the number of beams of each layer, as numbers for steps."""
        return FixedWidths(self.beams)

"""VERIFY: beam search and beam sampling as transformers does them, layer by layer, whatever was drafted."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float

from specbeam.core.control.width import FixedWidths
from specbeam.core.forest import Forest
from specbeam.core.records import Verdict
from specbeam.core.session import Session
from specbeam.core.verify.beams import SearchSpec, can_be_lazy, judged_beams


@dataclass(frozen=True)
class SearchRule:
    """Each layer takes the target's own candidates; it passes if those that go on are drafts.

    The semantics are those of transformers 5: per step max(2, 1 + end tokens) x `beams` candidates, the best ones or, in
    beam sampling, drawn without replacement from the softmax over all scores; of the candidates the first `beams` may
    finish, and the best-scored ones that did not end go on. A score is the sum of processed log-probabilities, which are not
    normalised again.

    Args:
        beams: beams that go on.
        coupling: "noise" draws by the noise of (seed, path, token), so drafts that were made with it pass more often;
            "dice" draws one pair after the other. The law is the same.

    Law: what is emitted never depends on the drafts, so it is the target's beam search or beam sampling, whatever they are.
    """

    beams: int
    coupling: str = "noise"
    keeps_nodes: ClassVar[bool] = True

    def spec(self, session: Session) -> SearchSpec:
        """Return how layers are drawn for a session; nothing is drawn at temperature 0."""
        warp = session.warp
        by_dice = self.coupling == "dice" and not warp.greedy
        lazy = not by_dice and can_be_lazy(warp)
        return SearchSpec(not warp.greedy, by_dice, self.beams, warp.cut, session.limits.stop, lazy)

    def ignores_drafts(self, session: Session) -> bool:
        """Return True: texts do not depend on which drafts there are, so drafts may be cut by what they are."""
        return True

    def is_lazy(self, session: Session) -> bool:
        """Return whether layers are decided without the rows of beams that cannot win, by the scores that beams go on by."""
        spec = self.spec(session)
        return spec.lazy and not spec.noisy

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        """Return what lives on."""
        return judged_beams(session, forest, scored, self.spec(session), self.widths(session), trace=False)

    def widths(self, session: Session) -> FixedWidths:
        """Return that as many beams go on in every layer."""
        return FixedWidths(self.beams)

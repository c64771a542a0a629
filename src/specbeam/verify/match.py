"""VERIFY: sample, and see whether it was drafted. Exact for any tree whatsoever."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from specbeam.forest import Forest
from specbeam.records import Verdict
from specbeam.session import Session
from specbeam.verify.single import Coupling, Walk


@dataclass(frozen=True)
class MatchRule:
    """Draw the next token from the target's law; go down if it is among the drafts, else leave the tree with it.

    How the drafts were made does not matter, so this rule takes greedy, pruned, merged and retrieved trees.

    Args:
        coupling: "noise" draws by the noise of (seed, path, token): the text is that of plain sampling with the same
            seed, whatever the drafts. "dice" draws by the session's dice.

    Law: exact: the target's.
    """

    coupling: Coupling = "noise"

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        walk = Walk(session, forest, scored)
        going = True
        while going and walk.node >= 0:
            token = walk.drawn(self.coupling)
            child = forest.find(np.array([walk.node]), np.array([token]))
            going = walk.emit(token, int(child[0]))
        return walk.verdict()

"""The target as its own draft model: nodes that it scores while drafting are not scored again."""

from collections.abc import Sequence

import torch
from jaxtyping import Float

from specbeam.core.forest import Forest
from specbeam.core.lm import LM
from specbeam.core.records import Needs, Scored, Turn
from specbeam.core.session import Session


class TargetAsDraft:
    """A draft model that is the target itself, with the target's KV cache.

    The target's pass at the end of a draft scores only the last layer of the forest; `all_rows` joins its rows with the
    earlier ones. All passes count as target passes. Drafts cannot be pruned: the target must score every drafted node.
    """

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self.vocab = lm.vocab
        self.max_positions = lm.max_positions

    def extend(
        self, sessions: Sequence[Session], forests: Sequence[Forest], needs: Sequence[Needs] | None = None
    ) -> list[Scored]:
        """See `LM.extend`."""
        scores = self.lm.extend(sessions, forests, needs)
        for session, scored in zip(sessions, scores, strict=True):
            before = session.state.setdefault(self, [])
            session.count.target_passes += bool(before) or session.length == 0  # the root's row is known from last turn
            before.append(scored.logits)
        return scores

    def all_rows(
        self, session: Session, newest: Float[torch.Tensor, "new vocab"]
    ) -> Float[torch.Tensor, "nodes vocab"]:
        """Return the logits of the whole forest, given those of the nodes that the last pass of the turn scored."""
        return torch.cat([*session.state.get(self, []), newest])

    def settle(self, session: Session, turn: Turn) -> None:
        """Forget the rows of the turn; the decoding loop settles the target's cache."""
        session.state.pop(self, None)

    def peak(self, session: Session) -> int:
        return self.lm.peak(session)

    def close(self, session: Session) -> None:
        """Forget the rows of the turn; the decoding loop closes the target's cache."""
        session.state.pop(self, None)

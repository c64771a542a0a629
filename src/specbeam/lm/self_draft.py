"""The target as its own draft model: what it scores while a draft grows is not scored again."""

from collections.abc import Sequence

import torch
from jaxtyping import Float

from specbeam.core.forest import Forest
from specbeam.lm.base import LM
from specbeam.records import Needs, Scored, Turn
from specbeam.session import Session


class TargetAsDraft:
    """Stands where a draft model is expected and is the target itself, cache included.

    The loop's own pass then scores only the last layer; `all_rows` puts the rows of a turn together again. Passes are booked
    as the target's. Nothing of the forest may be left out before the loop scores it.
    """

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self.vocab = lm.vocab
        self.max_positions = lm.max_positions

    def extend(
        self, sessions: Sequence[Session], forests: Sequence[Forest], needs: Sequence[Needs] | None = None
    ) -> list[Scored]:
        """See `LM.extend`."""
        found = self.lm.extend(sessions, forests, needs)
        for session, scored in zip(sessions, found, strict=True):
            before = session.state.setdefault(self, [])
            session.count.target_passes += bool(before) or session.length == 0  # the root's row is known from last turn
            before.append(scored.logits)
        return found

    def all_rows(
        self, session: Session, newest: Float[torch.Tensor, "new vocab"]
    ) -> Float[torch.Tensor, "nodes vocab"]:
        """The rows of the whole forest, of which the loop's pass gave the newest."""
        return torch.cat([*session.state.get(self, []), newest])

    def settle(self, session: Session, turn: Turn) -> None:
        """The target's cache is settled by the loop."""
        session.state.pop(self, None)

    def peak(self, session: Session) -> int:
        return self.lm.peak(session)

    def close(self, session: Session) -> None:
        """Likewise."""
        session.state.pop(self, None)

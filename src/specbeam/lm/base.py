"""SCORE: what the loop asks of a language model."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float

from specbeam.core.forest import Forest
from specbeam.records import Turn
from specbeam.session import Session


@runtime_checkable
class LM(Protocol):
    """A causal language model that scores forests of many sessions in one pass.

    What it keeps per session (caches) lives in `session.state[self]` and ends with `close`.
    """

    vocab: int
    max_positions: int | None  # None: no limit

    def extend(
        self, sessions: Sequence[Session], forests: Sequence[Forest]
    ) -> list[Float[torch.Tensor, "nodes vocab"]]:
        """Logits of the nodes of each forest that this model has not scored in this turn, in one pass.

        The first call of a turn scores the roots too (and what lies between them and the cache: at first the whole
        prompt); a later call may bring a grown forest and gets the rows of the new nodes only. Logits of a node equal
        those of a plain forward on its path. float[new nodes, vocab] each, on the host or on the model's device,
        valid until the session's next turn begins.
        """
        ...

    def settle(self, session: Session, turn: Turn) -> None:
        """Keep what the surviving beams need, free the rest."""
        ...

    def peak(self, session: Session) -> int:
        """Most tokens of the session that were stored at once."""
        ...

    def close(self, session: Session) -> None:
        """Forget the session."""
        ...


class Uncached:
    """What models without a cache have in common: all they keep of a session is how many nodes of the turn were scored."""

    max_positions: int | None = None

    def fresh(self, session: Session, forest: Forest) -> range:
        """The nodes that were not scored in this turn; from here on they count as scored."""
        start = session.state.get(self, 0)
        session.state[self] = forest.size
        return range(start, forest.size)

    def settle(self, session: Session, turn: Turn) -> None:
        session.state.pop(self, None)

    def peak(self, session: Session) -> int:
        return 0

    def close(self, session: Session) -> None:
        session.state.pop(self, None)

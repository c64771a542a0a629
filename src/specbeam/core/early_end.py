"""The early end of compiled runs, for sessions of other clients that wait or are over."""

import numpy as np

from specbeam.core.steps import Array


class EarlyEnd:
    """Ends the compiled runs of a decoder after the turn that they are in; shared by its sessions.

    Attributes:
        asked: int64[1], not 0 if the runs are to end; compiled runs read it after each turn.
        follows_ends: whether the end of one session ends the runs of the others.
    """

    def __init__(self) -> None:
        self.asked: Array = np.zeros(1, dtype=np.int64)
        self.follows_ends = False

    def ask(self) -> None:
        """End the runs after their turn. Any thread may call this at any time."""
        self.asked[0] = 1

    def forget(self) -> None:
        """Let the next runs go on."""
        self.asked[0] = 0

    @property
    def is_asked(self) -> bool:
        """Whether the runs are to end."""
        return bool(self.asked[0])

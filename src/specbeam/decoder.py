"""Sessions that are decoded side by side: they come, take turns and go. Batches, streams and servers are made of it."""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from specbeam.draft.batch import close_drafters, fill_drafters, models_of
from specbeam.errors import Cancelled
from specbeam.kernels.interrupts import interrupts_held
from specbeam.kernels.threads import torch_on_one_thread
from specbeam.lm.base import LM, check_gives, check_takes, fill_prompts
from specbeam.measure.profiler import span
from specbeam.runs import run_ahead, run_side_by_side
from specbeam.session import Session
from specbeam.turn import Turns, turns


class Decoder:
    """Decodes sessions of one target; they may differ in all else.

    A session that fails keeps its error in `session.failure`, has no turn, and takes nothing from the others. Between two
    steps the decoder is at rest: sessions may be added and cancelled, in the thread that steps.

    A prompt that is longer than a pass of its model is stored chunk by chunk, a chunk in each step, while the sessions that
    are live take their turns.

    Args:
        at_once: the most sessions side by side; more of them wait, first come first served.
        ahead: the most turns of a session that one compiled run may take, which are not shown; 0: all are shown.
        filling: the most prompts that are stored side by side.
    """

    def __init__(self, target: LM, at_once: int = 32, ahead: int = 0, filling: int = 1) -> None:
        self.target = target
        self.at_once = at_once
        self.ahead = ahead
        self.at_once_filling = filling
        self.waiting: deque[Session] = deque()
        self.filling: list[Session] = []  # their prompts are being stored
        self.live: list[Session] = []  # they take turns

    def add(self, session: Session) -> None:
        """Let a session wait for its place.

        Raises `NotSupported` if its parts need what the target cannot give, or it gives the target what that cannot take.
        """
        check_gives(self.target, session.parts.needs)
        check_takes(self.target, session)
        self.waiting.append(session)

    def cancel(self, session: Session) -> bool:
        """End a session: what it held is free again, and its `failure` says so. Returns False if it is not here."""
        for place in (self.waiting, self.filling, self.live):
            if session in place:
                place.remove(session)
                session.fail(Cancelled("it was cancelled"), "")
                self._close([session])
                return True
        return False

    @property
    def free(self) -> int:
        """How many more sessions could be side by side with those there are."""
        return max(self.at_once - len(self.waiting) - len(self.filling) - len(self.live), 0)

    @property
    def busy(self) -> bool:
        """Whether any session is not over."""
        return bool(self.waiting or self.filling or self.live)

    def step(self) -> Turns:
        """Take one turn of each live session, and store a chunk of the prompts that are long; return the turns.

        There are none where a compiled run took several turns, or where prompts are stored and nobody is live. Those who
        are over have left when it returns.
        """
        with interrupts_held(), self._threads():
            self._let_in()
            if self.filling:
                self._fill()
            done = self._turns() if self.live else []
            self._close([session for session in self.live if session.over])
            self.live = [session for session in self.live if not session.over]
        return done

    def _threads(self) -> AbstractContextManager[None]:
        """Leave all threads but one to compiled code, where nothing that a step does is worth more of them to torch."""
        models = [self.target]
        for session in (*self.waiting, *self.filling, *self.live):
            drafting = models_of(session.parts.drafter)
            if drafting is None:
                return nullcontext()
            models += drafting
        are_compiled = all(getattr(model, "loops", False) for model in models)
        return torch_on_one_thread() if are_compiled else nullcontext()

    def close(self) -> None:
        """Leave all sessions as they are, and free what they hold in the models."""
        self._close([*self.filling, *self.live])
        self.waiting.clear()
        self.filling = []
        self.live = []

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _let_in(self) -> None:
        """Give places to those who wait."""
        while self.waiting and len(self.filling) + len(self.live) < self.at_once:
            self.filling.append(self.waiting.popleft())

    def _fill(self) -> None:
        """Store a chunk of prompts that are long in the target, then in draft models; who has no more to store is live."""
        with span("fill"):
            needs = [session.parts.needs for session in self.filling]
            filled = fill_prompts(self.target, self.filling, needs, self.at_once_filling)
            stored = [session for session, is_filled in zip(self.filling, filled, strict=True) if is_filled]
            later: list[Session] = []
            if self.live:  # where nobody waits, a draft model stores its prompt when it drafts
                later = fill_drafters(stored, self.at_once_filling)
        ready = [session for session in stored if session not in later]
        self.filling = [session for session in self.filling if session not in ready]
        self.live += [session for session in ready if session.failure is None]
        self._close([session for session in ready if session.failure is not None])

    def _turns(self) -> Turns:
        if not self.ahead or self.filling:
            return turns(self.target, self.live)
        moved = self._run()
        rest = [session for session in self.live if session not in moved]
        return turns(self.target, rest) if rest else []

    def _run(self) -> list[Session]:
        """Take several turns of those sessions that can as runs. Returns those that took any, or failed."""
        with span("settle"):
            if len(self.live) > 1:
                return run_side_by_side(self.target, self.live, self.ahead)
            (session,) = self.live
            ran = True  # or it has failed
            with session.failing_alone():
                ran = run_ahead(self.target, session, self.ahead)
            return [session] if ran else []

    def _close(self, sessions: list[Session]) -> None:
        for session in sessions:
            self.target.close(session)
        close_drafters(sessions)

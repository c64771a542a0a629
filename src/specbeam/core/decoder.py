"""Decoding of many sessions side by side, for batches, streams and servers; sessions may come and go at any time."""

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType

from specbeam.core.compiling.forms import forms_made
from specbeam.core.compiling.interrupts import hold_interrupts
from specbeam.core.draft.batch import close_drafters, fill_drafters, models_of
from specbeam.core.draft.beams import NoDraft
from specbeam.core.early_end import EarlyEnd
from specbeam.core.errors import Cancelled, NotSupported, SpecbeamError, warn
from specbeam.core.guard import ThreadGuard
from specbeam.core.heap import HEAP
from specbeam.core.lm import LM, check_gives, check_takes, fill_prompts
from specbeam.core.measure.profiler import span
from specbeam.core.runs import PausedRun, run_ahead, run_side_by_side, run_together
from specbeam.core.session import Session, keeps_nodes
from specbeam.core.threads import torch_on_one_thread
from specbeam.core.turn import Turns, turns


class Decoder:
    """A decoder of sessions that share a target and may differ in everything else.

    A session that fails keeps its error in `session.failure`, takes no further turns, and does not affect the others.
    Sessions may be added, cancelled and released between two steps, by the thread that calls `step`. While sessions are
    unfinished, no other thread may decode with their models: it gets `NotSupported`. If no other decoder uses the models,
    the decoder may change its thread between two steps.

    A prompt that is longer than one pass of its model is stored in chunks, one chunk per step, while live sessions take
    their turns.

    Args:
        at_once: maximum number of sessions decoded side by side; further ones wait, first come, first served.
        ahead: maximum number of turns of a session that one compiled run may take without showing them; 0: show every turn.
        filling: maximum number of prompts that are stored at the same time.

    Attributes:
        is_last: whether no further session will be added, so that nobody waits for the place of one that is over. Then
            compiled runs go on until all of their sessions are over.
        early_end: ends the compiled runs of a step after a turn; any thread may ask for it at any time.
    """

    def __init__(self, target: LM, at_once: int = 32, ahead: int = 0, filling: int = 1) -> None:
        self.target = target
        self.at_once = at_once
        self.ahead = ahead
        self.at_once_filling = filling
        self.is_last = False
        self.early_end = EarlyEnd()
        self.waiting: deque[Session] = deque()
        self.filling: list[Session] = []  # their prompts are being stored
        self.live: list[Session] = []  # they are being decoded
        self._guards: list[ThreadGuard] = []  # of all models of these sessions
        self._thread: threading.Thread | None = None  # the thread that used them last
        self._stepping = threading.Lock()

    def add(self, session: Session) -> None:
        """Queue a session.

        Raises `NotSupported` if its parts need something that the target cannot give, if it has inputs that the target does
        not take, or if another thread decodes with its models.
        """
        check_gives(self.target, session.parts.needs)
        check_takes(self.target, session)
        models = [self.target, *(models_of(session.parts.drafter) or ())]
        keeps = keeps_nodes(self.target, session.parts)
        self._hold(models)  # after all checks: the guards are dropped when the last session is over
        session.keeps_nodes = keeps
        session.early_end = self.early_end
        self.waiting.append(session)

    def cancel(self, session: Session, error: SpecbeamError | None = None) -> bool:
        """End a session, free its state, and set its `failure`. Returns False if the decoder does not have it.

        Args:
            error: the failure; None: `Cancelled`.
        """
        if not self.release(session):
            return False
        session.fail(Cancelled("it was cancelled") if error is None else error, "")
        return True

    def release(self, session: Session) -> bool:
        """Remove a session with its texts so far, and free its state. Returns False if the decoder does not have it."""
        for place in (self.waiting, self.filling, self.live):
            if session in place:
                place.remove(session)
                self._close([session])
                self._drop_if_idle()
                return True
        return False

    @property
    def free(self) -> int:
        """The number of sessions that can still be added without waiting."""
        return max(self.at_once - len(self.waiting) - len(self.filling) - len(self.live), 0)

    @property
    def busy(self) -> bool:
        """Whether any session is not finished."""
        return bool(self.waiting or self.filling or self.live)

    def step(self, moving: Sequence[Session] | None = None) -> Turns:
        """Take one turn of each live session, and store one chunk of long prompts; return the turns.

        The turns of compiled runs are not returned. Finished sessions are removed.

        Args:
            moving: the sessions that take turns if they are live, in this order; None: all.
        """
        with self._exclusive(), hold_interrupts(), self._threads():
            self._let_in()
            began = time.perf_counter()
            forms = forms_made()
            if self.filling:
                self._fill()
            asked = self.live if moving is None else moving
            live = [session for session in asked if session in self.live]
            done = self._turns(live) if live else []
            self.early_end.forget()
            under_way = [*self.filling, *live]
            seconds = time.perf_counter() - began if forms_made() == forms else math.nan
            for session in under_way:
                session.count.seconds += seconds / len(under_way)
            self._close([session for session in self.live if session.over])
            self.live = [session for session in self.live if not session.over]
            self._drop_if_idle()
        return done

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep other threads out of a step, and out of the models of all sessions."""
        if not self._stepping.acquire(blocking=False):
            raise NotSupported("another thread is inside a step of this decoder; call its methods in one thread")
        try:
            if self._thread is not threading.current_thread():
                self._hold([])
            yield
        finally:
            self._stepping.release()

    def _hold(self, models: list[LM]) -> None:
        """Hold these models and those of earlier sessions in the current thread; on an error, hold none of them."""
        guards = [model.guard for model in models if hasattr(model, "guard")]
        guards += self._guards if self._thread is not threading.current_thread() else []
        with ExitStack() as undo:
            for guard in guards:
                before = guard.hold(self)
                undo.callback(guard.give_back, self, before)
            undo.pop_all()
        self._guards = [*dict.fromkeys([*self._guards, *guards])]
        self._thread = threading.current_thread()

    def _drop_if_idle(self) -> None:
        """Let other threads decode with the models, if no session is unfinished."""
        if not self.busy:
            for guard in self._guards:
                guard.drop(self)
            self._guards = []

    def _threads(self) -> AbstractContextManager[None]:
        """Limit torch to one thread if compiled code does all the heavy work of a step; otherwise change nothing."""
        models = [self.target]
        for session in (*self.waiting, *self.filling, *self.live):
            drafting = models_of(session.parts.drafter)
            if drafting is None:
                return nullcontext()
            models += drafting
        are_compiled = all(getattr(model, "is_compiled", False) for model in models)
        return torch_on_one_thread() if are_compiled else nullcontext()

    def close(self) -> None:
        """Drop all sessions unfinished, and free their state in the models."""
        self._close([*self.filling, *self.live])
        self.waiting.clear()
        self.filling = []
        self.live = []
        self._drop_if_idle()

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _let_in(self) -> None:
        """Start waiting sessions while there are free places."""
        batch_size = min(len(self.waiting) + len(self.filling) + len(self.live), self.at_once)
        while self.waiting and len(self.filling) + len(self.live) < self.at_once:
            session = self.waiting.popleft()
            enter = getattr(session.parts.controller, "enter", None)
            if enter is not None and not enter(session, batch_size):
                session.parts = replace(session.parts, drafter=NoDraft())
                session.keeps_nodes = False
            self.filling.append(session)

    def _fill(self) -> None:
        """Store a chunk of each long prompt, in the target and then in draft models; fully stored sessions become live."""
        with span("fill"):
            needs = [session.parts.needs for session in self.filling]
            filled = fill_prompts(self.target, self.filling, needs, self.at_once_filling)
            stored = [session for session, is_filled in zip(self.filling, filled, strict=True) if is_filled]
            later: list[Session] = []
            if self.live:  # otherwise no session waits while a draft model stores the prompt in its first draft
                later = fill_drafters(stored, self.at_once_filling)
        ready = [session for session in stored if session not in later]
        self.filling = [session for session in self.filling if session not in ready]
        self.live += [session for session in ready if session.failure is None]
        self._close([session for session in ready if session.failure is not None])

    def _turns(self, live: list[Session]) -> Turns:
        if not self.ahead or self.filling:
            return turns(self.target, live)
        moved = self._run(live)
        rest = [session for session in live if session not in moved]
        return turns(self.target, rest) if rest else []

    def _run(self, live: list[Session]) -> list[Session]:
        """Take several turns of each session that supports compiled runs. Returns the sessions that took turns or failed."""
        with span("settle"):
            if len(live) > 1:
                moved = run_side_by_side(self.target, live, self.ahead)
                rest = [session for session in live if session not in moved]
                return moved + run_together(self.target, rest, self.ahead, self.is_last)
            (session,) = live
            ran = True  # stays true if the session fails
            with session.failing_alone():
                ran = run_ahead(self.target, session, self.ahead)
            return [session] if ran else []

    def _close(self, sessions: list[Session]) -> None:
        # Freeing a row moves the store's last row into the gap; in reverse order nothing has to move.
        last_first = sessions[::-1]
        for session in last_first:
            self.target.close(session)
        close_drafters(last_first)
        for session in sessions:
            session.state.pop(PausedRun, None)  # it refers to the keys and values of all sessions
            _remember(session)
        if sessions:
            HEAP.trim_if_grown()


def _remember(session: Session) -> None:
    """Call the optional method `remember` of the controller of a session that is over; a failure becomes a warning."""
    remember = getattr(session.parts.controller, "remember", None)
    if remember is None:
        return
    try:
        remember(session)
    except Exception as error:  # the text is complete, and the work of the other sessions must not be lost
        warn(f"prompt {session.number}: the controller could not remember: {error!r}")

"""Turns ahead: where one session is decoded by compiled loops alone, they run many turns at a time."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

from specbeam.ahead.beams import beams_ahead
from specbeam.ahead.books import ACCEPTED, DRAFT_PASSES, DRAFT_SCORED, PARTS, PASSES, SCORED, SPAN, Books
from specbeam.ahead.trees import trees_ahead
from specbeam.clock import apportion, lap
from specbeam.lm.base import LM
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.session import Session


@runtime_checkable
class Ahead(Protocol):
    """The turns of one session, ready to be run.

    Attributes:
        models: the target, and the draft model if there is one.
    """

    models: list[HuggingFaceLM]

    @property
    def fresh(self) -> int:
        """Most new nodes of a turn."""
        ...

    def run(self, target: Any, draft: Any) -> tuple[Books, bool]:
        """Run turns in these lanes (`OneLane`); whether the next one is for this loop too."""
        ...

    def keep(self) -> None:
        """Leave the session where the run has led."""
        ...


KINDS: tuple[Callable[[HuggingFaceLM, Session], Ahead | None], ...] = (beams_ahead, trees_ahead)


def ran_ahead(target: LM, live: list[Session]) -> bool:
    """Move a session that is alone on by as many turns as a loop can decide, to the very state that turn by turn leads to.
    Whether there were any.
    """
    if len(live) != 1:
        return False
    (session,) = live
    with lap("settle"), session.failing_alone():
        return _moved_on(target, session)
    return True  # it has failed


class _Refused:
    """Left in the state of a session in which a turn was not for the loop: the rest goes turn by turn."""


def _moved_on(target: LM, session: Session) -> bool:
    session.beside = 1
    turns = ahead_of(target, session)
    return turns is not None and _ran(turns, session)


def ahead_of(target: LM, session: Session) -> Ahead | None:
    """How its turns go, if loops can run them."""
    if not isinstance(target, HuggingFaceLM) or not target.loops or _Refused in session.state:
        return None
    for kind in KINDS:
        turns = kind(target, session)
        if turns is not None and all(lm.loops and lm.vocab == target.vocab for lm in turns.models):
            return turns
    return None


def _ran(turns: Ahead, session: Session) -> bool:
    with ExitStack() as stack:
        more = min(session.remaining, SPAN)
        lanes = [stack.enter_context(lm.alone(session, turns.fresh, more)) for lm in turns.models]
        arrays = [lane.arrays for lane in lanes if lane is not None]
        if len(arrays) < len(turns.models):  # a long prompt goes in first
            return False
        began = time.perf_counter()
        books, told = turns.run(arrays[0], arrays[-1])
    apportion(dict(zip(PARTS, books.time.tolist(), strict=True)), began)
    _keep(session, turns.models, books)
    if not told:
        session.state[_Refused] = True
    turns.keep()
    return bool(books.numbers[PASSES])


def _keep(session: Session, models: list[HuggingFaceLM], books: Books) -> None:
    """Let everybody know what was counted."""
    numbers, count = books.numbers, session.count
    for lm, passes in zip(models, (numbers[SCORED], numbers[DRAFT_SCORED]), strict=False):
        lm.ran(session, int(passes))
    count.target_passes += int(numbers[PASSES])
    count.draft_passes += int(numbers[DRAFT_PASSES])
    count.accepted += int(numbers[ACCEPTED])
    count.peak_kv_tokens = models[0].peak(session)

"""THE LOOP: one Turn per session and pass of the target."""

from collections.abc import Iterable, Iterator
from itertools import islice

from specbeam.clock import lap
from specbeam.draft.together import close_drafters
from specbeam.kernels.interrupts import interrupts_held
from specbeam.lm.base import LM, check_gives
from specbeam.runs import run_ahead
from specbeam.session import Session
from specbeam.turn import Turns, turns

__all__ = ["Turns", "decode", "turns"]


def decode(target: LM, waiting: Iterable[Session], at_once: int = 32, ahead: int = 0) -> Iterator[Turns]:
    """Decode sessions until all are over; yield the turns of each pass.

    Sessions may differ in all but the target. One that fails keeps its error in `session.failure`, has no turn, and takes
    nothing from the others. When one is over its place goes to the next in line.

    Args:
        at_once: the most sessions side by side.
        ahead: the most turns that may be one compiled run, which are not shown.
    """
    line = iter(waiting)
    live: list[Session] = []
    try:
        while live := live + _let_in(target, line, at_once - len(live)):
            with interrupts_held():
                done = [] if ahead and len(live) == 1 and _ran(target, live[0], ahead) else turns(target, live)
            yield done
            _close(target, [session for session in live if session.over])
            live = [session for session in live if not session.over]
    finally:
        _close(target, live)


def _let_in(target: LM, line: Iterator[Session], most: int) -> list[Session]:
    """Return the next in line. Raises `NotSupported` if parts need what the target cannot give."""
    found = list(islice(line, most))
    for session in found:
        check_gives(target, session.parts.needs)
    return found


def _ran(target: LM, session: Session, most_turns: int) -> bool:
    """Take several turns of the only session as one run. Returns False if there was none."""
    with lap("settle"), session.failing_alone():
        return run_ahead(target, session, most_turns)
    return True  # it has failed


def _close(target: LM, sessions: list[Session]) -> None:
    for session in sessions:
        target.close(session)
    close_drafters(sessions)
